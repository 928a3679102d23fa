"""Runs a server with uvicorn, drains it and ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import ClassVar, Protocol

import uvicorn
from starlette.types import ASGIApp

from blockdraft.phases import StartProgress
from blockdraft.server.http.connection import HttpConnection
from blockdraft.server.http.listener import address_of
from blockdraft.server.options import ServerOptions

# Connections beyond max_connections: idle ones, probes, and requests that are refused with 503.
NUM_SPARE_CONNECTIONS = 128


def uvicorn_config(app: ASGIApp, options: ServerOptions, *, flush_s: int | None = None) -> uvicorn.Config:
    """Return uvicorn's settings. Its access log is off because it would contain query strings; AuthLimits
    writes one without them.

    `flush_s` is the time for complete answers to reach their clients when the server ends.
    """
    return uvicorn.Config(
        app,
        http=http_protocol(options),
        ws="none",
        timeout_keep_alive=options.keep_alive_s,
        timeout_graceful_shutdown=flush_s,
        proxy_headers=False,  # the client's address is not used
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="warning",
    )


def http_protocol(options: ServerOptions) -> type[HttpConnection]:
    """Return the class of one server's connections, with its time limits."""

    class TimedConnection(HttpConnection):
        head_timeout_s = options.idle_timeout_s
        send_timeout_s = options.send_timeout_s
        max_open = options.max_connections + NUM_SPARE_CONNECTIONS
        idle: ClassVar[dict[HttpConnection, None]] = {}

    return TimedConnection


UNHEALTHY_GRACE_S = 3.0  # from the engine's loss to the end of the process: /health reports it; arbitrary
FLUSH_S = 5  # for complete answers to reach their clients; arbitrary
DRAIN_INTERVAL_S = 0.02
GC_THRESHOLD = 20_000  # objects more than before that the youngest generation may hold: some 4 MB; arbitrary

log = logging.getLogger("blockdraft")


def settle_memory() -> None:
    """Note that the objects made so far stay, and collect garbage less often: a tenth of a request's cost."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


class Service(Protocol):
    """Interface of a service for the server: our engine, or a proxy to another engine."""

    @property
    def startup(self) -> StartProgress: ...
    @property
    def error(self) -> str | None:
        """Return why the service is lost; None if it is not."""

    @property
    def num_live(self) -> int:
        """Return the number of requests under way."""

    def close(self) -> None: ...


def ending(num_live: int, drain_timeout_s: float) -> str:
    """Return the log line about running requests for a user who has pressed Ctrl-C."""
    if not num_live:
        return "ending: no request is under way"
    return (
        f"ending: {num_live} under way, which may take {drain_timeout_s:g} s more (--drain-timeout); "
        "a second Ctrl-C ends at once"
    )


class DrainingServer(uvicorn.Server):
    """Ends on a signal or when the service is lost, after it has let running answers end."""

    def __init__(
        self, app: ASGIApp, service: Service, options: ServerOptions, *, drain_timeout_s: float
    ) -> None:
        super().__init__(uvicorn_config(app, options, flush_s=FLUSH_S))
        self._service = service
        self._drain_timeout_s = drain_timeout_s

    def serve_on(
        self, listener: socket.socket, *, show_start: Callable[[], None], on_ready: Callable[[], None]
    ) -> None:
        """Serve until the service is drained and closed. `show_start` may take as long as the start."""
        # uvicorn handles signals while it runs, and afterwards raises them again for these handlers.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "should_exit", True))
        log.info("listening on %s; not ready yet, /ready shows the progress", address_of(listener))
        threading.Thread(target=self._follow, args=(show_start, on_ready), daemon=True).start()
        self.run(sockets=[listener])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give running answers time to end; refuse new requests meanwhile."""
        service = self._service
        if service.error is None:  # if it is lost, the error is shown elsewhere
            log.info("%s", ending(service.num_live, self._drain_timeout_s))
        service.startup.drain()
        end_s = time.monotonic() + self._drain_timeout_s
        while service.num_live and not self.force_exit and time.monotonic() < end_s:
            await asyncio.sleep(DRAIN_INTERVAL_S)
        if self.force_exit and service.num_live:
            count = service.num_live
            log.info("ended at once: %s given up", "1 answer was" if count == 1 else f"{count} answers were")
        # Answers that are still running end with an error that clients understand.
        await asyncio.to_thread(service.close)
        await super().shutdown(sockets=sockets)
        if self.force_exit:  # uvicorn skips this and then logs an error
            await self.lifespan.shutdown()

    def _follow(self, show_start: Callable[[], None], on_ready: Callable[[], None]) -> None:
        """Call `on_ready` when the service is ready, and end the server when the service is lost."""
        show_start()
        was_ready = False
        while self._service.error is None:
            if not was_ready and self._service.startup.state == "ready":
                on_ready()
                was_ready = True
                settle_memory()
            time.sleep(0.05)
        if was_ready:
            time.sleep(UNHEALTHY_GRACE_S)
        self.should_exit = True
