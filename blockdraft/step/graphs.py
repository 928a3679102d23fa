"""StepGraphs: captures the decode step as one graph per (rows, width). Reading: copies results to the host.

Everything that a step reads or writes has a fixed address (Rows, Cache, the weights), so a captured graph
works for any content of the rows. A batch with fewer rows than the graph is padded with the scratch row.
"""

from __future__ import annotations

import functools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.step.captures import Capturing, Graph
from blockdraft.step.row_sizes import Place
from blockdraft.step.verify import Verdict

T = TypeVar("T")
MAX_SHARE = 0.03  # share of the time that captures may take while requests are served


class Reading:
    """Copies a verdict or a block to the host, while the device continues."""

    def __init__(self, packed: Tensor) -> None:
        """Start the copy. A packed verdict [R, 1 + B] has the count of committed tokens, then the samples."""
        self._host = packed if packed.is_cuda else packed.clone()  # the next replay overwrites it
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def rows(self) -> list[list[int]]:
        """Return the whole tensor. Wait for the step that made it, but for nothing launched later."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._host.tolist()
        return rows

    def token_ids(self) -> list[tuple[int, ...]]:
        """Return the committed tokens of each row."""
        return [tuple(row[1 : 1 + row[0]]) for row in self.rows()]


def pack(verdict: Verdict) -> Tensor:
    """Return the part of a verdict that the host needs, as one tensor."""
    return torch.cat((verdict.num_committed[:, None], verdict.token_ids), dim=1)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step of `num_rows` rows."""

    num_rows: int
    graph: Graph
    packed: Tensor

    def replay(self) -> Tensor:
        """Run the step and return its packed verdict, which the next replay overwrites."""
        self.graph.replay()
        return self.packed


class PartsOfStep(Protocol):
    """A step in which the host can change the drafts before the forward, and the masks before sampling."""

    @property
    def num_rows(self) -> int: ...
    @property
    def block(self) -> Tensor:
        """Return the block [R, B]. It exists after `draft`."""

    def draft(self) -> None: ...
    def forward(self) -> None: ...
    def settle(self) -> Tensor:
        """Sample, commit and return the packed verdict."""


@dataclass(frozen=True, slots=True)
class CapturedParts:
    """A step with a graph for each part. The tensors between the parts live as long as this object."""

    num_rows: int
    parts: PartsOfStep
    graphs: tuple[Graph, ...]
    packed: Tensor

    @property
    def block(self) -> Tensor:
        return self.parts.block

    def draft(self) -> None:
        self.graphs[0].replay()

    def forward(self) -> None:
        self.graphs[1].replay()

    def settle(self) -> Tensor:
        self.graphs[2].replay()
        return self.packed


class CaptureTime:
    """Limits captures to a small share of the time while requests are served."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_s = clock()  # the next capture may begin at this time

    @property
    def is_free(self) -> bool:
        return self._clock() >= self._free_s

    @contextmanager
    def counted(self) -> Iterator[None]:
        begun_s = self._clock()
        yield
        now_s = self._clock()
        self._free_s = now_s + (now_s - begun_s) / MAX_SHARE


class StepGraphs:
    """Captures graphs of `step(width)`, which runs the active rows. One runs at a time: they share memory.

    A capture takes as long as a few dozen replays, so graphs are captured when needed, not all at once.
    """

    def __init__(self, step: Callable[[int], Verdict], rows: Rows, captures: Capturing) -> None:
        self._step = step
        self._rows = rows
        self.captures = captures
        self._graphs: dict[Place, StepGraph] = {}
        self._parts: dict[Place, CapturedParts] = {}
        self.sizes: list[int] = []  # numbers of rows that a graph may have
        self._widths: list[int] = []
        self.time = CaptureTime()

    def capture(
        self, sizes: Iterable[int], widths: Iterable[int], now: Iterable[Place] | None = None
    ) -> None:
        """Allow these sizes and widths, and capture the pairs in `now` (default: all) at once.

        Capture the largest first, because the others fit into its memory.
        """
        self.sizes, self._widths = sorted(sizes), sorted(widths)
        wanted = self.places if now is None else [place for place in self.places if place in now]
        for place in reversed(wanted):
            self._graphs[place] = self._capture(*place)

    @property
    def places(self) -> list[Place]:
        """Return the (rows, width) pairs that may be captured, the smallest first."""
        return [(rows, width) for width in self._widths for rows in self.sizes]

    def capture_next(self, likely: Iterable[Place]) -> bool:
        """Capture the first of these places that is not captured yet. Return False if all are captured."""
        place = next((place for place in likely if place not in self._graphs), None)
        if place is not None:
            self._graphs[place] = self._capture(*place)
        return place is not None

    @torch.inference_mode()
    def _capture(self, num_rows: int, width: int) -> StepGraph:
        self._rows.activate((), num_rows)  # only scratch rows, so no sequence changes
        self.captures.warm(lambda: self._step(width))
        graph, packed = self.captures.capture(lambda: pack(self._step(width)))
        return StepGraph(num_rows, graph, packed)

    def size(self, num_rows: int, width: int) -> int | None:
        """Return the rows of the smallest graph for `num_rows` rows, or None if no graph fits."""
        index = bisect_left(self.sizes, num_rows)
        return self.sizes[index] if index < len(self.sizes) and width in self._widths else None

    def has(self, num_rows: int, width: int) -> bool:
        """Say if the smallest graph for `num_rows` rows is captured."""
        return (self.size(num_rows, width), width) in self._graphs

    def is_cheap(self, num_rows: int, width: int) -> bool:
        """Say if the graph is captured, or may be captured now (see CaptureTime)."""
        return self.time.is_free or self.has(num_rows, width)

    def find(self, num_rows: int, width: int) -> StepGraph | None:
        """Return the smallest graph for `num_rows` rows, or None if no graph fits.

        If it may not be captured now, prefer a captured graph of up to twice its rows. A capture changes the
        active rows.
        """
        return self._find(self._graphs, self._capture, num_rows, width)

    def find_parts(
        self, num_rows: int, width: int, make: Callable[[int, int], PartsOfStep]
    ) -> CapturedParts | None:
        """Return the captured parts of a step, as `find` does. `make` makes the step from rows and width."""
        return self._find(self._parts, functools.partial(self._capture_parts, make), num_rows, width)

    def _find(
        self, captured: dict[Place, T], capture: Callable[[int, int], T], num_rows: int, width: int
    ) -> T | None:
        size = self.size(num_rows, width)
        if size is None:
            return None
        if (size, width) not in captured and not self.time.is_free:
            larger = (one for one in self.sizes if size < one <= 2 * size and (one, width) in captured)
            size = next(larger, size)
        if (size, width) not in captured:
            with self.time.counted():
                captured[size, width] = capture(size, width)
        return captured[size, width]

    @torch.inference_mode()
    def _capture_parts(
        self, make: Callable[[int, int], PartsOfStep], num_rows: int, width: int
    ) -> CapturedParts:
        self._rows.activate((), num_rows)
        parts = make(num_rows, width)
        for run in (parts.draft, parts.forward, parts.settle):
            self.captures.warm(run)
        draft, _ = self.captures.capture(parts.draft)
        forward, _ = self.captures.capture(parts.forward, goes_on=True)
        settle, packed = self.captures.capture(parts.settle, goes_on=True)
        return CapturedParts(num_rows, parts, (draft, forward, settle), packed)

    def __len__(self) -> int:
        return len(self.sizes) * len(self._widths)
