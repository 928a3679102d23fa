"""HttpConnection: a client's connection, parsed by httptools, with limits on time and memory.

uvicorn's own protocols wait forever for a client that never finishes a request's head or never reads its
answer. With too many connections they refuse the newest, even a probe; this class closes the one that was
idle longest.
"""

from __future__ import annotations

import asyncio
import functools
import re
import select
from collections import deque
from typing import Any, ClassVar, Literal, cast
from urllib.parse import unquote

import httptools
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.server import ServerState

from blockdraft.server.http.exchange import EXTENSION, Exchange
from blockdraft.server.options import MAX_HEAD_BYTES

MAX_UNREAD_BYTES = 1 << 16  # of a body, before the application receives it; arbitrary
MAX_PIPELINED = 256  # requests that wait for the answer of the one before; arbitrary
MAX_DROPPED_BYTES = 1 << 20  # read after the last request, while that is answered; arbitrary
LINGER_S = 2.0  # for a client to read its answer while it still sends; arbitrary
FIRST_CHECK_S, CHECK_S = 0.001, 1.0  # delays of checks whether a half-closed client is there
NUM_CHECKS_PER_SIGN = 16  # repeated, as a network may lose packets

_HTTP_2 = b"PRI * HTTP/2"  # an HTTP/2 connection begins like this
_TLS = b"\x16\x03"
_NUM_OPENING_BYTES = 16
_WHOLE_ADDRESS = re.compile(rb"https?://([^/?]*)", re.IGNORECASE)


Timer = Literal["head", "send", "keep alive", "end"]


class NotHttp(ValueError):
    """The bytes are not a request; the message is for the client."""


