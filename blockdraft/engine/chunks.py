"""Chooses the prompt tokens of each prefill step, and the number of decode steps before the next one.

While no row decodes, a chunk is as large as the plan allows. Rows that decode wait for each chunk, so then a
chunk takes the time of a few decode steps, and of more steps the more prompts wait. The times are observed.
A chunk has a minimum size; if that takes longer, more decode steps follow it. Chunk boundaries change no bit
of a prompt's state (docs/lossless.md), so all of this may depend on the clock.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

MIN_CHUNK = 128  # tokens; on a card fewer take as long
MAX_BESIDE = 2048  # tokens while somebody decodes: of more a card does not make more
OWN_STEPS = 2  # decode steps' time for a chunk, and one more for each prompt that waits
MAX_STEPS = 8  # however many wait
FADE = 0.8  # what an observation leaves of those before it
SURPRISE = 4.0  # how much dearer than all before it may count: a graph is captured, a machine is suspended


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
    """The policy and its observations."""

    def __init__(self, most: int) -> None:
        self.most = most  # tokens of a chunk, ever
        self.most_beside = min(MAX_BESIDE, most)
        self.least = min(MIN_CHUNK, most)
        self._token, self._step = Observed(), Observed()
        self._num_owed = 0  # decode steps before the next chunk

    # ---- what steps took

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record a chunk's time. Chunks below the least size count only until a larger one was seen."""
        if num_tokens >= self.least or self._token.each_s is None:
            self._token.observe(seconds, max(num_tokens, self.least))

    def observe_decode(self, seconds: float) -> None:
        self._step.observe(seconds, 1)

    # ---- what comes next

    @property
    def is_due(self) -> bool:
        """Say if decoding has had its turn."""
        return self._num_owed == 0

    def count_decode(self) -> None:
        self._num_owed = max(0, self._num_owed - 1)

    def take(self, left: Items[int], *, is_decoding: bool) -> list[int]:
        """Return how many tokens of each prompt, the oldest first, the next chunk takes of those `left`."""
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
    """Cut `size` tokens among prompts, the oldest first; what is left of each is at least 1.

    The oldest gets half, so that it always advances. The shortest goes first, so that it does not wait for a
    long one, and is finished even if the chunk then has up to twice its size. Others start only if they end
    in the chunk: a partial prompt yields no token.
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
