"""blockdraft serve: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import socket
import sys
import threading
from typing import TYPE_CHECKING

from blockdraft.cli.flags import add_settings, add_verbose, reporter, settings_from
from blockdraft.errors import SettingsError
from blockdraft.settings import Settings, pin_threads

if TYPE_CHECKING:
    from blockdraft.engine.engine import Engine

SUMMARY = "serve chat completions over HTTP"
USAGE = "blockdraft serve [MODEL] [flags]"
DESCRIPTION = "Serve one model over HTTP, the way OpenAI's clients expect it. There is no authentication."
GRACE_S = 5  # for answers under way when the server is told to stop; arbitrary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_first", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call the model (default: as in --model)"
    )
    parser.add_argument("--access-log", action="store_true", help="a line on stdout per request")
    add_verbose(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    if args.model_first is not None:
        if args.model not in (Settings().model, args.model_first):
            raise SettingsError(f"two models, '{args.model_first}' and '{args.model}': give one.")
        args.model = args.model_first
    settings = settings_from(args)
    with bind(args.host, args.port) as listener:
        if settings.device == "cpu":
            pin_threads()
        from blockdraft.engine.engine import Engine
        from blockdraft.engine.loading import load_models

        engine = Engine(load_models(settings, reporter(args)))
        name = args.served_model_name or settings.model
        _serve(engine, listener, name, has_access_log=args.access_log)
    return 0


def bind(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded, but answer nobody yet: connections are refused."""
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


def _serve(engine: Engine, listener: socket.socket, name: str, *, has_access_log: bool) -> None:
    import uvicorn

    from blockdraft.engine.loop import EngineLoop
    from blockdraft.server.app import make_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                _announce(name, listener)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Answers still under way after the grace end with an error their clients understand.
            grace = threading.Timer(GRACE_S, loop.close)
            grace.start()
            await super().shutdown(sockets=sockets)
            grace.cancel()

    models = engine.models
    loop = EngineLoop(engine)
    try:
        app = make_app(loop=loop, tokenizer=models.tokenizer, name=name, max_context=models.plan.max_context)
        level = "info" if has_access_log else "warning"
        config = uvicorn.Config(
            app, log_level=level, access_log=has_access_log, timeout_graceful_shutdown=2 * GRACE_S
        )
        Server(config).run(sockets=[listener])
    finally:
        loop.close()


def _announce(name: str, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"'{name}' answers at http://{shown}:{port}/v1/chat/completions", flush=True)
    if host not in ("127.0.0.1", "::1"):
        print("whoever reaches this address can use it: there is no authentication", file=sys.stderr)
