"""Reads a message's content, a string or a list of parts, as one text."""

from __future__ import annotations

from collections.abc import Mapping

from blockdraft.errors import RequestError

MAY_BE_NULL = ("assistant", "tool")  # an answer of only calls or thoughts; a tool that returns nothing
_KINDS = ((bool, "true or false"), (int | float, "a number"), (str, "a string"), (list, "a list"))


def content_text(message: Mapping[str, object]) -> str:
    """Return the text of a message; join parts by newlines, as vLLM does. RequestError if one is not text."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("role") in MAY_BE_NULL:
        return ""
    if not isinstance(content, list):
        raise RequestError(
            f"a message's content is {json_kind(content)}: send a string, or a list of "
            '{"type": "text", "text": "..."} parts.',
            "messages",
        )
    return "\n".join(map(_part_text, content))


def _part_text(part: object) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(
            f'a part of a message is {json_kind(part)}: send {{"type": "text", "text": "..."}}.', "messages"
        )
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        named = f"'{kind[:64]}'" if isinstance(kind, str) else json_kind(kind)
        raise RequestError(
            f"a message has a part of type {named}, but this server reads text only, even if the "
            'model could read more: send {"type": "text", "text": "..."} parts.',
            "messages",
        )
    if not isinstance(text, str):
        raise RequestError(f"a text part holds {json_kind(text)}: its 'text' must be a string.", "messages")
    return text


def json_kind(value: object) -> str:
    """Return JSON's name for the type of a value, for error messages."""
    if value is None:
        return "null"
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "an object")
