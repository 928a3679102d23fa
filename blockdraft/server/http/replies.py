"""Answers that our own server and the proxy share: errors in each API's format, events, the state."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Literal

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from blockdraft import __version__
from blockdraft.phases import State

DONE = "data: [DONE]\n\n"  # the last event of a stream
START_RETRY_AFTER_S = 5  # arbitrary: a start takes seconds to minutes

# Streams are not stored, and nginx passes on each piece at once.
STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}

INVALID = "invalid_request_error"  # the type of errors that the client caused
VERSION_HEADER = "anthropic-version"  # Anthropic's clients send it with every path
OPENAI_PATHS = ("/v1/chat/", "/v1/completions", "/v1/responses")
OVERLOADED = 529  # Anthropic's status for too many requests at once
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}

Health = Literal["ok", "starting", "draining", "failed", "hanging"]

json_of = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # json.dumps makes one per call


# ---- errors


class ErrorDetail(TypedDict):
    """An error; `param` is the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Every error, whatever its status."""

    error: ErrorDetail


class MessageErrorDetail(TypedDict):
    """An error; the message names the field at fault."""

    type: str
    message: str


class MessageError(TypedDict):
    """Every error of the Messages API, whatever its status."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> Error:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def message_error(
    status: int, message: str, *, param: str | None = None, request_id: str | None = None
) -> MessageError:
    """Return an error of Anthropic's API, in which only the message can name the field at fault."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else INVALID)
    text = message if param is None or param in message else f"{param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": request_id}


def is_anthropic(path: str, *, has_version: bool = False) -> bool:
    """Return whether the client uses Anthropic's API, according to the path or its version header."""
    is_messages_path = path == "/v1/messages" or path.startswith("/v1/messages/")
    return is_messages_path or (has_version and not path.startswith(OPENAI_PATHS))


class ErrorResponse(JSONResponse):
    """An error in OpenAI's format; `of` converts it to the format of a path's API."""

    def __init__(self, status: int, error: Error, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error, status_code=status, headers=headers)
        self._error = error["error"]

    def of(self, path: str, request_id: str | None, *, has_version: bool = False) -> Response:
        """Return the error for a path. `has_version`: the request has the header of Anthropic's clients."""
        if not is_anthropic(path, has_version=has_version):
            return self
        status = OVERLOADED if self._error["code"] == "too_many_connections" else self.status_code
        body = message_error(
            status, self._error["message"], param=self._error["param"], request_id=request_id
        )
        kept = {name: value for name, value in self.headers.items() if name != "content-length"}
        return JSONResponse(body, status_code=status, headers=kept)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_version = any(name == VERSION_HEADER.encode() for name, _ in scope["headers"])
        request_id = scope.get("state", {}).get("request_id")
        shaped = self.of(scope["path"], request_id, has_version=has_version)
        await Response.__call__(shaped, scope, receive, send)


def error_event(path: str, message: str, code: str) -> str:
    """Return the last event of a stream that breaks off, in the format of the path's API."""
    if is_anthropic(path):
        return named_event("error", message_error(500, message))
    if path == "/v1/responses":
        failure = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return named_event("error", failure)
    return event(error_body(message, kind="server_error", code=code)) + DONE


def error_response(
    status: int,
    message: str,
    kind: str = "server_error",
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after_s: int | None = None,
) -> ErrorResponse:
    headers = None if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return ErrorResponse(status, error_body(message, kind=kind, param=param, code=code), headers)


def not_ready_response(state: object) -> ErrorResponse:
    """Return the answer to a request before the engine is ready, or after the end has begun."""
    if state == "starting":
        text = "the engine is still starting: /ready shows its progress."
        return error_response(503, text, code="not_ready", retry_after_s=START_RETRY_AFTER_S)
    return closing(error_response(503, f"the server is {state}: /ready says why.", code="not_ready"))


def closing(refusal: ErrorResponse) -> ErrorResponse:
    """Return the refusal; its connection ends, so that a balancer gives the next one to another server."""
    refusal.headers["connection"] = "close"
    return refusal


def health_of(state: State) -> Health:
    """Return the state for /health: "ok" instead of "ready"."""
    return "ok" if state == "ready" else state


def status_response(status: Health, **details: object) -> JSONResponse:
    """Return the answer of /live and /health."""
    return _state_response({"status": status, **details}, is_ok=status == "ok", state=status)


def start_response(start: Mapping[str, object]) -> JSONResponse:
    """Return the answer of /ready; `start` is StartProgress.snapshot()."""
    return _state_response(start, is_ok=start["state"] == "ready", state=start["state"])


def _state_response(body: Mapping[str, object], *, is_ok: bool, state: object) -> JSONResponse:
    headers = {"retry-after": str(START_RETRY_AFTER_S)} if state == "starting" else None
    return JSONResponse(body, status_code=200 if is_ok else 503, headers=headers)


class ServerInfo(TypedDict):
    """The model's name for clients. SGLang's router asks for it under SGLang's own path."""

    served_model_name: str
    version: str


def server_info_response(name: str) -> JSONResponse:
    """Return the answer of /server_info."""
    info: ServerInfo = {"served_model_name": name, "version": __version__}
    return JSONResponse(info)


def event(data: Mapping[str, object]) -> str:
    """Return one server-sent event."""
    return f"data: {orjson.dumps(data).decode()}\n\n"


def named_event(name: str, data: Mapping[str, object]) -> str:
    """Return one server-sent event with a name, as the newer APIs send it."""
    return f"event: {name}\ndata: {orjson.dumps(data).decode()}\n\n"


def live_response(request: Request, events: AsyncIterator[Mapping[str, object]]) -> Response:
    """Return the answer of /events, which the live page reads."""
    if request.method == "HEAD":  # Starlette would run the endless body and send none of it
        return Response(media_type="text/event-stream")
    lines = (event(data) async for data in events)
    return StreamingResponse(lines, media_type="text/event-stream", headers=STREAM_HEADERS)
