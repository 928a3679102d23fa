"""StepGraphs: the whole decode step as one CUDA graph per (rows, width), and how its result reaches the host.

Everything that a step reads or writes has a fixed address (Rows, Cache, the weights), so a graph that was
captured once serves whatever the rows hold when it is replayed. A batch of fewer rows than the graph's is
filled up with the scratch row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.step.verify import Verdict

WARM_RUNS = 2  # before a capture: kernels are compiled and libraries set up outside of it


class Reading:
    """A verdict on its way to the host; the device goes on meanwhile."""

    def __init__(self, packed: Tensor) -> None:
        """packed [R, 1 + B]: tokens committed, and the samples."""
        self._host = packed
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def token_ids(self) -> list[list[int]]:
        """The committed tokens of each row; waits for the step, and for no later one."""
        if self._event is not None:
            self._event.synchronize()
        return [row[1 : 1 + row[0]] for row in self._host.tolist()]


def pack(verdict: Verdict) -> Tensor:
    """What the host needs of a verdict, in one tensor."""
    return torch.cat((verdict.num_committed[:, None], verdict.token_ids), dim=1)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One captured step of `num_rows` rows."""

    num_rows: int
    graph: torch.cuda.CUDAGraph
    packed: Tensor

    def replay(self) -> Tensor:
        """Run the step; its packed verdict is overwritten by the next replay."""
        self.graph.replay()
        return self.packed


class StepGraphs:
    """Graphs of `step(width)`, which runs the active rows. They share their memory: one runs at a time."""

    def __init__(self, step: Callable[[int], Verdict], rows: Rows) -> None:
        self._step = step
        self._rows = rows
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, int], StepGraph] = {}
        self._sizes: list[int] = []

    @torch.inference_mode()
    def capture(self, sizes: Iterable[int], widths: Iterable[int]) -> None:
        """Every pair of them, the largest first: the others fit into its memory."""
        self._sizes = sorted(sizes)
        for width in sorted(widths, reverse=True):
            for num_rows in reversed(self._sizes):
                self._graphs[num_rows, width] = self._capture(num_rows, width)

    def _capture(self, num_rows: int, width: int) -> StepGraph:
        self._rows.activate((), num_rows)  # scratch rows only: nothing of a sequence is touched
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_RUNS):
                self._step(width)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side):
            packed = pack(self._step(width))
        return StepGraph(num_rows, graph, packed)

    def find(self, num_rows: int, width: int) -> StepGraph | None:
        """The smallest graph with room for `num_rows`."""
        index = bisect_left(self._sizes, num_rows)
        return self._graphs.get((self._sizes[index], width)) if index < len(self._sizes) else None

    def __len__(self) -> int:
        return len(self._graphs)


def row_sizes(max_rows: int) -> list[int]:
    """Powers of two and, from 16 on, what lies half-way: few graphs, and few rows filled up in vain."""
    sizes = {1, 2, 4, 8}
    size = 16
    while size < max_rows:
        sizes |= {size, size + size // 2}
        size *= 2
    return [*sorted(size for size in sizes if size < max_rows), max_rows]
