"""What every answer in OpenAI's wire format is made of: errors and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping

from blockdraft.server.shapes import Error

DONE = "data: [DONE]\n\n"  # the last event of a stream


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> Error:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(data: Mapping[str, object]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
