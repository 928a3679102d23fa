"""Chooses the widths of the next step's rows: those with the most committed tokens per second, as observed.

Of each number of tokens that a step may have, every row gets its anchor, and each next token goes to the row
where it is likeliest to be committed, so easy rows get wide blocks. If the drafter's cost grows with the
widest row, all rows get one width. Rows whose requests set a width keep it. Two estimates decide:

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

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean, median

import numpy as np

from blockdraft.engine.histogram import at_least
from blockdraft.planner.plan import Plan
from blockdraft.step.row_sizes import Place, row_sizes
from blockdraft.step.step_sizes import Means, StepSize, all_means, even, tight, uneven

ALL_SIZES = 16  # up to this many rows, each number of rows has its own times if all have one width
MANY_ROWS = 16  # with as many, the width is chosen in every second step, and so on: it changes slowly
MOST_KEPT = 3  # steps for which a choice is kept
BELIEF = 16.0  # weight, in tested drafts, of all rows' chances in the estimate of one row
FADE = 0.95  # each step scales the older counts by this
FEW = 3  # steps of few rows fade the counts more slowly, because they hold less evidence
PRIOR = 4.0  # weight, in tested drafts, of the expected chance at a position
LAST = 6  # steps within which the machine's speed is taken as constant
ENOUGH = 4  # steps needed to estimate the machine's speed
MEETINGS = 33  # times relative to other widths that are kept for each width
FIRST_MEETINGS = 3  # fewer are not believed if they take LATE times as long as was expected
LATE = 1.5
BELIEVED = 9  # steps after which a width's time is known
# The cost of a mixture's arithmetic, if all tokens were multiplied by the experts that one token chooses, in
# units of reading all experts. Qwen3.5-35B-A3B's steps of 1 to 512 tokens on an H200 are met within 8 %.
ARITHMETIC = 0.05
BEYOND = 0.5  # scales the time per token beyond the measured widths; too high a guess is never corrected
GAIN = 1.02  # the speedup that another width must promise, so that the width does not flip back and forth
AGE = 128  # steps after which a width that promises nearly as much is tried again
EARLY_AGE = 32  # AGE for a width that was rarely timed beside others
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
        num_tried = num_right + 1 if num_right + 1 < width else width - 1
        self.num_tried = FADE * self.num_tried + num_tried
        self.num_right = FADE * self.num_right + num_right


class DraftChances:
    """Estimates for each place in a block the chance that its draft is right if all before it are."""

    def __init__(self, known: Sequence[float]) -> None:
        """`known`: the initial chance at each place. Evidence at one place also updates later places."""
        chances = [min(max(chance, 0.01), 0.99) for chance in known]
        self._first = chances[0]
        # Of each place, relative to the last.
        self._steepness = [math.log(one) / math.log(last) for last, one in itertools.pairwise(chances)]
        self._tried = [0.0] * len(known)
        self._right = [0.0] * len(known)
        self._logs: list[float] | None = None  # None: they have to be computed

    def count(self, widths: Sequence[int], num_right: Sequence[int]) -> None:
        """Count a step: in row r, `num_right[r]` of the `widths[r] - 1` drafts were right."""
        most = max(widths)
        num_tested, num_rows = [0] * most, [0] * most  # [n]: rows with n tested drafts, with n right ones
        for width, count in zip(widths, num_right, strict=True):
            num_tested[count + 1 if count + 1 < width else width - 1] += 1
            num_rows[count] += 1
        tried, right = at_least(num_tested), at_least(num_rows)
        fade = FADE ** (len(widths) / (len(widths) + FEW))
        self._tried = [fade * old + new for old, new in zip_longest(self._tried, tried[1:], fillvalue=0)]
        self._right = [fade * old + new for old, new in zip_longest(self._right, right[1:], fillvalue=0)]
        self._logs = None

    @property
    def logs(self) -> list[float]:
        """Return the natural logarithms of the chances [places]."""
        if self._logs is None:
            found, expected = [], self._first
            for tried, right, steepness in zip_longest(self._tried, self._right, self._steepness):
                share = (right + PRIOR * expected) / (tried + PRIOR)
                found.append(math.log(min(max(share, 0.01), 0.99)))
                if steepness is not None:
                    expected = math.exp(found[-1] * steepness)
            self._logs = found
        return self._logs

    def committed(
        self, records: Sequence[DraftRecord], widths: Sequence[int], hope: float = 1.0
    ) -> np.ndarray:
        """Return the tokens that all rows commit in a step of each width; chances are to the power `hope`."""
        reached = self.kept(records, hope).sum(axis=0).tolist()  # [places] drafts kept
        kept = [0.0, *itertools.accumulate(reached)]  # [n]: in blocks of n drafts
        return np.array([len(records) + kept[width - 1] for width in widths])

    def kept(self, records: Sequence[DraftRecord], hope: float = 1.0) -> np.ndarray:
        """Return the chances [R, places] that drafts are committed, to the power `hope`."""
        logs = self.logs
        powers = self._powers(records, logs, hope)
        return np.exp(np.multiply.outer(powers, list(itertools.accumulate(logs))))  # type: ignore[no-any-return]

    def _powers(self, records: Sequence[DraftRecord], logs: Sequence[float], hope: float) -> np.ndarray:
        """Return [R] powers: a row's chance at a place is the chance of all rows to this power."""
        first = logs[:4]  # most tested drafts are at the first places
        middle = sum(first) / len(first)
        tried = np.array([one.num_tried for one in records])
        right = np.array([one.num_right for one in records])
        chance = (BELIEF * math.exp(middle) + right) / (BELIEF + tried)
        return np.log(np.minimum(np.maximum(chance, 0.01), 0.99)) * (hope / middle)


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

    def is_due(self, num_rows: int, width: int) -> bool:
        """Say if a step that promises nearly as much should be timed again."""
        place = self.size(num_rows), width
        most = AGE if len(self._met.get(place, ())) >= BELIEVED else EARLY_AGE
        return self._num_steps - self._seen.get(place, 0) > most

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
        guess = self._guess(*place)
        if self._is_sure and len(found) < FIRST_MEETINGS and self._base[place] > LATE * guess:
            self._base[place] = guess  # else one late step would exclude a width for good

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


