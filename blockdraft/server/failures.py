"""Errors in OpenAI's shape. No traceback, path or text of a bug leaves the server."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from blockdraft.engine.loop import EngineStopped
from blockdraft.errors import BlockdraftError, CapacityError, RequestError
from blockdraft.server.body import FieldError
from blockdraft.server.openai import error_body

RETRY_AFTER_S = 1  # arbitrary: the queue moves once per step
_INVALID = "invalid_request_error"
_HTTP_MESSAGES = {
    404: "no such path: /openapi.json lists what this server has.",
    405: "this path takes another method: completions and tokens are asked for with POST, the rest with GET.",
    415: "the body must be JSON: send the header 'Content-Type: application/json'.",
}


class NotReady(Exception):
    """The engine is still starting, or on its way out; `retry_after_s` says when to ask again."""

    def __init__(self, message: str, retry_after_s: int | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = _HTTP_MESSAGES.get(error.status_code, error.detail)
    return JSONResponse(
        error_body(message, kind=_INVALID), status_code=error.status_code, headers=error.headers
    )


def on_user_error(request: Request, error: Exception) -> Response:
    message = str(error)
    if isinstance(error, CapacityError):
        body = error_body(message, kind="rate_limit_error", code="queue_full")
        return JSONResponse(body, status_code=429, headers={"retry-after": str(RETRY_AFTER_S)})
    if isinstance(error, FieldError):
        body = error_body(message, kind=_INVALID, param=error.param, code=error.code)
        return JSONResponse(body, status_code=404 if error.code == "model_not_found" else 400)
    if isinstance(error, RequestError):
        return JSONResponse(error_body(message, kind=_INVALID), status_code=400)
    return JSONResponse(error_body(message, kind="server_error"), status_code=500)


def on_stop(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(str(error), kind="server_error"), status_code=503)


def on_not_ready(request: Request, error: Exception) -> Response:
    assert isinstance(error, NotReady)
    headers = None if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    body = error_body(str(error), kind="server_error", code="not_ready")
    return JSONResponse(body, status_code=503, headers=headers)


def on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises the error again behind this answer, so that the server's log has the traceback."""
    body = error_body("internal error: see the server's log.", kind="server_error")
    return JSONResponse(body, status_code=500)


HANDLERS = {
    HTTPException: on_http,
    BlockdraftError: on_user_error,
    EngineStopped: on_stop,
    NotReady: on_not_ready,
    Exception: on_bug,
}
