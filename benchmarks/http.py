"""The cost of HTTP: processor time of the server's process per request and per event, no model behind it.

    python -m benchmarks.http [--streams 1 64 256] [--rounds 3] [--profile FILE] [--json FILE]

The layout is that of `serve`: an HTTP process, and an engine in a process of its own at the other end of the
real connection. That engine's scheduler and texts are real, its tokens come from a table (see host.py), and
it waits between steps, so that events do not pile up: those that are written together would cost less. The
clients are in this process. Each figure is the HTTP process's own time in microseconds, all threads and the
kernel included, best of `--rounds`: an answer of one event, and each event after the first. A neighbour on
the same cores empties their caches, which may cost as much again: compare two versions in turns. Beside it
is a server that only writes (bench/null_server.py). `--profile` writes where the time goes.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import IO, cast

from benchmarks.record import context, save, table

TOKENS_PER_EVENT = 2
EVENTS = 48  # of a long answer
MIN_GAP_S, ROW_GAP_S = 0.004, 0.00016  # between steps; more than a row takes everybody on two slow cores
MAX_REQUEST_US, MAX_EVENT_US = 400.0, 12.0  # on a Neoverse-N1
PROMPT = "The host decides who runs next, reads what the device has said, and writes it out. " * 8


def request_of(number: int, num_events: int) -> bytes:
    body = json.dumps(
        {
            "model": "default",
            "messages": [{"role": "user", "content": f"Story {number}: {PROMPT}"}],
            "temperature": 0,
            "max_tokens": num_events * TOKENS_PER_EVENT,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n"
        "Accept-Encoding: gzip, deflate\r\nUser-Agent: blockdraft-bench\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
    )
    return head.encode() + body


# ---- the clients


class Reader(asyncio.Protocol):
    """One connection, one request after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.first_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes) -> "asyncio.Future[bytes]":
        self._answer: asyncio.Future[bytes] = self._loop.create_future()
        self._pieces: list[bytes] = []
        self._start_s = time.perf_counter()
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        if not self._pieces:
            self.first_s = time.perf_counter() - self._start_s
        self._pieces.append(data)
        if data.endswith(b"0\r\n\r\n"):
            self._answer.set_result(b"".join(self._pieces))

    def close(self) -> None:
        self._transport.close()


