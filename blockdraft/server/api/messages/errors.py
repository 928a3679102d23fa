"""Errors as Anthropic's clients know them: their shape, kinds and status codes."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

PATH = "/v1/messages"
VERSION_HEADER = "anthropic-version"  # its clients send it, whatever the path
OPENAI_PATHS = ("/v1/chat/", "/v1/completions", "/v1/responses")
OVERLOADED = 529  # Anthropic's own number

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class MessageErrorDetail(TypedDict):
    """What went wrong; the message names the field at fault."""

    type: str
    message: str


class MessageError(TypedDict):
    """Every error of the Messages API, whatever its status."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None


def is_messages_path(path: str) -> bool:
    return path == PATH or path.startswith(PATH + "/")


def is_anthropic(path: str, *, has_version: bool) -> bool:
    """Whether a client of Anthropic's asks: by the path, or by its header on all but OpenAI's own paths."""
    return is_messages_path(path) or (has_version and not path.startswith(OPENAI_PATHS))


def status_of(status: int, code: str | None) -> int:
    """Anthropic's number for a status of ours: too many requests at once are an overload."""
    return OVERLOADED if code == "too_many_connections" else status


def message_error(
    status: int, message: str, *, param: str | None = None, request_id: str | None = None
) -> MessageError:
    """`status` is Anthropic's. There is no place for a field at fault but the message."""
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    text = message if param is None or param in message else f"{param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": request_id}
