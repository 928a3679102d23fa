"""AuthLimits: the checks of every request, and the headers and log line of every answer.

It checks, in this order: the size of the head, CORS, the Host header, the API key, the type of the body, the
number of requests at once, the size of the body and the time it takes to arrive, and the time until an answer
begins. connection.py limits the time a client takes for its head and for reading.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockdraft.server.http.exchange import exchange_of
from blockdraft.server.http.logs import AccessRecord
from blockdraft.server.http.replies import (
    INVALID,
    VERSION_HEADER,
    ErrorResponse,
    error_response,
    is_anthropic,
)
from blockdraft.server.http.routing import BODY, no_such_path
from blockdraft.server.options import MAX_HEAD_BYTES, ServerOptions

# These paths need no API key; if keys are set, all others do. vLLM does the same for probes and metrics. The
# page itself is open, as it asks for the key and sends it with its calls.
PROBES = frozenset({"/live", "/health", "/ready", "/ping"})
OPEN_PATHS = PROBES | {"/", "/metrics", "/version", "/server_info", "/openapi.json", "/favicon.ico"}
OPEN_PREFIX = "/page/"

RETRY_AFTER_S = 1  # arbitrary
DRAIN_FACTOR = 8  # bodies up to this many limits are read to the end, so that clients read the answer
PREFLIGHT_AGE_S = 600

_VERSION_HEADER = VERSION_HEADER.encode()
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",  # the page has its own
}
_RAW_HEADERS = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]

access_log = logging.getLogger("blockdraft.access")


@dataclass(frozen=True, slots=True)
class _Head:
    """A request's head, before its body."""

    id: str
    method: str
    path: str
    headers: dict[bytes, bytes]  # the first value of each name
    raw: list[tuple[bytes, bytes]]
    num_bytes: int

    @property
    def has_body(self) -> bool:
        return self.headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in self.headers

    @property
    def is_preflight(self) -> bool:
        if self.method != "OPTIONS":
            return False
        return b"origin" in self.headers and b"access-control-request-method" in self.headers

    def value(self, name: bytes, default: str = "") -> str:
        """Return the first value of a header."""
        value = self.headers.get(name)
        return default if value is None else value.decode("latin-1")

    @property
    def has_version(self) -> bool:
        """Return whether the client is one of Anthropic's."""
        return _VERSION_HEADER in self.headers

    def values(self, name: bytes) -> list[str]:
        """Return all values of a header."""
        return [value.decode("latin-1") for key, value in self.raw if key == name]


