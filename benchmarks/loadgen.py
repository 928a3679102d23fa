"""What the load generator adds to what it measures: 500 streams at once against a server of a known pace.

    python -m benchmarks.loadgen [--streams 500] [--rounds 3] [--out FILE]

The generator has one core and the server another, in a process of its own, where there are two. The server
writes into each answer when it read the request and when it wrote the first chunk: what a time to first token
has beyond that was added on the way, and with one stream alone it is the machine's least. Closed loop: all
streams begin at once, and again as they end. Open loop: as many on average, by a Poisson process. Nothing
else may run meanwhile: the load before the start is recorded, and how long the generator waited for its core.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.record import context, save, table
from blockdraft.bench.client import Client
from blockdraft.bench.load import poisson, run_block
from blockdraft.bench.records import SPECULATIVE, Answer, Ask, OfferedLoad, Prompt

MAX_ADDED_MS = 5.0
MAX_PACE_ERROR = 0.02
PROMPT = Prompt(id="p", category="c", turns=("Tell a story of a hundred words. " * 20,))


@dataclass(frozen=True)
class Pace:
    """Chunk i leaves `ttft_s + i * gap_s` after the request was read."""

    ttft_s: float
    gap_s: float
    num_chunks: int
    tokens_per_chunk: int

    @property
    def num_tokens(self) -> int:
        return self.num_chunks * self.tokens_per_chunk

    @property
    def duration_s(self) -> float:
        return self.ttft_s + (self.num_chunks - 1) * self.gap_s

    @property
    def tpot_s(self) -> float:
        return (self.num_chunks - 1) * self.gap_s / (self.num_tokens - 1)


# ---- the server, in a process of its own: as little as can speak HTTP, so that it is never the one that lags


class Streamer(asyncio.Protocol):
    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._received = b""
        usage = {"prompt_tokens": 9, "completion_tokens": pace.num_tokens}
        last = [{"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}, {"usage": usage}]
        self._chunk = _event(_chunk("one two three four "))
        self._end = b"".join(map(_event, last)) + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.lower().split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        if len(body) >= length:
            self._received = b""
            self._read_s = time.perf_counter()
            self._start_s = self._loop.time() + self._pace.ttft_s
            self._loop.call_at(self._start_s, self._write, 0)

    def _write(self, number: int) -> None:
        if number == 0:
            text = f"{self._read_s} {time.perf_counter()} "
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self._transport.write(head + _event(_chunk(text)))
        else:
            self._transport.write(self._chunk)
        if number + 1 < self._pace.num_chunks:
            self._loop.call_at(self._start_s + (number + 1) * self._pace.gap_s, self._write, number + 1)
        else:
            self._transport.write(self._end)


def _chunk(text: str) -> dict[str, object]:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    head = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": [choice], "usage": None}


def _event(chunk: dict[str, object]) -> bytes:
    return _framed(f"data: {json.dumps(chunk)}\n\n".encode())


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(pace: Pace) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Streamer(pace), "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def serving(pace: Pace, core: int | None) -> Iterator[str]:
    """The address of the server."""
    command = [sys.executable, "-m", "benchmarks.loadgen", "--as-server", json.dumps(asdict(pace))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


# ---- the generator


def take_core() -> int | None:
    """Stay on one core; the number of another, for the server."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    return cores[1] if len(cores) > 1 else None


