"""Chooses the width of the next step: the one with the most committed tokens per second, as observed.

All rows whose requests set no width get the same width. It depends on two estimates:

1. The tokens that a step of each width commits. The chance of a draft depends on its position in the block,
alike for all rows, and on the row: in code five drafts in six are right, in trivia every other one. Counts by
position are over all rows. Each row has one number: how often a draft was right if all drafts before it were.
Older steps count less and less, because an answer may turn from prose to code.

2. The time that a step of each width takes. It is measured at the start for a few numbers of rows and widths,
then in every served step, host time included. If steps take twice as long as before, because contexts have
grown or other programs use the machine, steps of other widths are assumed to slow down alike. A wider step
never takes less time: if it seems to, the narrower step was disturbed, since noise only adds time.

If no draft pays, steps are plain, but now and then a step tries drafts: plain steps teach nothing about them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from blockdraft.planner.plan import Plan
from blockdraft.step.row_sizes import Place, row_sizes

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
ALL_SIZES = 16  # up to this many rows, each number of rows has its own times
BELIEF = 16.0  # weight, in tested drafts, of all rows' chances in the estimate of one row
FADE = 0.95  # each step scales the older counts by this
FEW = 3  # steps of few rows fade the counts more slowly, because they hold less evidence
PRIOR = 4.0  # weight, in tested drafts, of the expected chance at a position
LAST = 6  # steps within which the machine's speed is taken as constant
ENOUGH = 4  # steps needed to estimate the machine's speed
MEETINGS = 33  # times relative to other widths that are kept for each width
BELIEVED = 9  # steps after which a width's time is known
# The cost of a mixture's arithmetic, if all tokens were multiplied by the experts that one token chooses, in
# units of reading all experts. Qwen3.5-35B-A3B's steps of 1 to 512 tokens on an H200 are met within 8 %.
ARITHMETIC = 0.05
BEYOND = 0.5  # scales the time per token beyond the measured widths; too high a guess is never corrected
GAIN = 1.02  # the speedup that another width must promise, so that the width does not flip back and forth
AGE = 128  # steps after which a width that promises nearly as much is tried again
NEARLY = 0.85  # the share of the chosen width's speed that counts as nearly as much
PLAIN_AGE = 500  # AGE for plain steps, whatever they promise: they may have looked slow by chance
FIRST_AGE = 8  # AGE for plain steps that were never timed
MIN_PAUSE, MAX_PAUSE = 4, 128  # plain steps between two tries of drafts
HOPE = 0.4  # a try assumes all chances to this power: 0.6 becomes 0.8


@dataclass(slots=True)
class DraftRecord:
    """The faded counts of one sequence's drafts. Drafts after a wrong one do not count."""

    num_tried: float = 0.0
    num_right: float = 0.0

    def count(self, width: int, num_right: int) -> None:
        """Count a step that verified `width - 1` drafts."""
        self.num_tried = FADE * self.num_tried + min(num_right + 1, width - 1)
        self.num_right = FADE * self.num_right + num_right


