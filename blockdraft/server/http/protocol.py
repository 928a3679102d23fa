"""The settings that uvicorn runs with, so that the limits hold."""

from __future__ import annotations

from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp

from blockdraft.server.http.connection import HttpConnection
from blockdraft.server.options import ServerOptions

# Connections beyond max_connections: idle ones, probes, and those that are told to come back later.
NUM_SPARE_CONNECTIONS = 128


def uvicorn_config(app: ASGIApp, options: ServerOptions, *, flush_s: int | None = None) -> uvicorn.Config:
    """uvicorn so that the limits hold. Its access log would hold query strings: AuthLimits's own does not.

    `flush_s` is the time at the end for answers that are complete and on their way to their clients.
    """
    return uvicorn.Config(
        app,
        http=http_protocol(options),
        ws="none",
        timeout_keep_alive=options.keep_alive_s,
        timeout_graceful_shutdown=flush_s,
        proxy_headers=False,  # nothing here decides by the client's address
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="warning",
    )


def http_protocol(options: ServerOptions) -> type[HttpConnection]:
    """A class of connections, for one server, that drops clients too slow to ask or to listen."""

    class TimedConnection(HttpConnection):
        head_timeout_s = options.idle_timeout_s
        send_timeout_s = options.send_timeout_s
        max_open = options.max_connections + NUM_SPARE_CONNECTIONS
        idle: ClassVar[dict[HttpConnection, None]] = {}

    return TimedConnection
