"""Turns: lets several threads use one engine. Each waits for its own answer; all answers share steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident


class Turns:
    """Gives the engine to one thread at a time. Threads in `asking` go before the next step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taker: int | None = None  # the thread that has the engine
        self._asking: set[int] = set()  # threads

    @contextmanager
    def asking(self) -> Iterator[None]:
        with self._given_back():
            with self._changed:
                self._asking.add(get_ident())
                self._changed.wait_for(lambda: self._taker is None)
                self._taker = get_ident()
                self._asking.discard(get_ident())
            yield

    def if_free(self, run: Callable[[], None]) -> None:
        """Call `run` if no thread has the engine. Never wait."""
        if self._changed.acquire(blocking=False):
            try:
                if self._taker is None:
                    run()
            finally:
                self._changed.release()

    def step_unless(self, is_done: Callable[[], bool], step: Callable[[], None]) -> None:
        """Run `step` when the engine is free, unless another thread's step makes `is_done()` true first."""

        def is_mine() -> bool:
            return self._taker is None and not self._asking

        with self._given_back():
            with self._changed:
                self._changed.wait_for(lambda: is_done() or is_mine())
                if is_done():
                    return
                self._taker = get_ident()
            step()

    @contextmanager
    def _given_back(self) -> Iterator[None]:
        """Give the engine back at the end. Do it twice, because Ctrl-C may interrupt the first time."""
        try:
            try:
                yield
            finally:
                self._give_back()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Record that this thread neither has the engine nor waits for it."""
        with self._changed:
            self._asking.discard(get_ident())
            if self._taker == get_ident():
                self._taker = None
            self._changed.notify_all()
