"""WaitingQueue: the sequences without a row, and whose turn is next.

A lower priority goes first. Within a priority, clients take turns: a free row goes to the client that has the
fewest rows, or of those to the one that got its last row longest ago. So one with many requests delays
another with one by a single answer. A client is a path, such as an API key and an address: turns are taken by
key first, and by address among those of one key.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from itertools import chain

from blockdraft.engine.request import Turn
from blockdraft.engine.sequence import Sequence

Path = tuple[str, ...]
MAX_SERVED = 1 << 12  # clients whose last row is remembered; arbitrary


class WaitingQueue:
    """Sequences by priority and client. Those of one client keep their order.

    A new request gets in whole or not at all, also if an interrupt comes at any line.
    """

    def __init__(self, sequences: Iterable[Sequence] = ()) -> None:
        self._queues: dict[Turn, deque[Sequence]] = {}  # none is empty
        self._served: dict[Path, int] = {}  # numbers of the last rows of clients and groups
        self._num_served = 0
        for sequence in sequences:
            self.extend([sequence])

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._queues.values())

    def extend(self, sequences: Items[Sequence]) -> None:
        """Add the choices of one request."""
        turn = sequences[0].request.turn
        queue = self._queues.get(turn)
        if queue is None:
            self._queues[turn] = deque(sequences)
        else:
            queue.extend(sequences)

    def put_back(self, sequence: Sequence) -> None:
        """Add a sequence that has lost its row; it goes before its client's others."""
        queue = self._queues.get(sequence.request.turn)
        if queue is None:
            self._queues[sequence.request.turn] = deque([sequence])
        else:
            queue.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        turn = sequence.request.turn
        self._queues[turn].remove(sequence)
        if not self._queues[turn]:
            del self._queues[turn]

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence that has got a row."""
        self.remove(sequence)
        self._num_served += 1
        if len(self._served) >= MAX_SERVED:
            self._served.clear()
        self._served.update(dict.fromkeys(_parts(sequence.request.turn.client), self._num_served))

    def next(self, running: Iterable[Sequence]) -> Sequence:
        """Return the sequence that gets the next row; some must wait. `running` have rows."""
        if len(self._queues) == 1:
            return next(iter(self._queues.values()))[0]
        first = min(turn.priority for turn in self._queues)
        turns = [turn for turn in self._queues if turn.priority == first]
        num_rows = Counter(part for sequence in running for part in _parts(sequence.request.turn.client))

        def share(turn: Turn) -> tuple[list[tuple[int, int]], float]:
            shares = [(num_rows[part], self._served.get(part, 0)) for part in _parts(turn.client)]
            return shares, self._queues[turn][0].request.arrival_s

        return self._queues[min(turns, key=share)][0]


def _parts(client: Path) -> list[Path]:
    """Return the client and all groups that it belongs to, the largest first."""
    return [client[: depth + 1] for depth in range(len(client))]


def last_to_run(running: Items[Sequence]) -> Sequence:
    """Return the sequence that loses its row first: the youngest of the highest priority number.

    `running` has the oldest first.
    """
    return max(reversed(running), key=lambda sequence: sequence.request.turn.priority)