def waited_s() -> float:
    """How long this process was ready to run and did not, as Linux counts it."""
    path = Path("/proc/self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


@dataclass(frozen=True)
class Sample:
    """Answers, and what share of the time the generator ran, and waited for its core."""

    answers: list[Answer]
    busy: float
    waited: float


async def measure(url: str, load: OfferedLoad, times: list[float | None]) -> Sample:
    asks = [Ask(prompt=PROMPT, arm=SPECULATIVE, max_tokens=64, at_s=at_s) for at_s in times]
    clock = time.perf_counter
    async with Client(url, "m", clock=clock) as client:
        start_s, busy_s, ready_s = clock(), time.process_time(), waited_s()
        answers = await run_block(client, asks, load)
        seconds = clock() - start_s
    failed = [answer.error for answer in answers if answer.error is not None]
    assert not failed, failed[0]
    busy = (time.process_time() - busy_s) / seconds
    return Sample(answers, busy=busy, waited=(waited_s() - ready_s) / seconds)


def added_ms(answers: list[Answer]) -> list[float]:
    """Time to first token beyond what the server took."""
    found = []
    for answer in answers:
        assert answer.ttft_s is not None
        read_s, written_s = map(float, answer.text.split()[:2])
        found.append((answer.ttft_s - (written_s - read_s)) * 1e3)
    return found


def figures(sample: Sample, pace: Pace) -> dict[str, object]:
    answers = sample.answers
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    tpots = [answer.tpot_s for answer in answers if answer.tpot_s is not None]
    lags = [(answer.sent_s - answer.planned_s) * 1e3 for answer in answers]
    return {
        "requests": len(answers),
        "ttft_ms": percentiles([answer.ttft_s * 1e3 for answer in answers if answer.ttft_s is not None]),
        "added_ms": percentiles(added_ms(answers)),
        "sent_late_ms": percentiles(lags),
        "tpot_error": statistics.mean(tpots) / pace.tpot_s - 1,
        "gap_error": statistics.mean(gaps) / pace.gap_s - 1,
        "busy": sample.busy,
        "waited": sample.waited,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}


def run_round(url: str, pace: Pace, num_streams: int) -> dict[str, dict[str, object]]:
    rate, num_asks = num_streams / pace.duration_s, 2 * num_streams
    loads: dict[str, tuple[OfferedLoad, list[float | None]]] = {
        "alone": (OfferedLoad(concurrency=1), [None] * 6),
        "closed": (OfferedLoad(concurrency=num_streams), [None] * num_asks),
        "open": (OfferedLoad(rate=rate), [*poisson(num_asks, rate, seed=1)]),
    }
    return {name: figures(asyncio.run(measure(url, *load)), pace) for name, load in loads.items()}


def rows(rounds: list[dict[str, dict[str, object]]], num_streams: int) -> list[list[object]]:
    found: list[list[object]] = []
    for number, round_ in enumerate(rounds):
        alone = round_["alone"]["added_ms"]["p50"]  # type: ignore[index]
        for name, cell in round_.items():
            added, late = cell["added_ms"], cell["sent_late_ms"]
            pace_error = max(cell["tpot_error"], cell["gap_error"], key=abs)  # type: ignore[type-var,arg-type]
            label = f"{number + 1} {name}, {1 if name == 'alone' else num_streams} streams"
            found.append(
                [label]
                + [added[cut] - alone for cut in ("p50", "p90", "p99", "max")]  # type: ignore[index]
                + [late["p99"], pace_error * 100, cell["busy"] * 100, cell["waited"] * 100]  # type: ignore[index,operator]
            )
    return found


def main() -> None:
    if sys.argv[1:2] == ["--as-server"]:
        asyncio.run(serve(Pace(**json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ttft-ms", type=float, default=200.0)
    parser.add_argument("--gap-ms", type=float, default=100.0)
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--tokens-per-chunk", type=int, default=4)
    parser.add_argument("--out", metavar="FILE")
    options = parser.parse_args()
    pace = Pace(options.ttft_ms / 1e3, options.gap_ms / 1e3, options.chunks, options.tokens_per_chunk)
    result = context() | {"streams": options.streams, "pace": asdict(pace)}
    with serving(pace, take_core()) as url:
        rounds = [run_round(url, pace, options.streams) for _ in range(options.rounds)]
    result["rounds"] = rounds
    header = [
        "added to TTFT, ms",
        "p50",
        "p90",
        "p99",
        "max",
        "sent late p99",
        "pace %",
        "busy %",
        "waited %",
    ]
    print(table(header, rows(rounds, options.streams)))
    print(f"aim: p99 below {MAX_ADDED_MS:g} ms, pace within {MAX_PACE_ERROR:.0%}")
    save(options.out, result)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
