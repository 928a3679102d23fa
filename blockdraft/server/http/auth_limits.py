"""AuthLimits: the checks of every request, and the headers and log line of every answer.

It checks, in this order: the size of the head, CORS, the Host header, the API key, the type of the body, the
number of requests at once, the size of the body and the time it takes to arrive, and the time until an answer
begins. connection.py limits the time a client takes for its head and for reading.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockdraft.server.http.exchange import exchange_of
from blockdraft.server.http.replies import (
    INVALID,
    VERSION_HEADER,
    ErrorResponse,
    error_response,
    is_anthropic,
)
from blockdraft.server.http.routing import no_such_path
from blockdraft.server.options import MAX_HEAD_BYTES, ServerOptions

# These paths need no API key; if keys are set, all others do. vLLM does the same for probes and metrics. The
# page itself is open, as it asks for the key and sends it with its calls.
PROBES = frozenset({"/live", "/health", "/ready", "/ping"})
OPEN_PATHS = PROBES | {"/", "/metrics", "/version", "/server_info", "/openapi.json", "/favicon.ico"}
OPEN_PREFIX = "/page/"

RETRY_AFTER_S = 1  # arbitrary
DRAIN_FACTOR = 8  # bodies up to this many limits are read to the end, so that clients read the answer
PREFLIGHT_AGE_S = 600

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",  # the page has its own
}
_RAW_HEADERS = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]

log = logging.getLogger(__name__)
access_log = logging.getLogger("blockdraft.access")


@dataclass(frozen=True, slots=True)
class _Head:
    """A request's head, before its body."""

    id: str
    method: str
    path: str
    headers: dict[str, str]  # the first value of each name
    raw: list[tuple[bytes, bytes]]
    num_bytes: int

    @property
    def has_body(self) -> bool:
        return self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers

    @property
    def is_preflight(self) -> bool:
        asked = ("origin", "access-control-request-method")
        return self.method == "OPTIONS" and all(name in self.headers for name in asked)

    def values(self, name: bytes) -> list[str]:
        """Return all values of a header."""
        return [value.decode("latin-1") for key, value in self.raw if key == name]


