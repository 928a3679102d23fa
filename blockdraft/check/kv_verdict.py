"""What to do with a format of keys and values, by what it did to a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blockdraft.check.kv_quality import Loss

# Limits, of the tokens that were counted. What a user may notice begins somewhere between the two: our own
# judgement, with SmolLM2-135M's int8 (99.9 %, 0.0 %) and its tq4 (98 %, 0.3 %) in mind.
USE_SAME, CARE_SAME = 96.0, 92.0  # percent of the tokens have the same likeliest next one, at least
USE_PERPLEXITY, CARE_PERPLEXITY = 1.0, 3.0  # percent more, at most
USE_NEEDLES, CARE_NEEDLES = 0.9, 0.75  # of those that exact keys and values find, at least
NUM_SURE = 2.0  # standard errors by which a perplexity must lie past a limit to be past it
MIN_NEEDLES = 8  # found with exact ones: fewer say nothing

Verdict = Literal["use", "care", "harms", "unknown"]


@dataclass(frozen=True, slots=True)
class Needles:
    """How many were hidden, found with exact keys and values, and of those found as well."""

    num_hidden: int
    num_exact: int
    num_found: int  # in all
    num_both: int

    @classmethod
    def of(cls, exact: Sequence[bool], found: Sequence[bool]) -> Needles:
        both = sum(one and other for one, other in zip(exact, found, strict=True))
        return cls(len(exact), sum(exact), sum(found), both)

    @property
    def share(self) -> float | None:
        """Found, of what exact ones find; None: too few to say."""
        return None if self.num_exact < MIN_NEEDLES else self.num_found / self.num_exact


def verdict_of(loss: Loss, needles: Needles | None) -> Verdict:
    """The worst of what the numbers say. Past a limit is a perplexity that its error does not explain."""
    share = None if needles is None else needles.share
    sure = NUM_SURE * loss.error_percent

    def is_within(same: float, perplexity: float, found: float) -> bool:
        is_found = share is None or share >= found
        return loss.same_percent >= same and loss.perplexity_percent - sure <= perplexity and is_found

    if not is_within(CARE_SAME, CARE_PERPLEXITY, CARE_NEEDLES):
        return "harms"
    if sure > CARE_PERPLEXITY:
        return "unknown"
    return "use" if is_within(USE_SAME, USE_PERPLEXITY, USE_NEEDLES) else "care"


def sentence(name: str, loss: Loss, needles: Needles | None, verdict: Verdict, instead: str | None) -> str:
    """What was found, and what to do; `instead` is the smallest format that may be used."""
    found = [
        f"{loss.same_percent:.1f} % same likeliest token",
        f"{loss.perplexity_percent:+.1f} % perplexity (±{loss.error_percent:.1f})",
    ]
    if needles is not None and needles.num_exact:
        found.append(f"{needles.num_found} needles found where exact ones find {needles.num_exact}")
    advice = {
        "use": "use it",
        "care": "a loss that may show: use it where memory is short, and look at your own answers",
        "harms": f"harms this model: {'keep exact ones' if instead is None else f'use {instead}'}",
        "unknown": "too few tokens to say: use more of them (--tokens)",
    }[verdict]
    return f"{name}: {', '.join(found)}: {advice}."


def instead_of(verdicts: dict[str, Verdict], num_bytes: dict[str, float]) -> str | None:
    """The smallest format to use; None: there is none."""
    usable = [name for name, verdict in verdicts.items() if verdict == "use"]
    return min(usable, key=lambda name: num_bytes[name], default=None)
