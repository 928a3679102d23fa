"""The engine's process as the server's process handles it: started, ended, and watched for silence.

A thread inside the process cannot see that its interpreter is stuck: a call that holds the interpreter's
lock stops that thread, too.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from collections.abc import Sequence as Items
from multiprocessing.connection import Connection
from threading import Event, Thread
from typing import Any, NoReturn, Protocol

log = logging.getLogger(__name__)

Work = Callable[[Connection], None]  # the engine's side of a connection
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


class Child(Protocol):
    """The process of the engine."""

    def kill(self) -> None: ...
    def join(self) -> None: ...
    @property
    def exitcode(self) -> int | None:
        """Its exit code, -n after signal n."""


def start_child(work: Work, connection: Connection, closes: Items[Connection | socket.socket]) -> Child:
    """Run `work` in a process of its own, where what it has no use for is closed.

    Only Linux forks: Windows cannot, and macOS's libraries may crash after it. Elsewhere `work` is pickled.
    """
    is_forked = sys.platform == "linux"
    context: Any = multiprocessing.get_context("fork" if is_forked else "spawn")
    args = (work, connection, closes if is_forked else ())
    process = context.Process(target=_be_the_child, args=args)
    process.start()
    atexit.register(process.kill)  # else Python waits for it where we fail, and it for us
    child: Child = process
    return child


def _be_the_child(work: Work, connection: Connection, closes: Items[Connection | socket.socket]) -> NoReturn:
    """Run `work` and exit. Signals are left to the server, which ends this process with itself."""
    code = 1
    try:
        for one in closes:
            one.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # not ignored: what we start in turn would inherit that
        work(connection)
        code = 0
    except BaseException:
        log.exception("the engine's process failed")
    finally:
        logging.shutdown()
        os._exit(code)