class AuthLimits:
    """An ASGI application that checks requests before it calls another one."""

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        has_path: Callable[[Scope], bool] = lambda scope: True,
        refused: Counter[str] | None = None,
    ) -> None:
        self._app = app
        self._has_path = has_path  # whether the application has a scope's path, whatever its method
        self._options = options
        self._keys = tuple(_digest(key.encode()) for key in options.api_keys)
        self._num_open = 0
        self._refused = Counter() if refused is None else refused  # requests, by reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        head = _head(scope)
        state = {**scope.get("state", {}), "request_id": head.id}
        reply = _Reply(head, state, send, self._options)
        try:
            refusal: Response | None
            if head.num_bytes > MAX_HEAD_BYTES:
                text = f"the address and headers are larger than {MAX_HEAD_BYTES} bytes: shorten them."
                refusal = error_response(431, text, INVALID)
            elif head.is_preflight:
                await reply.preflight()
                return
            else:
                number = self._key_number(head)
                state["client"] = _client(number, scope)
                refusal = self._refusal(head, scope, has_key=number is not None)
            if refusal is None:
                refusal = await self._admit({**scope, "state": state}, head, receive, reply)
            if refusal is not None:
                await reply.refuse(refusal)
        finally:
            reply.log()

    def _refusal(self, head: _Head, scope: Scope, *, has_key: bool) -> Response | None:
        """Return the refusal of a request with an unacceptable head; None if the head is acceptable."""
        # Browsers always send the Host header, so a page of another name cannot avoid this check.
        hosts = self._options.allowed_hosts if b"host" in head.headers else ()
        if hosts and _host(head.value(b"host")) not in hosts:
            return error_response(
                421,
                "this server does not accept that Host header: use the address it announced, or start it "
                "with the name among its allowed hosts.",
                INVALID,
            )
        if self._keys and not has_key and not _is_open(head.path):
            text = "no valid API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
            refusal = error_response(401, text, INVALID, code="invalid_api_key")
            refusal.headers["www-authenticate"] = 'Bearer realm="blockdraft"'
            return refusal
        wrong = _wrong_body(head)
        if wrong is not None and not self._has_path(scope):
            return error_response(404, no_such_path(head.path), INVALID)
        return wrong

    def _key_number(self, head: _Head) -> int | None:
        """Return the number of the key that a request has; None if it has no valid one or needs none."""
        if not self._keys or _is_open(head.path):
            return None
        given = head.values(b"authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        bearer = self._number_of(key)
        plain = head.values(b"x-api-key")  # Anthropic's clients put the key here
        number = self._number_of(plain[0]) if len(plain) == 1 else None
        return number if number is not None or scheme.lower() != "bearer" else bearer

    def _number_of(self, key: str) -> int | None:
        """Return the number of a key; None if it is not valid."""
        # Compare digests of equal length, with all keys, so that the time reveals nothing about the keys.
        digest = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return matches.index(True) if any(matches) else None

    async def _admit(self, scope: Scope, head: _Head, receive: Receive, reply: _Reply) -> Response | None:
        """Run the application. Return a refusal if there are too many requests or the body is not valid."""
        if head.path in PROBES:  # always and at once: a supervisor may end a server that does not answer
            return await self._run(scope, _replay(b"", receive), reply)
        if self._num_open >= self._options.max_connections:
            self._refused["connections"] += 1
            text = f"the server answers {self._options.max_connections} requests already: try again later."
            return error_response(503, text, code="too_many_connections", retry_after_s=RETRY_AFTER_S)
        self._num_open += 1
        try:
            body: bytes | Response | None = exchange_of(scope).whole_body(self._options.max_body_bytes)
            if body is None:
                body = await self._read_body(head, receive)
            if body is None or isinstance(body, Response):
                return body
            scope[BODY] = body
            return await self._run(scope, _replay(body, receive), reply)
        finally:
            self._num_open -= 1

    async def _read_body(self, head: _Head, receive: Receive) -> bytes | Response | None:
        """Read all of the body, within limits; None if the client has gone."""
        limit = self._options.max_body_bytes
        if _announced(head) > limit and (
            b"expect" in head.headers or _announced(head) > DRAIN_FACTOR * limit
        ):
            return _too_large(limit)
        body, num_bytes, has_more = bytearray(), 0, True
        try:
            async with asyncio.timeout(self._options.idle_timeout_s):
                while has_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    num_bytes += len(message.get("body", b""))
                    if num_bytes <= limit:
                        body += message.get("body", b"")
                    elif num_bytes > DRAIN_FACTOR * limit:
                        return _too_large(limit)
                    has_more = message.get("more_body", False)
        except TimeoutError:
            text = f"the body did not arrive within {self._options.idle_timeout_s:g} s: send it faster."
            return error_response(408, text, INVALID)
        return bytes(body) if num_bytes <= limit else _too_large(limit)

    async def _run(self, scope: Scope, receive: Receive, reply: _Reply) -> Response | None:
        timeout_s, is_late = self._options.request_timeout_s, False
        task = asyncio.current_task()
        assert task is not None
        num_before = task.cancelling()

        def stop() -> None:
            nonlocal is_late
            is_late = task.cancel()

        async def send(message: Message) -> None:
            if is_late:
                return  # the application has not noticed it yet
            if reply.status is None:
                timer.cancel()  # an answer that has begun may end
            await reply.send(message)

        timer = asyncio.get_running_loop().call_later(timeout_s, stop)  # asyncio.timeout makes 15 calls
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not is_late or task.uncancel() > num_before:
                raise
            text = f"no answer began within {timeout_s:g} s: try again later, ask for less, or stream it."
            return error_response(504, text, code="timeout")
        finally:
            timer.cancel()
        return None


class _Reply:
    """Adds headers to the answer, and logs it."""

    def __init__(self, head: _Head, state: dict[str, str], send: Send, options: ServerOptions) -> None:
        self._head = head
        self._state = state  # the application may have taken another id from the body
        self._send = send
        origin = head.value(b"origin")
        self._origin = origin if origin in options.cors_origins else None
        self._has_cors = bool(options.cors_origins)
        self._start_s = time.monotonic()
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": self._with_headers(message.get("headers", []))}
        await self._send(message)

    async def refuse(self, refusal: Response) -> None:
        # The rest of the body is not read, so the connection cannot take another request.
        refusal.headers["connection"] = "close"
        if isinstance(refusal, ErrorResponse):
            has_version = self._head.has_version
            refusal = refusal.of(self._head.path, self._state["request_id"], has_version=has_version)
        await self._whole(refusal)

    async def preflight(self) -> None:
        """Answer a browser that asks whether a page of another origin may call this server."""
        if self._origin is None:
            origin = self._head.value(b"origin")[:200]
            state = "the server has other CORS origins" if self._has_cors else "CORS is off"
            text = (
                f"no web page of '{origin}' may call, as {state}: start the server with --cors-origin ORIGIN."
            )
            await self.refuse(error_response(403, text, INVALID))
            return
        asked = self._head.value(b"access-control-request-headers")
        headers = {
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": asked,  # this origin may send any header
            "access-control-max-age": str(PREFLIGHT_AGE_S),
        }
        if b"access-control-request-private-network" in self._head.headers:
            headers["access-control-allow-private-network"] = "true"
        given = {name: value for name, value in headers.items() if value}
        await self._whole(Response(status_code=204, headers=given))

    def log(self) -> None:
        """Log the path without its query, which may hold secrets."""
        if access_log.isEnabledFor(logging.INFO):
            seconds, path = time.monotonic() - self._start_s, _shown_path(self._head.path)
            status = "gone" if self.status is None else self.status
            text = f"{self._head.method} {path} {status} in {seconds:.3f} s"
            access_log.handle(AccessRecord(access_log.name, text, self._state["request_id"]))

    async def _whole(self, response: Response) -> None:
        """Send an answer of our own."""
        await self.send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await self.send({"type": "http.response.body", "body": response.body})

    def _with_headers(self, given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        raw = [field for field in given if field[0] != b"x-request-id"]
        names = {name for name, _ in raw}
        request_id = self._state["request_id"].encode("latin-1")
        raw.append((b"x-request-id", request_id))
        if is_anthropic(self._head.path, has_version=self._head.has_version):
            raw.append((b"request-id", request_id))  # the name that Anthropic's clients expect
        raw += [field for field in _RAW_HEADERS if field[0] not in names]
        if not self._has_cors:
            return raw
        headers = MutableHeaders(raw=raw)
        headers.add_vary_header("origin")
        if self._origin is not None:
            headers["access-control-allow-origin"] = self._origin
            headers["access-control-expose-headers"] = "x-request-id, retry-after"
            headers["cross-origin-resource-policy"] = "cross-origin"
        return headers.raw


def _head(scope: Scope) -> _Head:
    raw: list[tuple[bytes, bytes]] = scope["headers"]
    num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    num_bytes += sum(map(len, chain.from_iterable(raw))) + 4 * len(raw)  # ": " and the line's end
    headers = dict(reversed(raw))
    given = headers.get(b"x-request-id", b"")
    is_valid = given and _REQUEST_ID.fullmatch(given)
    request_id = given.decode() if is_valid else secrets.token_hex(16)
    return _Head(request_id, scope["method"], scope["path"], headers, raw, num_bytes)


def _client(key_number: int | None, scope: Scope) -> tuple[str, str]:
    """Return the number of the key, if there is one, and the address: clients take turns."""
    address = scope.get("client")
    return "" if key_number is None else str(key_number), "" if address is None else str(address[0])


@functools.lru_cache(256)
def _shown_path(path: str) -> str:
    """Return the path quoted, so that it is one line."""
    return quote(path[:200])


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or (path.startswith(OPEN_PREFIX) and ".." not in path.split("/"))


def _wrong_body(head: _Head) -> Response | None:
    """Return the refusal of a body that is not JSON, which other origins can send without a preflight."""
    if not head.has_body:
        return None
    kind = head.value(b"content-type")
    if kind != "application/json":
        kind = kind.partition(";")[0].strip().lower()
    if kind != "application/json":
        text = f"the body has the type '{kind[:100]}': use 'Content-Type: application/json'."
        return error_response(415, text, INVALID)
    encoding = head.value(b"content-encoding", "identity").lower()
    if encoding != "identity":
        text = "the body is compressed: send it as it is, without Content-Encoding."
        return error_response(415, text, INVALID)
    return None


def _too_large(limit: int) -> Response:
    return error_response(413, f"the body is larger than {limit} bytes: shorten the request.", INVALID)


def _announced(head: _Head) -> int:
    """Return the Content-Length; 0 if it is missing. The parser has checked it."""
    text = head.value(b"content-length", "0")
    return int(text) if text.isdecimal() and len(text) <= 20 else 0


def _host(value: str) -> str:
    """Return the name in a Host header, without port and brackets."""
    host = value.lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body first, and then waits for the end of the connection."""
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return rest.pop() if rest else await receive()

    return replay
