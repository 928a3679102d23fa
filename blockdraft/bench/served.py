"""Starts a server for the benchmark and measures its start.

The server runs in its own process, as for users, on a free port of the loopback address. Our server reports
its phases at /ready. For other servers we only know the time until they list their models.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from blockdraft.bench.figures import Startup
from blockdraft.bench.records import Answer
from blockdraft.bench.wire import inside
from blockdraft.errors import BenchError
from blockdraft.fp4_kernels import read_fp4_kernels
from blockdraft.jsonl import as_object
from blockdraft.machine.machine import free_port

POLL_S = 0.05
END_S = 30.0  # limit for a server to end by itself; arbitrary
SHOWN_LINES = 8  # last lines of its log, shown if it failed


@dataclass(frozen=True, slots=True)
class Started:
    """A running server and its start time."""

    url: str
    label: str
    seconds: float  # from the command to ready
    phases: tuple[tuple[str, float], ...]  # if the server reports them
    fp4_kernels: tuple[str, ...] = ()  # that its log names

    def facts(self, first: Answer | None) -> Startup:
        """Return the start as a part of the report. `first` is the answer to the first request."""
        good = first if first is not None and first.is_ok else None
        rest_s = self.seconds - sum(seconds for _, seconds in self.phases)
        phases = [("process and imports", rest_s), *self.phases] if self.phases else []
        return {
            "label": self.label,
            "phases": [{"name": name, "seconds": seconds} for name, seconds in phases],
            "ready_s": round(self.seconds, 3),
            "first_ttft_s": good.ttft_s if good else None,
            "first_latency_s": good.latency_s if good else None,
        }


def our_command(flags: Sequence[str]) -> list[str]:
    """Return the command `blockdraft serve` with these flags; {port} is the place of the port."""
    return [sys.executable, "-m", "blockdraft", "serve", "--host", "127.0.0.1", "--port", "{port}", *flags]


@contextlib.asynccontextmanager
async def served(command: Sequence[str], label: str, timeout_s: float) -> AsyncIterator[Started]:
    """Start `command` with a port for {port}, wait until the server is ready, and end it at the end."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [word.replace("{port}", str(port)) for word in command]
    with tempfile.TemporaryDirectory(prefix="blockdraft-bench-") as folder:
        log = Path(folder) / "server.log"
        begin_s = time.monotonic()
        with log.open("wb") as out:
            try:
                process = subprocess.Popen(
                    argv,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                raise BenchError(f"cannot start '{argv[0]}': {error.strerror}.") from None
        try:
            phases = await _until_ready(process, url, log, begin_s + timeout_s)
            seconds = time.monotonic() - begin_s
            yield Started(url, label, seconds, phases, read_fp4_kernels(_lines(log)))
        finally:
            await asyncio.to_thread(_end, process)


async def _until_ready(
    process: subprocess.Popen[bytes], url: str, log: Path, deadline_s: float
) -> tuple[tuple[str, float], ...]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while True:
            if (code := process.poll()) is not None:
                raise BenchError(f"the server ended with code {code} before it was ready: {_tail(log)}")
            if time.monotonic() > deadline_s:
                raise BenchError(f"the server was not ready within --start-timeout: {_tail(log)}")
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with session.get(f"{url}/ready") as reply:
                    body = as_object(await reply.text(errors="replace"))
                if reply.status == 200 and body:
                    return _phases(body)
                if not (reply.status == 503 and body):  # a 503 with JSON: our server is still starting
                    async with session.get(f"{url}/v1/models") as reply:
                        if reply.status in (200, 401, 403):
                            return ()
            await asyncio.sleep(POLL_S)


def _phases(body: Mapping[str, object]) -> tuple[tuple[str, float], ...]:
    listed = body.get("phases")
    return tuple(
        (str(inside(phase, "name")), float(phase.get("seconds") or 0.0))
        for phase in (listed if isinstance(listed, list) else [])
        if inside(phase, "state") == "done"
    )


def _tail(log: Path) -> str:
    last = _lines(log)[-SHOWN_LINES - 1 :]
    return " | ".join(line.strip() for line in last if line.strip()) or "it said nothing."


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").split("\n")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM so that our server drains; wait up to END_S; then kill the rest of its process group."""
    for end, name in ((process.terminate, "SIGTERM"), (process.kill, "SIGKILL")):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all processes have ended
            if hasattr(os, "killpg"):
                os.killpg(process.pid, getattr(signal, name))
            else:  # Windows
                end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
