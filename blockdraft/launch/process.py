"""Runs another engine in a process that never outlives ours, and reads its output."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from blockdraft.launch.log_signs import is_bar

REAPER = Path(__file__).with_name("reaper.py")
GRACE_S = 15.0  # limit for an engine to end by itself; arbitrary
REAPER_S = 12.0  # limit, after GRACE_S, for the reaper to end the remaining processes
MAX_LINES = 200  # last lines of its output, kept to explain its end
MAX_LINE = 4000  # characters
HIDDEN = "***"

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BREAK = re.compile(r"[\r\n]")


class EngineProcess:
    """A running engine. A separate thread calls `on_line` with each line, secrets removed."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        on_line: Callable[[str], None],
        secrets: Sequence[str] = (),
        grace_s: float = GRACE_S,
    ) -> None:
        self._on_line = on_line
        self._secrets = tuple(filter(None, secrets))
        self._grace_s = grace_s
        self._tail: deque[str] = deque(maxlen=MAX_LINES)
        self._lock = threading.Lock()
        # Without site packages and PYTHON variables: those are for the engine.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(REAPER), str(grace_s), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C goes to the server, which then ends the engine
        )
        self._reader = threading.Thread(target=self._read, name="engine output", daemon=True)
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """Return the exit code; None while the engine runs, 128 + n after signal n."""
        return self._process.poll()

    def last_lines(self, count: int) -> list[str]:
        with self._lock:
            return list(self._tail)[-count:]

    def wait_output(self, timeout_s: float) -> None:
        """Wait until all output of an ended engine was read, but at most `timeout_s`."""
        self._reader.join(timeout_s)

    def close(self) -> None:
        """End the engine and all its processes. Any thread may call this, also repeatedly."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # this tells the reaper to end the engine
        try:
            self._process.wait(self._grace_s + REAPER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the engine dies with it
            self._process.wait()
        self._reader.join(REAPER_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
        while data := os.read(self._process.stdout.fileno(), 1 << 16):
            *lines, rest = _BREAK.split(rest + decoder.decode(data))
            rest = rest[-MAX_LINE:]  # a line without an end must not fill the memory
            for line in lines:
                self._take(line)
        self._take(rest)

    def _take(self, raw: str) -> None:
        line = _ANSI.sub("", raw)[:MAX_LINE].rstrip()
        if not line:
            return
        for secret in self._secrets:
            line = line.replace(secret, HIDDEN)
        if not is_bar(line):
            with self._lock:
                self._tail.append(line)
        self._on_line(line)


def shown_exit(code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with code {code}"
