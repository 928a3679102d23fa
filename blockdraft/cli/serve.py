"""Serve one model over HTTP with OpenAI's API, and a live page at /."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from blockdraft.cli.flags import add_flags, add_model, add_settings, settings_from
from blockdraft.cli.server_terminal import (
    check_seconds,
    exit_code,
    open_private,
    serve_until_told,
    set_up_logs,
)
from blockdraft.errors import SettingsError
from blockdraft.settings.merge import flag_of
from blockdraft.settings.settings import Settings

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from blockdraft.server.engine_link.replica import Neighbours
    from blockdraft.server.engine_link.replicas import Replicas
    from blockdraft.server.options import ServerOptions

SUMMARY = "serve a model over HTTP, with a live page"
USAGE = "blockdraft serve [MODEL] [flags]"

EXIT_HUNG = 75  # a step did not return; EX_TEMPFAIL of sysexits
SERVER_FLAGS = """
--host HOST: address to listen on (default: 127.0.0.1)
--port N: port to listen on; 0: any free port (default: 8000)
--served-model-name NAME: name of the model in the API (default: --model)
--api-key KEY...: key that clients must send; repeatable. Other users of this machine can read flags: prefer
  --api-key-file or $BLOCKDRAFT_API_KEY
--api-key-file FILE: file with one key per line
--cors-origin URL...: let web pages of this origin call the server; repeatable
--allowed-host NAME...: also accept requests with this Host header; repeatable (default: any host; on
  a loopback address without a key: only loopback names)
--request-timeout S: seconds until a complete answer, or the first token of a stream (default: 600)
--max-wait S: refuse requests that would probably wait longer in the queue (default: --request-timeout)
--drain-timeout S: seconds that running answers get at shutdown (default: 30)
--step-timeout S: seconds after which a step counts as hung (default: 120)
--log-level {debug,info,warning,error}: log this level and worse; debug also logs requests (default: info)
--access-log: log every request (without its text) at any --log-level
--json: log one JSON object per line
--receipts FILE: append a line per answer to FILE, from which `blockdraft replay FILE` repeats it. The line
  has the prompt's token ids, from which the tokenizer makes its text
--receipt-texts: also write prompts and answers as text to the receipts
"""
ENGINE_FLAGS = """
--engine-python PYTHON: Python of the environment that has the engine (default: the one on PATH)
--engine-log FILE: write all output of the engine to FILE (default: only its errors, to our log)
--start-timeout S: seconds until the engine must be ready, downloads included (default: 3600)
--dry-run FORM: print the engine's command as shell (default), docker or compose, and start nothing
--card NAME: with --dry-run: print the command for another card, as in `blockdraft plan`
"""
DEFAULTS = {"host": "127.0.0.1", "port": 8000, "api_key": [], "cors_origin": [], "allowed_host": []}
TIMEOUTS = {"request_timeout": 600.0, "drain_timeout": 30.0, "step_timeout": 120.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    group, logs = parser.add_argument_group("server"), {"dest": "json_logs"}
    add_flags(group, SERVER_FLAGS, **DEFAULTS, **TIMEOUTS, log_level="info", json=logs)
    group = parser.add_argument_group("another engine (--engine vllm or sglang)")
    form = {"nargs": "?", "const": "shell", "choices": ("shell", "docker", "compose")}
    add_flags(group, ENGINE_FLAGS, start_timeout=3600.0, dry_run=form)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    settings = settings_from(args)
    options = _options(args)
    if args.receipt_texts and args.receipts is None:
        raise SettingsError("--receipt-texts needs a file for receipts: add --receipts FILE.")
    if settings.engine != "native":
        from blockdraft.cli import serve_engine

        return serve_engine.run(args, settings, options)
    _refuse_engine_flags(args)
    from blockdraft.server.http.listener import bind
    from blockdraft.start.preflight import check_replicas

    with ExitStack() as opened:
        listener = opened.enter_context(bind(args.host, args.port))
        receipts = None
        if args.receipts is not None:
            receipts = opened.enter_context(open_private("--receipts", args.receipts))
        replicas = check_replicas(settings, lambda warning: print(f"warning: {warning}", file=sys.stderr))
        _warn_open(args.host, options)
        return _serve(args, settings, replicas, options, listener, receipts)


def _warn_open(host: str, options: ServerOptions) -> None:
    from blockdraft.server.options import is_loopback

    if not options.api_keys and not is_loopback(host):
        risk = f"--host {host} without a key: anyone who can reach this machine can use the server"
        print(f"warning: {risk}. Add --api-key-file, or leave out --host.", file=sys.stderr)


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    for name in ("dry_run", "engine_python", "engine_log", "card"):
        if getattr(args, name) is not None:
            raise SettingsError(f"{flag_of(name)} needs another engine: add --engine vllm or sglang.")


def _options(args: argparse.Namespace) -> ServerOptions:
    from blockdraft.server.options import ServerOptions, default_hosts, hide_in_process_list, read_api_keys

    hide_in_process_list(args.api_key)
    check_seconds("--step-timeout", args.step_timeout, least=0.001)
    check_seconds("--drain-timeout", args.drain_timeout, least=0)
    if args.max_wait is not None:
        check_seconds("--max-wait", args.max_wait, least=0)
    keys = read_api_keys(args.api_key, args.api_key_file)
    return ServerOptions(
        api_keys=keys,
        cors_origins=tuple(args.cors_origin),
        allowed_hosts=(*default_hosts(args.host, has_keys=bool(keys)), *args.allowed_host),
        request_timeout_s=args.request_timeout,
    )


def _serve(
    args: argparse.Namespace,
    settings: Settings,
    replicas: tuple[Settings, ...],
    options: ServerOptions,
    listener: socket.socket,
    receipts: TextIO | None,
) -> int:
    """Load the model in the engines' processes. Meanwhile answer HTTP, with the progress at /ready."""
    from blockdraft.phases import StartProgress
    from blockdraft.server.engine_link.replica import ReplicaPlace
    from blockdraft.server.engine_link.replicas import start_replicas

    places = []
    for number, one in enumerate(replicas):
        num_on_card = sum(other.device == one.device for other in replicas)
        share = ReplicaShare(number, len(replicas), num_on_card)
        work = functools.partial(_run_engine, args, one, options.api_keys, share)
        places.append(ReplicaPlace(one.device, work))
    startup = StartProgress(set_up_logs(args, options.api_keys))
    limit_s, seed = args.step_timeout, settings.seed
    engine = start_replicas(places, startup, _end_hung, step_timeout_s=limit_s, seed=seed, closes=[listener])
    from blockdraft.server.api.receipts import ReceiptBook  # meanwhile the engines import PyTorch
    from blockdraft.server.app import make_app

    name = (args.served_model_name or settings.model) + settings.suffix
    book = None if receipts is None else ReceiptBook(receipts, keeps_texts=args.receipt_texts)
    app = make_app(engine, name=name, options=options, tool_format=settings.tool_format, receipts=book)
    serve_until_told(args, engine, app, options, name=name, listener=listener)
    engine.close()
    return exit_code(args, engine.error, was_ready=engine.engine_info is not None)


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    """The part of the machine that a replica uses."""

    number: int
    num_replicas: int
    num_on_card: int  # with itself


