"""One process of the load generator: sends its share of each block until its input ends.

    python -m blockdraft.bench.worker FILE

It reads Share, Begin and "end" from stdin and writes "ready", Answered and Done to stdout; Fleet has the
other ends of both pipes. FILE is the file descriptor of the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

from blockdraft.bench.client import Client
from blockdraft.bench.load import Ledger, in_order, quiet_collector, run_in_loop, send
from blockdraft.bench.records import SPECULATIVE, Answer, Ask, Prompt
from blockdraft.bench.worker_messages import Answered, Begin, Done, Share, next_frame, packed, take_numbers

_NO_ASK = Ask(Prompt("", "", ()), SPECULATIVE, max_tokens=0)


class Worker:
    """The process, between its two pipes."""

    def __init__(self, reader: asyncio.StreamReader, output: asyncio.WriteTransport, queue: int) -> None:
        self._reader = reader
        self._output = output
        self._queue = queue
        self._clients: dict[int, Client] = {}

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            self._output.write(packed("ready"))
            while isinstance(share := await next_frame(self._reader), Share):
                number = share.client_number
                if number not in self._clients:
                    self._clients[number] = await stack.enter_async_context(share.client)
                await self._send(share, self._clients[number])

    async def _send(self, share: Share, client: Client) -> None:
        with quiet_collector():
            ledger = _Told(share, self._output)
            self._output.write(packed("ready"))
            begin = await next_frame(self._reader)
            if not isinstance(begin, Begin):
                return
            ledger.start_s = begin.start_s
            stop = asyncio.Event()
            listening = asyncio.ensure_future(self._stop_at_a_word(stop))
            await send(client, ledger, share.load, self._numbers(share), stop)
            done = Done(ledger.begun_s, ledger.ended, client.num_refused, ledger.cpu_s)
            self._output.write(packed(done))
            await listening

    def _numbers(self, share: Share) -> Iterator[int]:
        if share.load.rate is None:
            return take_numbers(self._queue)
        return iter(in_order(share.asks)[share.place :: share.num_processes])

    async def _stop_at_a_word(self, stop: asyncio.Event) -> None:
        """Set `stop` when "end" comes, or when the parent process is gone."""
        await next_frame(self._reader)
        stop.set()


class _Told(Ledger):
    """A ledger that sends answers to the parent instead of keeping them."""

    def __init__(self, share: Share, output: asyncio.WriteTransport) -> None:
        super().__init__(share.asks)
        self._output = output

    def take(self, number: int, answer: Answer) -> None:
        self._output.write(packed(Answered(number, replace(answer, ask=_NO_ASK))))


async def _main(queue: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    output, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(os.dup(1), "wb", buffering=0))
    await Worker(reader, output, queue).run()


if __name__ == "__main__":
    run_in_loop(_main(int(sys.argv[1])))
