"""The shapes of messages in chat requests: what /openapi.json says of them. Other code reads the messages."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import PlainValidator
from typing_extensions import TypedDict

from blockdraft.server.api.fields import an_object


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
