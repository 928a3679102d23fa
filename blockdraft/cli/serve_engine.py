"""blockdraft serve --engine vllm or sglang: another engine, started with the right flags and served through.

Nothing of ours that computes is loaded here: this process is a guard, a page and a pipe.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.checkpoints.draft_config import draft_block
from blockdraft.cli.asked import Asked, ask, ask_to_print
from blockdraft.cli.serving import bind, exit_code, serve_until_told, set_up_logs
from blockdraft.errors import SettingsError
from blockdraft.launch.command import Command
from blockdraft.launch.installed import Installed, find_engine
from blockdraft.launch.shell import compose, docker_run, shell_line
from blockdraft.launch.supervisor import Launch, Supervisor
from blockdraft.launch.versions import TITLES, read_version
from blockdraft.settings.settings import Settings

if TYPE_CHECKING:
    from blockdraft.phases import StartProgress
    from blockdraft.server.options import ServerOptions
    from blockdraft.server.proxy import Proxy

MAX_BODY_BYTES = 64 << 20  # of requests that may hold images; arbitrary
DEFAULT_PORT = 8000
PRINTERS: dict[str, Callable[[Command], str]] = {
    "shell": shell_line,
    "docker": docker_run,
    "compose": compose,
}

_LABELS = {"warn": "warning", "note": "note"}


def run(args: argparse.Namespace, settings: Settings, options: ServerOptions) -> int:
    if not (math.isfinite(args.start_timeout) and args.start_timeout > 0):
        raise SettingsError(f"--start-timeout {args.start_timeout} is not a positive number of seconds.")
    name = (args.served_model_name or settings.model) + settings.suffix
    if args.dry_run is not None:
        key = options.api_keys[0] if options.api_keys else None
        asked = ask_to_print(settings, name, args.card)
        command = asked.command(port=args.port or DEFAULT_PORT, api_key=key, host=args.host)
        _print(args.dry_run, asked, command)
        return 0
    if args.card is not None:
        raise SettingsError("--card is for --dry-run: a start is on the cards that are here.")
    installed = find_engine(settings.engine, args.engine_python)
    settings, warnings = as_installed(settings, installed)
    asked = ask(settings, name)
    asked = replace(asked, warnings=(*warnings, *asked.warnings))
    with ExitStack() as opened:
        listener = opened.enter_context(bind(args.host, args.port))
        # The engine is for us alone, and other users of this machine reach its port as well.
        command = asked.command(port=_free_port(), api_key=secrets.token_urlsafe(32))
        launch = _launch(args, asked, installed, command)
        write = _writer(args.engine_log, opened)
        return _serve(args, replace(options, max_body_bytes=MAX_BODY_BYTES), asked, launch, listener, write)


def as_installed(settings: Settings, installed: Installed) -> tuple[Settings, tuple[str, ...]]:
    """With the version that flags are written for, and warnings. A name of the same release is believed: only
    its user knows which pull requests a build carries.
    """
    asked, found = settings.engine_version, installed.version
    if found is None or (asked is not None and not _is_another(settings.engine, asked, found)):
        return settings, ()
    settings = replace(settings, engine_version=found)
    if asked is None:
        return settings, ()
    return settings, (
        f"{TITLES[installed.engine]} {found} is installed, not {asked}: its flags are written for {found}",
    )


def _is_another(engine: str, asked: str, found: str) -> bool:
    try:
        release = read_version(engine, found).release
    except SettingsError:  # a build that does not know its own version
        return False
    return read_version(engine, asked).release != release


def _print(form: str, asked: Asked, command: Command) -> None:
    for warning in asked.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for finding in asked.findings:
        print(f"{_LABELS[finding.severity]}: {finding}", file=sys.stderr)
    print(PRINTERS[form](command).rstrip("\n"))


def _launch(args: argparse.Namespace, asked: Asked, installed: Installed, command: Command) -> Launch:
    settings = asked.settings
    return Launch(
        command=command,
        argv=tuple(installed.argv(command.argv)),
        name=asked.name,
        has_drafter=asked.draft is not None,
        api_key=command.env.get("VLLM_API_KEY"),
        start_timeout_s=args.start_timeout,
        head_address=settings.head_address if settings.node_rank > 0 else None,
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _writer(path: Path | None, opened: ExitStack) -> Callable[[str], None]:
    """Where all of the engine's output goes. Its owner alone may read it: who knows what an engine writes."""
    if path is None:
        return lambda line: None
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise SettingsError(f"cannot write --engine-log {path} ({error.strerror}).") from None
    file = opened.enter_context(os.fdopen(number, "a", buffering=1, errors="replace"))
    lock = threading.Lock()

    def write(line: str) -> None:
        with lock:
            if not file.closed:
                file.write(line + "\n")

    return write


