"""The tape that records in this thread: kernels report their runs to it, and `repeat` reports Python code."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from torch import Tensor


class NotRecordable(RuntimeError):
    """The step reads values on the host, which a replay would not read again."""


class Call(NamedTuple):
    """A kernel and its job."""

    address: int
    job: ctypes.Array[ctypes.c_char]
    name: str


class Recording(Protocol):
    """The interface of a tape for what it records."""

    def add(self, call: Call, used: Iterable[Tensor]) -> None:
        """Record a kernel that was run on this memory."""

    def add_python(self, run: Callable[[], None]) -> None:
        """Run Python code now and at every replay."""


class _Recorder(threading.local):
    tape: Recording | None = None


recorder = _Recorder()


def current_tape() -> Recording | None:
    return recorder.tape


def repeat(run: Callable[[], None]) -> None:
    """Run this now and, if a tape records, at each of its replays."""
    tape = current_tape()
    if tape is None:
        run()
    else:
        tape.add_python(run)
