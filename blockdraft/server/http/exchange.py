"""Exchange: one request and its answer; a connection has one exchange after another.

The application uses ASGI's `receive` and `send`. Streams, which write many thousand events a second, use
`write` and `end` instead, which write directly to the socket's buffer. Callbacks tell a stream that the
client reads again or has gone.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Protocol, TypeVar

from starlette.types import ASGIApp, Message, Scope

T = TypeVar("T")
Headers = Iterable[tuple[bytes, bytes]]
EXTENSION = "blockdraft.exchange"  # the key in a scope's extensions

# uvicorn's name: logs.py logs errors of this logger without data that the client sent.
log = logging.getLogger("uvicorn.error")

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus
}
_BODILESS = (204, 304)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FAILED_HEADERS = [
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-length", b"21"),
    (b"connection", b"close"),
]


class Line(Protocol):
    """Interface of the connection for an exchange."""

    transport: asyncio.Transport
    is_write_paused: bool

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]: ...
    async def drain(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
    def answered(self) -> None:
        """Note that the exchange has ended."""


def exchange_of(scope: Scope) -> Exchange:
    found: Exchange = scope["extensions"][EXTENSION]
    return found


class Exchange:
    """One request and its answer; made when the request's head is complete."""

    def __init__(self, scope: Scope, line: Line, *, keeps_alive: bool, awaits_continue: bool) -> None:
        self.scope = scope
        self.is_gone = False  # the client has gone before the answer was complete
        self.has_begun = False  # whether the answer has begun
        self._is_event_stream, self._last_part = False, b""
        self.is_complete = False
        self.on_gone: Callable[[], object] | None = None
        self.on_resume: Callable[[], None] | None = None
        self._line = line
        self._transport = line.transport
        self._keeps_alive = keeps_alive
        self._awaits_continue = awaits_continue
        self._body = bytearray()
        self._has_more = True  # whether more of the body comes
        self._is_unread = False  # the application has not received all that arrived
        self._news = asyncio.Event()
        self._has_body = scope["method"] != "HEAD"  # whether the answer has one
        self._is_chunked = False
        self._num_left: int | None = None  # bytes of the Content-Length that are not sent yet
        self._head = b""  # the answer's, held back for the body's first part or the loop's next turn

    # ---- from the connection

    def take_body(self, data: bytes) -> int:
        """Add a part of the body, and return the number of bytes that the application has not read."""
        self._body += data
        self._is_unread = True
        self._news.set()
        return len(self._body)

    def end_body(self) -> None:
        self._has_more = False
        self._is_unread = True
        self._news.set()

    def close_after(self) -> None:
        """Close the connection after this answer."""
        self._keeps_alive = False

    def lose(self) -> None:
        """Note that the client has gone. Call `on_gone` only once: a second `cancel` would hit other work."""
        if self.is_gone:
            return
        self.is_gone = not self.is_complete
        self._news.set()
        if self.is_gone and self.on_gone is not None:
            self.on_gone()

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            log.error("Exception in ASGI application\n", exc_info=error)
            await self._fail()
            return
        if not (self.is_complete or self.is_gone):
            log.error("ASGI callable returned without completing response.")
            await self._fail()
        self.scope["extensions"].clear()  # else both would hold each other until the garbage is collected

    async def _fail(self) -> None:
        if self.has_begun:
            self._line.close()
            return
        await self.send({"type": "http.response.start", "status": 500, "headers": _FAILED_HEADERS})
        await self.send({"type": "http.response.body", "body": b"Internal Server Error"})

    def write_sign(self) -> None:
        """Write something that clients ignore, if possible: if the client has gone, a reset comes back.

        Before the answer, write an interim response, which HTTP/1.0 lacks. Between two events, write a
        comment, unless the answer has a Content-Length.
        """
        if not self.has_begun:
            if self.scope["http_version"] == "1.1":
                self._transport.write(_CONTINUE)
            return
        is_open = self._num_left is None and not self.is_complete
        if is_open and self._is_event_stream and self._last_part.endswith(b"\n\n"):
            self.write(b":\n\n")

    # ---- for the application

    @property
    def is_write_paused(self) -> bool:
        """Return whether the client reads too slowly, so that more data would pile up in memory."""
        return self._line.is_write_paused

    def whole_body(self, limit: int) -> bytes | None:
        """Return the body if it is complete and within the limit, else None."""
        if self._has_more or self.is_gone or len(self._body) > limit:
            return None
        self._is_unread = False
        return bytes(self._body)

    async def receive(self) -> Message:
        if self._awaits_continue and not self._transport.is_closing():
            self._transport.write(_CONTINUE)
        self._awaits_continue = False
        while not (self.is_gone or self.is_complete):
            if self._is_unread:
                body, self._body, self._is_unread = bytes(self._body), bytearray(), False
                return {"type": "http.request", "body": body, "more_body": self._has_more}
            self._line.resume_reading()
            self._news.clear()
            await self._news.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._line.is_write_paused and not self.is_gone:
            await self._line.drain()
        if self.is_gone:
            return
        if message["type"] == "http.response.start" and not self.has_begun:
            self._begin(message["status"], message.get("headers", ()))
        elif message["type"] == "http.response.body" and self.has_begun and not self.is_complete:
            body = message.get("body", b"")
            if message.get("more_body", False):
                self.write(body)
            else:
                self.end(body)
        else:
            raise RuntimeError(f"unexpected ASGI message '{message['type']}'.")

    def write(self, body: bytes) -> None:
        """Write a part of the answer's body. The answer must have begun."""
        if not body or not self._has_body:
            return
        self._last_part = body
        if self._is_chunked:
            self._transport.write(b"%b%x\r\n%b\r\n" % (self._head, len(body), body))
        else:
            if self._num_left is not None:
                self._num_left -= len(body)
                if self._num_left < 0:
                    raise RuntimeError("the answer is longer than its Content-Length.")
            self._transport.write(self._head + body)
        self._head = b""

    def end(self, body: bytes) -> None:
        """Write the last part of the answer's body."""
        if self._is_chunked and self._has_body:
            framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
            self._transport.write(self._head + framed)
            self._head = b""
        else:
            self.write(body)
            self._flush_head()
            if self._has_body and self._num_left:
                raise RuntimeError("the answer is shorter than its Content-Length.")
        self.is_complete = True
        self._news.set()
        if not self._keeps_alive:
            self._line.close()
        self._line.answered()

    async def while_connected(self, work: Coroutine[None, None, T]) -> T | None:
        """Await `work` in this task. If the client goes away, cancel `work` and return None."""
        task = asyncio.current_task()
        assert task is not None
        if self.is_gone:
            work.close()
            return None
        num_before = task.cancelling()
        self.on_gone = task.cancel
        try:
            return await work
        except asyncio.CancelledError:
            if self._has_lost() and task.uncancel() <= num_before:
                return None
            raise
        finally:
            self.on_gone = None

    def _has_lost(self) -> bool:
        return self.is_gone

    def _begin(self, status: int, headers: Headers) -> None:
        """Prepare the head, and write it in the event loop's next turn at the latest."""
        self.has_begun, self._awaits_continue = True, False
        fields = [*self._line.default_headers, *headers]
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        lines += [b"%b: %b\r\n" % field for field in fields]
        _check_lines(lines)
        given = dict(fields)
        if b"content-length" in given:
            self._num_left = int(given[b"content-length"])
        says_close = b"close" in given.get(b"connection", b"").lower()
        self._keeps_alive = self._keeps_alive and not says_close
        self._is_event_stream = given.get(b"content-type", b"").startswith(b"text/event-stream")
        self._has_body = self._has_body and status not in _BODILESS
        if self._num_left is None and self._has_body:
            self._is_chunked = self.scope["http_version"] == "1.1"
            if self._is_chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self._keeps_alive = False  # in HTTP/1.0, the answer ends with the connection
        if not self._keeps_alive and not says_close:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)
        asyncio.get_running_loop().call_soon(self._flush_head)

    def _flush_head(self) -> None:
        """Write the head, if it was not written with a part of the body."""
        head, self._head = self._head, b""
        if head and not self.is_gone and not self._transport.is_closing():
            self._transport.write(head)


def _check_lines(lines: list[bytes]) -> None:
    """Raise RuntimeError if a header has a line end or a NUL in it, or a name that is not ASCII."""
    text = b"".join(lines)
    num_ends = len(lines)
    is_split = text.count(b"\n") != num_ends or text.count(b"\r") != num_ends or b"\0" in text
    if is_split or not (text.isascii() or all(line.partition(b":")[0].isascii() for line in lines)):
        raise RuntimeError("a header of the answer is not valid.")
