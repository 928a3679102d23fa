"""Overload: what clients get when more requests arrive than the server can answer. No model behind it.

    python -m benchmarks.overload [--loads 0.5 1 2 4] [--max-wait 2] [--limit 4] [--seconds 15]

The layout is that of benchmarks/http.py. First as many clients as rows ask one request after the other: that
is the load that is held. Then requests arrive at random times, at multiples of that load, each on its own
connection, and nobody asks again. An answer is good if it is whole and its first byte came within `--limit`
seconds; `--max-wait` is the server's. Columns: requests and good answers per second, of those that arrive in
the second half of `--seconds`; the share that was refused; seconds to the first byte; refusals without
Retry-After.
"""

import argparse
import asyncio
import functools
import json
import random
import sys
import time
import urllib.request
from typing import cast

from benchmarks.http import request_of, run_paced_engine, serve, serving
from benchmarks.record import context, save, table

ROWS, EVENTS, GAP_S = 16, 24, 0.05  # rows of the engine, steps of an answer, and seconds of a step
MAX_QUEUE = 1024


class Asking(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.begun_s = time.perf_counter()
        self.first_s: float | None = None
        self.data = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.first_s is None:
            self.first_s = time.perf_counter() - self.begun_s
        self.data += data
        if self.data.endswith(b"0\r\n\r\n") or (not self.is_answered and data.endswith(b"}")):
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def is_answered(self) -> bool:
        return self.data.startswith(b"HTTP/1.1 200")

    @property
    def is_whole(self) -> bool:
        return self.is_answered and b"data: [DONE]" in self.data

    def is_good(self, limit_s: float) -> bool:
        return self.is_whole and self.first_s is not None and self.first_s <= limit_s


async def ask(port: int, number: int) -> Asking:
    make = functools.partial(Asking, request_of(number, EVENTS))
    _, asking = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port)
    await asking.ended
    return asking


async def held_load(port: int, seconds: float) -> float:
    """Return the answers per second that as many clients as rows get, one after the other."""
    end_s = time.perf_counter() + seconds

    async def client(number: int) -> int:
        count = 0
        while time.perf_counter() < end_s:
            count += (await ask(port, number * 1000 + count)).is_whole
        return count

    return sum(await asyncio.gather(*map(client, range(ROWS)))) / seconds


async def arrive(port: int, per_second: float, seconds: float, seed: int) -> list[tuple[float, Asking]]:
    """Return every request, with the second in which it arrived."""
    chance, begin_s, at_s = random.Random(seed), time.perf_counter(), 0.0
    tasks: list[tuple[float, asyncio.Task[Asking]]] = []
    while at_s < seconds:
        await asyncio.sleep(max(0.0, begin_s + at_s - time.perf_counter()))
        tasks.append((at_s, asyncio.create_task(ask(port, len(tasks)))))
        at_s += chance.expovariate(per_second)
    return [(at_s, await task) for at_s, task in tasks]


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if "_refused_total{" in line)
    return {name: float(value) for name, value in found.items()}


def measure(port: int, load: float, held: float, seconds: float, limit_s: float) -> dict[str, float]:
    everyone = asyncio.run(arrive(port, load * held, seconds, seed=int(load * 8)))
    late = [asking for at_s, asking in everyone if at_s >= seconds / 2]
    refused = [asking for asking in late if asking.data and not asking.is_answered]
    first = sorted(asking.first_s or 0.0 for asking in late if asking.is_answered)
    return {
        "load": load,
        "arrived_per_s": len(late) / (seconds / 2),
        "good_per_s": sum(asking.is_good(limit_s) for asking in late) / (seconds / 2),
        "refused": len(refused) / len(late),
        "first_byte_p50_s": first[len(first) // 2],
        "first_byte_p99_s": first[len(first) * 99 // 100],
        "without_retry_after": sum(b"\r\nretry-after: " not in asking.data for asking in refused),
    }


def main() -> None:
    if sys.argv[1:2] == ["--as-server"]:
        run = functools.partial(
            run_paced_engine, ROWS, gap_s=GAP_S, max_queue=MAX_QUEUE, max_wait_s=float(sys.argv[2])
        )
        serve(run)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1, 2, 4])
    parser.add_argument("--max-wait", type=float, default=2.0)
    parser.add_argument("--limit", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    with serving(str(options.max_wait), module="benchmarks.overload") as server:
        held = asyncio.run(held_load(server.port, 5.0))
        found = [measure(server.port, load, held, options.seconds, options.limit) for load in options.loads]
        refused = metrics(server.port)
    print(f"held: {held:.1f} answers per second")
    rows = [[f"{one['load']:g} x held", *list(one.values())[1:]] for one in found]
    heads = ["load", "arrived/s", "good/s", "refused", "first byte p50, s", "p99, s", "no Retry-After"]
    print(table(heads, rows))
    print(json.dumps(refused, indent=1))
    save(options.json, context() | {"held_per_s": held, "results": found, "refused": refused})


if __name__ == "__main__":
    main()
