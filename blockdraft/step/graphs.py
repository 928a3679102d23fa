"""StepGraphs: captures the decode step as one graph per StepSize. Reading: copies results to the host.

Everything that a step reads or writes has a fixed address (Rows, Cache, the weights), so a captured graph
works for any content and any widths of the rows. A smaller batch fills a graph as `step_sizes.fill` does.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.step.captures import Capturing, Graph
from blockdraft.step.step_sizes import StepSize, even_sizes, widest
from blockdraft.step.verify import Verdict

T = TypeVar("T")
MAX_BATCHES = 512  # for which the sizes with room are kept
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

    def _wait(self) -> np.ndarray:
        """Wait for the step that made the tensor, but for nothing launched later."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()

    def rows(self) -> list[list[int]]:
        """Return the whole tensor."""
        rows: list[list[int]] = self._wait().tolist()
        return rows

    def token_ids(self) -> list[tuple[int, ...]]:
        """Return the committed tokens of each row."""
        packed = self._wait()
        counts = packed[:, 0].tolist()
        rows = packed[:, 1 : 1 + max(counts)].tolist()  # the columns behind hold no committed token
        return [tuple(row[:count]) for row, count in zip(rows, counts, strict=True)]

    def chains(self) -> list[tuple[int, int, int]]:
        """Return of each tree a chain's width, what it would commit, and how many columns were tried."""
        return [(width, count, tried) for width, count, tried in self._wait()[:, -3:].tolist()]


