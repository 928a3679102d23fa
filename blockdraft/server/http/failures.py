"""Errors in OpenAI's shape. No traceback, path or text of a bug leaves the server."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from blockdraft.engine.streams import EngineStopped
from blockdraft.errors import BlockdraftError, CapacityError, RequestError
from blockdraft.server.http.no_such_path import no_such_path
from blockdraft.server.http.replies import INVALID, error_response, not_ready_response

RETRY_AFTER_S = 1  # arbitrary: the queue moves once per step
_HTTP_MESSAGES = {
    415: "the body must be JSON: send the header 'Content-Type: application/json'.",
}


class NotReady(Exception):
    """The engine is still starting, or on its way out."""

    def __init__(self, state: str) -> None:
        super().__init__(state)
        self.state = state


def on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = error.headers or {}
    text = _HTTP_MESSAGES.get(error.status_code, error.detail)
    if error.status_code == 404:
        text = no_such_path(request.url.path)
    elif error.status_code == 405:
        text = f"this path does not take {request.method}: use {headers.get('Allow', 'another method')}."
    response = error_response(error.status_code, text, INVALID)
    response.headers.update(headers)
    return response


def on_user_error(request: Request, error: Exception) -> Response:
    message = str(error)
    if isinstance(error, CapacityError):
        return error_response(
            429, message, "rate_limit_error", code="queue_full", retry_after_s=RETRY_AFTER_S
        )
    if isinstance(error, RequestError):
        status = 404 if error.code == "model_not_found" else 400
        return error_response(status, message, INVALID, param=error.field, code=error.code)
    return error_response(500, message)


def on_stop(request: Request, error: Exception) -> Response:
    return error_response(503, str(error))


def on_not_ready(request: Request, error: Exception) -> Response:
    assert isinstance(error, NotReady)
    return not_ready_response(error.state)


def on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises the error again behind this answer, so that the server's log has the traceback."""
    return error_response(500, "internal error: see the server's log.")


HANDLERS = {
    HTTPException: on_http,
    BlockdraftError: on_user_error,
    EngineStopped: on_stop,
    NotReady: on_not_ready,
    Exception: on_bug,
}
