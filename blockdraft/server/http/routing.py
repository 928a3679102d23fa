"""Routes: a fast path for POST routes, hints for paths of other servers, and the answers to errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from blockdraft.engine.streams import EngineStopped
from blockdraft.errors import BlockdraftError, CapacityError, RequestError
from blockdraft.server.http.replies import INVALID, closing, error_response, not_ready_response

BODY = "blockdraft.body"  # the key of the whole body in a scope
RETRY_AFTER_S = 1  # arbitrary: the queue moves once per step

_HAS = (
    "this server has /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, "
    "/tokenize and /detokenize; /openapi.json describes them."
)
_BASE = "set the client's base URL to http://HOST:PORT/v1"

# Our paths as clients request them if their base URL lacks /v1 or has it twice.
_OURS = re.compile(r"(?:/\w+){0,3}?/(chat/completions|completions|responses|models|messages)(/.*)?")
# Anthropic's clients add /v1 themselves.
_TWICE = re.compile(r"/v1(/v1)+(/.*)?")
_PARTS_OF_OPENAI = {
    "embeddings": "embeddings",
    "audio": "speech",
    "images": "images",
    "videos": "videos",
    "moderations": "moderation",
    "files": "files",
    "uploads": "files",
    "batches": "batches",
    "fine_tuning": "fine-tuning",
    "assistants": "assistants",
    "threads": "assistants",
    "vector_stores": "vector stores",
    "conversations": "conversations",
    "realtime": "realtime sessions",
    "evals": "evaluations",
    "rerank": "reranking",
    "score": "scoring by a path of its own",
    "engines": "engines",
}
_LLAMA_CPP = {"completion", "infill", "props", "slots", "apply-template", "embedding", "lora-adapters"}
_TEXT_GENERATION = {"generate", "generate_stream", "info", "get_model_info"}


def no_such_path(path: str) -> str:
    """Return the message for a path that this server does not have."""
    if _TWICE.fullmatch(path):
        return (
            "no such path: it has /v1 twice. Anthropic's clients add /v1 themselves, so their base URL is "
            f"http://HOST:PORT; for OpenAI's clients it is http://HOST:PORT/v1. T{_HAS[1:]}"
        )
    if path.startswith("/v1beta/"):
        return _other("Gemini's API")
    found = _OURS.fullmatch(path)
    if found is not None and not path.startswith("/v1/"):
        return f"no such path: this is /v1/{found[1]} here: {_BASE}."
    if path.startswith("/api/"):
        return _other("Ollama's API")
    first = path.removeprefix("/v1").strip("/").partition("/")[0]
    if first in _PARTS_OF_OPENAI:
        return f"no such path: this server writes text and has no {_PARTS_OF_OPENAI[first]}; {_HAS}"
    if first in _LLAMA_CPP:
        return _other("an API of llama.cpp's own")
    if first in _TEXT_GENERATION:
        return _other("an API of TGI's or SGLang's own")
    return f"no such path: {_HAS}"


def _other(name: str) -> str:
    return f"no such path: this is {name}, which this server does not have: {_BASE}, as for OpenAI's; {_HAS}"


# ---- errors


class NotReady(Exception):
    """The engine is still starting, or is shutting down."""

    def __init__(self, state: str) -> None:
        super().__init__(state)
        self.state = state


_EXPECTED = (HTTPException, BlockdraftError, EngineStopped, NotReady)


def answer_error(request: Request, error: Exception) -> Response:
    """Return the answer to a request that raised `error`. An unexpected error is answered without details."""
    if isinstance(error, HTTPException):
        return _answer_http(request, error)
    if isinstance(error, NotReady):
        return not_ready_response(error.state)
    message = str(error)
    if isinstance(error, CapacityError):
        after_s = error.retry_after_s or RETRY_AFTER_S
        return error_response(429, message, "rate_limit_error", code="queue_full", retry_after_s=after_s)
    if isinstance(error, RequestError):
        status = 404 if error.code == "model_not_found" else 400
        return error_response(status, message, INVALID, param=error.field, code=error.code)
    if isinstance(error, EngineStopped):
        return closing(error_response(503, message))
    is_bug = not isinstance(error, BlockdraftError)
    return error_response(500, "internal error: see the server's log." if is_bug else message)


def _answer_http(request: Request, error: HTTPException) -> Response:
    headers, text = error.headers or {}, error.detail
    if error.status_code == 404:
        text = no_such_path(request.url.path)
    elif error.status_code == 405:
        text = f"this path does not take {request.method}: use {headers.get('Allow', 'another method')}."
    response = error_response(error.status_code, text, INVALID)
    response.headers.update(headers)
    return response


# Starlette answers unexpected errors, too, and raises them again for the server's log.
HANDLERS = dict.fromkeys((*_EXPECTED, Exception), answer_error)


class WholeRequest(Request):
    """A request whose body AuthLimits has read."""

    async def body(self) -> bytes:
        body: bytes = self.scope[BODY]
        return body


class FastRoutes:
    """Calls POST routes without Starlette's middleware, matching and wrapping, which take a quarter of the
    time of a short answer. Starlette handles all other routes.
    """

    def __init__(self, api: Starlette) -> None:
        self._api = api
        self._endpoints: dict[str, Callable[[Request], Awaitable[Response]]] = {
            route.path: route.endpoint
            for route in api.routes
            if isinstance(route, Route)
            and route.methods == {"POST"}
            and not route.param_convertors
            and inspect.iscoroutinefunction(route.endpoint)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._api(scope, receive, send)
            return
        request = WholeRequest(scope, receive)
        try:
            response = await endpoint(request)
        except Exception as error:  # any: the client gets an answer, and what we did not expect goes on
            await answer_error(request, error)(scope, receive, send)
            if not isinstance(error, _EXPECTED):
                raise
        else:
            await response(scope, receive, send)
