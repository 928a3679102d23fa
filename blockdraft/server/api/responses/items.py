"""Turns items of the Responses API into messages of a chat."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping

from blockdraft.server.api.translation import Conversation
from blockdraft.server.http.body import Nested, all_of

Item = Mapping[str, object]
FindItem = Callable[[str], Item | None]

_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_ROLES = frozenset({"user", "system", "developer", "assistant"})
_SEALED = "blockdraft:"  # precedes thoughts that a client keeps for this server


def full_name(namespace: str, name: str) -> str:
    """Return a function's name for the model, which knows no namespaces."""
    return f"{namespace}__{name}" if namespace else name


def add_input(conversation: Conversation, given: str | list[dict[str, object]], find: FindItem) -> None:
    """Add a request's input; `find` returns the items that it refers to by id."""
    if isinstance(given, str):
        conversation.say("user", given)
        return
    for item in all_of(given, "input"):
        add_item(conversation, item, find)


def add_item(conversation: Conversation, item: Nested, find: FindItem) -> None:
    kind = item.get("type")
    if kind == "message" or (kind is None and "role" in item):
        _add_message(conversation, item)
    elif kind == "function_call":
        name = full_name(item.text("namespace", default=""), item.name("name"))
        conversation.call(item.name("call_id"), name, item.text("arguments"))
    elif kind == "function_call_output":
        if not conversation.has_called(item.name("call_id")):
            raise item.wrong("call_id", "no earlier item has made this call")
        conversation.result(item.name("call_id"), _text(item, "output"))
    elif kind == "reasoning":
        thoughts = _thoughts(item)
        if thoughts:
            conversation.think(thoughts)
    elif kind == "item_reference" or (kind is None and "id" in item):
        found = find(item.name("id"))
        if found is None:
            raise item.wrong("id", "there is no such item: send the item itself")
        add_item(conversation, Nested(dict(found), item.where), find)
    else:
        raise item.unknown("type", "messages, function calls, their outputs and reasoning")


def _add_message(conversation: Conversation, item: Nested) -> None:
    role = item.text("role")
    if role not in _ROLES:
        raise item.unknown("role", "user, assistant, system or developer")
    if role == "assistant":
        conversation.answer(_text(item, "content") if "content" in item else "")
    else:
        conversation.say(role, _text(item, "content"))


def _text(item: Nested, name: str) -> str:
    """Return a string, or the text of all parts."""
    given = item.text_or_all(name)
    return given if isinstance(given, str) else "\n".join(map(_part_text, given))


def _part_text(part: Nested) -> str:
    if part.get("type") == "refusal":
        return part.text("refusal")
    if part.get("type") not in _TEXT_PARTS:
        raise part.unknown("type", "this model reads text only")
    return part.text("text")


def _thoughts(item: Nested) -> str:
    """Return the thoughts, their summary, or thoughts that this server sealed; "" for any others."""
    texts = [
        "\n".join(part.text("text") for part in item.all(name)) if name in item else ""
        for name in ("content", "summary")
    ]
    return next(filter(None, [*texts, unsealed(item.text("encrypted_content", default=""))]), "")


def sealed(thoughts: str) -> str:
    """Return encoded thoughts for a client to send back. They need no encryption, as they are its own."""
    return _SEALED + base64.b64encode(thoughts.encode()).decode()


def unsealed(text: str) -> str:
    if not text.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
