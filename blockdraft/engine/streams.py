"""Streams: what an engine says about a request, on its way to the event loop that asked.

An engine's thread hands out the mail of a whole step at once: a wake-up for each delta would cost more than
the delta.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from blockdraft.engine.request import Delta


class EngineStopped(Exception):
    """The engine is not ready, was closed or has failed; no request is at fault and none will be served."""


class StepFailed(EngineStopped):
    """The step that a request was part of failed; the engine goes on without it."""


class Receiver(Protocol):
    """Where the deltas of one request go."""

    @property
    def request_id(self) -> str: ...
    @property
    def outlet(self) -> Outlet: ...


Mail = list[tuple[Receiver, Delta | EngineStopped]]


class Outlet(Protocol):
    """The way to some receivers; hashable."""

    def send(self, mail: Mail) -> bool:
        """From an engine's thread. False: nobody is there any more."""


class EventLoopOutlet:
    """To the streams of one event loop."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self.event_loop = event_loop

    def send(self, mail: Mail) -> bool:
        try:
            self.event_loop.call_soon_threadsafe(_hand_out, mail)
        except RuntimeError:
            return False
        return True


class Outlets:
    """One for each event loop that asks: what is sent at once is grouped by it."""

    def __init__(self) -> None:
        self._known: dict[asyncio.AbstractEventLoop, EventLoopOutlet] = {}

    def here(self) -> EventLoopOutlet:
        """That of the event loop that runs."""
        event_loop = asyncio.get_running_loop()
        return self._known.setdefault(event_loop, EventLoopOutlet(event_loop))


def _hand_out(mail: Mail) -> None:
    for stream, item in mail:
        cast(Stream, stream).put(item)  # who has this outlet is one


class Stream:
    """The deltas of one request, for one consumer on the event loop that submitted it.

    Close it when done, however that came about: closing an unfinished stream aborts its request.
    """

    def __init__(
        self, request_id: str, num_choices: int, outlet: EventLoopOutlet, abort: Callable[[str], None]
    ) -> None:
        self.request_id = request_id
        self.outlet = outlet
        self._abort = abort
        self._inbox: deque[Delta | EngineStopped] = deque()
        self._news: asyncio.Future[None] | None = None  # while the consumer waits
        self._num_unfinished = num_choices

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if self._num_unfinished == 0:
            raise StopAsyncIteration
        while not self._inbox:
            self._news = self.outlet.event_loop.create_future()
            await self._news
        item = self._inbox.popleft()
        if isinstance(item, EngineStopped):
            self._num_unfinished = 0
            raise item
        self._num_unfinished -= item.finish_reason is not None
        return item

    @property
    def has_next(self) -> bool:
        """Whether its next delta, or its end, is there already."""
        return bool(self._inbox) or self._num_unfinished == 0

    def close(self) -> None:
        if self._num_unfinished:
            self._num_unfinished = 0
            self._abort(self.request_id)

    def put(self, item: Delta | EngineStopped) -> None:
        """Called on the stream's event loop; other threads use its outlet."""
        self._inbox.append(item)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
