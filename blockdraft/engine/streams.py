"""Streams carry the deltas of a request from the engine's thread to the event loop that submitted it.

The engine's thread sends the mail of a whole step at once: waking the event loop for each delta would cost
more than the delta.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from blockdraft.engine.request import Delta, Deltas


class EngineStopped(Exception):
    """The engine is not ready, was closed or has failed. It serves no requests; none of them is at fault."""


class StepFailed(EngineStopped):
    """The request's step failed. The engine continues without the request."""


Item = Delta | Exception  # a stream raises an exception and is then over


def ends_request(item: Item) -> bool:
    """Say if this is the request's last item."""
    return isinstance(item, Exception) or item.ends_request


class Outlet(Protocol):
    """Takes from an engine's thread what goes to all its requests."""

    def send(self, deltas: Deltas) -> bool:
        """Send the deltas of a step. Return False if nobody receives them any more."""

    def end(self, request_ids: Collection[str], reason: EngineStopped) -> None:
        """End requests with an error."""


class EventLoopOutlet:
    """Delivers mail, from any thread, to the streams of one event loop."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self.event_loop = event_loop
        self._mail: deque[Mail] = deque()
        self._is_called = False  # the event loop was asked to run `_hand_out` and has not run it yet

    def send(self, mail: Mail) -> bool:
        """Send mail. Return False if the event loop is closed."""
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
        """Deliver all mail, then wake each stream once, so that it writes once."""
        self._is_called = False  # first: mail that arrives from now on schedules another call
        told: dict[Stream, None] = {}
        while self._mail:
            for stream, item in self._mail.popleft():
                stream.inbox.append(item)
                told[stream] = None
        for stream in told:
            stream.wake()


class Outlets:
    """Keeps one outlet for each event loop, so that a step's mail is grouped by event loop."""

    def __init__(self) -> None:
        self._known: dict[asyncio.AbstractEventLoop, EventLoopOutlet] = {}

    def here(self) -> EventLoopOutlet:
        """Return the outlet of the running event loop."""
        event_loop = asyncio.get_running_loop()
        return self._known.setdefault(event_loop, EventLoopOutlet(event_loop))


class Stream:
    """The deltas of one request, for one consumer on the event loop that submitted it.

    Always close a stream, also after an error: closing an unfinished stream aborts its request.
    """

    def __init__(self, request_id: str, outlet: EventLoopOutlet, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.outlet = outlet
        self.inbox: deque[Item] = deque()
        self.is_over = False  # all items were taken, or the stream was closed
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
        """Call `on_news` on the event loop whenever the inbox has new items."""
        self._on_news = on_news

    def take(self) -> Delta | None:
        """Return the next delta, or None if none has arrived. Raise the item if it is an exception."""
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
        """Notify the consumer that the inbox has items."""
        if self._on_news is not None:
            self._on_news()
        elif self._news is not None and not self._news.done():
            self._news.set_result(None)


Mail = list[tuple[Stream, Item]]
