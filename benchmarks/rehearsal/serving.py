"""A server of the rehearsal: started as a command, followed to ready, asked how it is, ended by a signal."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rehearsal.children import Children, last_line
from benchmarks.rehearsal.sheet import Failure

ADDRESS = re.compile(r"listening on (http://[^\s;]+)")
GRAPHS = re.compile(r"(\d+) of at most \d+ kinds of decoding steps captured")
WARNING = re.compile(r"warning\b", re.IGNORECASE)  # our own, and those of libraries
RECHECKS = re.compile(r"^blockdraft:(recheck|recheck_different)_total\{.*\} (\S+)$", re.M)
RECHECK_S = 60.0  # until the first: an idle engine captures graphs before
POLL_S = 0.1
HTTP_S = 30.0
DRAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """One that is ready."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    startup: Mapping[str, object]  # as /ready says it
    engine: Mapping[str, object]  # as the live page gets it

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, without those that were skipped."""
        phases = self.startup["phases"]
        assert isinstance(phases, list)
        return {one["name"]: one["seconds"] for one in phases if one["seconds"] is not None}

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs from the start's own line; 0 if nothing is captured."""
        phases = self.startup["phases"]
        assert isinstance(phases, list)
        capture = next(one for one in phases if one["name"] == "capture")
        if capture["state"] != "done":
            return 0
        found = GRAPHS.search(capture["detail"] or "")
        if found is None:
            raise Failure(f"the start does not say how many graphs it has: {capture['detail']!r}")
        return int(found[1])


def start(
    children: Children, *flags: str, env: Mapping[str, str], log: Path, timeout_s: float = 300.0
) -> Server:
    """`blockdraft serve` on a free port, to ready. Raises Failure where it does not get there."""
    with log.open("w") as file:
        process = children.start("serve", "--port", "0", *flags, env=env, out=file, err=subprocess.STDOUT)
    try:
        url, startup = _until_ready(process, log, timeout_s)
        return Server(url, process, log, startup, _engine(url))
    except BaseException:
        children.kill(process)
        raise


def _until_ready(
    process: subprocess.Popen[str], log: Path, timeout_s: float
) -> tuple[str, Mapping[str, object]]:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise Failure(f"`blockdraft serve` ended with {process.returncode}: {last_line(log.read_text())}")
        found = ADDRESS.search(log.read_text())
        if found is not None:
            startup = _ready(found[1])
            if startup is not None:
                return found[1], startup
        time.sleep(POLL_S)
    said = last_line(log.read_text())
    raise Failure(f"`blockdraft serve` was not ready within {timeout_s:.0f} s; its last line: {said}")


def _ready(url: str) -> Mapping[str, object] | None:
    try:
        return get_json(f"{url}/ready")
    except (urllib.error.URLError, OSError):  # not yet: 503, or nobody listens
        return None


def get_json(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=HTTP_S) as response:
        found: dict[str, object] = json.load(response)
    return found


def ask(url: str, question: str, max_tokens: int) -> tuple[str, int]:
    """Return the greedy answer, and how many tokens of the prompt were cached."""
    asked = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": max_tokens}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=HTTP_S) as response:
        found = json.load(response)
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], cached


def wait_for_rechecks(url: str) -> tuple[int, int]:
    """Return how many answers the idle server has computed again, once there is one, and how many differ."""
    end_s = time.monotonic() + RECHECK_S
    while time.monotonic() < end_s:
        with urllib.request.urlopen(f"{url}/metrics", timeout=HTTP_S) as response:
            found = dict(RECHECKS.findall(response.read().decode()))
        if float(found["recheck"]) > 0:
            return int(float(found["recheck"])), int(float(found["recheck_different"]))
        time.sleep(POLL_S)
    raise Failure(f"no answer was computed again within {RECHECK_S:.0f} s")


def _engine(url: str) -> Mapping[str, object]:
    """Return the engine's description, from the live page's first event."""
    with urllib.request.urlopen(f"{url}/events", timeout=HTTP_S) as response:
        for line in response:
            if line.startswith(b"data: "):
                found: Mapping[str, object] = json.loads(line[len(b"data: ") :])["engine"]
                return found
    raise Failure("/events ended without an event")


def complaints(server: Server) -> list[str]:
    """Yield what is wrong with a start that became ready: a dropped drafter, and every warning."""
    found = [] if server.engine["draft"] else ["the drafter was dropped"]
    warnings = server.startup["warnings"]
    assert isinstance(warnings, list)
    said = [line for line in server.log.read_text().splitlines() if WARNING.search(line)]
    return found + (warnings or said)


def end(children: Children, server: Server) -> int:
    """Send SIGTERM and return the exit code; raise Failure if the server does not end."""
    server.process.terminate()
    try:
        return server.process.wait(DRAIN_S)
    except subprocess.TimeoutExpired:
        raise Failure(f"the server did not end within {DRAIN_S:.0f} s of SIGTERM") from None
    finally:
        children.kill(server.process)
