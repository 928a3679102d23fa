"""Compares two answers to one question, and counts equal answers of each way of asking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockdraft.prove.asking import GivenAnswer, Token

AROUND = 40  # characters shown before and after a difference


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two answers to one question differ."""

    question: int
    prompt: str
    at: int  # number of equal characters before the difference
    before: str  # the last equal characters
    expected: str  # what follows in the baseline, or a note that it ends
    found: str
    tie: float | None = None  # the likeliest token's log-probability minus the second's; None if unknown

    @property
    def token(self) -> str:
        """Return the difference in one line."""
        return f"{self.before!r} then {self.expected!r}, here {self.found!r}"


@dataclass(slots=True)
class Counts:
    """Counts of one way's answers to greedy or to seeded questions."""

    num_equal: int = 0
    differences: list[Difference] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def num_asked(self) -> int:
        return self.num_equal + len(self.differences) + len(self.errors)

    @property
    def num_answered(self) -> int:
        return self.num_asked - len(self.errors)

    def add(self, difference: Difference | None) -> None:
        if difference is None:
            self.num_equal += 1
        else:
            self.differences.append(difference)

    def __str__(self) -> str:
        if not self.num_asked:
            return "-"
        failed = f", {len(self.errors)} failed" if self.errors else ""
        return f"{self.num_equal} of {self.num_asked}{failed}"


@dataclass(slots=True)
class WayResult:
    """The result of one way of asking."""

    way: str
    greedy: Counts = field(default_factory=Counts)
    seeded: Counts = field(default_factory=Counts)
    problem: str | None = None  # a fault that the counts of equal answers do not show
    untested: str | None = None  # why this way was not tested, if so
    note: str | None = None
    num_as_drafted: int = 0  # differences with the answer of "with drafts": drafts alone explain them

    def counts(self, *, is_seeded: bool) -> Counts:
        return self.seeded if is_seeded else self.greedy

    @property
    def differences(self) -> list[Difference]:
        return [*self.greedy.differences, *self.seeded.differences]

    @property
    def errors(self) -> list[str]:
        return [*self.greedy.errors, *self.seeded.errors]

    @property
    def is_different(self) -> bool:
        return bool(self.differences) or self.problem is not None


def first_difference(
    question: int, prompt: str, expected: GivenAnswer, found: GivenAnswer, tokens: Sequence[Token] = ()
) -> Difference | None:
    """Return the first difference of two answers, or None if they are equal.

    `tokens` are an answer to this question with log-probabilities, which show how close a tie is.
    """
    if expected.text == found.text and expected.finish_reason == found.finish_reason:
        return None
    pairs = zip(expected.text, found.text, strict=False)
    at = next(
        (place for place, (mine, theirs) in enumerate(pairs) if mine != theirs),
        min(len(expected.text), len(found.text)),
    )
    return Difference(
        question,
        prompt,
        at,
        expected.text[max(0, at - AROUND) : at],
        _shown(expected, at),
        _shown(found, at),
        tie_at(expected.text, at, tokens),
    )


def _shown(choice: GivenAnswer, at: int) -> str:
    return choice.text[at : at + AROUND] or f"[end: {choice.finish_reason}]"


def tie_at(text: str, at: int, tokens: Sequence[Token]) -> float | None:
    """Return the gap between the log-probabilities of the two likeliest tokens at character `at` of `text`.

    Return None if `tokens` have another text before that place, or no alternatives there.
    """
    end = 0
    for token in tokens:
        begin, end = end, end + len(token.text)
        if text[begin:end] != token.text and end <= at:
            return None
        if end > at:
            values = sorted((value for _, value in token.tops), reverse=True)
            return values[0] - values[1] if len(values) > 1 else None
    return None