class DraftChances:
    """Estimates for each place in a block the chance that its draft is right if all before it are."""

    def __init__(self, known: Sequence[float]) -> None:
        """`known`: the initial chance at each place. Evidence at one place also updates later places."""
        chances = np.clip(np.asarray(known, dtype=np.float64), 0.01, 0.99)
        self._first = float(chances[0])
        self._steepness = np.log(chances[1:]) / np.log(chances[:-1])  # of each place, relative to the last
        self._tried = np.zeros(len(known))
        self._right = np.zeros(len(known))

    def count(self, width: int, num_right: np.ndarray) -> None:
        """Count a step: in row r, `num_right[r]` of the `width - 1` drafts were right."""
        places, fade = np.arange(width - 1), FADE ** (len(num_right) / (len(num_right) + FEW))
        self._tried *= fade
        self._right *= fade
        self._tried[: width - 1] += (num_right[:, None] >= places).sum(axis=0)
        self._right[: width - 1] += (num_right[:, None] > places).sum(axis=0)

    @property
    def logs(self) -> np.ndarray:
        """Return the natural logarithms of the chances [places]."""
        found, expected = np.empty(len(self._tried)), self._first
        for place in range(len(found)):
            if place:
                expected = math.exp(found[place - 1] * self._steepness[place - 1])
            share = (self._right[place] + PRIOR * expected) / (self._tried[place] + PRIOR)
            found[place] = math.log(min(max(share, 0.01), 0.99))
        return found

    def committed(
        self, records: Sequence[DraftRecord], widths: Sequence[int], hope: float = 1.0
    ) -> np.ndarray:
        """Return the tokens that all rows commit in a step of each width; chances are to the power `hope`."""
        logs = self.logs
        power = self._powers(records, logs, hope)
        reached = np.exp(power[:, None] * np.cumsum(logs)[None, :]).sum(axis=0)  # [places] drafts kept
        return np.array([len(records) + reached[: width - 1].sum() for width in widths])

    def _powers(self, records: Sequence[DraftRecord], logs: np.ndarray, hope: float) -> np.ndarray:
        """Return [R] powers: a row's chance at a place is the chance of all rows to this power."""
        middle = float(np.exp(logs[:4].mean()))  # most tested drafts are at the first places
        tried = np.fromiter((one.num_tried for one in records), np.float64, len(records))
        right = np.fromiter((one.num_right for one in records), np.float64, len(records))
        chance = np.clip((BELIEF * middle + right) / (BELIEF + tried), 0.01, 0.99)
        return hope * np.log(chance) / math.log(middle)


