"""Watchdog: a thread that detects a hanging step."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from threading import Event, Thread

from blockdraft.engine.loop import EngineLoop

log = logging.getLogger(__name__)


class Watchdog:
    """Logs all stacks and calls `on_hang` once, when a step of `loop` has run for `limit_s` seconds.

    Until then it calls `on_tick` about four times in each `limit_s` or more often. If the ticks stop, this
    process's interpreter is stuck, which a thread of the process cannot detect.
    """

    def __init__(
        self,
        loop: EngineLoop,
        limit_s: float,
        *,
        on_hang: Callable[[], object],
        on_tick: Callable[[], object] = lambda: None,
    ) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._on_tick = on_tick
        self._stop = Event()
        self._thread = Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._limit_s / 4)):
            self._on_tick()
            began_s = self._loop.step_began_s
            if began_s is not None and time.monotonic() - began_s > self._limit_s:
                log.error("a step has run for over %.0f s: giving up", self._limit_s)
                _log_stacks()
                self._on_hang()
                return


def _log_stacks() -> None:
    """Log the stack of each thread, one line per frame, innermost last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        for entry in traceback.extract_stack(frame):
            place = f"{entry.filename}:{entry.lineno} {entry.name}"
            log.error("thread %s: %s", names.get(ident, ident), place)
