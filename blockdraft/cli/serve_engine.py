"""blockdraft serve --engine vllm or sglang: start another engine with the right flags and proxy it.

This process never imports torch. It checks keys, shows the live page and forwards requests.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.cli.server_terminal import (
    check_seconds,
    exit_code,
    open_private,
    serve_until_told,
    set_up_logs,
)
from blockdraft.errors import SettingsError
from blockdraft.launch.installed import find_engine
from blockdraft.launch.launch_request import Command
from blockdraft.launch.preflight import CheckedLaunch, as_installed, check_launch, check_to_print
from blockdraft.launch.shell import compose, docker_run, shell_line
from blockdraft.launch.supervisor import Launch, Supervisor
from blockdraft.settings.settings import Settings

if TYPE_CHECKING:
    from blockdraft.server.options import ServerOptions

MAX_BODY_BYTES = 64 << 20  # largest request, which may contain images; arbitrary
DEFAULT_PORT = 8000
PRINTERS: dict[str, Callable[[Command], str]] = {
    "shell": shell_line,
    "docker": docker_run,
    "compose": compose,
}
_LABELS = {"warn": "warning", "note": "note"}


def run(args: argparse.Namespace, settings: Settings, options: ServerOptions) -> int:
    check_seconds("--start-timeout", args.start_timeout, least=0.001)
    if args.max_wait is not None:
        raise SettingsError("--max-wait works with our own engine only: leave it out, or --engine.")
    if args.receipts is not None:
        raise SettingsError("--receipts works with our own engine only: leave it out, or --engine.")
    name = (args.served_model_name or settings.model) + settings.suffix
    if args.dry_run is not None:
        key = options.api_keys[0] if options.api_keys else None
        checked = check_to_print(settings, name, args.card)
        if args.dry_run != "shell":
            checked = checked.in_image()
        command = checked.command(port=args.port or DEFAULT_PORT, api_key=key, host=args.host)
        for warning in checked.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        for finding in checked.findings:
            print(f"{_LABELS[finding.severity]}: {finding}", file=sys.stderr)
        print(PRINTERS[args.dry_run](command).rstrip("\n"))
        return 0
    if sys.platform == "win32":
        raise SettingsError(f"--engine {settings.engine} does not run on Windows: start it in WSL.")
    if args.card is not None:
        raise SettingsError("--card works only with --dry-run: a real start uses the cards of this machine.")
    installed = find_engine(settings.engine, args.engine_python)
    settings, warnings = as_installed(settings, installed)
    checked = check_launch(settings, name)
    checked = replace(checked, warnings=(*warnings, *checked.warnings))
    from blockdraft.server.http.listener import bind

    options = replace(options, max_body_bytes=MAX_BODY_BYTES)
    with ExitStack() as opened:
        listener = opened.enter_context(bind(args.host, args.port))
        launch = checked.launch(installed, start_timeout_s=args.start_timeout)
        return _serve(args, options, checked, launch, listener, _writer(args.engine_log, opened))


def _writer(path: Path | None, opened: ExitStack) -> Callable[[str], None]:
    """Return a function that appends a line to `path`."""
    if path is None:
        return lambda line: None
    file, lock = opened.enter_context(open_private("--engine-log", path)), threading.Lock()

    def write(line: str) -> None:
        with lock:
            if not file.closed:
                file.write(line + "\n")

    return write


def _serve(
    args: argparse.Namespace,
    options: ServerOptions,
    checked: CheckedLaunch,
    launch: Launch,
    listener: socket.socket,
    write: Callable[[str], None],
) -> int:
    from blockdraft.server.proxy.proxy import Proxy

    engine = Supervisor(launch, checked.facts(), set_up_logs(args, options.api_keys), write)
    log = logging.getLogger("blockdraft")
    log.info("starting %s %s", engine.title, launch.command.version)
    for warning in checked.warnings:
        engine.startup.warn(warning)
    for finding in checked.findings:
        if finding.severity == "warn":
            engine.startup.warn(str(finding))
        else:
            log.info("%s: %s", _LABELS[finding.severity], finding)
    proxy = Proxy(engine, name=checked.name, options=options, stall_limit_s=args.step_timeout)
    try:
        serve_until_told(args, proxy, proxy.app, options, name=checked.name, listener=listener)
    finally:
        proxy.close()
    return exit_code(args, engine.error, was_ready=engine.is_ready)
