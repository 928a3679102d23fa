"""Our server in front of another engine: requests and answers pass through unchanged. The engine answers
every /v1 route, with its bodies, streams, tools, images and errors. We add the checks in front of it, /live,
/health, /ready, /metrics (the engine's with ours added) and the live page.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

import aiohttp
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from blockdraft import __version__
from blockdraft.phases import StartProgress
from blockdraft.server.http.auth_limits import AuthLimits
from blockdraft.server.http.exchange import exchange_of
from blockdraft.server.http.replies import (
    INVALID,
    error_event,
    error_response,
    health_of,
    live_response,
    not_ready_response,
    server_info_response,
    start_response,
    status_response,
)
from blockdraft.server.options import ServerOptions
from blockdraft.server.page.live_feed import live_events
from blockdraft.server.page.live_page import routes as page_routes
from blockdraft.server.page.metrics import render_proxy
from blockdraft.server.proxy.proxy_feed import MetricsFeed, fetch_metrics

METHODS = frozenset({"GET", "HEAD", "POST", "DELETE"})
CONNECT_S = 10.0
# Engines also have routes that stop, drain or reload them, so only these are passed on.
PASSED_PATHS = ("/tokenize", "/detokenize", "/openapi.json")

# RFC 9110, 7.6.1. The sets below add headers that concern only one of our two connections.
_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
_NOT_SENT = _HOP | {
    *(
        "host",
        "authorization",
        "x-api-key",
        "content-length",
        "accept-encoding",
        "expect",
        "origin",
        "cookie",
    ),
    "x-request-id",  # the id of AuthLimits is sent instead
}
_NOT_RETURNED = _HOP | {"date", "server", "set-cookie"}

log = logging.getLogger(__name__)


class Upstream(Protocol):
    """The engine that the proxy serves."""

    @property
    def url(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers that the engine needs in every request."""

    @property
    def error(self) -> str | None:
        """Return why the engine is lost; None if it is not."""

    @property
    def startup(self) -> StartProgress: ...
    def last_lines(self) -> list[str]: ...
    def info(self) -> dict[str, object] | None:
        """Return the live page's data; None before the engine is ready, or if its API is elsewhere."""

    def versions(self) -> dict[str, str]: ...
    def close(self) -> None: ...