def _run_engine(
    args: argparse.Namespace,
    settings: Settings,
    secrets: tuple[str, ...],
    share: ReplicaShare,
    neighbours: Neighbours,
    connection: Connection,
) -> None:
    from blockdraft.phases import StartProgress
    from blockdraft.planner.replicas import settings_beside
    from blockdraft.planner.resolver import asked_otherwise
    from blockdraft.start.driver_warmup import quick_imports, wake_card
    from blockdraft.start.preflight import pin_cpu_threads, use_cores

    report = set_up_logs(args, secrets)
    if share.num_replicas > 1:
        use_cores(settings.device, share.number, share.num_replicas)
        report = functools.partial(_report_replica, report, share.number)
    if settings.prefix_disk != "off":
        own = os.path.join(settings.prefix_disk, str(share.number))
        settings = asked_otherwise(settings, prefix_disk=own)
    settings = settings_beside(settings, share.num_on_card, neighbours.num_on_card, neighbours.max_model_len)
    startup = StartProgress(report)
    wake_card(settings.device)
    pin_cpu_threads(settings.device)
    with quick_imports():
        from blockdraft.server.engine_link.engine_worker import run_engine
        from blockdraft.start.start_engine import start_engine

    make_engine = functools.partial(start_engine, settings)
    run_engine(
        connection,
        make_engine,
        startup,
        step_timeout_s=args.step_timeout,
        recheck_share=settings.recheck,
        has_tokenizer=neighbours.max_model_len is not None,
        max_wait_s=args.request_timeout if args.max_wait is None else args.max_wait,
    )


def _report_replica(report: Callable[[str], None], number: int, line: str) -> None:
    warning = "warning: "
    mark = warning if line.startswith(warning) else ""
    report(f"{mark}replica {number}: {line.removeprefix(warning)}")


def _end_hung(engine: Replicas) -> None:
    """Show the reason at /health for a moment, then end all processes: a hung step cannot be stopped."""
    from blockdraft.server.http.lifetime import UNHEALTHY_GRACE_S

    time.sleep(UNHEALTHY_GRACE_S)
    engine.kill()
    closing = threading.Thread(target=logging.shutdown, daemon=True)  # it writes the lines that wait
    closing.start()
    closing.join(1.0)  # a pipe that nobody reads blocks it
    os._exit(EXIT_HUNG)
