"""blockdraft serve: an OpenAI-compatible server, from its first connection to its last."""

from __future__ import annotations

import argparse
import asyncio
import functools
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from blockdraft.cli.flags import add_model, add_settings, bind_threads, settings_from
from blockdraft.errors import SettingsError
from blockdraft.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from blockdraft.engine.startup import Startup
    from blockdraft.server.options import ServerOptions

SUMMARY = "serve a model over HTTP, with a live page"
USAGE = "blockdraft serve [MODEL] [flags]"
DESCRIPTION = "Serve one model over HTTP, the way OpenAI's clients expect it, with a live page at /."

EXIT_ERROR = 2  # the start failed on something a user can mend
EXIT_FAILED = 1  # the engine failed while serving
EXIT_HUNG = 75  # a step did not come back; sysexits' "temporary failure"
RED_S = 3.0  # how long /health says that the engine is lost before the process ends; arbitrary
LAST_WORDS_S = 5  # for answers that are complete and on their way to their clients; arbitrary
DRAIN_INTERVAL_S = 0.02
DRY_RUNS = ("shell", "docker", "compose")


class Service(Protocol):
    """What answers behind the server: our own engine's loop, or another engine that we started."""

    @property
    def startup(self) -> Startup: ...
    @property
    def error(self) -> str | None:
        """Why it is lost."""

    @property
    def num_live(self) -> int:
        """Requests under way."""

    def close(self) -> None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    group.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call the model (default: as in --model)"
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="clients must send it; may be repeated. Other users of the machine can read flags: prefer "
        "--api-key-file or $BLOCKDRAFT_API_KEY",
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="one key per line")
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        help="web pages that may call; repeatable",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="more names to be called by (default: any; loopback's on a loopback address without a key)",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="until an answer begins (default: 600)",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="for answers under way at the end (default: 30)",
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="a longer step counts as hung (default: 120)",
    )
    group.add_argument("--access-log", action="store_true", help="a line per request, without its text")
    group.add_argument(
        "--json", dest="json_logs", action="store_true", help="logs as one JSON object per line"
    )
    _add_engine_arguments(parser)
    add_settings(parser)


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("another engine (--engine vllm or sglang)")
    group.add_argument(
        "--engine-python",
        metavar="PYTHON",
        help="of the environment it is installed in (default: as found on PATH)",
    )
    group.add_argument(
        "--engine-log", type=Path, metavar="FILE", help="all that it writes (default: its errors, in our log)"
    )
    group.add_argument(
        "--start-timeout",
        type=float,
        default=3600.0,
        metavar="S",
        help="until it is ready, downloads included (default: 3600)",
    )
    group.add_argument(
        "--dry-run",
        nargs="?",
        const="shell",
        choices=DRY_RUNS,
        metavar="FORM",
        help="print its command and start nothing; as shell (the default), docker or compose",
    )
    group.add_argument(
        "--card", metavar="NAME", help="with --dry-run: for a card that is not here, as in `blockdraft plan`"
    )


def run(args: argparse.Namespace) -> int:
    settings = settings_from(args)
    options = _options(args)
    if settings.engine != "native":
        from blockdraft.cli import serve_engine

        return serve_engine.run(args, settings, options)
    _refuse_engine_flags(args)
    from blockdraft.cli.asked import check_native

    with bind(args.host, args.port) as listener:
        check_native(settings)
        bind_threads(settings)
        return _serve(args, settings, options, listener)


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    for name in ("dry_run", "engine_python", "engine_log", "card"):
        if getattr(args, name) is not None:
            raise SettingsError(
                f"--{name.replace('_', '-')} is for another engine, which is not asked for: "
                "add --engine vllm or --engine sglang."
            )


def _options(args: argparse.Namespace) -> ServerOptions:
    from blockdraft.server.options import ServerOptions, default_hosts, read_api_keys
    from blockdraft.server.process_title import hide

    hide(args.api_key)
    if not (math.isfinite(args.step_timeout) and args.step_timeout >= 0.001):
        raise SettingsError(f"--step-timeout {args.step_timeout} is not a positive number of seconds.")
    if not (math.isfinite(args.drain_timeout) and args.drain_timeout >= 0):
        raise SettingsError(f"--drain-timeout {args.drain_timeout} is not a number of seconds.")
    keys = read_api_keys(args.api_key, args.api_key_file)
    defaults = default_hosts(args.host, has_keys=bool(keys))
    hosts = (*defaults, *args.allowed_host)
    return ServerOptions(
        api_keys=keys,
        cors_origins=tuple(args.cors_origin),
        allowed_hosts=hosts,
        request_timeout_s=args.request_timeout,
    )


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


def _serve(
    args: argparse.Namespace, settings: Settings, options: ServerOptions, listener: socket.socket
) -> int:
    """Answer at once, /ready saying how far the start is; load and serve on the engine's own thread."""
    from blockdraft.engine.loop import EngineLoop
    from blockdraft.engine.start import start_engine
    from blockdraft.engine.startup import Startup
    from blockdraft.engine.watchdog import Watchdog
    from blockdraft.server.app import make_app

    report = set_up_logs(args, options.api_keys)
    name = (args.served_model_name or settings.model) + settings.suffix
    loop = EngineLoop(lambda startup: start_engine(settings, startup), Startup(report))
    watchdog = Watchdog(loop, args.step_timeout, _end_hung)
    app = make_app(loop, name=name, options=options, is_hanging=lambda: watchdog.is_hanging)
    serve_until_told(args, loop, app, options, name=name, listener=listener)
    watchdog.close()
    loop.close()
    code = exit_code(args, loop.error, was_ready=loop.engine_info is not None)
    if loop.is_running:  # in the middle of its start: Python cannot take itself apart around it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


# ---- what any engine's server does


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
            timeout_graceful_shutdown=LAST_WORDS_S,
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
        time.sleep(RED_S)
    server.should_exit = True  # type: ignore[attr-defined]


def _end_hung() -> None:
    """The engine's thread cannot be stopped, so the process ends; first /health shows why for a moment."""
    time.sleep(RED_S)
    os._exit(EXIT_HUNG)


def _announce(name: str, listener: socket.socket) -> None:
    address = _address(listener)
    print(f"'{name}' is ready: {address}/ to look, {address}/v1 for clients", flush=True)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