class HttpConnection(asyncio.Protocol):
    """A client's connection. uvicorn makes one per client and calls `shutdown` at the end."""

    head_timeout_s: float
    send_timeout_s: float
    max_open: int
    idle: ClassVar[dict[HttpConnection, None]]  # connections without a request, the longest first

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.is_write_paused = False
        self._app = config.loaded_app
        self._keep_alive_s = config.timeout_keep_alive
        self._loop = _loop or asyncio.get_running_loop()
        self._state = server_state
        self._app_state = app_state
        self._parser = self._new_parser()
        self._opening = b""  # the first bytes
        self._exchange: Exchange | None = None  # the one being answered, or the last one
        self._arriving: Exchange | None = None  # the one whose body is arriving
        self._waiting: deque[Exchange] = deque()  # pipelined, after the one being answered
        self._is_in_head = False
        self._wants_upgrade = False
        self._num_unparsed = 0  # bytes since the last part of a body
        self._has_moved = False
        self._is_read_paused = False
        self._has_ended = False  # no more requests are read
        self._num_dropped = 0  # bytes after the last request
        self._is_lingering = False
        self._has_heard_all = False  # the client has closed its half
        self._writable = asyncio.Event()
        self._timers: dict[Timer, asyncio.TimerHandle] = {}

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # What a client sends after its last request is ignored.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self._state.default_headers

    # ---- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the methods, but is no asyncio.Transport.
        self.transport = cast("asyncio.Transport", transport)
        self._state.connections.add(self)  # type: ignore[arg-type]
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        self._watch_head()
        if len(self._state.connections) > self.max_open and self.idle:
            # If no connection is idle, AuthLimits refuses the request, unless it is a probe.
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.transport.abort()
        self._note_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self.idle.pop(self, None)
        for timer in self._timers.values():
            timer.cancel()
        self._waiting.clear()
        self._writable.set()
        if self._exchange is not None:
            self._exchange.lose()

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            # Read and dropped: to close with bytes unread would reset the connection and lose the answers.
            self._num_dropped += len(data)
            if self._num_dropped > MAX_DROPPED_BYTES and not self._is_lingering:
                self._pause_reading()
            return
        self._opening += data[: _NUM_OPENING_BYTES - len(self._opening)]
        self._has_moved = False
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._end(str(cause) if isinstance(cause, NotHttp) else _why(self._opening))
            return
        self._num_unparsed = 0 if self._has_moved else self._num_unparsed + len(data)
        if self._num_unparsed > MAX_HEAD_BYTES and (self._is_in_head or self._arriving is not None):
            # A head, or the framing of a body; AuthLimits checks the size of complete heads.
            self._end(f"the address and headers are larger than {MAX_HEAD_BYTES} bytes: shorten them.")
            return
        self._watch_head()
        self._note_idle()

    def _parse(self, data: bytes) -> None:
        """Parse data. A request to upgrade to another protocol is read as a normal request."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._wants_upgrade:
                    self._end("")  # CONNECT: what follows is not for us
                    return
                # The parser has skipped the body, and cannot read another request.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = self._new_parser()
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, self._version.encode())]
        lines += [b"%b: %b" % field for field in self._headers if field[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def eof_received(self) -> bool:
        """Note that the client sends no more. It may still wait for its answer, or it may have gone.

        If it has gone, its machine answers anything that we send with a reset. Return True to keep the
        connection open.
        """
        self._has_heard_all = True
        exchange = self._exchange
        is_waiting = exchange is not None and not exchange.is_complete and self._arriving is not exchange
        if self._is_lingering or not is_waiting:
            self._watch_rest()  # the transport closes itself
            return False
        self._end("")
        self._look_for_client(FIRST_CHECK_S, 0)
        return True

    def _look_for_client(self, delay_s: float, number: int) -> None:
        exchange = self._exchange
        assert exchange is not None
        if self.transport.is_closing():
            return
        if _is_reset(self.transport):
            self.transport.abort()
            return
        if number % NUM_CHECKS_PER_SIGN == 0:
            exchange.write_sign()
        again = functools.partial(self._look_for_client, min(2 * delay_s, CHECK_S), number + 1)
        self._timers["end"] = self._loop.call_later(delay_s, again)

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._writable.clear()
        self._watch_sending()

    def resume_writing(self) -> None:
        self._stop("send")
        if self.transport.is_closing():
            self._watch_rest()
        self.is_write_paused = False
        self._writable.set()
        if self._exchange is not None and self._exchange.on_resume is not None:
            self._exchange.on_resume()

    # ---- from uvicorn, and from an exchange

    def shutdown(self) -> None:
        """Close the connection when its answer, if any, has ended, because the server ends."""
        if self._exchange is None or self._exchange.is_complete:
            self.close()
        else:
            self._exchange.close_after()

    def close(self) -> None:
        """Close when all written data has been sent, or the client has not read it in time.

        If the client still sends, its data is read for a while: to close with bytes unread would reset the
        connection, and the client would miss its answer.
        """
        is_sending = self._arriving is not None or self._is_read_paused or self._num_dropped > 0
        is_over = self._exchange is None or self._exchange.is_complete or self._exchange.is_gone
        if self._is_lingering or self._has_heard_all or not (is_sending and is_over):
            self.transport.close()
            self._watch_rest()
            return
        self._has_ended = self._is_lingering = True
        self._stop("head")
        self.transport.write_eof()
        if self._is_read_paused:
            self._is_read_paused = False
            self.transport.resume_reading()
        self._timers["end"] = self._loop.call_later(LINGER_S, self.close)

    async def drain(self) -> None:
        await self._writable.wait()

    def resume_reading(self) -> None:
        if self._is_read_paused and not self._waiting:
            self._is_read_paused = False
            self.transport.resume_reading()
            self._watch_head()

    def answered(self) -> None:
        """Note that an answer is complete, and start the next request if it has arrived."""
        self._state.total_requests += 1
        if self._arriving is not None and self._arriving is self._exchange and not self._is_lingering:
            self.close()  # the rest of its body is not read
        if self.transport.is_closing() or self._is_lingering:
            self.idle.pop(self, None)
            return
        if self._waiting:
            self._start(self._waiting.popleft())
        elif not self._is_in_head:
            self._timers["keep alive"] = self._loop.call_later(self._keep_alive_s, self.close)
        self.resume_reading()
        self._note_idle()

    # ---- from the parser

    def on_message_begin(self) -> None:
        if self._has_ended:
            return
        self._stop("keep alive")
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_in_head = True
        self._num_unparsed = 0

    def on_url(self, url: bytes) -> None:
        if not self._has_ended:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # else it follows a body and is ignored
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._has_ended:
            return
        self._version = version = self._parser.get_http_version()
        self._wants_upgrade = self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"
        if self._wants_upgrade:
            return  # the same head is parsed again, without the upgrade
        self._is_in_head = False
        names = [name for name, _ in self._headers]
        if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
            raise NotHttp(f"the request has {names.count(b'host')} Host headers: HTTP/1.1 wants one.")
        expected = dict(self._headers).get(b"expect", b"").lower() if version == "1.1" else b""
        exchange = Exchange(
            self._scope(version),
            self,
            keeps_alive=version != "1.0" and self._parser.should_keep_alive(),
            awaits_continue=b"100-continue" in expected,
        )
        exchange.scope["extensions"] = {EXTENSION: exchange}
        if self._exchange is None or self._exchange.is_complete:
            self._arriving = exchange
            self._start(exchange)
        elif len(self._waiting) < MAX_PIPELINED:
            self._arriving = exchange
            self._waiting.append(exchange)
            self._pause_reading()
        else:
            self._end("")  # the client must repeat the rest

    def _scope(self, version: str) -> Scope:
        whole = _WHOLE_ADDRESS.match(self._url)
        if whole is not None:  # by RFC 9112, its host overrides the Host header
            self._headers = [field for field in self._headers if field[0] != b"host"]
            self._headers.append((b"host", whole[1]))
            self._url = self._url[whole.end() :]
            self._url = self._url if self._url.startswith(b"/") else b"/" + self._url
        raw_path, _, query = self._url.partition(b"?")
        if not raw_path.isascii():
            raise NotHttp("the address is not ASCII, as HTTP/1.1 wants it: write other characters as %XX.")
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": self._headers,
            "client": self._client,
            "server": self._server,
            "state": self._app_state.copy(),
        }

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        if self._arriving is not None and self._arriving.take_body(body) > MAX_UNREAD_BYTES:
            self._pause_reading()

    def on_message_complete(self) -> None:
        self._has_moved = True
        if self._arriving is not None:
            self._arriving.end_body()
            self._arriving = None
            self.resume_reading()  # read on, to notice if the client goes

    # ---- limits

    def _start(self, exchange: Exchange) -> None:
        self._exchange = exchange
        task = self._loop.create_task(exchange.run(self._app))
        task.add_done_callback(self._state.tasks.discard)
        self._state.tasks.add(task)

    def _end(self, why: str) -> None:
        """Stop reading, for the reason `why`. Complete requests are still answered."""
        self._stop("head")
        self._has_ended, self._is_in_head = True, False
        self._num_dropped += 1  # at least
        broken, self._arriving = self._arriving, None
        if broken is not None and broken is not self._exchange:
            self._waiting.remove(broken)
        is_idle = self._exchange is None or self._exchange.is_complete
        if broken is not None and broken is self._exchange and not is_idle:
            self._refuse(why, broken)
        elif not is_idle:
            last = self._waiting[-1] if self._waiting else self._exchange
            assert last is not None
            last.close_after()
        else:
            self._refuse(why, None)

    def _refuse(self, why: str, broken: Exchange | None) -> None:
        """Answer 400 and close the connection; if the answer to `broken` has begun, cut it off instead."""
        if broken is None or not broken.has_begun:
            text = why.encode()
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(text), text)
            )
        self.idle.pop(self, None)
        if broken is not None:
            broken.lose()
        self.close()

    def _pause_reading(self) -> None:
        if not self._is_read_paused:
            self._is_read_paused = True
            self.transport.pause_reading()

    def _note_idle(self) -> None:
        is_ending = self.transport.is_closing() or self._is_lingering
        if is_ending or not (self._exchange is None or self._exchange.is_complete):
            self.idle.pop(self, None)
        else:
            self.idle.setdefault(self)

    def _watch_head(self) -> None:
        """Limit the time from a head's first byte, or from the connection's start, to the head's end.

        More bytes do not extend the time. No limit applies while reading is paused.
        """
        is_between = self._exchange is not None and not self._is_in_head
        if self._has_ended or self._is_read_paused or is_between:
            self._stop("head")
        elif "head" not in self._timers:
            self._timers["head"] = self._loop.call_later(self.head_timeout_s, self.transport.abort)

    def _watch_rest(self) -> None:
        """Limit the time to send the rest of the last answer, which may be too short for `pause_writing`."""
        if self.transport.get_write_buffer_size():
            self._watch_sending()

    def _watch_sending(self) -> None:
        if "send" not in self._timers:
            self._timers["send"] = self._loop.call_later(self.send_timeout_s, self.transport.abort)

    def _stop(self, name: Timer) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


def _why(opening: bytes) -> str:
    """Return the message for bytes that are not HTTP/1.1; `opening` holds the first ones."""
    if opening.startswith(_HTTP_2):
        return "this port speaks HTTP/1.1, and this is HTTP/2: have the client use HTTP/1.1."
    if opening.startswith(_TLS):
        return "this port speaks plain HTTP/1.1, and this is TLS: use http:// instead of https://."
    return "Invalid HTTP request received: this port speaks HTTP/1.1."


def _is_reset(transport: asyncio.Transport) -> bool:
    """Return whether the client has reset the connection. asyncio does not report it after end of input."""
    found = transport.get_extra_info("socket")
    if found is None or not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(found.fileno(), 0)  # errors are always reported
    return any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))


def _address(found: Any) -> tuple[str, int] | None:  # noqa: ANN401  # a socket's, of whatever family
    return (str(found[0]), int(found[1])) if isinstance(found, list | tuple) else None
