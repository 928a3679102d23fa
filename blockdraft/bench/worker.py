"""One process of the load generator: sends its share of each block until its connection ends.

Fleet has the other end. It sends a Share, then the start time, then "end". The worker sends "ready", answers
with their numbers, and Done. `taken` counts the asks of a block that the workers have taken together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from blockdraft.bench.client import Client
from blockdraft.bench.load import Ledger, in_order, quiet_collector, run_in_loop, send
from blockdraft.bench.records import SPECULATIVE, Answer, Ask, OfferedLoad, Prompt

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

READY, END = "ready", "end"  # END ends a block: give up running requests
_NO_ASK = Ask(Prompt("", "", ()), SPECULATIVE, max_tokens=0)  # replaces the ask in answers: it may be long


@dataclass(frozen=True, slots=True)
class Share:
    """One process's part of a block. It sends timed asks in turn with the others, beginning at `place`."""

    client_number: int  # the process reuses its client with this number
    client: Client
    asks: Sequence[Ask]  # all asks of the block
    load: OfferedLoad  # the load of this process
    place: int
    num_processes: int


@dataclass(frozen=True, slots=True)
class Done:
    """The message that a process has finished or given up its part of a block."""

    begun_s: dict[int, float]
    ended: set[int]
    num_refused: int
    cpu_s: float


async def receive(connection: Connection) -> object:
    """Return the next message; None if the other side has ended."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(connection.fileno())
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return None


def work(connection: Connection, taken: Synchronized[int]) -> None:
    """Run the process until its connection ends."""
    run_in_loop(_work(connection, taken))


async def _work(connection: Connection, taken: Synchronized[int]) -> None:
    clients: dict[int, Client] = {}
    connection.send(READY)
    async with contextlib.AsyncExitStack() as stack:
        while isinstance(share := await receive(connection), Share):
            if share.client_number not in clients:
                clients[share.client_number] = await stack.enter_async_context(share.client)
            await _send(share, clients[share.client_number], connection, taken)


async def _send(share: Share, client: Client, connection: Connection, taken: Synchronized[int]) -> None:
    with quiet_collector():
        ledger = _Told(share.asks, connection)
        connection.send(READY)
        start_s = await receive(connection)
        if not isinstance(start_s, float):
            return
        ledger.start_s = start_s
        stop = asyncio.Event()
        listening = asyncio.ensure_future(_set_at_end(stop, connection))
        numbers = in_order(share.asks)[share.place :: share.num_processes]
        in_turn = share.load.rate is None
        await send(client, ledger, share.load, _take(taken, share) if in_turn else iter(numbers), stop)
        connection.send(Done(ledger.begun_s, ledger.ended, client.num_refused, ledger.cpu_s))
        await listening


async def _set_at_end(stop: asyncio.Event, connection: Connection) -> None:
    """Set `stop` when END comes or the parent process is gone."""
    await receive(connection)
    stop.set()


def _take(taken: Synchronized[int], share: Share) -> Iterator[int]:
    """Yield numbers of asks that no worker has taken yet, until all are taken."""
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= len(share.asks):
            return
        yield number


class _Told(Ledger):
    """A ledger that sends answers to the parent instead of keeping them."""

    def __init__(self, asks: Sequence[Ask], connection: Connection) -> None:
        super().__init__(asks)
        self._connection = connection

    def take(self, number: int, answer: Answer) -> None:
        self._connection.send((number, replace(answer, ask=_NO_ASK)))
