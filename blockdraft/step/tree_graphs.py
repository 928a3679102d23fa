"""TreeGraphs: captures steps with trees of drafts, by rows and nodes, when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from blockdraft.cache.rows import Rows
from blockdraft.step.graphs import StepGraph, StepGraphs, pack
from blockdraft.step.step_sizes import StepSize
from blockdraft.step.verify import Verdict


class TreeGraphs:
    """Captures graphs of `step(nodes)`. They share memory with the other steps' graphs."""

    def __init__(
        self,
        step: Callable[[int], Verdict],
        rows: Rows,
        steps: StepGraphs,
        places: Sequence[tuple[int, int]],
    ) -> None:
        """`places`: the rows and nodes of all steps that may be captured."""
        self._step = step
        self._rows = rows
        self._captures = steps.captures
        self._time = steps.time
        self._places = places
        self._graphs: dict[tuple[int, int], StepGraph] = {}

    def has(self, num_rows: int, num_nodes: int) -> bool:
        """Say if such a step is captured."""
        return (num_rows, num_nodes) in self._graphs

    def is_cheap(self, num_rows: int, num_nodes: int) -> bool:
        """Say if the graph is captured, or may be captured now (see CaptureTime)."""
        may = self._time.is_free and (num_rows, num_nodes) in self._places
        return may or self.has(num_rows, num_nodes)

    def capture_next(self) -> bool:
        """Capture the first graph that is not captured yet. Return False if all are."""
        place = next((place for place in self._places if place not in self._graphs), None)
        if place is not None:
            self._graphs[place] = self._capture(*place)
        return place is not None

    def find(self, num_rows: int, num_nodes: int) -> StepGraph | None:
        """Return the graph of such a step, or None if it may not be captured now.

        A capture changes the active rows.
        """
        place = num_rows, num_nodes
        if place not in self._graphs and self.is_cheap(*place):
            with self._time.counted():
                self._graphs[place] = self._capture(*place)
        return self._graphs.get(place)

    @torch.inference_mode()
    def _capture(self, num_rows: int, num_nodes: int) -> StepGraph:
        self._rows.activate((), num_rows)  # only scratch rows, so no sequence changes
        self._captures.warm(lambda: self._step(num_nodes))
        graph, packed = self._captures.capture(lambda: pack(self._step(num_nodes)))
        return StepGraph(StepSize(num_rows, packed.shape[1] - 4, num_rows * num_nodes), graph, packed)