class StepCosts:
    """Estimates a step's seconds by rows and width: from the start's measurements, then from served steps.

    It separates the cost of one width relative to another from the machine's current speed. The speed changes
    all the time, with other programs and growing contexts; the last steps of any width show it. The relative
    cost is learnt only when steps of different kinds follow each other, so that the machine was equally fast
    for both, and from several such cases.
    """

    def __init__(
        self,
        measured: Mapping[Place, float],
        sizes: Sequence[int],
        *,
        is_sure: bool = True,
        chosen_share: float = 1.0,
    ) -> None:
        """`sizes`: the numbers of rows that batches are padded to. `measured` has at least one place.

        `is_sure`: nothing disturbed the measurements. `chosen_share`: of the experts, by each token.
        """
        self._measured, self._is_sure, self._chosen_share = dict(measured), is_sure, chosen_share
        self._sizes = sorted(sizes)
        self._base: dict[Place, float] = {}  # seconds, if the machine is as fast as at the start
        self._met: dict[Place, deque[float]] = {}  # such seconds, from single steps next to other widths
        self._last: deque[tuple[Place, float]] = deque(maxlen=LAST)  # seconds of the last steps
        self._seen: dict[Place, int] = {}  # the number of the last step
        self._count: dict[Place, int] = {}  # the number of steps
        self._num_steps = 0

    def size(self, num_rows: int) -> int:
        return self._sizes[min(bisect_left(self._sizes, num_rows), len(self._sizes) - 1)]

    def seconds(self, num_rows: int, width: int) -> float:
        size = self.size(num_rows)
        return self._base_s((size, width)) * self._pace()

    def by_width(self, num_rows: int, widths: Sequence[int]) -> np.ndarray:
        """Return the seconds of a step of each width, in ascending order. A wider step never takes less."""
        size = self.size(num_rows)
        found = np.array([self._base_s((size, width)) for width in widths])
        return self._pace() * np.minimum.accumulate(found[::-1])[::-1]

    def least_ratios(self, num_rows: int, widths: Sequence[int]) -> np.ndarray:
        """Return each cost in plain steps: the lower of what was learnt and what the start measured."""
        size = self.size(num_rows)
        learnt = np.array([self._base_s((size, width)) for width in widths])
        measured = np.array([self._guess(size, width) for width in widths])
        plain = self._base_s((size, 1)), self._guess(size, 1)
        return np.minimum(learnt / plain[0], measured / plain[1])

    def num_plain(self, num_rows: int, width: int) -> float | None:
        """Return how many plain steps take as long as such a step, at least 1. None before both were timed.

        Use the median of the plain steps: they are few while drafts pay, and one may have waited for a core.
        """
        if width == 1:
            return 1.0
        if not (self.is_known(num_rows, 1) and self.is_known(num_rows, width)):
            return None
        plain = self.size(num_rows), 1
        found = [*2 * self._firm(plain), *self._met.get(plain, ())] or [self._base_s(plain)]
        return max(1.0, float(self._base_s((plain[0], width)) / median(found)))

    def is_known(self, num_rows: int, width: int) -> bool:
        """Say if such steps were timed: undisturbed at the start, or often enough while serving."""
        return self._is_sure or self._count.get((self.size(num_rows), width), 0) >= BELIEVED

    def age(self, num_rows: int, width: int) -> int:
        """Return how many steps ago a step of this width and number of rows last ran."""
        return self._num_steps - self._seen.get((self.size(num_rows), width), -AGE)

    def observe(self, num_rows: int, width: int, seconds: float) -> None:
        self._num_steps += 1
        place = self.size(num_rows), width
        others = [one for one in self._last if one[0] != place]
        if len(others) >= ENOUGH:
            self._meet(place, seconds / self._pace(others))
        self._last.append((place, seconds))
        self._seen[place] = self._num_steps
        self._count[place] = self._count.get(place, 0) + 1

    def _meet(self, place: Place, base_s: float) -> None:
        """Record a step's seconds, corrected for the speed of the recent steps of other widths or rows."""
        self._met.setdefault(place, deque(maxlen=MEETINGS)).append(base_s)
        found = sorted([*self._firm(place), *self._met[place]])
        cut = len(found) // 4
        self._base[place] = fmean(found[cut : len(found) - cut])

    def _firm(self, place: Place) -> list[float]:
        """Return the start's measurement in a list, or an empty list if there is none or it was disturbed."""
        return [self._measured[place]] if self._is_sure and place in self._measured else []

    def _pace(self, steps: Iterable[tuple[Place, float]] | None = None) -> float:
        """Return how many times as long as at the start these steps (default: the last ones) took."""
        steps = list(self._last)[-ENOUGH:] if steps is None else steps
        return median([seconds / self._base_s(place) for place, seconds in steps] or [1.0])

    def _base_s(self, place: Place) -> float:
        if place not in self._base:
            self._base[place] = self._guess(*place)
        return self._base[place]

    def _guess(self, size: int, width: int) -> float:
        """Interpolate the measurements: first by width for each number of rows, then by rows."""
        by_load = {
            self._load(rows, width): _between(
                {self._load(rows, at): s for (one, at), s in self._measured.items() if one == rows},
                self._load(rows, width),
                BEYOND,
            )
            for rows in {rows for rows, _ in self._measured}
        }
        return _between(by_load, self._load(size, width))

    def _load(self, num_rows: int, width: int) -> float:
        """Return a number that grows as evenly as the step's cost.

        A step reads the experts that its tokens choose: each token adds less than the one before. Without
        experts, the number is linear in the tokens.
        """
        num_tokens = num_rows * width
        touched = 1 - (1 - self._chosen_share) ** num_tokens
        return touched + ARITHMETIC * self._chosen_share * num_tokens


def _between(known: Mapping[float, float], wanted: float, beyond: float = 1.0) -> float:
    """Interpolate between the two nearest keys. Beyond the last key, scale its slope by `beyond`.

    The result never falls as `wanted` rises from one key to the next, or beyond the last.
    """
    if wanted in known or len(known) == 1:
        return known.get(wanted, next(iter(known.values())))
    ordered = sorted(known)
    at = min(max(bisect_left(ordered, wanted), 1), len(ordered) - 1)
    first, second = ordered[at - 1], ordered[at]
    slope = max(0.0, (known[second] - known[first]) / (second - first))
    inside = min(max(wanted, first), second) - first
    return known[first] + slope * (inside + beyond * max(wanted - second, 0))


def widths_for(block: int) -> list[int]:
    """Return the widths to choose from for a drafter trained for this block."""
    return sorted({width for width in (*WIDTHS, block) if width <= block})


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """The width chosen for a step."""

    num_rows: int = 0  # 0: nothing was chosen yet
    width: int = 0
    tokens: float = 0.0  # expected of each row


