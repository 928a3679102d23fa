"""Streams: carry the deltas of a request from the engine's thread to the event loop that asked.

The engine's thread sends the mail of a whole step at once: waking the event loop for each delta would cost
more than the delta.
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
    """Receives the deltas of one request."""

    @property
    def request_id(self) -> str: ...
    @property
    def outlet(self) -> Outlet: ...


Item = Delta | Exception  # a stream raises the latter, which is its end
Mail = list[tuple[Receiver, Item]]


def ends_request(item: Item) -> bool:
    """Say if the request gets nothing after this."""
    return isinstance(item, Exception) or item.ends_request


class Outlet(Protocol):
    """Delivers mail to some receivers; hashable."""

    def send(self, mail: Mail) -> bool:
        """Send mail from the engine's thread. False: the receivers are gone."""


class EventLoopOutlet:
    """Delivers to the streams of one event loop."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self.event_loop = event_loop
        self._mail: deque[Mail] = deque()
        self._is_called = False  # the event loop, and it has not come yet

    def send(self, mail: Mail) -> bool:
        self._mail.append(mail)
        if not self._is_called:
            self._is_called = True
            try:
                self.event_loop.call_soon_threadsafe(self._hand_out)
            except RuntimeError:
                self._is_called = False
                return False
        return True

    def _hand_out(self) -> None:
        """Deliver all mail, then wake each receiver once, so that it writes once."""
        self._is_called = False  # first: what comes from here on calls again
        told: dict[Stream, None] = {}
        while self._mail:
            for receiver, item in self._mail.popleft():
                stream = cast(Stream, receiver)  # who has this outlet is one
                stream.inbox.append(item)
                told[stream] = None
        for stream in told:
            stream.wake()


class Outlets:
    """One outlet for each event loop, so that mail sent at once is grouped by it."""

    def __init__(self) -> None:
        self._known: dict[asyncio.AbstractEventLoop, EventLoopOutlet] = {}

    def here(self) -> EventLoopOutlet:
        """Return the outlet of the running event loop."""
        event_loop = asyncio.get_running_loop()
        return self._known.setdefault(event_loop, EventLoopOutlet(event_loop))


class Stream:
    """The deltas of one request, for one consumer on the event loop that submitted it.

    Close it when done, however that came about: closing an unfinished stream aborts its request.
    """

    def __init__(self, request_id: str, outlet: EventLoopOutlet, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.outlet = outlet
        self.inbox: deque[Item] = deque()
        self.is_over = False  # all has been taken, or it was closed
        self._abort = abort
        self._news: asyncio.Future[None] | None = None  # while the consumer waits
        self._on_news: Callable[[], None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if self.is_over:
            raise StopAsyncIteration
        while not self.inbox:
            self._news = self.outlet.event_loop.create_future()
            await self._news
        item = self.take()
        assert item is not None
        return item

    def listen(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` on the event loop whenever there is something to take."""
        self._on_news = on_news

    def take(self) -> Delta | None:
        """Return the next delta if it has arrived, else None."""
        if not self.inbox or self.is_over:
            return None
        item = self.inbox.popleft()
        self.is_over = ends_request(item)
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self._on_news = None
        if not self.is_over:
            self.is_over = True
            self._abort(self.request_id)

    def put(self, item: Item) -> None:
        """Add an item, on the stream's event loop; other threads use its outlet."""
        self.inbox.append(item)
        self.wake()

    def wake(self) -> None:
        """Tell the consumer that there is something in the inbox."""
        if self._on_news is not None:
            self._on_news()
        elif self._news is not None and not self._news.done():
            self._news.set_result(None)
