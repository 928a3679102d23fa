"""A load generator of several processes: one process reads about 25,000 events/s, a GPU server writes more.

The processes live as long as the run and share the streams of a block. In a closed loop each holds its part
of the streams, and all take the next ask from one pile, as the streams of one process do; in an open loop
they take turns. All have the same clock. What they measure comes here, where a block is put together.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from blockdraft.bench.client import Client, OnAnswer
from blockdraft.bench.load import Ledger, send_block
from blockdraft.bench.records import Ask, OfferedLoad
from blockdraft.bench.worker_messages import (
    Answered,
    Begin,
    Done,
    Frame,
    Share,
    fill_queue,
    next_frame,
    packed,
)
from blockdraft.errors import BenchError
from blockdraft.machine.machine import read_machine

STREAMS_PER_PROCESS = 32  # at 100 steps a second, a sixth of what one process can read
END_S = 5.0  # for a process to end by itself; arbitrary


def num_processes(load: OfferedLoad, limit: int) -> int:
    """Return how many processes send a load well.

    With a rate, how many streams run at once is the server's doing; a second's requests are taken for it.
    """
    streams = load.concurrency if load.rate is None else math.ceil(load.rate)
    return max(1, min(-(-streams // STREAMS_PER_PROCESS), limit))


def most_processes() -> int:
    """Return how many processes this machine has room for: a server on it wants the other half."""
    return 1 if sys.platform == "win32" else max(1, read_machine().cpu.num_cores // 2)


class Fleet:
    """The processes, as a context manager. A load gets at most `limit`; 1 means this process alone."""

    def __init__(self, loads: Sequence[OfferedLoad], limit: int) -> None:
        self._limit = limit
        self._size = max(self.num_processes(load) for load in loads)
        self._processes: list[Process] = []
        self._queue = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the fleet
        self._clients: list[Client] = []

    def num_processes(self, load: OfferedLoad) -> int:
        return num_processes(load, self._limit)

    async def __aenter__(self) -> Self:
        try:
            if self._size > 1:
                for _ in range(self._size):
                    self._processes.append(await self._start())
                await asyncio.gather(*map(_expect_ready, self._processes))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # the process ends when stdin closes, also if we are killed
        await asyncio.gather(*map(_end, self._processes))
        self._queue.close()

    async def _start(self) -> Process:
        file = self._queue.fileno()
        command = [sys.executable, "-m", "blockdraft.bench.worker", str(file)]
        # Its own session: Ctrl-C reaches only us, and we tell the processes.
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, pass_fds=[file], start_new_session=True
        )

    async def send_block(
        self,
        client: Client,
        asks: Sequence[Ask],
        load: OfferedLoad,
        on_answer: OnAnswer | None = None,
        stop: asyncio.Event | None = None,
    ) -> Ledger:
        """Send a block, as SendBlock says, from as many processes as the load needs."""
        count = self.num_processes(load)
        if count == 1:
            return await send_block(client, asks, load, on_answer, stop)
        processes = self._processes[:count]
        await self._share_out(processes, client, asks, load)
        ledger = Ledger(asks, start_s=client.clock(), on_answer=on_answer)
        for process in processes:
            _tell(process, Begin(ledger.start_s))
        stopping = asyncio.ensure_future(_end_when(stop or asyncio.Event(), processes))
        try:
            parts = await asyncio.gather(*(_follow(process, ledger) for process in processes))
        finally:
            is_stopped = stopping.done()
            stopping.cancel()
        if not is_stopped:
            for process in processes:
                _tell(process, "end")
        for part in parts:
            ledger.begun_s |= part.begun_s
            ledger.ended |= part.ended
            ledger.cpu_s += part.cpu_s
        client.num_refused = sum(part.num_refused for part in parts)
        ledger.mark_unanswered(client)
        return ledger

    async def _share_out(
        self, processes: Sequence[Process], client: Client, asks: Sequence[Ask], load: OfferedLoad
    ) -> None:
        """Give each process its share, and wait until all have it."""
        fill_queue(self._queue.fileno(), len(asks))
        if not any(client is known for known in self._clients):
            self._clients.append(client)
        number = next(i for i, known in enumerate(self._clients) if known is client)
        for place, process in enumerate(processes):
            streams = len(range(place, load.concurrency, len(processes)))
            part = replace(load, concurrency=max(1, streams))
            _tell(process, Share(number, client, asks, part, place, len(processes)))
        await asyncio.gather(*map(_expect_ready, processes))


def _tell(process: Process, frame: Frame) -> None:
    assert process.stdin is not None
    process.stdin.write(packed(frame))


async def _end_when(stop: asyncio.Event, processes: Sequence[Process]) -> None:
    await stop.wait()
    for process in processes:
        _tell(process, "end")


async def _follow(process: Process, ledger: Ledger) -> Done:
    """Enter what a process tells, until it has done its part."""
    while isinstance(frame := await _hear(process), Answered):
        frame.answer.ask = ledger.asks[frame.number]
        ledger.take(frame.number, frame.answer)
    assert isinstance(frame, Done)
    return frame


async def _expect_ready(process: Process) -> None:
    frame = await _hear(process)
    assert frame == "ready"


async def _hear(process: Process) -> Frame:
    assert process.stdout is not None
    frame = await next_frame(process.stdout)
    if frame is None:
        code = await process.wait()
        raise BenchError(
            f"a process of the load generator ended with code {code}, its measurements are lost: run again."
        )
    return frame


async def _end(process: Process) -> None:
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