def _num_drafts(size: StepSize, num_rows: int, others: Sequence[int]) -> int:
    """Return the drafts that rows may have in a step beside `others`, whose widths are set."""
    return max(0, min(size.tokens - sum(others) - num_rows, num_rows * (size.width - 1)))


def likeliest_widths(kept: np.ndarray, num_drafts: int) -> list[int]:
    """Return widths [R] with `num_drafts` drafts in all, those with the greatest chances kept [R, places].

    A row's chances must not rise from place to place. Of equal chances, the first rows' come first.
    """
    if num_drafts == 0:
        return [1] * len(kept)
    least = np.partition(kept, -num_drafts, axis=None)[-num_drafts]
    above, equal = (kept > least).sum(axis=1), (kept == least).sum(axis=1)
    ties = np.minimum(equal.cumsum(), num_drafts - above.sum())  # up to each row
    widths: list[int] = (1 + above + np.diff(ties, prepend=0)).tolist()
    return widths


def always(num_rows: int, width: int, num_tokens: int | None = None) -> bool:
    """Return True: without graphs, no step has to be captured before it runs."""
    return True


def widths_for(block: int) -> list[int]:
    """Return the widths to choose from for a drafter trained for this block."""
    return list(all_means(1, block))


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """The width chosen for a step."""

    num_rows: int = 0  # 0: nothing was chosen yet
    width: int = 0  # the mean, if rows have widths of their own
    tokens: float = 0.0  # expected of each row
    num_tokens: int = 0  # that all rows verify


