"""A server's life, whatever answers behind it: its socket, its logs, its drain and its exit code."""

from __future__ import annotations

import argparse
import asyncio
import functools
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from blockdraft.errors import SettingsError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from blockdraft.phases import StartProgress
    from blockdraft.server.options import ServerOptions

EXIT_ERROR = 2  # the start failed on something a user can mend
EXIT_FAILED = 1  # the engine failed while serving
UNHEALTHY_GRACE_S = 3.0  # how long /health says that the engine is lost before the process ends; arbitrary
FLUSH_S = 5  # for answers that are complete and on their way to their clients; arbitrary
DRAIN_INTERVAL_S = 0.02


class Service(Protocol):
    """What answers behind the server: our own engine's loop, or another engine that we started."""

    @property
    def startup(self) -> StartProgress: ...
    @property
    def error(self) -> str | None:
        """Why it is lost."""

    @property
    def num_live(self) -> int:
        """Requests under way."""

    def close(self) -> None: ...


def bind(host: str, port: int) -> socket.socket:
    """Take the address before anything else: a port in use is the commonest mistake."""
    if not 0 <= port <= 65535:  # getaddrinfo would wrap it around
        raise SettingsError(f"--port {port} is outside 0 to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --host or --port."
        ) from None
    return listener


def set_up_logs(args: argparse.Namespace, secrets: tuple[str, ...]) -> Callable[[str], None]:
    """Where a start's phases are reported: the log has a line per phase where they are not drawn."""
    import logging

    from blockdraft.server import logs

    logs.set_up(is_json=args.json_logs, level=logging.INFO, secrets=secrets)
    logging.getLogger("blockdraft.access").setLevel(logging.INFO if args.access_log else logging.WARNING)
    log = logging.getLogger("blockdraft")
    return log.debug if _is_drawn(args) else log.info


def _is_drawn(args: argparse.Namespace) -> bool:
    return sys.stderr.isatty() and not args.json_logs


def serve_until_told(
    args: argparse.Namespace,
    service: Service,
    app: ASGIApp,
    options: ServerOptions,
    *,
    name: str,
    listener: socket.socket,
) -> None:
    """Serve until a signal, or until the service is lost. At the end it is drained and closed."""
    import logging

    import uvicorn

    from blockdraft.server.protocol import uvicorn_options

    log = logging.getLogger("blockdraft")

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Let answers under way end, for a while; whoever comes meanwhile is told that it is over."""
            log.info("ending: %d requests under way", service.num_live)
            service.startup.drain()
            end_s = time.monotonic() + args.drain_timeout
            while service.num_live and not self.force_exit and time.monotonic() < end_s:
                await asyncio.sleep(DRAIN_INTERVAL_S)
            # What is left ends with an error that its client understands.
            await asyncio.to_thread(service.close)
            await super().shutdown(sockets=sockets)

    server = Server(
        uvicorn.Config(
            app,
            log_level="warning",
            timeout_graceful_shutdown=FLUSH_S,
            **uvicorn_options(options),
        )
    )
    # uvicorn handles the signal while it runs, and afterwards raises it again for whoever came first.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    log.info("listening on %s: /ready says when it is", _address(listener))
    follow = functools.partial(_follow, service, server, name, listener, is_drawn=_is_drawn(args))
    threading.Thread(target=follow, daemon=True).start()
    server.run(sockets=[listener])


def exit_code(args: argparse.Namespace, error: str | None, *, was_ready: bool) -> int:
    """Of a server that has ended; says why, where it was not asked to."""
    if error is None:
        return 0
    _complain(" ".join(error.split()), is_json=args.json_logs)
    return EXIT_FAILED if was_ready else EXIT_ERROR


def _complain(error: str, *, is_json: bool) -> None:
    import logging

    if is_json:
        logging.getLogger("blockdraft").error("%s", error)
    else:
        print("blockdraft: error:", error, file=sys.stderr)


def _follow(service: Service, server: object, name: str, listener: socket.socket, *, is_drawn: bool) -> None:
    """Announce the server when it is ready, and end it when its engine has failed."""
    if is_drawn:
        from blockdraft.cli.progress import draw

        draw(service.startup)
        for warning in service.startup.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    has_announced = False
    while service.error is None:
        if not has_announced and service.startup.state == "ready":
            _announce(name, listener)
            has_announced = True
        time.sleep(0.05)
    if has_announced:
        time.sleep(UNHEALTHY_GRACE_S)
    server.should_exit = True  # type: ignore[attr-defined]


def _announce(name: str, listener: socket.socket) -> None:
    address = _address(listener)
    print(f"'{name}' is ready: {address}/ to look, {address}/v1 for clients", flush=True)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
