"""Finds the prompt categories and block positions where drafts fail.

A draft is reached if all drafts before it were right, and only then it can be accepted. So with any drafter,
later positions are accepted less often. Positions are therefore compared by the share of right drafts among
the reached drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GAINS_LESS = 0.75  # a category with less than this share of the mean accepted drafts is weak; arbitrary
MIN_REACHED = 20  # drafts or steps; smaller samples are not judged; arbitrary
MAX_NAMED = 3  # categories


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of steps, and for each position, of steps that reached and that accepted its draft."""

    num_steps: int
    committed: float  # tokens per step
    reached: tuple[int, ...]  # empty if unknown, as is `accepted`
    accepted: tuple[int, ...]

    def right(self, first: int, last: int) -> float | None:
        """Return the share of right drafts at positions `first` to `last` (from 1); None if too few."""
        reached = sum(self.reached[first - 1 : last])
        return sum(self.accepted[first - 1 : last]) / reached if reached >= MIN_REACHED else None


def where_reached(accepted: Sequence[int], reached: Sequence[int]) -> list[float | None]:
    """Return, by position, the share of right drafts among the reached ones; None if never reached."""
    return [kept / tried if tried else None for kept, tried in zip(accepted, reached, strict=False)]


@dataclass(frozen=True, slots=True)
class WeakCategory:
    """A category that gains much less from drafts than all prompts together."""

    name: str
    committed_per_step: float
    first: float | None  # share of right first drafts
    later: float | None  # share of right drafts among the reached later ones


@dataclass(frozen=True, slots=True)
class WeakSpots:
    """The weakest categories, weakest first, and positions where less than half of the drafts are right."""

    overall: float  # tokens committed per step
    num_drafts: int
    categories: tuple[WeakCategory, ...]
    from_draft: int | None  # from this draft on, less than half of the reached drafts are right
    to_draft: int | None  # the last draft that enough steps reached

    def lines(self) -> list[str]:
        """Return a sentence for each weak category and for the weak positions."""
        found = [self._category(one) for one in self.categories]
        if self.from_draft is not None:
            end = "on" if self.to_draft == self.num_drafts else f"to {self.to_draft}"
            where = f"from draft {self.from_draft} {end}"
            found.append(f"{where}, fewer than half of the drafts that are reached are right")
        return found

    def _category(self, one: WeakCategory) -> str:
        text = f"{one.name}: {one.committed_per_step:.2f} per step, {self.overall:.2f} overall"
        if one.first is not None:
            text += f"; draft 1 is right in {one.first:.0%} of the steps"
            if one.later is not None:
                text += f", a later one in {one.later:.0%} where it is reached"
        return text


def weak_spots(overall: DraftCounts, categories: Mapping[str, DraftCounts]) -> WeakSpots:
    """Return the weak categories, unless there is only one, and the weak positions."""
    limit = 1 + GAINS_LESS * (overall.committed - 1)
    low = [
        (one.committed, name)
        for name, one in categories.items()
        if one.committed < limit and one.num_steps >= MIN_REACHED and len(categories) > 1
    ]
    found = [(name, categories[name]) for _, name in sorted(low)[:MAX_NAMED]]
    named = tuple(
        WeakCategory(name, one.committed, one.right(1, 1), one.right(2, len(one.accepted)))
        for name, one in found
    )
    return WeakSpots(overall.committed, len(overall.accepted), named, *_weak_drafts(overall))


def _weak_drafts(one: DraftCounts) -> tuple[int | None, int | None]:
    """Return the first and last weak position. Both are None if the last judged one is not weak."""
    first = last = None
    for draft in range(1, len(one.accepted) + 1):
        share = one.right(draft, draft)
        if share is None:
            break
        first, last = (None, None) if share >= 0.5 else (first or draft, draft)
    return first, last
