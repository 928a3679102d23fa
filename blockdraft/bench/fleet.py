"""A load generator of several processes. One process reads about 25,000 events/s; a GPU server writes more.

The processes live as long as the run and share the streams of a block. At a fixed concurrency, each process
holds its part of the streams and takes the next conversation from a shared queue. At a fixed rate, the
processes take turns. All use the same clock. This process collects their answers into one block.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Self

from blockdraft.bench.client import Client, OnAnswer
from blockdraft.bench.figures import GeneratorFigures
from blockdraft.bench.load import Ledger, send_block
from blockdraft.bench.null_server import StreamPace, null_server
from blockdraft.bench.records import SPECULATIVE, Ask, OfferedLoad, Prompt
from blockdraft.bench.worker import END, READY, Done, Share, receive, work
from blockdraft.errors import BenchError
from blockdraft.machine.machine import read_machine

STREAMS_PER_PROCESS = 32  # at 100 steps a second, a sixth of what one process can read
END_S = 5.0  # limit for a process to end by itself; arbitrary
# The burst that measures how fast we can read.
BURST_S = 0.5
MIN_CHUNKS = 24  # per answer: with fewer, the cost of requests dominates
MIN_GAP_S = 0.002  # event-loop timers have millisecond resolution
MAX_EVENT_S = 0.0001  # an upper bound for reading an event: 0.04 ms on a Neoverse-N1
BURST_PROMPT = Prompt("null", "null", ("Say nothing. " * 40,))


def num_processes(load: OfferedLoad, limit: int) -> int:
    """Return how many processes a load needs; at a rate, the requests of one second count as streams."""
    streams = load.concurrency if load.rate is None else math.ceil(load.rate)
    return max(1, min(-(-streams // STREAMS_PER_PROCESS), limit))


def most_processes() -> int:
    """Return half of the cores: a server on this machine needs the others."""
    return 1 if sys.platform == "win32" else max(1, read_machine().cpu.num_cores // 2)


class Worker(NamedTuple):
    """A process, with our end of the connection to it."""

    process: BaseProcess
    connection: Connection


class Fleet:
    """The processes, as a context manager. A load gets at most `limit` processes; 1 means only this one."""

    def __init__(self, loads: Sequence[OfferedLoad], limit: int) -> None:
        self._limit = limit
        self._size = max(self.num_processes(load) for load in loads)
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[Worker] = []
        self._clients: list[Client] = []

    def num_processes(self, load: OfferedLoad) -> int:
        return num_processes(load, self._limit)

    async def __aenter__(self) -> Self:
        if self._size > 1:
            self._taken = self._context.Value("I")
            # Only this process gets Ctrl-C and SIGHUP: the others inherit the blocked signals.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
            try:
                self._workers += [self._start() for _ in range(self._size)]
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                await asyncio.gather(*map(_expect_ready, self._workers))
            except BaseException:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                await self.__aexit__()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.connection.close()  # then the process ends; this also happens if we are killed
        await asyncio.gather(*(asyncio.to_thread(_end, worker.process) for worker in self._workers))

    def _start(self) -> Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(theirs, self._taken), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    async def send_block(
        self,
        client: Client,
        asks: Sequence[Ask],
        load: OfferedLoad,
        on_answer: OnAnswer | None = None,
        stop: asyncio.Event | None = None,
    ) -> Ledger:
        """Send a block from as many processes as the load needs; SendBlock has the details."""
        count = self.num_processes(load)
        if count == 1:
            return await send_block(client, asks, load, on_answer, stop)
        workers = self._workers[:count]
        await self._share_out(workers, client, asks, load)
        ledger = Ledger(asks, start_s=client.clock(), on_answer=on_answer)
        _tell(workers, ledger.start_s)
        stopping = asyncio.ensure_future(_end_when(stop or asyncio.Event(), workers))
        try:
            parts = await asyncio.gather(*(_follow(worker, ledger) for worker in workers))
        finally:
            is_stopped = stopping.done()
            stopping.cancel()
        if not is_stopped:
            _tell(workers, END)
        for part in parts:
            ledger.begun_s |= part.begun_s
            ledger.ended |= part.ended
            ledger.cpu_s += part.cpu_s
        client.num_refused = sum(part.num_refused for part in parts)
        ledger.mark_unanswered(client)
        return ledger

    async def _share_out(
        self, workers: Sequence[Worker], client: Client, asks: Sequence[Ask], load: OfferedLoad
    ) -> None:
        """Send each process its share, and wait until all have received theirs."""
        self._taken.value = 0
        if not any(client is known for known in self._clients):
            self._clients.append(client)
        number = next(i for i, known in enumerate(self._clients) if known is client)
        for place, worker in enumerate(workers):
            streams = len(range(place, load.concurrency, len(workers)))
            part = replace(load, concurrency=max(1, streams))
            worker.connection.send(Share(number, client, asks, part, place, len(workers)))
        await asyncio.gather(*map(_expect_ready, workers))


def _tell(workers: Sequence[Worker], word: float | str) -> None:
    for worker in workers:
        worker.connection.send(word)


async def _end_when(stop: asyncio.Event, workers: Sequence[Worker]) -> None:
    await stop.wait()
    _tell(workers, END)


async def _follow(worker: Worker, ledger: Ledger) -> Done:
    """Record the answers that a process sends until it reports Done; return Done."""
    while isinstance(told := await _hear(worker), tuple):
        number, answer = told
        answer.ask = ledger.asks[number]
        ledger.take(number, answer)
    assert isinstance(told, Done)
    return told


async def _expect_ready(worker: Worker) -> None:
    word = await _hear(worker)
    assert word == READY


async def _hear(worker: Worker) -> object:
    said = await receive(worker.connection)
    if said is None:
        await asyncio.to_thread(worker.process.join)
        code = worker.process.exitcode
        raise BenchError(
            f"a process of the load generator ended with code {code}, its measurements are lost: run again."
        )
    return said


def _end(process: BaseProcess) -> None:
    process.join(END_S)
    process.kill()  # does nothing if the process has ended
    process.join()


async def measure_headroom(fleet: Fleet, load: OfferedLoad) -> GeneratorFigures:
    """Measure how fast the processes of a load can read its streams, with a server that computes nothing.

    A real server writes one event to each of its streams after every step. The test server does the same. It
    is so slow that no two events of a stream are read at once: events that pile up are read faster, but late.
    The speed is computed from CPU time, so other programs on the same cores do not change it.
    """
    streams = load.concurrency if load.rate is None else math.ceil(load.rate)
    count = fleet.num_processes(load)
    gap_s = max(MIN_GAP_S, streams / count * MAX_EVENT_S)
    pace = StreamPace(gap_s, gap_s, max(MIN_CHUNKS, round(BURST_S / gap_s)), 1, is_together=True)
    asks = [Ask(BURST_PROMPT, SPECULATIVE, max_tokens=pace.num_tokens)] * streams
    with null_server(pace) as (url, _):
        async with Client(url, "null") as client:
            ledger = await fleet.send_block(client, asks, OfferedLoad(concurrency=streams))
    num_events = sum(answer.num_events for answer in ledger.all_answers())
    return {
        "concurrency": load.concurrency,
        "rate": load.rate,
        "num_processes": count,
        "events_per_s": count * num_events / ledger.cpu_s if ledger.cpu_s > 0 else 0.0,
        "used": None,
    }
