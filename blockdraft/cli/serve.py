"""blockdraft serve: run an OpenAI-compatible server."""

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
DESCRIPTION = "Serve one model over HTTP with OpenAI's API, and a live page at /."

EXIT_HUNG = 75  # a step did not come back; sysexits' "temporary failure"
DRY_RUNS = ("shell", "docker", "compose")
LOG_LEVELS = ("debug", "info", "warning", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free port (default: 8000)")
    add("--served-model-name", metavar="NAME", help="name of the model in the API (default: --model)")
    key_help = (
        "key that clients must send; repeatable. Other users of this machine can read flags: prefer "
        "--api-key-file or $BLOCKDRAFT_API_KEY"
    )
    add("--api-key", action="append", default=[], metavar="KEY", help=key_help)
    add("--api-key-file", type=Path, metavar="FILE", help="file with one key per line")
    cors_help = "let web pages of this origin call the server; repeatable"
    add("--cors-origin", action="append", default=[], metavar="URL", help=cors_help)
    host_help = (
        "also accept requests with this Host header; repeatable (default: any host; on a loopback address "
        "without a key only loopback names)"
    )
    add("--allowed-host", action="append", default=[], metavar="NAME", help=host_help)
    for flag, default, text in (
        (
            "--request-timeout",
            600.0,
            "seconds until the answer is complete, or until the first token of a stream (default: 600)",
        ),
        ("--drain-timeout", 30.0, "seconds that running answers get at shutdown (default: 30)"),
        ("--step-timeout", 120.0, "seconds after which a step counts as hung (default: 120)"),
    ):
        add(flag, type=float, default=default, metavar="S", help=text)
    level_help = "log from this level on: debug (also logs requests), info, warning, error (default: info)"
    add("--log-level", choices=LOG_LEVELS, default="info", metavar="LEVEL", help=level_help)
    add("--access-log", action="store_true", help="log every request (without its text) at any --log-level")
    add("--json", dest="json_logs", action="store_true", help="log one JSON object per line")
    _add_engine_arguments(parser)
    add_settings(parser)


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("another engine (--engine vllm or sglang)").add_argument
    python_help = "Python of the environment that has the engine (default: the one on PATH)"
    add("--engine-python", metavar="PYTHON", help=python_help)
    log_help = "write all output of the engine to FILE (default: only its errors, to our log)"
    add("--engine-log", type=Path, metavar="FILE", help=log_help)
    start_help = "seconds until the engine must be ready, downloads included (default: 3600)"
    add("--start-timeout", type=float, default=3600.0, metavar="S", help=start_help)
    dry_help = "print the engine's command as shell (default), docker or compose, and start nothing"
    add("--dry-run", nargs="?", const="shell", choices=DRY_RUNS, metavar="FORM", help=dry_help)
    card_help = "with --dry-run: print the command for another card, as in `blockdraft plan`"
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
            f"warning: --host {host} without a key: anyone who can reach this machine can use the server. "
            "Add --api-key-file, or leave out --host.",
            file=sys.stderr,
        )


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    for name in ("dry_run", "engine_python", "engine_log", "card"):
        if getattr(args, name) is not None:
            raise SettingsError(
                f"--{name.replace('_', '-')} needs another engine: add --engine vllm or --engine sglang."
            )


def _options(args: argparse.Namespace) -> ServerOptions:
    from blockdraft.server.options import ServerOptions, default_hosts, hide_in_process_list, read_api_keys

    hide_in_process_list(args.api_key)
    if not (math.isfinite(args.step_timeout) and args.step_timeout >= 0.001):
        raise SettingsError(f"--step-timeout {args.step_timeout}: give a positive number of seconds.")
    if not (math.isfinite(args.drain_timeout) and args.drain_timeout >= 0):
        raise SettingsError(f"--drain-timeout {args.drain_timeout}: give a number of seconds, 0 or more.")
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
    """Load the model in the engine's process; meanwhile answer HTTP, with the progress at /ready."""
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
    """Run the engine's process."""
    from blockdraft.phases import StartProgress
    from blockdraft.start.driver_warmup import quick_imports, wake_card
    from blockdraft.start.preflight import pin_cpu_threads

    startup = StartProgress(set_up_logs(args, secrets))
    wake_card(settings.device)
    pin_cpu_threads(settings.device)
    with quick_imports():
        from blockdraft.server.engine_link.engine_worker import run_engine
        from blockdraft.start.start_engine import start_engine

    make_engine = functools.partial(start_engine, settings)
    run_engine(connection, make_engine, startup, step_timeout_s=args.step_timeout)


def _end_hung(engine: RemoteEngine) -> None:
    """End all processes, since a hung step cannot be stopped; /health shows the reason for a moment first."""
    from blockdraft.server.http.lifetime import UNHEALTHY_GRACE_S

    time.sleep(UNHEALTHY_GRACE_S)
    engine.kill()
    os._exit(EXIT_HUNG)
