"""An answer on its way to the client, whole or as events, over the engine's streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Items
from contextlib import ExitStack, closing

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from blockdraft.engine.request import Delta
from blockdraft.engine.streams import EngineStopped, Stream
from blockdraft.server.answers import AnswerWriter
from blockdraft.server.responses import DONE, error_body, event, while_connected


async def respond(answer: AnswerWriter, streams: Items[Stream], *, is_stream: bool) -> Response:
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
    """Server-sent events of streams that are closed with the connection. The last one is DONE."""

    def __init__(self, events: AsyncIterator[str], streams: Items[Stream]) -> None:
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
        async for text in self.events:
            has_more = not text.endswith(DONE)  # with the last event goes the end: one write, not two
            await send({"type": "http.response.body", "body": text.encode(), "more_body": has_more})


async def _events(answer: AnswerWriter, streams: Items[Stream]) -> AsyncIterator[str]:
    """What is written at once is one string. Raises EngineStopped if it comes before the first.

    Writing costs more than making an event: what has piled up while others were written is written together.
    """
    has_begun, held = False, ""
    try:
        async for prompt, delta in _deltas(streams):
            held += answer.event(prompt, delta) or ""
            if held and not streams[prompt].has_next:
                yield held
                has_begun, held = True, ""
    except EngineStopped as error:
        if not has_begun and not held:
            raise
        yield held + event(error_body(str(error), kind="server_error")) + DONE
    else:
        last = answer.last_chunk()
        yield held + DONE if last is None else held + event(last) + DONE


async def _chained(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for text in rest:
        yield text


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