async def ask_all(
    server: "Server", num_streams: int, num_requests: int, num_events: int
) -> tuple[float, float]:
    """Return the server's microseconds per request, and the median milliseconds to the first byte."""
    loop, first_ms = asyncio.get_running_loop(), []
    opened = [await loop.create_connection(Reader, "127.0.0.1", server.port) for _ in range(num_streams)]
    readers = [reader for _, reader in opened]

    async def ask(reader: Reader, number: int) -> None:
        for turn in range(num_requests // num_streams):
            answer = await reader.ask(request_of(number * 1000 + turn, num_events))
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert answer.count(b'"content":') >= num_events, answer
            first_ms.append(reader.first_s * 1e3)

    await readers[0].ask(request_of(0, 1))
    before_s = server.cpu_s()
    await asyncio.gather(*(ask(reader, number) for number, reader in enumerate(readers)))
    spent_s = server.cpu_s() - before_s
    for reader in readers:
        reader.close()
    return spent_s / num_requests * 1e6, statistics.median(first_ms)


# ---- the server


class Server:
    """A handle of the HTTP process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._to, self._from = process.stdin, process.stdout
        self.port = int(self._from.readline())

    def cpu_s(self) -> float:
        self._to.write("time\n")
        self._to.flush()
        return float(self._from.readline())


@contextlib.contextmanager
def serving(*words: str, module: str = "benchmarks.http") -> Iterator[Server]:
    command = [sys.executable, "-m", module, "--as-server", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Server(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # on which it ends


def run_paced_engine(
    num_rows: int,
    _: object,
    connection: Connection,
    *,
    gap_s: float | None = None,
    max_queue: int | None = None,
    max_wait_s: float = math.inf,
) -> None:
    """Run the engine's process. `gap_s`: seconds from step to step."""
    step_s = max(MIN_GAP_S, num_rows * ROW_GAP_S) if gap_s is None else gap_s
    from benchmarks.host import TEXT, FakeEngine, make_models
    from blockdraft.checkpoints.opening import open_checkpoint
    from blockdraft.engine.engine import Engine
    from blockdraft.engine.request import Deltas
    from blockdraft.phases import StartProgress
    from blockdraft.server.engine_link.engine_worker import run_engine
    from blockdraft.text.tokenizer import Tokenizer

    class PacedEngine(FakeEngine):
        next_s = 0.0

        def step(self) -> Deltas:
            time.sleep(max(0.0, self.next_s - time.monotonic()))
            self.next_s = time.monotonic() + step_s
            return super().step()

    def make_engine(startup: StartProgress, on_tokenizer: object) -> Engine:
        assert callable(on_tokenizer)
        tokenizer = Tokenizer(open_checkpoint("default").tokenizer_parts())
        on_tokenizer(tokenizer)
        models, plan = make_models(tokenizer, num_rows=num_rows, context=1024, num_steps=EVENTS)
        plan = replace(plan, max_queue=plan.max_queue if max_queue is None else max_queue)
        return PacedEngine(models, plan, tokenizer.encode(TEXT * 4), TOKENS_PER_EVENT)

    run_engine(connection, make_engine, StartProgress(), step_timeout_s=60, max_wait_s=max_wait_s)


def serve(run: Callable[[Connection], None], profile: str | None = None) -> None:
    """Run the HTTP process, and `run` in the engine's process, until its input ends."""
    from blockdraft.phases import StartProgress
    from blockdraft.server.engine_link.replica import ReplicaPlace
    from blockdraft.server.engine_link.replicas import start_replicas

    places = [ReplicaPlace("cpu", run)]
    engine = start_replicas(places, StartProgress(), lambda engine: engine.kill(), step_timeout_s=60)
    import uvicorn

    from blockdraft.server.app import make_app
    from blockdraft.server.http.lifetime import settle_memory, uvicorn_config
    from blockdraft.server.http.logs import set_up
    from blockdraft.server.options import ServerOptions

    set_up(is_json=False, level=20, stream=open(os.devnull, "w"))  # noqa: SIM115
    options = ServerOptions()
    server = uvicorn.Server(uvicorn_config(make_app(engine, name="default", options=options), options))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    while engine.startup.state == "starting":
        time.sleep(0.02)
    settle_memory()  # as the server does when the engine is ready

    def answer(lines: IO[str]) -> None:
        print(listener.getsockname()[1], flush=True)
        for _ in lines:
            print(time.process_time(), flush=True)
        server.should_exit = True

    threading.Thread(target=answer, args=(sys.stdin,), daemon=True).start()
    if profile is None:
        server.run(sockets=[listener])
    else:
        import cProfile

        with cProfile.Profile() as profiler:
            server.run(sockets=[listener])
        profiler.dump_stats(profile)
    engine.close()


# ---- the figures


def measure(num_streams: int, rounds: int, profile: str | None) -> dict[str, float]:
    num_short = max(4 * num_streams, 128)
    num_long = max(num_streams, 16)
    short, long, first = [], [], []
    with serving(str(num_streams), profile or "-") as server:
        for _ in range(rounds):
            cost, first_ms = asyncio.run(ask_all(server, num_streams, num_short, 1))
            short.append(cost)
            first.append(first_ms)
            long.append(asyncio.run(ask_all(server, num_streams, num_long, EVENTS))[0])
    return {
        "streams": num_streams,
        "request_us": min(short),
        "event_us": (min(long) - min(short)) / (EVENTS - 1),
        "first_byte_ms": min(first),
    }


def floor_us() -> float:
    """Return the cost of an event in a process that only writes it."""
    from blockdraft.bench.null_server import StreamPace, null_server

    pace = StreamPace(0.0, 64 * ROW_GAP_S, EVENTS, TOKENS_PER_EVENT, is_together=True)

    async def ask(port: int) -> None:
        loop = asyncio.get_running_loop()
        opened = [await loop.create_connection(Reader, "127.0.0.1", port) for _ in range(64)]
        await asyncio.gather(*(reader.ask(request_of(0, EVENTS)) for _, reader in opened))

    with null_server(pace) as (url, pid):
        clock = (~pid << 3) | 2  # Linux: the processor time of another process
        before_s = time.clock_gettime(clock)
        asyncio.run(ask(int(url.rpartition(":")[2])))
        return (time.clock_gettime(clock) - before_s) / (64 * EVENTS) * 1e6


def main() -> None:
    if sys.argv[1:2] == ["--as-server"]:
        engine = functools.partial(run_paced_engine, int(sys.argv[2]))
        serve(engine, None if sys.argv[3] == "-" else sys.argv[3])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", metavar="FILE", help="pstats of the last of `--streams`")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    result = context() | {
        "tokens_per_event": TOKENS_PER_EVENT,
        "events": EVENTS,
        "floor_event_us": floor_us(),
    }
    found = [measure(streams, options.rounds, options.profile) for streams in options.streams]
    rows: list[list[object]] = [
        [f"{one['streams']} streams", one["request_us"], one["event_us"], one["first_byte_ms"]]
        for one in found
    ]
    rows += [["a server that only writes", "", cast(float, result["floor_event_us"]), ""]]
    rows += [["aim", MAX_REQUEST_US, MAX_EVENT_US, ""]]
    print(table(["CPU of the HTTP process", "us per request", "us per event", "first byte, ms"], rows))
    save(options.json, result | {"results": found})


if __name__ == "__main__":
    main()
