"""Sends a block of conversations, either N at a time or each at its planned time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

from blockdraft.bench.client import Client, OnAnswer
from blockdraft.bench.records import NOT_ENDED, NOT_SENT, Answer, Ask, OfferedLoad

MAX_REFUSED = 3  # failed connections in a row: the server is gone
STOPPED = "the run was stopped."

T = TypeVar("T")


def poisson(num: int, rate: float, seed: int) -> list[float]:
    """Return the first `num` arrival times, in seconds, of a Poisson process with `rate` per second."""
    source = random.Random(seed)
    return list(accumulate(source.expovariate(rate) for _ in range(num)))


class SendBlock(Protocol):
    """Sends a block from this process (`send_block`) or from several (`Fleet.send_block`)."""

    async def __call__(
        self,
        client: Client,
        asks: Sequence[Ask],
        load: OfferedLoad,
        on_answer: OnAnswer | None = None,
        stop: asyncio.Event | None = None,
    ) -> Ledger:
        """Send all asks and return the ledger of their answers. `on_answer` is called with each answer.

        Without a rate, `load.concurrency` conversations run at a time; when one ends, the next one begins.
        With a rate, each conversation begins at its `at_s`. When `stop` is set, running requests are given
        up. Every ask gets an answer; the error of an ask that was never sent begins with NOT_SENT.
        """


async def send_block(
    client: Client,
    asks: Sequence[Ask],
    load: OfferedLoad,
    on_answer: OnAnswer | None = None,
    stop: asyncio.Event | None = None,
) -> Ledger:
    """Send a block from this process; SendBlock has the details."""
    with quiet_collector():
        ledger = Ledger(asks, start_s=client.clock(), on_answer=on_answer)
        await send(client, ledger, load, iter(in_order(asks)), stop or asyncio.Event())
        ledger.mark_unanswered(client)
        return ledger


def in_order(asks: Sequence[Ask]) -> list[int]:
    """Return the indexes of the asks by their planned times; without times, in the listed order."""
    return sorted(range(len(asks)), key=lambda number: asks[number].at_s or 0.0)


async def send(
    client: Client, ledger: Ledger, load: OfferedLoad, numbers: Iterator[int], stop: asyncio.Event
) -> None:
    """Send the conversations with these indexes and record their answers until all end or `stop` is set."""
    before_s = time.process_time()
    client.num_refused = 0  # forget an earlier block's failures: the server may be back
    work = asyncio.ensure_future(
        _at_times(client, ledger, numbers)
        if load.rate is not None
        else _in_turn(client, ledger, numbers, load.concurrency)
    )
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        work.cancel()
        stopping.cancel()
        await asyncio.gather(work, stopping, return_exceptions=True)
    ledger.cpu_s = time.process_time() - before_s
    if not work.cancelled():
        work.result()  # raise the exception of a bug, if any


async def _in_turn(client: Client, ledger: Ledger, numbers: Iterator[int], concurrency: int) -> None:
    async def one_after_another() -> None:
        for number in numbers:  # shared: each task takes the next number
            if client.num_refused >= MAX_REFUSED:
                return
            await _converse(client, ledger, number, client.clock())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(ledger.asks))):
            group.create_task(one_after_another())


async def _at_times(client: Client, ledger: Ledger, numbers: Iterator[int]) -> None:
    async with asyncio.TaskGroup() as group:
        for number in numbers:
            time_s = ledger.start_s + (ledger.asks[number].at_s or 0.0)
            while (left_s := time_s - client.clock()) > 0:  # uvloop's timers may be early by 0.5 ms
                await asyncio.sleep(left_s)
            if client.num_refused >= MAX_REFUSED:
                return
            group.create_task(_converse(client, ledger, number, time_s))


async def _converse(client: Client, ledger: Ledger, number: int, planned_s: float) -> None:
    ledger.begun_s[number] = client.clock()
    await client.converse(
        ledger.asks[number], planned_s=planned_s, on_answer=lambda answer: ledger.take(number, answer)
    )
    ledger.ended.add(number)


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Exempt existing objects from garbage collection, which takes 0.1 s if PyTorch is loaded."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Ledger:
    """Records the answers to the asks of a block."""

    def __init__(
        self, asks: Sequence[Ask], *, start_s: float = 0.0, on_answer: OnAnswer | None = None
    ) -> None:
        self.asks = asks
        self.start_s = start_s  # `at_s` is relative to this time
        self.begun_s: dict[int, float] = {}
        self.ended: set[int] = set()
        self.cpu_s = 0.0  # CPU seconds for sending, over all processes
        self._on_answer = on_answer
        self._answers: list[list[Answer]] = [[] for _ in asks]

    def take(self, number: int, answer: Answer) -> None:
        self._answers[number].append(answer)
        if self._on_answer is not None:
            self._on_answer(answer)

    def all_answers(self) -> list[Answer]:
        return [answer for answers in self._answers for answer in answers]

    def mark_unanswered(self, client: Client) -> None:
        """Add an error for each conversation that has not ended."""
        gone = f"{client.host} refused {MAX_REFUSED} connections in a row."
        why = gone if client.num_refused >= MAX_REFUSED else STOPPED
        for number, ask in enumerate(self.asks):
            if number in self.ended:
                continue
            now_s, answers = client.clock(), self._answers[number]
            planned_s = now_s if ask.at_s is None else self.start_s + ask.at_s
            begun_s = self.begun_s.get(number)
            error = NOT_SENT + why if begun_s is None else NOT_ENDED + STOPPED
            sent_s = answers[-1].end_s if answers else now_s if begun_s is None else begun_s
            self.take(
                number,
                Answer(
                    ask=ask, turn=len(answers), planned_s=planned_s, sent_s=sent_s, end_s=now_s, error=error
                ),
            )


def run_in_loop(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine like asyncio.run, on uvloop if installed: uvloop reads an event in half the time."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(work)


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
