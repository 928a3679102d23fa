"""Sends a block of conversations: so many at a time, or each at its time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate

from blockdraft.bench.client import Client, OnAnswer
from blockdraft.bench.records import NOT_ENDED, NOT_SENT, Answer, Ask, OfferedLoad

MAX_REFUSED = 3  # connections in a row that did not come about: the server has gone
STOPPED = "the run was stopped."


def poisson(num: int, rate: float, seed: int) -> list[float]:
    """Return `num` arrival times in seconds, of a Poisson process with `rate` per second."""
    source = random.Random(seed)
    return list(accumulate(source.expovariate(rate) for _ in range(num)))


async def run_block(
    client: Client,
    asks: Sequence[Ask],
    load: OfferedLoad,
    on_answer: OnAnswer | None = None,
    stop: asyncio.Event | None = None,
) -> list[Answer]:
    """Return the answers, all turns, in the order of `asks`; `on_answer` gets each as it ends.

    Without a rate `load.concurrency` conversations run at a time, and the next begins the moment one ends.
    With a rate each begins at its `at_s`, whatever else is running. When `stop` is set what runs is given up.
    Everything asked for is answered, if only by an error that begins with NOT_SENT.
    """
    with _quiet_collector():
        block = _Block(client, asks, on_answer)
        work = asyncio.ensure_future(
            block.at_times() if load.rate is not None else block.in_turn(load.concurrency)
        )
        stopping = asyncio.ensure_future((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            stopping.cancel()
            await asyncio.gather(work, stopping, return_exceptions=True)
        if not work.cancelled():
            work.result()  # a bug of ours shows itself here
        block.mark_unanswered()
        return [answer for answers in block.answers for answer in answers]


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep what is in memory already out of garbage collections: with PyTorch loaded one takes 0.1 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Block:
    def __init__(self, client: Client, asks: Sequence[Ask], on_answer: OnAnswer | None) -> None:
        self._client = client
        self._asks = asks
        self._clock = client.clock
        self._on_answer = on_answer
        self._start_s = client.clock()
        client.num_refused = 0  # of an earlier block: the server may be back
        self._begun_s: list[float | None] = [None] * len(asks)
        self._is_ended = [False] * len(asks)
        self.answers: list[list[Answer]] = [[] for _ in asks]

    async def in_turn(self, concurrency: int) -> None:
        numbers = iter(range(len(self._asks)))  # shared: each takes the next
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(self._asks))):
                group.create_task(self._one_after_another(numbers))

    async def _one_after_another(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            if self._is_gone:
                return
            await self._converse(number, self._clock())

    async def at_times(self) -> None:
        times = [self._start_s + (ask.at_s or 0.0) for ask in self._asks]
        async with asyncio.TaskGroup() as group:
            for number in sorted(range(len(times)), key=times.__getitem__):
                while (left_s := times[number] - self._clock()) > 0:  # uvloop's timers may be early by 0.5 ms
                    await asyncio.sleep(left_s)
                if self._is_gone:
                    return
                group.create_task(self._converse(number, times[number]))

    @property
    def _is_gone(self) -> bool:
        return self._client.num_refused >= MAX_REFUSED

    async def _converse(self, number: int, planned_s: float) -> None:
        self._begun_s[number] = self._clock()
        await self._client.converse(
            self._asks[number], planned_s=planned_s, on_answer=lambda answer: self._take(number, answer)
        )
        self._is_ended[number] = True

    def _take(self, number: int, answer: Answer) -> None:
        self.answers[number].append(answer)
        if self._on_answer is not None:
            self._on_answer(answer)

    def mark_unanswered(self) -> None:
        """Add an error for each conversation that has not come to its end."""
        gone = f"{self._client.host} refused {MAX_REFUSED} connections in a row."
        why = gone if self._is_gone else STOPPED
        for number, ask in enumerate(self._asks):
            if self._is_ended[number]:
                continue
            now_s, turn = self._clock(), len(self.answers[number])
            planned_s = now_s if ask.at_s is None else self._start_s + ask.at_s
            begun_s = self._begun_s[number]
            error = NOT_SENT + why if begun_s is None else NOT_ENDED + STOPPED
            sent_s = self.answers[number][-1].end_s if turn else now_s if begun_s is None else begun_s
            answer = Answer(ask=ask, turn=turn, planned_s=planned_s, sent_s=sent_s, end_s=now_s, error=error)
            self._take(number, answer)