class Proxy:
    """An ASGI application that passes requests on to the engine, and counts them."""

    def __init__(
        self, upstream: Upstream, *, name: str, options: ServerOptions, stall_limit_s: float = 120.0
    ) -> None:
        self.num_live = 0
        self._upstream = upstream
        self._name = name
        self._stall_limit_s = stall_limit_s
        self._answers: Counter[int] = Counter()
        self._feed = MetricsFeed()
        self._is_closed = False
        self._num_watching = 0  # open live pages
        self._session: aiohttp.ClientSession | None = None
        self.app: ASGIApp = AuthLimits(self._api(), options)

    @property
    def startup(self) -> StartProgress:
        return self._upstream.startup

    @property
    def error(self) -> str | None:
        return self._upstream.error

    def close(self) -> None:
        """Close open live pages, then end the engine with all running requests."""
        self._is_closed = True
        self._upstream.close()

    def _api(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/live", self._alive),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/ping", self._health, methods=["GET", "POST"]),
                Route("/version", self._version),
                Route("/server_info", self._server_info),
                Route("/metrics", self._metrics),
                Route("/events", self._events),
                *(Route(path, _Endpoint(self)) for path in ("/v1/{path:path}", *PASSED_PATHS)),
                *page_routes(),
            ],
            exception_handlers={HTTPException: _on_http},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        # One connection per request: the engine may close an idle one just as we send a request.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            self._session = session
            looking = asyncio.create_task(self._feed.run(self._look))
            try:
                yield
            finally:
                looking.cancel()

    async def _look(self) -> str | None:
        """Return the engine's metrics. Read them only while they are needed, as engines log every request."""
        assert self._session is not None
        if self._upstream.info() is None or not (self.num_live or self._num_watching):
            return None
        found = await fetch_metrics(self._session, self._upstream.url)
        return None if found is None else found[0]

    # ---- state

    async def _alive(self, request: Request) -> Response:
        return self._trouble() or status_response("ok")

    async def _health(self, request: Request) -> Response:
        return self._trouble() or status_response(health_of(self.startup.state))

    def _trouble(self) -> Response | None:
        error = self._upstream.error
        if error is not None:
            return status_response("failed", error=error, log=self._upstream.last_lines())
        if self._feed.stalled_s > self._stall_limit_s:
            text = f"the engine has requests, and has done nothing for {self._feed.stalled_s:.0f} s"
            return status_response("hanging", error=text)
        return None

    async def _ready(self, request: Request) -> Response:
        return start_response(self.startup.snapshot())

    async def _version(self, request: Request) -> Response:
        return JSONResponse({**self._upstream.versions(), "blockdraft": __version__})

    async def _server_info(self, request: Request) -> Response:
        return server_info_response(self._name)

    async def _metrics(self, request: Request) -> Response:
        assert self._session is not None
        ours, content_type = render_proxy(self.startup.snapshot(), self._name, self._answers, self.num_live)
        theirs = (
            None if self._upstream.info() is None else await fetch_metrics(self._session, self._upstream.url)
        )
        if theirs is None:
            return Response(ours, headers={"content-type": content_type})
        text, content_type = theirs
        end = "" if text.endswith("\n") else "\n"
        return Response((text + end).encode() + ours, headers={"content-type": content_type})

    async def _events(self, request: Request) -> Response:
        return live_response(request, self._live())

    async def _live(self) -> AsyncIterator[dict[str, object]]:
        self._num_watching += 1
        try:
            async for data in live_events(
                self._feed, self.startup.snapshot, self._upstream.info, lambda: self._is_closed
            ):
                yield data
        finally:
            self._num_watching -= 1

    # ---- requests that are passed on

    def refusal(self, scope: Scope) -> Response | None:
        """Return the refusal of a request that cannot be passed on now; None if it can."""
        if scope["method"] not in METHODS:
            return error_response(405, "this path takes GET, POST and DELETE.", INVALID)
        if ".." in scope["path"].split("/"):
            return error_response(404, "no such path.", INVALID)
        state = self.startup.state
        if state != "ready":
            return not_ready_response(state)
        if self._upstream.info() is None:
            text = "this machine runs a part of an engine whose API is on another machine."
            return error_response(503, text, code="not_here")
        return None

    async def pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        """Send the request to the engine, and its answer to `send` as it comes. If cancelled, close both."""
        assert self._session is not None
        path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        query = scope["query_string"].decode("latin-1")
        url = URL(f"{self._upstream.url}{path}{'?' if query else ''}{query}", encoded=True)
        reply = _Reply(send)
        try:
            async with self._session.request(
                scope["method"],
                url,
                data=body or None,
                headers=self._sent_headers(scope),
                allow_redirects=False,
                skip_auto_headers=("user-agent", "accept", "content-type"),
            ) as response:
                self._answers[response.status] += 1
                await reply.pass_on(response, has_body=scope["method"] != "HEAD")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("the engine broke off: %s", type(error).__name__)
            self._answers[502] += 1
            lost = "" if self._upstream.error is None else f": {self._upstream.error}"
            await reply.break_off(f"the engine did not finish its answer{lost}.", scope)

    def _sent_headers(self, scope: Scope) -> list[tuple[str, str]]:
        given = Headers(raw=scope["headers"])
        named = {word.strip().lower() for value in given.getlist("connection") for word in value.split(",")}
        kept = [(name, value) for name, value in given.items() if name not in _NOT_SENT | named]
        ours = {
            "accept-encoding": "identity",
            "x-request-id": scope["state"]["request_id"],
            **self._upstream.headers,
        }
        return [*kept, *ours.items()]


class _Endpoint:
    """A route of the engine. It is a class because Starlette wraps functions as its own routes."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._proxy.refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        body = await Request(scope, receive).body()  # AuthLimits has checked its size
        self._proxy.num_live += 1
        try:
            await exchange_of(scope).while_connected(self._proxy.pass_on(scope, body, send))
        finally:
            self._proxy.num_live -= 1


class _Reply:
    """The engine's answer on its way to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_started = False
        self._is_stream = False

    async def pass_on(self, response: aiohttp.ClientResponse, *, has_body: bool) -> None:
        headers = [
            (name.lower(), value)
            for name, value in response.raw_headers
            if _is_returned(name.lower().decode())
        ]
        self._is_stream = response.content_type == "text/event-stream"
        chunks = response.content.iter_any()
        # An engine sends the head of a stream at once: the answer begins with the first event.
        first = await anext(aiter(chunks), b"") if has_body else b""
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
        self._has_started = True
        await self._send({"type": "http.response.body", "body": first, "more_body": True})
        if has_body:
            async for chunk in chunks:
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def break_off(self, message: str, scope: Scope) -> None:
        """End the answer so that the client sees that it is incomplete."""
        if not self._has_started:
            await error_response(502, message, code="engine_lost")(scope, _nothing, self._send)
        elif self._is_stream:  # an empty line first, as the last event may be incomplete
            last = "\n\n" + error_event(scope["path"], message, "engine_lost")
            await self._send({"type": "http.response.body", "body": last.encode()})
        else:
            raise ConnectionAbortedError(message)  # closes the client's connection early, so that it notices


def _is_returned(name: str) -> bool:
    """Return whether an answer's header is passed on; the engine's CORS headers would undo ours."""
    return name not in _NOT_RETURNED and not name.startswith("access-control-")


async def _nothing() -> dict[str, object]:
    return {"type": "http.disconnect"}


def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = "no such path here." if error.status_code == 404 else error.detail
    return error_response(error.status_code, text, INVALID)
