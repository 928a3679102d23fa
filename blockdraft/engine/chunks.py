"""Chooses the prompt tokens of each prefill step, and the number of decode steps before the next one.

While no row decodes, a chunk is as large as the plan allows. Rows that decode must wait for each chunk, so
then a chunk takes as long as a few decode steps; the more prompts wait, the longer. The times are observed.
A chunk has a minimum size; if that takes longer, more decode steps follow it. Chunk boundaries change no bit
of a prompt's state (docs/lossless.md), so the sizes may depend on the clock.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

MIN_CHUNK = 128  # tokens; on a GPU a smaller chunk takes as long
MAX_BESIDE = 2048  # tokens while a row decodes; a larger chunk does not raise a GPU's throughput
OWN_STEPS = 2  # a chunk may take as long as this many decode steps, and one more per waiting prompt
MAX_STEPS = 8  # the most decode steps that a chunk may take as long as
FADE = 0.8  # each observation scales the older ones by this
SURPRISE = 4.0  # limit on one observation, in means: a graph capture or a suspended machine is an outlier


class Observed:
    """The recent mean seconds of one unit."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    @property
    def each_s(self) -> float | None:
        """Return the seconds of one unit, or None before the first observation."""
        return self._seconds / self._units if self._seconds > 0 else None

    def observe(self, seconds: float, num_units: int) -> None:
        known = self.each_s
        if known is not None:
            seconds = min(seconds, SURPRISE * known * num_units)
        self._seconds = FADE * self._seconds + seconds
        self._units = FADE * self._units + num_units


class Chunks:
    """Choose chunk sizes from the observed times of steps."""

    def __init__(self, most: int) -> None:
        self.most = most  # tokens of a chunk, ever
        self.most_beside = min(MAX_BESIDE, most)
        self.least = min(MIN_CHUNK, most)
        self._token, self._step = Observed(), Observed()
        self._num_owed = 0  # decode steps before the next chunk

    # ---- what steps took

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record a chunk's time. A chunk below the minimum size counts only as the first observation."""
        if num_tokens >= self.least or self._token.each_s is None:
            self._token.observe(seconds, max(num_tokens, self.least))

    def observe_decode(self, seconds: float) -> None:
        self._step.observe(seconds, 1)

    # ---- what comes next

    @property
    def is_due(self) -> bool:
        """Say if a chunk may run now: no decode steps are left to run before it."""
        return self._num_owed == 0

    def count_decode(self) -> None:
        self._num_owed = max(0, self._num_owed - 1)

    def take(self, left: Items[int], *, is_decoding: bool) -> list[int]:
        """Return how many of the `left` tokens of each prompt the next chunk takes, oldest prompt first."""
        self._num_owed = 1
        if not is_decoding:
            return share(left, self.most, self.most)
        token_s, step_s = self._token.each_s, self._step.each_s
        if token_s is None or step_s is None:
            return share(left, self.least, self.most_beside)
        allowed_s = step_s * min(OWN_STEPS + len(left), MAX_STEPS)
        size = int(allowed_s / token_s) // self.least * self.least
        counts = share(left, max(self.least, min(self.most_beside, size)), self.most_beside)
        self._num_owed = max(1, int(sum(counts) * token_s / allowed_s))
        return counts


def share(left: Items[int], size: int, most: int) -> list[int]:
    """Divide `size` tokens among prompts, the oldest first. Each prompt has at least 1 token `left`.

    The oldest prompt gets half, so that it always advances. The shortest prompt comes next, so that it does
    not wait for a long one; it is finished even if the chunk grows to up to twice its size (at most `most`).
    Other prompts start only if they end in the chunk, because a partial prompt yields no token.
    """
    order = sorted(range(len(left)), key=lambda prompt: left[prompt])  # of equals, the older
    shortest, counts = order[0], [0] * len(left)
    if shortest != 0:
        counts[0] = min(left[0], max(1, size // 2))
    room = size - counts[0]
    is_finished = left[shortest] <= min(2 * room, most - counts[0])
    counts[shortest] = left[shortest] if is_finished else room
    room -= counts[shortest]
    for prompt in order[1:]:
        rest = left[prompt] - counts[prompt]
        if rest > room:
            break
        counts[prompt] += rest
        room -= rest
    counts[0] += max(0, min(left[0] - counts[0], room))
    return counts
