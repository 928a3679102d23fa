"""The HTTP server of one model: the routes of all APIs, and routes for the server's state."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from blockdraft import __version__
from blockdraft.engine.stats import Load, Stats
from blockdraft.server.api.host import ApiHost
from blockdraft.server.api.messages.routes import routes as message_routes
from blockdraft.server.api.openapi import EngineLimits, openapi
from blockdraft.server.api.receipts import ReceiptBook
from blockdraft.server.api.responses.routes import routes as response_routes
from blockdraft.server.api.schemas import Version
from blockdraft.server.engine_link.replicas import Replicas
from blockdraft.server.http.auth_limits import AuthLimits
from blockdraft.server.http.replies import (
    health_of,
    live_response,
    server_info_response,
    start_response,
    status_response,
)
from blockdraft.server.http.routing import HANDLERS, FastRoutes
from blockdraft.server.options import ServerOptions
from blockdraft.server.page.live_feed import LoopFeed, live_events
from blockdraft.server.page.live_page import routes as page_routes
from blockdraft.server.page.metrics import Served, render


def make_app(
    engine: Replicas,
    *,
    name: str,
    options: ServerOptions,
    tool_format: str = "auto",
    receipts: ReceiptBook | None = None,
) -> ASGIApp:
    """Return the server. `name` is the model's name for clients, `tool_format` its format of tool calls."""
    refused: Counter[str] = Counter()
    api = make_api(engine, name=name, tool_format=tool_format, receipts=receipts, refused=refused)

    def has_path(scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in api.routes)

    return AuthLimits(FastRoutes(api), options, has_path, refused)


def make_api(
    engine: Replicas,
    *,
    name: str,
    tool_format: str = "auto",
    receipts: ReceiptBook | None = None,
    refused: Counter[str] | None = None,
) -> Starlette:
    """Return all routes. They also answer during the start, and must be wrapped in AuthLimits."""
    host = ApiHost(engine, name, tool_format, receipts)
    state = _State(engine, name, Counter() if refused is None else refused)
    return Starlette(
        routes=[
            *state.routes(),
            *host.routes(),
            *message_routes(host),
            *response_routes(host),
            *page_routes(),
        ],
        exception_handlers=dict(HANDLERS),
    )


class _State:
    """The routes for the server's state."""

    def __init__(self, engine: Replicas, name: str, refused: Counter[str]) -> None:
        self.engine = engine
        self.name = name
        self.refused = refused  # by AuthLimits

    def routes(self) -> list[Route]:
        return [
            Route("/live", self.live),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/server_info", self.server_info),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/events", self.events),
        ]

    async def live(self, request: Request) -> Response:
        is_alive = self.engine.error is None and not self.engine.is_hanging
        return status_response("ok" if is_alive else "failed")

    async def health(self, request: Request) -> Response:
        if self.engine.error is not None or self.engine.is_hanging:
            return status_response("failed")
        return status_response("hanging" if self.engine.is_silent else health_of(self.engine.startup.state))

    async def ready(self, request: Request) -> Response:
        start, snapshot = self.engine.startup.snapshot(), None
        if start["state"] == "ready":
            snapshot = await self.engine.snapshot()
        if self.engine.engine_info is not None:
            start["sampling"] = dict(self.engine.engine_info.sampling)
            start["fingerprint"] = asdict(self.engine.engine_info.fingerprint)
        start["replicas"] = self.engine.status()
        if snapshot is not None:  # before the first answer, what the start found
            start["speculation"] = snapshot.speculation or self.engine.startup.speculation
        return start_response(start)

    async def version(self, request: Request) -> Response:
        version: Version = {"version": __version__}
        return JSONResponse(version)

    async def server_info(self, request: Request) -> Response:
        return server_info_response(self.name)

    async def metrics(self, request: Request) -> Response:
        engine, unknown = self.engine, Stats().snapshot(Load())
        snapshots = [one or unknown for one in await engine.snapshots()]
        served = Served(engine.status(), engine.num_repeated, self.refused["connections"])
        start = engine.startup.snapshot()
        body, content_type = render(snapshots, engine.engine_info, self.name, start, served)
        return Response(body, headers={"content-type": content_type})

    async def events(self, request: Request) -> Response:
        """Send one event per second with the live page's data."""
        engine = self.engine

        def info() -> dict[str, object] | None:
            if engine.engine_info is None:
                return None
            states = [one["state"] for one in engine.status()]
            of_several = {"replicas": f"{states.count('ready')} of {len(states)} ready"}
            return asdict(engine.engine_info) | (of_several if len(states) > 1 else {})

        feed = LoopFeed(engine.snapshot)
        return live_response(
            request, live_events(feed, engine.startup.snapshot, info, lambda: engine.is_closed)
        )

    async def openapi(self, request: Request) -> Response:
        info = self.engine.engine_info
        limits = None if info is None else EngineLimits(info.block, info.vocab_size)
        return JSONResponse(openapi(limits))
