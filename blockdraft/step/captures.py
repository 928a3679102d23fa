"""Captures a step: as a CUDA graph on a GPU, as a tape on a CPU. Both are replayed without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None: ...


class Capturing(Protocol):
    """Captures the steps of one engine. Its graphs share memory, so only one is replayed at a time."""

    def warm(self, run: Callable[[], object]) -> None:
        """Compile and set up everything that the first call of `run` needs, before `run` is captured."""

    def capture(self, run: Callable[[], T], *, goes_on: bool = False) -> tuple[Graph, T]:
        """Return a graph that replays `run`, and its result, which each replay overwrites.

        `goes_on`: this graph is always replayed after the previously captured one, and reads its results.
        """


class OnCard:
    """Captures CUDA graphs on a GPU."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def warm(self, run: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, run: Callable[[], T], *, goes_on: bool = False) -> tuple[Graph, T]:
        """Capture `run`. `goes_on` changes nothing: tensors in use keep their memory."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            found = run()
        return graph, found


class OnCpu:
    """Records tapes of the CPU's kernels."""

    def __init__(self) -> None:
        from blockdraft.kernels.llvm.tape import Arena

        self._arena = Arena()

    def warm(self, run: Callable[[], object]) -> None:
        """Do nothing: a tape runs what it records."""

    def capture(self, run: Callable[[], T], *, goes_on: bool = False) -> tuple[Graph, T]:
        from blockdraft.kernels.llvm.tape import StepTape, end_recording

        tape = StepTape(self._arena, goes_on=goes_on)
        try:
            with tape:
                found = run()
        finally:
            end_recording()  # Ctrl-C may have come inside `__enter__` or `__exit__`
        return tape, found


def capturing(device: torch.device) -> Capturing:
    return OnCard() if device.type == "cuda" else OnCpu()
