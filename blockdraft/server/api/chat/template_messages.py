"""Checks tool calls and their results in a conversation, and shapes messages for chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from blockdraft.errors import RequestError
from blockdraft.server.http.body import is_too_deep
from blockdraft.text.content import content_text, json_kind
from blockdraft.tool_calls.checking import read_json

Message = Mapping[str, object]


def check_messages(messages: Items[Message]) -> None:
    """Raises RequestError for malformed calls, and for results without a call."""
    called: set[str] = set()
    for number, message in enumerate(messages):
        if message.get("role") == "tool":
            given = message.get("tool_call_id")
            if not isinstance(given, str) or given not in called:
                raise RequestError(
                    f"messages[{number}] is the result of a call that no earlier message has made: its "
                    "'tool_call_id' must be the 'id' of one of an assistant message's 'tool_calls'.",
                    "messages",
                )
        called.update(str(call["id"]) for call in calls_of(message, number))


def calls_of(message: Message, number: int = 0) -> list[dict[str, object]]:
    """The calls of a message. Raises RequestError if they do not have OpenAI's shape."""
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise RequestError(f"messages[{number}].tool_calls is {json_kind(calls)}, not a list.", "messages")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(call.get("id"), str):
            raise RequestError(
                f"messages[{number}].tool_calls: a call is "
                '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}.',
                "messages",
            )
        is_known = call.get("type", "function") == "function" and isinstance(function.get("name"), str)
        if not is_known or not isinstance(function.get("arguments"), str | dict | None):
            raise RequestError(
                f"messages[{number}].tool_calls: a function has a 'name' and 'arguments', a JSON text.",
                "messages",
            )
    return calls


def for_template(messages: Items[Message], *, has_developer: bool) -> list[dict[str, object]]:
    """Messages as templates read them.

    Contents are texts. Arguments are objects, not texts. Results name their function. Thoughts that a client
    sends back go by the names that templates use. A developer is the system where the template knows no
    developer.
    """
    names: dict[str, str] = {}
    shaped = []
    for number, message in enumerate(messages):
        said = _as_said(message) if message.get("role") == "assistant" else message
        new = {**said, "content": content_text(said)}
        if calls := calls_of(message, number):
            new["tool_calls"] = [_with_object(call, names) for call in calls]
        else:
            new.pop("tool_calls", None)
        if new.get("role") == "tool" and (name := names.get(str(new.get("tool_call_id")))) is not None:
            new.setdefault("name", name)
        if new.get("role") == "developer" and not has_developer:
            new["role"] = "system"
        shaped.append(new)
    return shaped


def _as_said(message: Message) -> dict[str, object]:
    """A message of the model, with its thoughts under all names, and a refusal as text."""
    said = dict(message)
    thoughts = said.get("reasoning_content", said.get("reasoning"))
    if isinstance(thoughts, str) and thoughts:
        said |= {"reasoning_content": thoughts, "reasoning": thoughts, "thinking": thoughts}
    content, refusal = said.get("content"), said.get("refusal")
    if content is None and isinstance(refusal, str):
        said["content"] = refusal
    elif isinstance(content, list):
        said["content"] = [_as_text(part) for part in content]
    return said


def _as_text(part: object) -> object:
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


def _with_object(call: dict[str, object], names: dict[str, str]) -> dict[str, object]:
    function = call["function"]
    assert isinstance(function, dict)
    names[str(call["id"])] = str(function["name"])
    return {
        **call,
        "type": "function",
        "function": {**function, "arguments": _object(function.get("arguments"))},
    }


def _object(arguments: object) -> object:
    """Arguments as an object. Invalid JSON of a model is shown to it as it was, never refused."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        found = read_json(arguments) if arguments.strip() else {}
    except ValueError:
        found = None
    return found if isinstance(found, dict) and not is_too_deep(found) else {"arguments": arguments}
