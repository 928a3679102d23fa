"""How wide a request's next step is, by how its own drafts have fared.

No width suits all prompts: of code five drafts in six are right, of trivia every other one. One number tells
requests apart, the chance p that a draft is right where all before it were: a step of width w then commits
1 + p + … + p^(w - 1) tokens, and the width is the one at which that over its cost is best. A request begins
with a chance that makes this the plan's width, and goes on with what becomes of its drafts. Older steps count
less and less: an answer may turn from prose to code, and one that decodes plainly, as no draft pays, tries
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FADE = 0.95  # what a step leaves of what was known before it
BELIEF = 8.0  # drafts put to the test that the chance at the beginning counts for
PATIENCE = 1.1  # plain steps that drafts may cost without any gain: without them nothing is learnt of them


@dataclass(slots=True)
class DraftRecord:
    """How the drafts of one sequence fared, faded. After the first wrong one of a step nobody looks."""

    num_tried: float = 0.0
    num_right: float = 0.0

    def count(self, width: int, num_right: int) -> None:
        """One step that verified `width - 1` drafts."""
        self.num_tried = FADE * self.num_tried + min(num_right + 1, width - 1)
        self.num_right = FADE * self.num_right + num_right


@dataclass(frozen=True, slots=True)
class Pace:
    """Widths to choose from, and what a step of each costs."""

    width: int  # of a request's first step
    costs: Mapping[int, float]  # by width, 1 (a plain step) included; in any unit
    chance: float = field(init=False)  # of a draft of which nothing is known

    def __post_init__(self) -> None:
        fitting = [percent / 100 for percent in range(101) if self._best(percent / 100) == self.width]
        object.__setattr__(self, "chance", fitting[len(fitting) // 2] if fitting else 0.5)

    def next_width(self, record: DraftRecord) -> int:
        if record.num_tried == 0:
            return self.width
        right = BELIEF * self.chance + record.num_right
        return self._best(right / (BELIEF + record.num_tried))

    def _best(self, chance: float) -> int:
        speed = {
            width: sum(chance**place for place in range(width)) / cost for width, cost in self.costs.items()
        }
        speed[1] /= PATIENCE
        return max(speed, key=lambda width: speed[width])
