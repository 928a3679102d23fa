"""SilenceWatch: sees from outside that a process no longer speaks, whatever holds it up.

A thread inside the process cannot see that its interpreter is stuck: a call that holds the interpreter's
lock stops that thread, too.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

UNHEALTHY_S = 10.0  # of silence, until the server says that something is wrong; arbitrary


class SilenceWatch:
    """Calls `on_silence` once when nothing was heard for `limit_s` seconds, from `start` on.

    Time counts in ticks of its own thread: where this process itself was stopped, no silence adds up.
    """

    def __init__(self, limit_s: float, on_silence: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_silence = on_silence
        self._num_heard = 0
        self._silent_s = 0.0
        self._stop = Event()
        self._thread = Thread(target=self._run, name="silence", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hear(self) -> None:
        """Note a sign of life. One thread calls this."""
        self._num_heard += 1
        self._silent_s = 0.0

    @property
    def is_long(self) -> bool:
        """Whether it has been silent for longer than any process should be."""
        return self._silent_s >= min(UNHEALTHY_S, self._limit_s)

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        tick_s, num_heard = min(1.0, self._limit_s / 4), self._num_heard
        while not self._stop.wait(tick_s):
            self._silent_s = 0.0 if self._num_heard != num_heard else self._silent_s + tick_s
            num_heard = self._num_heard
            if self._silent_s >= self._limit_s:
                self._on_silence()
                return
