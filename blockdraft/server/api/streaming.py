"""Sends answers to clients, whole or as events, from the engine's streams."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import closing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from blockdraft.engine.request import Delta
from blockdraft.engine.streams import EngineStopped, Stream
from blockdraft.errors import BlockdraftError, RequestError
from blockdraft.server.http.exchange import Exchange, exchange_of
from blockdraft.server.http.large_json import LARGE_ANSWER, beside, json_response, size_of
from blockdraft.server.http.replies import STREAM_HEADERS


class Writer(ABC):
    """Writes an answer as one API does; `prompt` is the index of the prompt that a delta answers."""

    @abstractmethod
    def take(self, prompt: int, delta: Delta) -> None:
        """Keep a delta for `whole`."""

    @abstractmethod
    def whole(self) -> Mapping[str, object]:
        """Return the complete answer, after the last delta."""

    @abstractmethod
    def event(self, prompt: int, delta: Delta) -> str | None:
        """Take a delta, and return the text to write for it; None if there is none."""

    @abstractmethod
    def end(self) -> str:
        """Return the last events of a stream."""

    @abstractmethod
    def failed(self, message: str) -> str:
        """Return the last events of a stream that breaks off."""


async def respond(
    answer: Writer, streams: Items[Stream], *, is_stream: bool, num_prompt_tokens: int = 0
) -> Response:
    """Return the response once it can begin, so that earlier errors and timeouts can set the status."""
    events = None
    try:
        if is_stream:
            source = EventSource(answer, streams)
            source.first = await source.next_text()
            events = AnswerEvents(source)  # from here on the response closes the streams
            return events
        size = await _take_all(answer, streams)
        return await json_response(answer.whole, size + num_prompt_tokens)
    finally:
        if events is None:
            for stream in streams:
                stream.close()


async def _take_all(answer: Writer, streams: Items[Stream]) -> int:
    """Take all deltas as they come, and return their size. Raises an error of any stream at once."""
    news, size = asyncio.Event(), 0
    for stream in streams:
        stream.listen(news.set)
    while True:
        news.clear()
        for prompt, stream in enumerate(streams):
            while (delta := stream.take()) is not None:
                answer.take(prompt, _going_on(delta))
                size += size_of(delta)
        if all(stream.is_over for stream in streams):
            return size
        await news.wait()


def _going_on(delta: Delta) -> Delta:
    """Return the delta. Raises RequestError if the engine could not complete the structured output."""
    if delta.finish_reason == "abort" and delta.stop_reason is not None:
        raise RequestError(str(delta.stop_reason), "structured_outputs")
    return delta


class EventSource:
    """Makes the events of an answer from its streams' deltas, when the connection takes them."""

    def __init__(self, answer: Writer, streams: Items[Stream]) -> None:
        self.first = ""  # the first events of the answer, which `write_to` writes
        self.is_over = False  # the last event has been taken
        self._answer = answer
        self._streams = streams
        self._has_begun = False
        self._beside: asyncio.Future[str | None] | None = None  # a large event that a thread is writing
        self._news = asyncio.Event()
        self._listen(self._news.set)

    def _listen(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news
        for stream in self._streams:
            stream.listen(on_news)

    def take(self) -> str:
        """Return all events that can be made now, as one text. Raises an error that precedes the first event.

        Writing costs more than making an event, so all waiting events are written together.
        """
        held = ""
        try:
            held = "" if self._beside is None else self._written_beside()
            for prompt, stream in enumerate(self._streams):
                while self._beside is None and (delta := stream.take()) is not None:
                    if delta.finish_reason == "abort":
                        delta = _going_on(delta)
                    held += self._event(prompt, delta)
        except (EngineStopped, BlockdraftError) as error:
            if not self._has_begun and not held:
                raise
            self.is_over = True
            return held + self._answer.failed(str(error))
        self._has_begun = self._has_begun or bool(held)
        if self._beside is None and all(stream.is_over for stream in self._streams):
            self.is_over = True
            return held + self._answer.end()
        return held

    def _event(self, prompt: int, delta: Delta) -> str:
        """Return the event of a delta; if it is large, return "" and let a thread write it."""
        if delta.prompt_logprobs is None or size_of(delta) <= LARGE_ANSWER:
            return self._answer.event(prompt, delta) or ""
        self._beside = beside(self._answer.event, prompt, delta)
        self._beside.add_done_callback(lambda _: self._on_news())
        return ""

    def _written_beside(self) -> str:
        """Return the event that a thread has written; "" if it is not complete."""
        if self._beside is None or not self._beside.done():
            return ""
        written, self._beside = self._beside.result(), None
        return written or ""

    async def next_text(self) -> str:
        """Wait for events, and return all of them as one text."""
        while not (text := self.take()):
            self._news.clear()
            await self._news.wait()
        return text

    def write_to(self, exchange: Exchange) -> asyncio.Future[None]:
        """Write events to a connection from now on, until the stream or the connection ends."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def write() -> None:
            if done.done() or (exchange.is_write_paused and not exchange.is_gone):
                return
            try:
                self._write_once(exchange)
            except Exception as error:  # noqa: BLE001  # raised again where the answer is waited for
                done.set_exception(error)
            else:
                if self.is_over or exchange.is_gone:
                    done.set_result(None)

        self._listen(write)
        exchange.on_gone = exchange.on_resume = write
        write()
        return done

    def _write_once(self, exchange: Exchange) -> None:
        if exchange.is_gone:
            return
        text, self.first = self.first, ""
        if not self.is_over:
            text += self.take()
        if self.is_over:
            exchange.end(text.encode())  # one write for the last event and the end
        elif text:
            exchange.write(text.encode())

    def close(self) -> None:
        self._on_news = self._news.set  # refers to nothing of the connection
        for stream in self._streams:
            stream.close()


_STREAM_FIELDS = {"content-type": "text/event-stream; charset=utf-8", **STREAM_HEADERS}
_RAW_STREAM_HEADERS = [(name.encode(), value.encode()) for name, value in _STREAM_FIELDS.items()]


class AnswerEvents(Response):
    """A response of server-sent events. The engine's streams are closed when it ends."""

    def __init__(self, events: EventSource) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self.raw_headers = list(_RAW_STREAM_HEADERS)
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        with closing(self.events):
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            if exchange.has_begun and not exchange.is_gone:
                await self.events.write_to(exchange)
                exchange.on_gone = exchange.on_resume = None
