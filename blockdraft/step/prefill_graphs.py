"""PrefillGraphs: captures small prefills as CUDA graphs.

The host needs far longer to launch a prefill's kernels one by one than the device needs to run them. A graph
has a fixed number of tokens and rows. A smaller batch is padded with tokens of the scratch row. Only the
device knows which row each token belongs to, from `offsets`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.kernels.transfer import to_device
from blockdraft.step.captures import Graph
from blockdraft.step.graphs import StepGraphs

TOKENS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # more keep the device busy anyway
ROWS = (1, 8, 64)  # rows for prompts; a graph adds the scratch row
# Padding to so many tokens takes less time than launching the kernels of a prefill one by one.
SMALL = 512
FIRST_TOKENS = (64, 128, 256, SMALL)  # of one prompt, so that small ones are at most doubled

# token ids, the tokens one position later, counts, offsets
Prefill = Callable[[Tensor, Tensor, tuple[int, ...], Tensor], object]


@dataclass(frozen=True, slots=True)
class PrefillGraph:
    """A captured prefill of `num_tokens` tokens in `num_rows` rows. The last row is the scratch row."""

    num_tokens: int
    num_rows: int
    graph: Graph
    inputs: Tensor  # [2 * num_tokens + num_rows + 1], as `filled` makes them

    @torch.inference_mode()
    def replay(self, token_ids: Items[int], next_ids: Items[int], counts: Items[int]) -> None:
        """Run the graph. `counts[r]` tokens belong to active row r; the rows are padded to `num_rows`."""
        values = filled(token_ids, next_ids, counts, self.num_tokens, self.num_rows)
        self.inputs.copy_(to_device(values, self.inputs.device))
        self.graph.replay()


def filled(
    token_ids: Items[int], next_ids: Items[int], counts: Items[int], num_tokens: int, num_rows: int
) -> list[int]:
    """Return a graph's input: token ids, the next ids, then each row's offset.

    The last row gets the padding tokens.
    """
    ends = list(itertools.accumulate(counts))
    padding = [0] * (num_tokens - len(token_ids))
    offsets = [0, *ends, *[ends[-1]] * (num_rows - 1 - len(ends)), num_tokens]
    return [*token_ids, *padding, *next_ids, *padding, *offsets]


class PrefillGraphs:
    """Captures graphs of `prefill` when they are first needed, or in `capture_next`.

    They share memory with the decode steps' graphs, so only one runs at a time.
    """

    def __init__(self, prefill: Prefill, rows: Rows, *, max_tokens: int, steps: StepGraphs) -> None:
        self._prefill = prefill
        self._rows = rows
        self._captures = steps.captures
        self._time = steps.time
        self._tokens = [size for size in TOKENS if size <= max_tokens]
        self._sizes = sorted({min(size, rows.max_rows) for size in ROWS})
        self._graphs: dict[tuple[int, int], PrefillGraph] = {}
        self._shapes = shapes(max_tokens, rows.max_rows)

    def capture_first(self) -> None:
        """Capture the few graphs that the first requests use or are padded to, the largest first."""
        for shape in sorted(first_shapes(self._shapes), reverse=True):
            self._graphs[shape] = self._capture(*shape)

    def capture_next(self) -> bool:
        """Capture the first graph that is not captured yet. Return False if all are captured."""
        shape = next((shape for shape in self._shapes if shape not in self._graphs), None)
        if shape is not None:
            self._graphs[shape] = self._capture(*shape)
        return shape is not None

    def has(self, num_tokens: int, num_rows: int) -> bool:
        """Say if the smallest graph that fits is captured."""
        return self._shape(num_tokens, num_rows) in self._graphs

    def find(self, num_tokens: int, num_rows: int) -> PrefillGraph | None:
        """Return the smallest graph that fits, or None if none fits.

        If it may not be captured now, return a captured one of up to `SMALL` or twice as many tokens, or
        None. A capture changes the active rows.
        """
        shape = self._shape(num_tokens, num_rows)
        if shape is None:
            return None
        if shape not in self._graphs and self._time.is_free:
            with self._time.counted():
                self._graphs[shape] = self._capture(*shape)
        return self._graphs.get(shape) or self._stand_in(*shape)

    def _stand_in(self, num_tokens: int, num_rows: int) -> PrefillGraph | None:
        """Return the smallest captured graph with room for one of these sizes, unless it is far too large."""
        most = max(SMALL, 2 * num_tokens)
        fitting = [at for at in self._graphs if num_tokens <= at[0] <= most and at[1] >= num_rows]
        return self._graphs[min(fitting)] if fitting else None

    def _shape(self, num_tokens: int, num_rows: int) -> tuple[int, int] | None:
        at, row_at = bisect_left(self._tokens, num_tokens), bisect_left(self._sizes, num_rows)
        if at == len(self._tokens) or row_at == len(self._sizes):
            return None
        return self._tokens[at], self._sizes[row_at] + 1

    @torch.inference_mode()
    def _capture(self, num_tokens: int, num_rows: int) -> PrefillGraph:
        rows = self._rows
        rows.activate((), num_rows)  # only scratch rows, so no sequence changes
        inputs = to_device(filled((), (), (0,), num_tokens, num_rows), rows.device)
        token_ids, next_ids, offsets = torch.split(inputs, [num_tokens, num_tokens, num_rows + 1])
        counts = widest_counts(num_tokens, num_rows)
        self._captures.warm(lambda: self._prefill(token_ids, next_ids, counts, offsets))
        graph, _ = self._captures.capture(lambda: self._prefill(token_ids, next_ids, counts, offsets))
        return PrefillGraph(num_tokens, num_rows, graph, inputs)


def shapes(max_tokens: int, max_rows: int) -> list[tuple[int, int]]:
    """Return (tokens, rows) of all graphs, the scratch row included; graphs for one prompt come first."""
    sizes = sorted({min(size, max_rows) for size in ROWS})
    return [(tokens, size + 1) for size in sizes for tokens in TOKENS if tokens <= max_tokens]


def first_shapes(shapes: Items[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the first sizes to capture: a few for one prompt, and two for many."""
    one, many = (find((rows for _, rows in shapes), default=0) for find in (min, max))
    largest = max((tokens for tokens, _ in shapes), default=0)
    wanted = {*((tokens, one) for tokens in FIRST_TOKENS), (min(SMALL, largest), many), (largest, many)}
    return wanted & set(shapes)


def widest_counts(num_tokens: int, num_rows: int) -> tuple[int, ...]:
    """Return counts with sum `num_tokens` and the largest possible maximum: kernels are chosen by it."""
    return (num_tokens, *(0,) * (num_rows - 1))