def _serve(
    args: argparse.Namespace,
    options: ServerOptions,
    asked: Asked,
    launch: Launch,
    listener: socket.socket,
    write: Callable[[str], None],
) -> int:
    from blockdraft.server.proxy import Proxy

    report = set_up_logs(args, options.api_keys)
    supervisor = Supervisor(launch, report, write)
    log = logging.getLogger("blockdraft")
    log.info("starting %s %s", supervisor.title, launch.command.version)
    for warning in asked.warnings:
        supervisor.startup.warn(warning)
    for finding in asked.findings:
        if finding.severity == "warn":
            supervisor.startup.warn(str(finding))
        else:
            log.info("%s: %s", _LABELS[finding.severity], finding)
    upstream = EngineUpstream(supervisor, asked)
    proxy = Proxy(upstream, name=asked.name, options=options, still_limit_s=args.step_timeout)
    service = EngineService(supervisor, proxy)
    try:
        serve_until_told(args, service, proxy.app, options, name=asked.name, listener=listener)
    finally:
        service.close()
    return exit_code(args, supervisor.error, was_ready=supervisor.is_ready)


class EngineService:
    """A supervised engine and the proxy in front of it, as one thing that serves and ends."""

    def __init__(self, supervisor: Supervisor, proxy: Proxy) -> None:
        self._supervisor = supervisor
        self._proxy = proxy

    @property
    def startup(self) -> StartProgress:
        return self._supervisor.startup

    @property
    def error(self) -> str | None:
        return self._supervisor.error

    @property
    def num_live(self) -> int:
        return self._proxy.num_live

    def close(self) -> None:
        self._proxy.close()
        self._supervisor.close()


class EngineUpstream:
    """A supervised engine as the proxy sees it."""

    def __init__(self, supervisor: Supervisor, asked: Asked) -> None:
        self._supervisor = supervisor
        self._facts = _facts(asked)
        self.url = f"http://127.0.0.1:{supervisor.launch.command.port}"
        self.headers = supervisor.headers

    @property
    def error(self) -> str | None:
        return self._supervisor.error

    def last_lines(self) -> list[str]:
        return self._supervisor.last_lines()

    def start(self) -> dict[str, object]:
        return self._supervisor.startup.snapshot()

    def info(self) -> dict[str, object] | None:
        supervisor = self._supervisor
        if not supervisor.is_ready or supervisor.launch.head_address is not None:
            return None
        engine = f"{supervisor.title} {self.version()['version']}"
        return {"engine": engine, **self._facts, "max_context": supervisor.max_context}

    def version(self) -> dict[str, str]:
        command = self._supervisor.launch.command
        return {"version": self._supervisor.version or command.version, "engine": command.engine}


def _facts(asked: Asked) -> dict[str, object]:
    """What the live page shows of the engine, beside what the engine says itself."""
    settings, width = asked.settings, 1
    if asked.draft is not None:
        width = draft_block(asked.draft) if settings.width == "auto" else settings.width
    return {
        "target": settings.model,
        "draft": None if asked.draft is None else settings.draft,
        "width": width,
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "is_dummy": settings.load_format == "dummy",
        "synthetic_acceptance": settings.synthetic_acceptance,
        "can_switch": False,  # single requests cannot do without speculation
        "notices": [],
    }