class WidthController:
    """Chooses the widths of each step.

    With `means`, a width stands for the mean width of a step, padding rows included.
    """

    def __init__(
        self,
        costs: StepCosts,
        chances: DraftChances,
        *,
        first: int,
        block: int,
        means: Means | None = None,
    ) -> None:
        """`first`: the width to begin with. `means`: of steps whose rows have widths of their own."""
        self.costs, self.chances = costs, chances
        self._block, self._means = block, means
        self._all_widths = tuple(widths_for(block))
        self._width = first
        self._pause = self._until_try = MIN_PAUSE
        self._num_kept = 0  # more steps for which the choice is kept
        self._is_kept = False  # the last step was one of them
        self._dealt: list[int] = []  # the rows' widths when they were last computed, as long
        self._dealt_to: tuple[int, ...] = ()  # the mean width, the other rows' widths, and the rows
        self.last = ChosenStep()

    @classmethod
    def of(cls, plan: Plan, means: Means | None = None) -> WidthController:
        """Make the controller from the measurements of the start."""
        # Rows of their own widths are padded as captured steps are.
        is_exact = means is None and plan.max_num_seqs <= ALL_SIZES
        sizes = row_sizes(plan.max_num_seqs, is_exact=is_exact)
        costs = StepCosts(
            plan.step_costs, sizes, is_sure=plan.is_sure_of_costs, chosen_share=plan.chosen_share
        )
        chances = DraftChances(plan.draft_chances)
        return cls(costs, chances, first=plan.width, block=plan.block, means=means)

    def next_widths(
        self,
        records: Sequence[DraftRecord],
        is_ready: Callable[..., bool] = always,
        others: Sequence[int] = (),
    ) -> list[int]:
        """Return the width of each row in the next step. `records` has one record per row.

        `others`: the widths of the rows beside them, whose requests set them.
        """
        mean = self.next_width(records, is_ready, others)
        size, count = self._size(len(records) + len(others), mean), len(records)
        if size.is_even:
            return [size.width] * count
        dealt_to = (mean, *others, *map(id, records))
        if not self._is_kept or dealt_to != self._dealt_to:
            kept = self.chances.kept(records)[:, : size.width - 1]
            num_drafts = _num_drafts(size, count, others)
            self._dealt, self._dealt_to = likeliest_widths(kept, num_drafts), dealt_to
        return self._dealt

    def _size(self, num_rows: int, mean: int) -> StepSize:
        """Return the size of a step that has this mean width together with the rows that pad it."""
        if self._means is None or num_rows == 1 or mean in (1, self._block):
            return even(num_rows, mean)
        size = uneven(self.costs.size(num_rows), mean, self._block)
        return StepSize(num_rows, size.width, min(size.tokens - size.rows + num_rows, num_rows * size.width))

    def _widths(self, num_rows: int, others: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the widths that steps of as many rows may have: those with room for the other rows' own."""
        if self._means is None:
            return self._all_widths
        widths = self._means(self.costs.size(num_rows), self._block)
        if not others:
            return widths
        least = StepSize(num_rows, max(others), sum(others) + num_rows - len(others))
        return tuple(width for width in widths if self._size(num_rows, width).has_room(least))

    def _committed(
        self,
        records: Sequence[DraftRecord],
        widths: Sequence[int],
        hope: float = 1.0,
        others: Sequence[int] = (),
    ) -> np.ndarray:
        """Return the tokens that these rows are expected to commit in steps of each width."""
        if self._means is None or (len(records) == 1 and not others):
            return self.chances.committed(records, widths, hope)
        kept, totals = self.chances.kept(records, hope), dict[int, np.ndarray]()
        found = np.full(len(widths), float(len(records)))
        for index, width in enumerate(widths):
            size = self._size(len(records) + len(others), width)
            num_drafts = _num_drafts(size, len(records), others)
            if num_drafts > 0:
                if size.width not in totals:  # [n]: of the n + 1 likeliest drafts
                    totals[size.width] = np.sort(kept[:, : size.width - 1], axis=None)[::-1].cumsum()
                found[index] += totals[size.width][num_drafts - 1]
        return found

    def mean_of(self, size: StepSize) -> int:
        """Return the mean width of a step with its padding rows, as costs know it."""
        if size.is_even:
            return size.width
        padded = max(size.rows, self.costs.size(size.rows))
        return -(-(size.tokens + padded - size.rows) // padded)

    def next_width(
        self,
        records: Sequence[DraftRecord],
        is_ready: Callable[..., bool] = always,
        others: Sequence[int] = (),
    ) -> int:
        """Return the width of the next step, a ready one if any is. `records` has one record per row.

        `others`: the widths of the rows beside them, which are assumed to commit one token each.
        """
        count = len(records) + len(others)
        self._is_kept = self._num_kept > 0 and count == self.last.num_rows and not others
        if self._is_kept:
            self._num_kept -= 1
            return self._width
        widths = self._widths(count, others)
        committed = self._committed(records, widths, others=others)
        speeds = (committed + len(others)) / self.costs.by_width(count, widths)
        ready = [is_ready(*self._size(count, width)) for width in widths]
        if any(ready):
            speeds = speeds * ready
        best = int(speeds.argmax())
        now = widths.index(self._width) if self._width in widths else best
        if speeds[best] > GAIN * speeds[now]:
            now = best
        self._width = widths[now]
        num_tokens = self._size(count, self._width).tokens
        self.last = ChosenStep(count, self._width, float(committed[now] / len(records)), num_tokens)
        self._num_kept = min(count // MANY_ROWS, MOST_KEPT)
        if self._width > 1:
            width = self._neglected(widths, speeds, now, count)
        else:
            self._until_try -= 1
            width = 1 if self._until_try > 0 else self._tried_again(records, widths, speeds, others)
        if width != self._width:
            self._num_kept = 0  # a try is one step
        elif width == 1:
            self._num_kept = min(self._num_kept, self._until_try - 1)
            self._until_try -= self._num_kept
        return width

    def likely_width(self, num_rows: int) -> int:
        """Return the best width of a step of `num_rows` rows that have no drafts counted yet."""
        widths = self._widths(num_rows)
        speeds = self._committed([DraftRecord()] * num_rows, widths) / self.costs.by_width(num_rows, widths)
        return widths[int(speeds.argmax())]

    def _tried_again(
        self,
        records: Sequence[DraftRecord],
        widths: Sequence[int],
        speeds: np.ndarray,
        others: Sequence[int],
    ) -> int:
        """Return the best width that would pay if drafts were far better than expected; 1 if none would."""
        self._pause = min(2 * self._pause, MAX_PAUSE)
        self._until_try = self._pause
        # While steps are plain, a plain step that was timed too low while the machine was busy is never timed
        # again beside others. So what the start measured counts, too.
        costs = self.costs.least_ratios(len(records) + len(others), widths)
        hoped = self._committed(records, widths, HOPE, others) / costs
        could_pay = hoped > GAIN * hoped[0]
        return widths[int(np.argmax(np.where(could_pay, speeds, 0.0)))]

    def _neglected(self, widths: Sequence[int], speeds: np.ndarray, now: int, count: int) -> int:
        """Return the width to run: a neighbouring or plain width that has not run for long, or the chosen."""
        able = [index for index, speed in enumerate(speeds) if speed > 0]
        place = able.index(now)
        for other in (*able[max(0, place - 1) : place], *able[place + 1 : place + 2], 0):
            if speeds[other] > NEARLY * speeds[now] and self.costs.is_due(count, widths[other]):
                return widths[other]
        plain_age = PLAIN_AGE if self.costs.is_known(count, 1) else FIRST_AGE
        if widths[0] == 1 and speeds[0] > 0 and self.costs.age(count, 1) > plain_age:
            return 1
        return widths[now]

    def observe(
        self,
        widths: Sequence[int],
        num_right: Sequence[int],
        seconds: float | None,
        size: StepSize | None = None,
    ) -> None:
        """Learn from a step that verified `widths[r] - 1` drafts of row r. `seconds`: its time, if known.

        `size`: what ran, if it was larger than the rows.
        """
        mean = self.mean_of(size or tight(widths))
        if seconds is not None:
            self.costs.observe(len(num_right), mean, seconds)
        if max(widths) > 1:
            self.chances.count(widths, num_right)
            if self._width == 1 and self._has_paid(mean, num_right):
                self._pause = max(self._pause // 4, MIN_PAUSE)  # it doubles with every try
                self._until_try, self._num_kept = 1, 0  # try drafts again in the next step

    def _has_paid(self, width: int, num_right: Sequence[int]) -> bool:
        """Say if a step committed more tokens than plain steps would have in the same time."""
        count = len(num_right)
        plain_s, seconds = self.costs.by_width(count, (1, width))
        return bool(count + sum(num_right) > count * seconds / plain_s)
