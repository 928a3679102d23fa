"""Which tape records in this thread: kernels tell it what they ran, and `repeat` what Python runs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from torch import Tensor


class NotRecordable(RuntimeError):
    """The step asks for numbers on its way, which a replay would not ask again."""


class Call(NamedTuple):
    """A kernel and its job: what `jit` runs."""

    address: int
    job: ctypes.Array[ctypes.c_char]
    name: str


class Recording(Protocol):
    """A tape, as those see it who put something on it."""

    def add(self, call: Call, used: Iterable[Tensor]) -> None:
        """A kernel that was run on this memory."""

    def add_python(self, run: Callable[[], None]) -> None:
        """What Python runs now and at every replay."""


class _Recorder(threading.local):
    tape: Recording | None = None


recorder = _Recorder()


def current_tape() -> Recording | None:
    """The tape that records in this thread."""
    return recorder.tape


def repeat(run: Callable[[], None]) -> None:
    """Run this now and, where a tape records, at each of its replays."""
    tape = current_tape()
    if tape is None:
        run()
    else:
        tape.add_python(run)
