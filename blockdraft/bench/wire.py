"""Reads addresses and replies, and describes network errors on one line without the API key."""

from __future__ import annotations

import json
import os
from urllib.parse import urlsplit

import aiohttp

from blockdraft.errors import BenchError

MAX_LINE = 300  # characters of an error; arbitrary
_API_PATHS = ("/chat/completions", "/completions", "/models")
Json = dict[str, object]


def inside(value: object, *keys: str) -> object:
    """Return the value at this path of nested keys in a JSON value; None if the path does not exist."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def whole_number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def server_root(url: str) -> str:
    """Return the base address, without /v1. `url` may end in /v1 or in a route."""
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise BenchError(f"'{_without_password(url)}' is not an address: write http://HOST:PORT.")
    path = parts.path.rstrip("/")
    for route in _API_PATHS:
        path = path.removesuffix(route)
    return f"{parts.scheme}://{parts.netloc}{path.removesuffix('/v1').rstrip('/')}"


def shown_host(url: str) -> str:
    """Return the host and port of an address, without user name and password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://{tail}" if at and "://" in head else tail


def headers(api_key: str | None) -> dict[str, str]:
    """Return the headers. Replies must be uncompressed: decompression would count as the server's time."""
    found = {"accept-encoding": "identity"}
    return found if api_key is None else {**found, "authorization": f"Bearer {api_key}"}


def one_line(text: str, api_key: str | None) -> str:
    """Return `text` on one line, shortened and without the API key."""
    line = " ".join(text.split())
    if api_key:
        line = line.replace(api_key, "***")
    return line if len(line) <= MAX_LINE else line[: MAX_LINE - 1] + "…"


def server_message(body: bytes) -> str:
    """Return the message in an error's body, as OpenAI, vLLM, SGLang or FastAPI write it."""
    text = body.decode("utf-8", "replace")
    try:
        said: object = json.loads(text)
    except ValueError:
        return text.strip() or "no explanation"
    for key in ("error", "message", "detail"):
        said = inside(said, key) or said
    return said if isinstance(said, str) else json.dumps(said)


def is_refusal(error: BaseException) -> bool:
    """Return whether the connection failed."""
    return isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def reason(error: aiohttp.ClientError | OSError | ValueError, host: str, timeout_s: float) -> str:
    """Return why the network failed a request. `timeout_s` is the request's timeout."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"cannot connect to {host}: it does not answer."
    if isinstance(error, TimeoutError):
        return f"no complete answer from {host} within {timeout_s:g} s."
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        # asyncio replaces the system's message; an unknown host name has no error number.
        why = os.strerror(number) if number is not None and number > 0 else error.os_error.strerror
        return f"cannot connect to {host}: {why or error.os_error}."
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return f"{host} closed the connection without an answer."
    if isinstance(error, aiohttp.ClientPayloadError | ConnectionError):
        return "the stream broke off: the connection was closed."
    return f"the request failed: {type(error).__name__}: {error}"
