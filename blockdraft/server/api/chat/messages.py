"""Messages of chat requests: their schemas for /openapi.json, their checks, and their form for templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Annotated, Any, Literal, NotRequired

from pydantic import PlainValidator
from typing_extensions import TypedDict

from blockdraft.errors import RequestError
from blockdraft.server.api.fields import an_object
from blockdraft.server.http.body import is_too_deep
from blockdraft.text.content import content_text, json_kind
from blockdraft.tool_calls.checking import read_json


class TextPartParam(TypedDict):
    """A text."""

    type: Literal["text"]
    text: str


class RefusalPartParam(TypedDict):
    """A refusal of the model."""

    type: Literal["refusal"]
    refusal: str


class CalledParam(TypedDict):
    """A function that was called; its arguments are JSON, as text or as an object."""

    name: str
    arguments: NotRequired[str | dict[str, object] | None]


class ToolCallParam(TypedDict):
    """One call."""

    id: str
    type: NotRequired[Literal["function"]]
    function: CalledParam


class SaidParam(TypedDict):
    """A message of the system, a developer or the user."""

    role: Literal["system", "user", "developer", "function", "ipython"]
    content: str | list[TextPartParam]
    tool_calls: NotRequired[list[ToolCallParam] | None]


class AnswerParam(TypedDict):
    """A message of the model: text, thoughts, calls, or nothing."""

    role: Literal["assistant"]
    content: NotRequired[str | list[TextPartParam | RefusalPartParam] | None]
    tool_calls: NotRequired[list[ToolCallParam] | None]


class ResultParam(TypedDict):
    """The result of a call of an earlier message."""

    role: Literal["tool"]
    tool_call_id: str
    content: NotRequired[str | list[TextPartParam] | None]
    tool_calls: NotRequired[list[ToolCallParam] | None]


MessageParam = SaidParam | AnswerParam | ResultParam


Message = Annotated[dict[str, object], PlainValidator(an_object, json_schema_input_type=MessageParam)]


_Given = Mapping[str, object]


def check_messages(messages: Items[_Given]) -> None:
    """Raise RequestError for malformed calls, and for results without a call."""
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
        _check_calls(message, number)
        called.update(str(call["id"]) for call in calls_of(message))


def _check_calls(message: _Given, number: int) -> None:
    calls = message.get("tool_calls")
    if not isinstance(calls, list | None):
        raise RequestError(f"messages[{number}].tool_calls is {json_kind(calls)}, not a list.", "messages")
    for call in calls or ():
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


def calls_of(message: _Given) -> Iterator[dict[str, Any]]:
    """Yield the tool calls of a message that has been checked."""
    calls = message.get("tool_calls") or ()
    assert isinstance(calls, list | tuple)
    yield from calls


def for_template(messages: Items[_Given], *, has_developer: bool) -> list[dict[str, object]]:
    """Return messages as templates read them.

    A content becomes a text, and arguments become an object. A result gets the name of its function.
    Thoughts that a client sends back get the names that templates use. The role "developer" becomes "system"
    if the template does not know it.
    """
    names: dict[str, str] = {}
    shaped = []
    for message in messages:
        said = _as_said(message) if message.get("role") == "assistant" else message
        new = {**said, "content": content_text(said)}
        if calls := [_with_object(call, names) for call in calls_of(message)]:
            new["tool_calls"] = calls
        else:
            new.pop("tool_calls", None)
        if new.get("role") == "tool" and (name := names.get(str(new.get("tool_call_id")))) is not None:
            new.setdefault("name", name)
        if new.get("role") == "developer" and not has_developer:
            new["role"] = "system"
        shaped.append(new)
    return shaped


def _as_said(message: _Given) -> dict[str, object]:
    """Return a message of the model with its thoughts under all names and a refusal as text."""
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


def _with_object(call: dict[str, Any], names: dict[str, str]) -> dict[str, object]:
    function = call["function"]
    names[call["id"]] = function["name"]
    shown = {**function, "arguments": _object(function.get("arguments"))}
    return {**call, "type": "function", "function": shown}


def _object(arguments: object) -> object:
    """Return arguments as an object. Invalid JSON, which a model may write, is kept as text in an object."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        found = read_json(arguments) if arguments.strip() else {}
    except ValueError:
        found = None
    return found if isinstance(found, dict) and not is_too_deep(found) else {"arguments": arguments}
