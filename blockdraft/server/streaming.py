"""An answer on its way to the client, whole or as events, over the engine's streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Items
from contextlib import ExitStack, closing
from typing import NamedTuple, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from blockdraft.engine.request import Delta
from blockdraft.engine.streams import EngineStopped, Stream
from blockdraft.server.responses import while_connected


class Writer(Protocol):
    """Writes an answer in the words of one API; `prompt` says which prompt a delta answers."""

    def take(self, prompt: int, delta: Delta) -> None:
        """Remember a delta for `whole`."""

    def whole(self) -> Mapping[str, object]:
        """The complete answer, when all deltas are in."""

    def event(self, prompt: int, delta: Delta) -> str | None:
        """Take a delta in. What to write, at once; None if there is nothing to show."""

    def end(self) -> str:
        """What a stream ends with."""

    def failed(self, message: str) -> str:
        """What a stream ends with that cannot go on."""


class Written(NamedTuple):
    """What is written at once."""

    text: str
    is_last: bool


async def respond(answer: Writer, streams: Items[Stream], *, is_stream: bool) -> Response:
    """The response, once it can begin: what fails before, and a time limit, still have a status."""
    with ExitStack() as opened:
        for stream in streams:
            opened.enter_context(closing(stream))
        if is_stream:
            events = _events(answer, streams)
            first = await anext(events)
            opened.pop_all()  # from here on they are the response's to close
            return AnswerEvents(_chained(first, events), streams)
        # One after the other: the engine answers all of them meanwhile.
        for prompt, stream in enumerate(streams):
            async for delta in stream:
                answer.take(prompt, delta)
        return JSONResponse(answer.whole())


class AnswerEvents(Response):
    """Server-sent events of streams that are closed with the connection."""

    def __init__(self, events: AsyncIterator[Written], streams: Items[Stream]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self.events = events
        self._streams = streams

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text, is_last in self.events:
            # With the last event goes the end: one write, not two.
            await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})


async def _events(answer: Writer, streams: Items[Stream]) -> AsyncIterator[Written]:
    """What is written at once is one string. Raises EngineStopped if it comes before the first.

    Writing costs more than making an event: what has piled up while others were written is written together.
    """
    has_begun, held = False, ""
    try:
        async for prompt, delta in _deltas(streams):
            held += answer.event(prompt, delta) or ""
            if held and not streams[prompt].has_next:
                yield Written(held, is_last=False)
                has_begun, held = True, ""
    except EngineStopped as error:
        if not has_begun and not held:
            raise
        yield Written(held + answer.failed(str(error)), is_last=True)
    else:
        yield Written(held + answer.end(), is_last=True)


async def _chained(first: Written, rest: AsyncIterator[Written]) -> AsyncIterator[Written]:
    yield first
    async for written in rest:
        yield written


async def _deltas(streams: Items[Stream]) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of all streams as they come, each with the number of its stream."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    waiting = {asyncio.ensure_future(anext(stream, None)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                item = task.result()
                if item is not None:
                    waiting[asyncio.ensure_future(anext(streams[number], None))] = number
                    yield number, item
    finally:
        for task in waiting:
            task.cancel()
