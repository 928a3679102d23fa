"""The shapes of objects in requests of the Messages API: what /openapi.json says of them."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field, PlainValidator
from typing_extensions import TypedDict

from blockdraft.server.api.chat.shapes import TextPartParam
from blockdraft.server.api.fields import an_object
from blockdraft.server.api.json_schemas import Schema
from blockdraft.server.api.tool_fields import ToolName

Name = Annotated[str, Field(min_length=1)]


class ThinkingParam(TypedDict):
    """Thoughts of the model."""

    type: Literal["thinking"]
    thinking: str


class RedactedParam(TypedDict):
    """Thoughts that another server encrypted: they are left out."""

    type: Literal["redacted_thinking"]


class ToolUseParam(TypedDict):
    """A tool that the model has called."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, object]


class ToolResultParam(TypedDict):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: NotRequired[str | list[TextPartParam] | None]


class UserTurnParam(TypedDict):
    """A turn of the user, with results of tools."""

    role: Literal["user"]
    content: str | list[TextPartParam | ToolResultParam]


class AnswerTurnParam(TypedDict):
    """A turn of the model."""

    role: Literal["assistant"]
    content: NotRequired[str | list[TextPartParam | ThinkingParam | RedactedParam | ToolUseParam] | None]


class SystemTurnParam(TypedDict):
    """Instructions: ahead of all turns, or as a reminder among them."""

    role: Literal["system"]
    content: str | list[TextPartParam]


class CustomToolParam(TypedDict):
    """A tool that the model may call."""

    type: NotRequired[Literal["custom"] | None]
    name: ToolName
    description: NotRequired[str | None]
    input_schema: Schema
    strict: NotRequired[bool | None]


Turn = Annotated[
    dict[str, object],
    PlainValidator(an_object, json_schema_input_type=UserTurnParam | AnswerTurnParam | SystemTurnParam),
]
Text = Annotated[dict[str, object], PlainValidator(an_object, json_schema_input_type=TextPartParam)]
Tool = Annotated[dict[str, object], PlainValidator(an_object, json_schema_input_type=CustomToolParam)]
