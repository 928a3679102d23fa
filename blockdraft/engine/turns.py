"""Several threads at one engine: each waits for its own answer, and all answers share their steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """One thread at a time has the engine. Who asks for something comes before the next step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        self._num_asking = 0

    @contextmanager
    def asking(self) -> Iterator[None]:
        with self._changed:
            self._num_asking += 1
            try:
                self._changed.wait_for(lambda: not self._is_taken)
                self._is_taken = True
            finally:
                self._num_asking -= 1
        with self._given_back():
            yield

    def if_free(self, run: Callable[[], None]) -> None:
        """Run it if nobody has the engine; never waits."""
        if self._changed.acquire(blocking=False):
            try:
                if not self._is_taken:
                    run()
            finally:
                self._changed.release()

    def step_unless(self, is_done: Callable[[], bool], step: Callable[[], None]) -> None:
        """Return when it is done: by this step, or by another thread's."""

        def is_mine() -> bool:
            return not self._is_taken and self._num_asking == 0

        with self._changed:
            self._changed.wait_for(lambda: is_done() or is_mine())
            if is_done():
                return
            self._is_taken = True
        with self._given_back():
            step()

    @contextmanager
    def _given_back(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()
