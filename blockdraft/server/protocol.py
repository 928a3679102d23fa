"""uvicorn's HTTP protocol with limits that it lacks, and the settings it runs with.

uvicorn waits for ever for a client that opens a connection and never finishes a request's head, and for one
that never reads its answer. Both cost a client nothing and hold a connection of the server. And its own limit
on connections turns away whoever comes last, be it a probe: here the one that was idle longest gives way.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from blockdraft.server.options import MAX_HEAD_BYTES, ServerOptions

# Connections beyond max_connections: idle ones, probes, and those that are told to come back later.
NUM_SPARE_CONNECTIONS = 128


def uvicorn_config(app: ASGIApp, options: ServerOptions, *, flush_s: int | None = None) -> uvicorn.Config:
    """uvicorn so that the limits hold. Its access log would hold query strings: Guard's own does not.

    `flush_s` is the time at the end for answers that are complete and on their way to their clients.
    """
    return uvicorn.Config(
        app,
        http=http_protocol(options),
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,  # of one that comes in parts: Guard sees the whole ones
        timeout_keep_alive=options.keep_alive_s,
        timeout_graceful_shutdown=flush_s,
        proxy_headers=False,  # nothing here decides by the client's address
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="warning",
    )


def http_protocol(options: ServerOptions) -> type[H11Protocol]:
    """A protocol class, for one server, that drops clients too slow to ask or to listen."""

    class TimedProtocol(_TimedProtocol):
        head_timeout_s = options.idle_timeout_s
        send_timeout_s = options.send_timeout_s
        max_open = options.max_connections + NUM_SPARE_CONNECTIONS
        idle: ClassVar[dict[_TimedProtocol, None]] = {}

    return TimedProtocol


class _TimedProtocol(H11Protocol):
    head_timeout_s: float
    send_timeout_s: float
    max_open: int
    idle: ClassVar[dict[_TimedProtocol, None]]  # connections without a request, the longest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._timers: dict[str, asyncio.TimerHandle] = {}
        super().connection_made(transport)
        self._watch_head()
        if len(self.connections) > self.max_open and self.idle:
            # Where none is idle, Guard refuses what is too much, and answers probes.
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.transport.abort()
        self._note_idle()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()
        self._note_idle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer("head")
        self._stop_timer("send")
        self.idle.pop(self, None)
        super().connection_lost(exc)

    def _note_idle(self) -> None:
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self.idle.pop(self, None)
        else:
            self.idle.setdefault(self)

    def _watch_head(self) -> None:
        """The time runs from the first byte of a head, or from the connection; more bytes do not renew it."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer("head")
        else:
            self._start_timer("head", self.head_timeout_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("send", self.send_timeout_s)

    def resume_writing(self) -> None:
        self._stop_timer("send")
        super().resume_writing()

    def _start_timer(self, name: str, seconds: float) -> None:
        """The connection ends when the time is over; one that runs already is not begun anew."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()