class WidthController:
    """Chooses the width of each step."""

    def __init__(self, costs: StepCosts, chances: DraftChances, *, first: int, block: int) -> None:
        """`first`: the width to begin with."""
        self.costs, self.chances = costs, chances
        self._widths = widths_for(block)
        self._width = first
        self._pause = self._until_try = MIN_PAUSE
        self.last = ChosenStep()

    @classmethod
    def of(cls, plan: Plan) -> WidthController:
        """Make the controller from the measurements of the start."""
        sizes = (
            range(1, plan.max_num_seqs + 1)
            if plan.max_num_seqs <= ALL_SIZES
            else row_sizes(plan.max_num_seqs)
        )
        costs = StepCosts(
            plan.step_costs, sizes, is_sure=plan.is_sure_of_costs, chosen_share=plan.chosen_share
        )
        return cls(costs, DraftChances(plan.draft_chances), first=plan.width, block=plan.block)

    def next_width(
        self, records: Sequence[DraftRecord], is_ready: Callable[[int, int], bool] = lambda rows, width: True
    ) -> int:
        """Return the width of the next step, a ready one if any is. `records` has one record per row."""
        count = len(records)
        seconds = self.costs.by_width(count, self._widths)
        committed = self.chances.committed(records, self._widths)
        speeds = committed / seconds
        ready = np.array([is_ready(count, width) for width in self._widths])
        if ready.any():
            speeds = np.where(ready, speeds, 0.0)
        best = int(np.argmax(speeds))
        now = self._widths.index(self._width) if self._width in self._widths else best
        if speeds[best] > GAIN * speeds[now]:
            now = best
        self._width = self._widths[now]
        self.last = ChosenStep(count, self._width, float(committed[now] / count))
        if self._width == 1:
            self._until_try -= 1
            return 1 if self._until_try > 0 else self._tried_again(records, speeds)
        return self._neglected(speeds, now, count)

    def likely_width(self, num_rows: int) -> int:
        """Return the best width of a step of `num_rows` rows that have no drafts counted yet."""
        seconds = self.costs.by_width(num_rows, self._widths)
        fresh = [DraftRecord()] * num_rows
        return self._widths[int(np.argmax(self.chances.committed(fresh, self._widths) / seconds))]

    def _tried_again(self, records: Sequence[DraftRecord], speeds: np.ndarray) -> int:
        """Return the best width that would pay if drafts were far better than expected; 1 if none would."""
        self._pause = min(2 * self._pause, MAX_PAUSE)
        self._until_try = self._pause
        # While steps are plain, a plain step that was timed too low while the machine was busy is never timed
        # again beside others. So what the start measured counts, too.
        costs = self.costs.least_ratios(len(records), self._widths)
        hoped = self.chances.committed(records, self._widths, HOPE) / costs
        could_pay = hoped > GAIN * hoped[0]
        return self._widths[int(np.argmax(np.where(could_pay, speeds, 0.0)))]

    def _neglected(self, speeds: np.ndarray, now: int, count: int) -> int:
        """Return the width to run: a neighbouring or plain width that has not run for long, or the chosen."""
        for other in (now - 1, now + 1, 0):
            if 0 <= other < len(speeds) and speeds[other] > NEARLY * speeds[now]:
                width = self._widths[other]
                if self.costs.age(count, width) > AGE:
                    return width
        plain_age = PLAIN_AGE if self.costs.is_known(count, 1) else FIRST_AGE
        if speeds[0] > 0 and self.costs.age(count, 1) > plain_age:
            return 1
        return self._widths[now]

    def observe(self, width: int, num_right: Sequence[int], seconds: float | None) -> None:
        """Learn from a step that verified `width - 1` drafts of each row. `seconds`: its time, if known."""
        if seconds is not None:
            self.costs.observe(len(num_right), width, seconds)
        if width > 1:
            self.chances.count(width, np.asarray(num_right))
            if self._width == 1 and self._has_paid(width, num_right):
                self._pause = max(self._pause // 4, MIN_PAUSE)  # it doubles with every try
                self._until_try = 1  # try drafts again in the next step

    def _has_paid(self, width: int, num_right: Sequence[int]) -> bool:
        """Say if a step committed more tokens than plain steps would have in the same time."""
        count = len(num_right)
        plain_s, seconds = self.costs.by_width(count, (1, width))
        return bool(count + sum(num_right) > count * seconds / plain_s)
