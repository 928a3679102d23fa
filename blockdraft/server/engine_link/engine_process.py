"""The engine's process as the server's process handles it: started, ended, and watched for silence.

A thread inside the process cannot see that its interpreter is stuck: a call that holds the interpreter's
lock stops that thread, too.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Event, Thread
from typing import NoReturn, Protocol

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


def forked(work: Work, connection: Connection, closes: Items[Connection | socket.socket]) -> Child:
    pid = os.fork()
    if pid == 0:
        for one in closes:
            one.close()
        _be_the_child(work, connection)
    return ForkedChild(pid)


def spawned(work: Work, connection: Connection) -> Child:
    process = multiprocessing.get_context("spawn").Process(
        target=_be_the_child, args=(work, connection), daemon=True
    )
    process.start()
    atexit.register(process.kill)  # else Python waits for it where we fail, and it for us
    return SpawnedChild(process)


def _be_the_child(work: Work, connection: Connection) -> NoReturn:
    """Run `work` and exit. Signals are left to the server, which ends this process with itself."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # not ignored: what we start in turn would inherit that
        work(connection)
        code = 0
    except BaseException:
        log.exception("the engine's process failed")
    finally:
        logging.shutdown()
        os._exit(code)


class Child(Protocol):
    """The process of the engine."""

    def kill(self) -> None: ...

    def wait(self) -> int:
        """Its exit code, -n after signal n."""


@dataclass(frozen=True, slots=True)
class SpawnedChild:
    """A process that was started afresh."""

    process: BaseProcess

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> int:
        self.process.join()
        return self.process.exitcode or 0


@dataclass(frozen=True, slots=True)
class ForkedChild:
    """A process that began as a copy of ours."""

    pid: int

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
