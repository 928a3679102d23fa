"""TreeChoice: decides whether the next step's drafts are trees, and of how many tokens.

A tree takes longer than a chain and commits more. Both are measured while serving: the seconds of a step, and
the ratio of what trees of a size committed to what chains of the same rows were expected to commit. The first
branch of a tree begins as the chain that would have been drafted, so chains' chances are learnt from trees,
too. The branch ends where the drafter is unsure: the draft behind it counts, too, though it is in no tree.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from blockdraft.engine.width_controller import (
    AGE,
    GAIN,
    NEARLY,
    ChosenStep,
    DraftRecord,
    WidthController,
    always,
)

FEW = 3  # steps that a size of trees is tried for
KEPT = 9  # the last steps of a size whose seconds count
FADE = 0.98  # each step scales the older counts by this
SHORTEST = 1e-9  # seconds of a step; a clock may be too coarse to tell
PRIOR = 16.0  # weight, in tokens, of the expectation that a tree commits as much as a chain
MAX_PAUSE = 64 * AGE  # steps between two tries of a size that is far from paying; they begin with AGE


@dataclass(slots=True)
class _Gain:
    """What trees of a size committed, and chains of the same rows were expected to, faded."""

    committed: float = PRIOR
    expected: float = PRIOR

    def count(self, committed: float, expected: float) -> None:
        self.committed = FADE * self.committed + committed
        self.expected = FADE * self.expected + expected

    @property
    def ratio(self) -> float:
        return self.committed / self.expected


@dataclass(slots=True)
class _Steps:
    """The steps of one number of rows with trees of one size."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    num_left: int = FEW  # of the present try
    last: int = 0  # the number of the last step
    pause: int = AGE  # until the next try


class TreeChoice:
    """Chooses among chains and trees of several sizes by the tokens that they commit per second."""

    def __init__(self, controller: WidthController, sizes: Sequence[int], block: int) -> None:
        """`controller` knows what chains cost and commit. `sizes`: the tokens of a row's tree."""
        self._controller, self._sizes, self._block = controller, sizes, block
        self._gains: dict[int, _Gain] = defaultdict(_Gain)
        self._steps: dict[tuple[int, int], _Steps] = defaultdict(_Steps)
        self._chosen: dict[int, int] = {}  # by rows
        self._num_steps = 0
        self.last: ChosenStep | None = None  # the last step, if it had trees

    def next_tree(self, records: Sequence[DraftRecord], is_ready: Callable[[int, int], bool] = always) -> int:
        """Return the tokens of each row's tree in the next step, 0 for chains.

        The controller has just chosen the widths of chains for these rows.
        """
        count = len(records)
        self._num_steps += 1
        ready = [size for size in self._sizes if is_ready(count, size)]
        speeds = self._speeds(records, ready)
        able = [size for size in ready if self._could_pay(count, size, speeds[0])]
        for size in able:
            if self._steps[count, size].num_left > 0:
                return self._ran(count, size)
        now, best = self._chosen.get(count, 0), max(speeds, key=lambda size: speeds[size])
        if now not in speeds or speeds[best] > GAIN * speeds[now]:
            now = best
        self._chosen[count] = now
        self._steps[count, now].pause = AGE
        for size in able:
            self._try_again(self._steps[count, size], speeds.get(size), speeds[now])
        if self._num_steps - self._steps[count, 0].last > AGE:
            now = 0  # what chains cost is learnt from chains alone
        return self._ran(count, now)

    def _speeds(self, records: Sequence[DraftRecord], ready: Sequence[int]) -> dict[int, float]:
        """Return the tokens per second of chains (0) and of the sizes that were timed."""
        count, chain, expected = len(records), self._controller.last, self._expected(records)
        speeds = {0: count * chain.tokens / max(self._controller.costs.seconds(count, chain.width), SHORTEST)}
        for size in ready:
            seconds = self._steps[count, size].seconds
            if seconds:
                speeds[size] = expected * self._gains[size].ratio / median(seconds)
        return speeds

    def _could_pay(self, count: int, size: int, chain: float) -> bool:
        """Return False if a smaller tree takes so long that a whole block of it would not pay."""
        smaller = (self._steps[count, one].seconds for one in self._sizes if one < size)
        return all(count * self._block / median(seconds) > chain for seconds in smaller if seconds)

    def _try_again(self, steps: _Steps, speed: float | None, best: float) -> None:
        """Begin another try of a size that has not run for long, later each time if it is far from paying."""
        is_near = speed is None or speed > NEARLY * best  # None: no step of it was timed
        if self._num_steps - steps.last > (AGE if is_near else steps.pause):
            steps.num_left = FEW if is_near else 1
            steps.pause = min(2 * steps.pause, MAX_PAUSE)

    def _ran(self, count: int, size: int) -> int:
        steps = self._steps[count, size]
        steps.num_left, steps.last = max(0, steps.num_left - 1), self._num_steps
        self.last = replace(self._controller.last, num_tokens=count * size) if size else None
        return size

    def num_plain(self, count: int, size: int) -> float | None:
        """Return how many plain steps take as long as a step of trees, or None if that is not known."""
        seconds, costs = self._steps[count, size].seconds, self._controller.costs
        if not seconds or not costs.is_known(count, 1):
            return None
        return max(1.0, median(seconds) / costs.seconds(count, 1))

    def _expected(self, records: Sequence[DraftRecord]) -> float:
        """Return the tokens that a step of whole chains is expected to commit."""
        return float(self._controller.chances.committed(records, [self._block])[0])

    def count_chains(self, chains: Sequence[tuple[int, int]]) -> None:
        """Count the chains that rows would have drafted, as far as is known: widths and right drafts."""
        widths, num_right = zip(*chains, strict=True)
        self._controller.chances.count(widths, num_right)

    def observe(
        self, size: int, records: Sequence[DraftRecord], committed: Sequence[int], seconds: float | None
    ) -> None:
        """Learn from a step with trees, before its rows' records do. `seconds`: its time, if known."""
        self._gains[size].count(sum(committed), self._expected(records))
        if seconds is not None and seconds > SHORTEST:
            self._steps[len(records), size].seconds.append(seconds)
