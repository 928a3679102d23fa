"""ServerOptions: who may use the server, and limits on clients. This module imports no web library."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from blockdraft.errors import SettingsError
from blockdraft.settings.settings import environment_api_key

MAX_KEY_FILE_BYTES = 1 << 20
MAX_HEAD_BYTES = 16 << 10  # of a request: its line and its headers
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The server's options. Without API keys, everyone who reaches the server may use it."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)  # a secret: never printed
    cors_origins: tuple[str, ...] = ()  # web pages of other origins that may call; none by default
    allowed_hosts: tuple[str, ...] = ()  # names a request may call the server by; empty: any
    max_body_bytes: int = 4 << 20
    max_connections: int = 512  # requests being answered at once
    request_timeout_s: float = 600.0  # until an answer begins; a stream may take longer
    idle_timeout_s: float = 30.0  # for a client to send a request's head, and the same for its body
    send_timeout_s: float = 30.0  # for a client to read its answer
    keep_alive_s: int = 5  # between two requests on one connection

    def __post_init__(self) -> None:
        for number, key in enumerate(self.api_keys, 1):
            _check_key(key, f"API key {number} of {len(self.api_keys)}")
        for origin in self.cors_origins:
            _check_origin(origin)
        for host in self.allowed_hosts:
            if not host or host != host.lower() or any(c in host for c in "/ []*"):
                raise SettingsError(
                    f"allowed host '{host}' is not a plain name: give it in lower case and without a port."
                )
        for name in ("max_body_bytes", "max_connections", "keep_alive_s"):
            _check_number(name, getattr(self, name), int, 1)
        for name in ("request_timeout_s", "idle_timeout_s", "send_timeout_s"):
            _check_number(name, getattr(self, name), (int, float), 0.001)


def read_api_keys(given: Iterable[str] = (), file: Path | None = None) -> tuple[str, ...]:
    """Return all keys from flags, $BLOCKDRAFT_API_KEY and `file`, each once.

    Every user of the machine can read a flag while the process starts, so the others are safer.
    """
    keys = [key.strip() for key in given]
    if any(not key for key in keys):
        raise SettingsError("--api-key is empty: give a key, or leave the flag out.")
    from_environment = environment_api_key()
    if from_environment is not None:
        key = from_environment.strip()
        _check_key(key, "the key in BLOCKDRAFT_API_KEY")
        keys.append(key)
    if file is not None:
        keys += _read_key_file(file)
    return tuple(dict.fromkeys(keys))


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def default_hosts(host: str, *, has_keys: bool) -> tuple[str, ...]:
    """Return the default of `allowed_hosts` for a server that listens on `host`.

    A web page can let its own name point to 127.0.0.1 and so reach a server that only this machine should
    (DNS rebinding). Without a key, the check of the Host header stops it.
    """
    if has_keys or not is_loopback(host):
        return ()
    return tuple(dict.fromkeys((*LOOPBACK_NAMES, host.lower())))


def _read_key_file(path: Path) -> list[str]:
    """Return the keys of a file, one per line; empty lines and lines that begin with # are skipped."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_FILE_BYTES + 1)
            mode = path.stat().st_mode
    except OSError as error:
        raise SettingsError(f"cannot read the API key file {path} ({error.strerror}).") from None
    if len(content) > MAX_KEY_FILE_BYTES:
        raise SettingsError(
            f"{path} is larger than {MAX_KEY_FILE_BYTES} bytes, too large for a file of API keys."
        )
    if os.name == "posix" and mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("other users of this machine can read the API keys in %s: chmod 600 it", path)
    keys = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        key = line.strip()
        if key and not key.startswith("#"):
            _check_key(key, f"line {number} of {path}")
            keys.append(key)
    if not keys:
        raise SettingsError(f"the API key file {path} holds no key: write one per line.")
    return keys


def _check_key(key: str, where: str) -> None:
    """Raise SettingsError for an invalid key, without the key in the message."""
    if not re.fullmatch(r"[\x21-\x7e]{1,512}", key):
        raise SettingsError(
            f"{where} cannot be sent in a header: use 1 to 512 printable ASCII characters, no spaces."
        )


def _check_origin(origin: str) -> None:
    advice = "give scheme, host and port as a browser does, like https://chat.example.com."
    if origin == "*":
        raise SettingsError(f"CORS for '*' would let every web page use the server: {advice}")
    parts = urlsplit(origin)
    is_plain = parts.scheme in ("http", "https") and parts.hostname is not None
    if (
        not is_plain
        or origin != f"{parts.scheme}://{parts.netloc}"
        or "@" in origin
        or origin.lower() != origin
    ):
        raise SettingsError(f"'{origin}' is not a valid CORS origin: {advice}")


def _check_number(name: str, value: float, kind: type | tuple[type, ...], low: float) -> None:
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not low <= value < float("inf"):
        whole = "whole number" if kind is int else "number"
        raise SettingsError(f"{name} = {value!r} is not a {whole} of at least {low}.")


def hide_in_process_list(secrets: Iterable[str]) -> bool:
    """Overwrite `secrets` in /proc/self/cmdline. Return False if that is impossible, as it is outside Linux.

    The kernel shows the memory that holds the arguments, and tells its address. Python has its own copy and
    does not read that memory again. Until this call, other users can see the arguments.
    """
    try:
        # The name in parentheses may hold spaces. proc(5): arg_start is field 48, the state is field 3.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        arguments = Path("/proc/self/cmdline").read_bytes()
        start = int(fields[48 - 3])
    except (OSError, IndexError, ValueError):
        return False
    if not start:
        return False
    for secret in filter(None, map(str.encode, secrets)):
        place = arguments.find(secret)
        while place >= 0:
            ctypes.memset(start + place, ord("*"), len(secret))
            place = arguments.find(secret, place + len(secret))
    return True