class AuthLimits:
    """An ASGI application that checks requests before it calls another one."""

    def __init__(
        self, app: ASGIApp, options: ServerOptions, has_path: Callable[[Scope], bool] = lambda scope: True
    ) -> None:
        self._app = app
        self._has_path = has_path  # whether the application has a scope's path, whatever its method
        self._options = options
        self._keys = tuple(_digest(key.encode()) for key in options.api_keys)
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
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
                refusal = self._refusal(head, scope)
            if refusal is None:
                refusal = await self._admit({**scope, "state": state}, head, receive, reply)
            if refusal is not None:
                await reply.refuse(refusal)
        finally:
            reply.log()

    def _refusal(self, head: _Head, scope: Scope) -> Response | None:
        """Return the refusal of a request with an unacceptable head; None if the head is acceptable."""
        # Browsers always send the Host header, so a page of another name cannot avoid this check.
        hosts = self._options.allowed_hosts if "host" in head.headers else ()
        if hosts and _host(head.headers) not in hosts:
            return error_response(
                421,
                "this server does not accept that Host header: use the address it announced, or start it "
                "with the name among its allowed hosts.",
                INVALID,
            )
        if not self._is_allowed(head):
            text = "no valid API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
            refusal = error_response(401, text, INVALID, code="invalid_api_key")
            refusal.headers["www-authenticate"] = 'Bearer realm="blockdraft"'
            return refusal
        wrong = _wrong_body(head)
        if wrong is not None and not self._has_path(scope):
            return error_response(404, no_such_path(head.path), INVALID)
        return wrong

    def _is_allowed(self, head: _Head) -> bool:
        if not self._keys or _is_open(head.path):
            return True
        given = head.values(b"authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        is_bearer = self._is_known(key) and scheme.lower() == "bearer"
        plain = head.values(b"x-api-key")  # Anthropic's clients put the key here
        return (len(plain) == 1 and self._is_known(plain[0])) or is_bearer

    def _is_known(self, key: str) -> bool:
        # Compare digests of equal length, with all keys, so that the time reveals nothing about the keys.
        digest = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return any(matches)

    async def _admit(self, scope: Scope, head: _Head, receive: Receive, reply: _Reply) -> Response | None:
        """Run the application. Return a refusal if there are too many requests or the body is not valid."""
        if head.path in PROBES:  # always and at once: a supervisor may end a server that does not answer
            return await self._run(scope, _replay(b"", receive), reply)
        if self._num_open >= self._options.max_connections:
            text = f"the server answers {self._options.max_connections} requests already: try again later."
            return error_response(503, text, code="too_many_connections", retry_after_s=RETRY_AFTER_S)
        self._num_open += 1
        try:
            body: bytes | Response | None = exchange_of(scope).whole_body(self._options.max_body_bytes)
            if body is None:
                body = await self._read_body(head, receive)
            if body is None or isinstance(body, Response):
                return body
            return await self._run(scope, _replay(body, receive), reply)
        finally:
            self._num_open -= 1

    async def _read_body(self, head: _Head, receive: Receive) -> bytes | Response | None:
        """Read all of the body, within limits; None if the client has gone."""
        limit = self._options.max_body_bytes
        if _announced(head) > limit and ("expect" in head.headers or _announced(head) > DRAIN_FACTOR * limit):
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
        timeout_s = self._options.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as deadline:

                async def send(message: Message) -> None:
                    if deadline.expired():
                        return  # too late: the application's task has not noticed the timeout yet
                    if reply.status is None:
                        deadline.reschedule(None)  # an answer that has begun may end
                    await reply.send(message)

                await self._app(scope, receive, send)
        except TimeoutError:
            if not deadline.expired():
                raise
            text = f"no answer began within {timeout_s:g} s: try again later, ask for less, or stream it."
            return error_response(504, text, code="timeout")
        return None


class _Reply:
    """Adds headers to the answer, and logs it."""

    def __init__(self, head: _Head, state: dict[str, str], send: Send, options: ServerOptions) -> None:
        self._head = head
        self._state = state  # the application may have taken another id from the body
        self._send = send
        origin = head.headers.get("origin")
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
            has_version = VERSION_HEADER in self._head.headers
            refusal = refusal.of(self._head.path, self._state["request_id"], has_version=has_version)
        await self._whole(refusal)

    async def preflight(self) -> None:
        """Answer a browser that asks whether a page of another origin may call this server."""
        if self._origin is None:
            origin = self._head.headers.get("origin", "")[:200]
            state = "the server has other CORS origins" if self._has_cors else "CORS is off"
            text = (
                f"no web page of '{origin}' may call, as {state}: start the server with --cors-origin ORIGIN."
            )
            await self.refuse(error_response(403, text, INVALID))
            return
        asked = self._head.headers.get("access-control-request-headers", "")
        headers = {
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": asked,  # this origin may send any header
            "access-control-max-age": str(PREFLIGHT_AGE_S),
        }
        if "access-control-request-private-network" in self._head.headers:
            headers["access-control-allow-private-network"] = "true"
        given = {name: value for name, value in headers.items() if value}
        await self._whole(Response(status_code=204, headers=given))

    def log(self) -> None:
        """Log the path without its query, which may hold secrets, and quoted, so that it is one line."""
        seconds, path = time.monotonic() - self._start_s, quote(self._head.path[:200])
        status = "gone" if self.status is None else self.status
        access_log.info(
            "%s %s %s in %.3f s",
            self._head.method,
            path,
            status,
            seconds,
            extra={"request_id": self._state["request_id"]},
        )

    async def _whole(self, response: Response) -> None:
        """Send an answer of our own."""
        await self.send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await self.send({"type": "http.response.body", "body": response.body})

    def _with_headers(self, given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        raw = [field for field in given if field[0] != b"x-request-id"]
        names = {name for name, _ in raw}
        raw.append((b"x-request-id", self._state["request_id"].encode("latin-1")))
        has_version = VERSION_HEADER in self._head.headers
        if is_anthropic(self._head.path, has_version=has_version):  # the name that Anthropic's clients expect
            raw.append((b"request-id", self._state["request_id"].encode("latin-1")))
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
    raw: list[tuple[bytes, bytes]] = list(scope["headers"])
    headers: dict[str, str] = {}
    num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    for name, value in raw:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        num_bytes += len(name) + len(value) + 4  # ": " and the line's end
    given = headers.get("x-request-id", "")
    request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return _Head(request_id, scope["method"], scope["path"], headers, raw, num_bytes)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or (path.startswith(OPEN_PREFIX) and ".." not in path.split("/"))


def _wrong_body(head: _Head) -> Response | None:
    """Return the refusal of a body that is not JSON, which other origins can send without a preflight."""
    if not head.has_body:
        return None
    kind = head.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        text = f"the body has the type '{kind[:100]}': use 'Content-Type: application/json'."
        return error_response(415, text, INVALID)
    encoding = head.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        text = "the body is compressed: send it as it is, without Content-Encoding."
        return error_response(415, text, INVALID)
    return None


def _too_large(limit: int) -> Response:
    return error_response(413, f"the body is larger than {limit} bytes: shorten the request.", INVALID)


def _announced(head: _Head) -> int:
    """Return the Content-Length; 0 if it is missing. The parser has checked it."""
    text = head.headers.get("content-length", "0")
    return int(text) if text.isdecimal() and len(text) <= 20 else 0


def _host(headers: dict[str, str]) -> str:
    """Return the name in the Host header, without port and brackets."""
    host = headers.get("host", "").lower()
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
