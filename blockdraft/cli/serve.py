"""blockdraft serve: an OpenAI-compatible server, from its first connection to its last."""

from __future__ import annotations

import argparse
import functools
import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.cli.flags import add_model, add_settings, settings_from
from blockdraft.cli.server_terminal import exit_code, serve_until_told, set_up_logs
from blockdraft.errors import SettingsError
from blockdraft.settings.settings import Settings

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from blockdraft.server.engine_link.remote_engine import RemoteEngine
    from blockdraft.server.options import ServerOptions

SUMMARY = "serve a model over HTTP, with a live page"
USAGE = "blockdraft serve [MODEL] [flags]"
DESCRIPTION = "Serve one model over HTTP, the way OpenAI's clients expect it, with a live page at /."

EXIT_HUNG = 75  # a step did not come back; sysexits' "temporary failure"
DRY_RUNS = ("shell", "docker", "compose")
LOG_LEVELS = ("debug", "info", "warning", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    add("--served-model-name", metavar="NAME", help="what clients call the model (default: as in --model)")
    key_help = (
        "clients must send it; may be repeated. Other users of the machine can read flags: prefer "
        "--api-key-file or $BLOCKDRAFT_API_KEY"
    )
    add("--api-key", action="append", default=[], metavar="KEY", help=key_help)
    add("--api-key-file", type=Path, metavar="FILE", help="one key per line")
    cors_help = "web pages that may call; repeatable"
    add("--cors-origin", action="append", default=[], metavar="URL", help=cors_help)
    host_help = "more names to be called by (default: any; loopback's on a loopback address without a key)"
    add("--allowed-host", action="append", default=[], metavar="NAME", help=host_help)
    for flag, default, text in (
        ("--request-timeout", 600.0, "until an answer, or the first token of a stream (default: 600)"),
        ("--drain-timeout", 30.0, "for answers under way at the end (default: 30)"),
        ("--step-timeout", 120.0, "a longer step counts as hung (default: 120)"),
    ):
        add(flag, type=float, default=default, metavar="S", help=text)
    level_help = (
        "the least that is logged: debug (with a line per request), info, warning or error (default: info)"
    )
    add("--log-level", choices=LOG_LEVELS, default="info", metavar="LEVEL", help=level_help)
    add("--access-log", action="store_true", help="a line per request, without its text, at any --log-level")
    add("--json", dest="json_logs", action="store_true", help="logs as one JSON object per line")
    _add_engine_arguments(parser)
    add_settings(parser)


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("another engine (--engine vllm or sglang)").add_argument
    python_help = "of the environment it is installed in (default: as found on PATH)"
    add("--engine-python", metavar="PYTHON", help=python_help)
    log_help = "all that it writes (default: its errors, in our log)"
    add("--engine-log", type=Path, metavar="FILE", help=log_help)
    start_help = "until it is ready, downloads included (default: 3600)"
    add("--start-timeout", type=float, default=3600.0, metavar="S", help=start_help)
    dry_help = "print its command and start nothing; as shell (the default), docker or compose"
    add("--dry-run", nargs="?", const="shell", choices=DRY_RUNS, metavar="FORM", help=dry_help)
    card_help = "with --dry-run: for a card that is not here, as in `blockdraft plan`"
    add("--card", metavar="NAME", help=card_help)


def run(args: argparse.Namespace) -> int:
    settings = settings_from(args)
    options = _options(args)
    if settings.engine != "native":
        from blockdraft.cli import serve_engine

        return serve_engine.run(args, settings, options)
    _refuse_engine_flags(args)
    from blockdraft.server.http.listener import bind
    from blockdraft.start.preflight import check_native

    with bind(args.host, args.port) as listener:
        check_native(settings, lambda warning: print(f"warning: {warning}", file=sys.stderr))
        _warn_open(args.host, options)
        return _serve(args, settings, options, listener)


def _warn_open(host: str, options: ServerOptions) -> None:
    from blockdraft.server.options import is_loopback

    if not options.api_keys and not is_loopback(host):
        print(
            f"warning: --host {host} without a key: whoever reaches this machine may use the server. "
            "Add --api-key-file, or leave out --host.",
            file=sys.stderr,
        )


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    for name in ("dry_run", "engine_python", "engine_log", "card"):
        if getattr(args, name) is not None:
            raise SettingsError(
                f"--{name.replace('_', '-')} is for another engine, which is not asked for: "
                "add --engine vllm or --engine sglang."
            )


def _options(args: argparse.Namespace) -> ServerOptions:
    from blockdraft.server.engine_link.process_title import hide
    from blockdraft.server.options import ServerOptions, default_hosts, read_api_keys

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


def _serve(
    args: argparse.Namespace, settings: Settings, options: ServerOptions, listener: socket.socket
) -> int:
    """Answer at once, /ready saying how far the start is; load and serve in a process of the engine's own."""
    from blockdraft.phases import StartProgress
    from blockdraft.server.engine_link.remote_engine import start_engine_process

    work = functools.partial(_run_engine, args, settings, options.api_keys)
    startup = StartProgress(set_up_logs(args, options.api_keys))
    engine = start_engine_process(
        work, startup, _end_hung, step_timeout_s=args.step_timeout, closes=[listener]
    )
    from blockdraft.server.app import make_app  # while the engine's process imports PyTorch

    name = (args.served_model_name or settings.model) + settings.suffix
    app = make_app(engine, name=name, options=options, tool_format=settings.tool_format)
    serve_until_told(args, engine, app, options, name=name, listener=listener)
    engine.close()
    return exit_code(args, engine.error, was_ready=engine.engine_info is not None)


def _run_engine(
    args: argparse.Namespace, settings: Settings, secrets: tuple[str, ...], connection: Connection
) -> None:
    """All that the engine's process does."""
    from blockdraft.phases import StartProgress
    from blockdraft.start.driver_warmup import quick_imports, wake_card
    from blockdraft.start.preflight import pin_cpu_threads

    startup = StartProgress(set_up_logs(args, secrets))
    wake_card(settings.device)
    pin_cpu_threads(settings)
    with quick_imports():
        from blockdraft.server.engine_link.engine_worker import run_engine
        from blockdraft.start.start_engine import start_engine

    make_engine = functools.partial(start_engine, settings)
    run_engine(connection, make_engine, startup, step_timeout_s=args.step_timeout)


def _end_hung(engine: RemoteEngine) -> None:
    """A step that does not come back cannot be stopped, so all ends; first /health shows why for a moment."""
    from blockdraft.server.http.lifetime import UNHEALTHY_GRACE_S

    time.sleep(UNHEALTHY_GRACE_S)
    engine.kill()
    os._exit(EXIT_HUNG)
