"""Prints a server's logs, its start and the reason for its end, for every engine."""

from __future__ import annotations

import argparse
import logging
import math
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from blockdraft.errors import SettingsError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from blockdraft.server.http.lifetime import Service
    from blockdraft.server.options import ServerOptions

EXIT_ERROR = 2  # the start failed for a reason that a user can fix
EXIT_FAILED = 1  # the engine failed while serving


def check_seconds(flag: str, value: float, *, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        what = "a positive number of seconds" if least else "a number of seconds, 0 or more"
        raise SettingsError(f"{flag} {value}: give {what}.")


def open_private(flag: str, path: Path) -> TextIO:
    """Open a file to append lines to. Only its owner may read it: it may contain secrets."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        reason = f"{flag} {path} cannot be written ({error.strerror})"
        raise SettingsError(f"{reason}: choose another file.") from None
    return os.fdopen(number, "a", buffering=1, encoding="utf-8", errors="replace")


def set_up_logs(args: argparse.Namespace, secrets: tuple[str, ...]) -> Callable[[str], None]:
    """Set up logging. Return a function that logs the phases of the start, unless bars show them."""
    from blockdraft.server.http import logs

    level = logging.getLevelNamesMapping()[args.log_level.upper()]
    # Other packages never log at debug: some would log headers with keys.
    logs.set_up(is_json=args.json_logs, level=max(level, logging.INFO), secrets=secrets)
    log = logging.getLogger("blockdraft")
    log.setLevel(level)
    has_requests = args.access_log or level <= logging.DEBUG
    logging.getLogger("blockdraft.access").setLevel(logging.INFO if has_requests else logging.WARNING)

    def report(line: str) -> None:
        text = line.removeprefix("warning: ")
        log.log(logging.INFO if text == line else logging.WARNING, "%s", text)

    return log.debug if _is_drawn(args) else report


def _is_drawn(args: argparse.Namespace) -> bool:
    """Return whether progress bars show the start. At level debug the log shows it instead."""
    return sys.stderr.isatty() and not args.json_logs and args.log_level != "debug"


def ready_line(name: str, listener: socket.socket) -> str:
    from blockdraft.server.http.listener import addresses_to_use

    here, elsewhere = addresses_to_use(listener)
    line = f"'{name}' is ready: live page at {here}/, API at {here}/v1"
    return line if elsewhere is None else f"{line}; for other machines: {elsewhere}/"


def serve_until_told(
    args: argparse.Namespace,
    service: Service,
    app: ASGIApp,
    options: ServerOptions,
    *,
    name: str,
    listener: socket.socket,
) -> None:
    """Serve until a signal or a failure of the service; then drain and close it."""
    from blockdraft.server.http.lifetime import DrainingServer

    def show_start() -> None:
        if not _is_drawn(args):
            return
        from blockdraft.cli.progress import draw

        draw(service.startup)
        if service.startup.state != "ready":
            show_warnings()

    def show_warnings() -> None:
        for warning in service.startup.warnings:
            print(f"warning: {warning}", file=sys.stderr)

    def announce() -> None:
        print(ready_line(name, listener), flush=True)
        if _is_drawn(args):  # otherwise the log already has these lines
            if service.startup.speculation:
                print(service.startup.speculation, file=sys.stderr)
            show_warnings()

    server = DrainingServer(app, service, options, drain_timeout_s=args.drain_timeout)
    server.serve_on(listener, show_start=show_start, on_ready=announce)


def exit_code(args: argparse.Namespace, error: str | None, *, was_ready: bool) -> int:
    """Return the exit code of an ended server; print its error, if any."""
    if error is None:
        return 0
    text = " ".join(error.split())
    if args.json_logs:
        logging.getLogger("blockdraft").error("%s", text)
    else:
        print("blockdraft: error:", text, file=sys.stderr)
    return EXIT_FAILED if was_ready else EXIT_ERROR
