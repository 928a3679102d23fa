"""The server under mixed load for some minutes: no failure, and resident memory that stays flat.

    python -m benchmarks.soak [--minutes 10] [--clients 8] [--json FILE] [-- FLAGS OF SERVE]

A real server with the default model in a process of its own. Clients ask for answers of mixed lengths,
streamed or not, and a quarter of them hang up. Exits with 1 when a request fails, or when the memory of the
last quarter is above that of the second by more than the tolerance. The cache is small, so that all of its
pages are touched in the first quarter.
"""

import argparse
import asyncio
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from benchmarks.record import context, save, table

CHAT = "/v1/chat/completions"
STORY = "the sea was calm and a small boat went out to look for what had been lost there long ago"
START_S = 300  # to load the model, and fetch it before the first time
TOLERANCE = 0.02
TOLERANCE_MB = 16.0  # arbitrary: an allocator's moods


class Soak:
    def __init__(self, url: str, pid: int, seconds: float) -> None:
        self.url = url
        self.pid = pid
        self.end_s = time.monotonic() + seconds
        self.start_s = time.monotonic()
        self.num_answers = 0
        self.num_left = 0
        self.errors: list[str] = []
        self.memory_mb: list[tuple[float, float]] = []  # seconds since the start, resident

    async def run(self, num_clients: int) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as client:
            await asyncio.gather(self.watch(), *(self.work(client, number) for number in range(num_clients)))

    async def watch(self) -> None:
        while time.monotonic() < self.end_s:
            self.memory_mb.append((time.monotonic() - self.start_s, resident_mb(self.pid)))
            await asyncio.sleep(1)

    async def work(self, client: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < self.end_s:
            try:
                await self.ask(client, chance)
            except httpx.HTTPError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(1)

    async def ask(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        body = {
            "messages": [
                {
                    "role": "user",
                    "content": " ".join(chance.choices(STORY.split(), k=chance.randrange(5, 300))),
                }
            ],
            "max_tokens": chance.choice((1, 8, 32, 100)),
            "temperature": chance.choice((0.0, 1.0)),
            "stream": chance.random() < 0.6,
        }
        num_pieces = chance.randrange(20) if chance.random() < 0.25 else None
        async with client.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                self.errors.append(f"status {response.status_code}: {(await response.aread())[:200]!r}")
                return
            async for _ in response.aiter_lines():
                if num_pieces is not None:
                    num_pieces -= 1
                    if num_pieces < 0:
                        self.num_left += 1
                        return
        self.num_answers += 1

    def growth_mb(self) -> tuple[float, float]:
        """Medians of the second and the last quarter."""
        quarter = len(self.memory_mb) // 4
        if quarter == 0:
            raise SystemExit("too short to say anything about memory: give it at least a minute")
        values = [value for _, value in self.memory_mb]
        return statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])


def resident_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    if found is None:
        raise SystemExit("the server has ended")
    return int(found[1]) / 1024


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with code {server.returncode}")
        try:
            ready = httpx.get(f"{url}/ready", timeout=5)
            if ready.status_code == 200:
                return
            if ready.status_code == 404 and httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"the server was not ready within {START_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="more flags of serve, behind --")
    options = parser.parse_args()
    result = context()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--max-context", "2048", "--cache-bytes", str(128 << 20), *options.flags]
    command = [sys.executable, "-m", "blockdraft", "serve", "--port", str(port), *flags]
    with subprocess.Popen(command) as server:
        try:
            wait_until_ready(url, server)
            soak = Soak(url, server.pid, options.minutes * 60)
            asyncio.run(soak.run(options.clients))
            has_survived = server.poll() is None
        finally:
            server.terminate()
    early, late = soak.growth_mb()
    limit = early + max(early * TOLERANCE, TOLERANCE_MB)
    result |= {
        "minutes": options.minutes,
        "clients": options.clients,
        "answers": soak.num_answers,
        "hung_up": soak.num_left,
        "errors": soak.errors,
        "resident_mb": {"second_quarter": early, "last_quarter": late, "limit": limit},
        "exit_code": server.returncode,
        "samples_mb": soak.memory_mb[:: max(1, len(soak.memory_mb) // 100)],
    }
    rows: list[list[object]] = [
        ["answers", soak.num_answers],
        ["clients that hung up", soak.num_left],
        ["errors", len(soak.errors)],
        ["resident MB, second quarter", early],
        ["resident MB, last quarter", late],
        ["resident MB, at most", limit],
    ]
    print(table(["soak", f"{options.minutes:g} min"], rows))
    for error in soak.errors[:5]:
        print(error, file=sys.stderr)
    save(options.json, result)
    is_well = has_survived and not soak.errors and soak.num_answers > 0 and late <= limit
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
