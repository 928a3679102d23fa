"""Runs between the server and an engine, so that no process of the engine outlives either.

    server ──stdin──► reaper ──► engine ──► its workers

The script `reaper.py GRACE_S PROGRAM ARGUMENT...` uses only the standard library. It exits with the engine's
exit code, or 128 + n after signal n. When its stdin ends, because the server closed it or was killed,
it asks the engine to end and kills the remaining processes after GRACE_S. The kernel's parent-death signal
would end only the engine, not its worker processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.05
LEFT_OVER_S = 3.0  # limit for workers whose engine has ended; arbitrary
EXIT_NOT_STARTED = 127  # as shells report it
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main(argv: list[str]) -> int:
    grace_s, command = float(argv[1]), argv[2:]
    wakes, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # workers without a parent become our children
    try:
        engine = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # the kernel kills it with us
        )
    except OSError as error:
        sys.stderr.write(f"cannot start '{command[0]}': {error.strerror}\n")
        return EXIT_NOT_STARTED
    children = Children(engine.pid)
    children.wait_until_told(wakes)
    children.end(grace_s)
    return children.exit_code


class Children:
    """The engine and all processes that it started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid  # also the id of its process group
        self._code: int | None = None

    @property
    def exit_code(self) -> int:
        if self._code is None:
            return 128 + signal.SIGKILL
        return self._code if self._code >= 0 else 128 - self._code

    def wait_until_told(self, wakes: int) -> None:
        """Wait until the engine or stdin has ended, or a signal arrives."""
        while not self._has_ended():
            ready, _, _ = select.select([wakes, 0], [], [])
            if 0 in ready and not os.read(0, 1024):
                return
            if wakes in ready and set(os.read(wakes, 1024)) - {int(signal.SIGCHLD)}:
                return

    def end(self, grace_s: float) -> None:
        """End the engine first, which can end its workers; then end the remaining processes."""
        if not self._has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)
            _wait(self._has_ended, grace_s)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, number)
            _wait(self._is_group_gone, LEFT_OVER_S)
        for pid in _children():  # children that left the process group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _wait(lambda: self._has_ended() and not _children(), LEFT_OVER_S)

    def _has_ended(self) -> bool:
        """Return whether the engine has ended; reap all dead children, as a zombie keeps the group alive."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._pid:
                    self._code = os.waitstatus_to_exitcode(status)
        return self._code is not None

    def _is_group_gone(self) -> bool:
        self._has_ended()
        try:
            os.killpg(self._pid, 0)
        except (ProcessLookupError, PermissionError):  # macOS raises PermissionError if only zombies are left
            return True
        return False


def _wait(condition: Callable[[], bool], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(POLL_S)


def _children() -> list[int]:
    """Return our children, if /proc lists them. Only on Linux we can adopt processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