def pack(verdict: Verdict) -> Tensor:
    """Return the part of a verdict that the host needs, as one tensor."""
    chains = [] if verdict.chains is None else [verdict.chains]
    return torch.cat((verdict.num_committed[:, None], verdict.token_ids, *chains), dim=1)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step."""

    size: StepSize
    graph: Graph
    packed: Tensor

    def replay(self) -> Tensor:
        """Run the step and return its packed verdict, which the next replay overwrites."""
        self.graph.replay()
        return self.packed


class PartsOfStep(Protocol):
    """A step in which the host can change the drafts before the forward, and the masks before sampling."""

    @property
    def size(self) -> StepSize: ...
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

    size: StepSize
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
    """Captures graphs of `step(width, num_tokens)`, which runs the active rows; `num_tokens` if uneven.

    One runs at a time: they share memory. A capture takes as long as a few dozen replays, so graphs are
    captured when needed, not all at once.
    """

    def __init__(
        self,
        step: Callable[..., Verdict],
        rows: Rows,
        captures: Capturing,
        *,
        most_padding: float = math.inf,
    ) -> None:
        """`most_padding`: a step with more than so many times the tokens of its rows is not worth a graph."""
        self._step = step
        self._rows = rows
        self.captures = captures
        self._graphs: dict[StepSize, StepGraph] = {}
        self._parts: dict[StepSize, CapturedParts] = {}
        self.places: list[StepSize] = []  # the sizes that may be captured, the smallest first
        self._most_padding = most_padding
        self._fitting = _fitting_of((), most_padding)
        self.time = CaptureTime()

    def capture(
        self,
        sizes: Iterable[int],
        widths: Iterable[int],
        now: Iterable[tuple[int, ...]] | None = None,
        *,
        uneven: Iterable[StepSize] = (),
    ) -> None:
        """Allow even steps of these numbers of rows and widths, and uneven ones.

        Capture those that run the batches in `now` (rows and width; default: all) at once, the largest first,
        because the others fit into its memory.
        """
        self.places = sorted({*even_sizes(sizes, widths), *uneven}, key=_by_tokens)
        self._fitting = _fitting_of(tuple(self.places), self._most_padding)
        wanted = self.places if now is None else [self.size(*one) for one in now]
        for place in reversed([place for place in self.places if place in wanted]):
            self._graphs[place] = self._capture(place)

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of rows that a graph may have."""
        return sorted({place.rows for place in self.places})

    def capture_next(self, likely: Iterable[tuple[int, ...]]) -> bool:
        """Capture the first graph for these batches that is not captured yet. Return False if all are."""
        sizes = (self.size(*one) for one in likely)
        place = next((one for one in sizes if one is not None and one not in self._graphs), None)
        if place is not None:
            self._graphs[place] = self._capture(place)
        return place is not None

    @torch.inference_mode()
    def _capture(self, size: StepSize) -> StepGraph:
        self._activate(size)
        run = self._run(size)
        self.captures.warm(run)
        graph, packed = self.captures.capture(lambda: pack(run()))
        return StepGraph(size, graph, packed)

    def _run(self, size: StepSize) -> Callable[[], Verdict]:
        given = (size.width,) if size.is_even else (size.width, size.tokens)
        return functools.partial(self._step, *given)

    def _activate(self, size: StepSize) -> None:
        """Activate only scratch rows, so no sequence changes."""
        self._rows.activate((), size.rows, widths=() if size.is_even else widest(size))

    def size(self, num_rows: int, width: int, num_tokens: int | None = None) -> StepSize | None:
        """Return the smallest size with room for such a batch, even by default.

        None if it has more than `most_padding` times the batch's tokens per row.
        """
        return next(iter(self._fitting(num_rows, width, num_tokens)), None)

    def has(self, num_rows: int, width: int, num_tokens: int | None = None) -> bool:
        """Say if the smallest graph for such a batch is captured."""
        return self.size(num_rows, width, num_tokens) in self._graphs

    def is_cheap(self, num_rows: int, width: int, num_tokens: int | None = None) -> bool:
        """Say if the graph is captured, or may be captured now (see CaptureTime)."""
        return self.time.is_free or self.has(num_rows, width, num_tokens)

    def captured_for(self, num_rows: int, width: int) -> StepGraph | None:
        """Return the smallest graph for such an even batch, captured now if need be: to be timed."""
        size = self.size(num_rows, width)
        if size is not None and size not in self._graphs:
            with self.time.counted():
                self._graphs[size] = self._capture(size)
        return None if size is None else self._graphs[size]

    def find(self, num_rows: int, width: int, num_tokens: int | None = None) -> StepGraph | None:
        """Return the smallest graph for such a batch, or None if no graph fits.

        If it may not be captured now, prefer a captured graph of up to twice its tokens. A capture changes
        the active rows.
        """
        return self._find(self._graphs, self._capture, self._fitting(num_rows, width, num_tokens))

    def find_parts(self, wanted: StepSize, make: Callable[[StepSize], PartsOfStep]) -> CapturedParts | None:
        """Return the captured parts of a step, as `find` does. `make` makes the step of a size."""
        return self._find(self._parts, functools.partial(self._capture_parts, make), self._fitting(*wanted))

    def _find(
        self,
        captured: dict[StepSize, T],
        capture: Callable[[StepSize], T],
        fitting: tuple[StepSize, ...],
    ) -> T | None:
        if not fitting:
            return None
        size = fitting[0]
        if size not in captured and not self.time.is_free:
            size = next((one for one in fitting if one in captured), size)
        if size not in captured:
            with self.time.counted():
                captured[size] = capture(size)
        return captured[size]

    @torch.inference_mode()
    def _capture_parts(self, make: Callable[[StepSize], PartsOfStep], size: StepSize) -> CapturedParts:
        self._activate(size)
        parts = make(size)
        for run in (parts.draft, parts.forward, parts.settle):
            self.captures.warm(run)
        draft, _ = self.captures.capture(parts.draft)
        forward, _ = self.captures.capture(parts.forward, goes_on=True)
        settle, packed = self.captures.capture(parts.settle, goes_on=True)
        return CapturedParts(size, parts, (draft, forward, settle), packed)

    def __len__(self) -> int:
        return len(self.places)


def _fitting_of(places: tuple[StepSize, ...], most_padding: float) -> Callable[..., tuple[StepSize, ...]]:
    """Return `_fitting` for these sizes; it keeps what it found, as each step asks a few times."""
    return functools.lru_cache(MAX_BATCHES)(functools.partial(_fitting, places, most_padding))


def _fitting(
    places: tuple[StepSize, ...],
    most_padding: float,
    num_rows: int,
    width: int,
    num_tokens: int | None = None,
) -> tuple[StepSize, ...]:
    """Return the sizes with room for such a batch, and at most twice the tokens of the smallest."""
    wanted = StepSize(num_rows, width, num_rows * width if num_tokens is None else num_tokens)
    found = [place for place in places if place.has_room(wanted)]
    if not found or found[0].tokens * num_rows > most_padding * wanted.tokens * found[0].rows:
        return ()
    return tuple(one for one in found if one.tokens <= 2 * found[0].tokens)


def _by_tokens(size: StepSize) -> tuple[int, int, int]:
    """Return the order of sizes: a batch takes the first with room."""
    return size.tokens, size.rows, size.width
