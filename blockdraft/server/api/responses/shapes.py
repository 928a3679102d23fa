"""The shapes of objects in requests of the Responses API: what /openapi.json says of them."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field, PlainValidator
from typing_extensions import TypedDict

from blockdraft.server.api.chat.shapes import RefusalPartParam
from blockdraft.server.api.fields import an_object
from blockdraft.server.api.json_schemas import Schema
from blockdraft.server.api.tool_fields import MAX_TOOLS, ToolName

Name = Annotated[str, Field(min_length=1)]


class TextParam(TypedDict):
    """A text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


Parts = list[TextParam | RefusalPartParam]


class SaidItemParam(TypedDict):
    """A message of the user, the system or a developer."""

    type: NotRequired[Literal["message"] | None]
    role: Literal["user", "system", "developer"]
    content: str | Parts


class AnswerItemParam(TypedDict):
    """A turn of the model."""

    type: NotRequired[Literal["message"] | None]
    role: Literal["assistant"]
    content: NotRequired[str | Parts | None]


class CallItemParam(TypedDict):
    """A function that the model has called."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    namespace: NotRequired[str | None]


class CallOutputParam(TypedDict):
    """The result of a function."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | Parts


class ThoughtParam(TypedDict):
    """One thought."""

    text: str


class ReasoningItemParam(TypedDict):
    """Thoughts of the model."""

    type: Literal["reasoning"]
    content: NotRequired[list[ThoughtParam] | None]
    summary: NotRequired[list[ThoughtParam] | None]
    encrypted_content: NotRequired[str | None]


class ReferenceParam(TypedDict):
    """An item of a stored response."""

    type: NotRequired[Literal["item_reference"] | None]
    id: Name
    role: NotRequired[None]


ItemParam = (
    SaidItemParam | AnswerItemParam | CallItemParam | CallOutputParam | ReasoningItemParam | ReferenceParam
)


class FunctionToolParam(TypedDict):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: NotRequired[str | None]
    parameters: NotRequired[Schema | None]
    strict: NotRequired[bool | None]


class NamespaceParam(TypedDict):
    """Functions of one namespace: to the model they are called by both names."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,62}$")]
    tools: list[FunctionToolParam]


class NamedParam(TypedDict):
    """A function by its name."""

    name: Name


class FunctionChoiceParam(TypedDict):
    """This function must be called."""

    type: Literal["function"]
    name: Name


class AllowedChoiceParam(TypedDict):
    """Only these may be called."""

    type: Literal["allowed_tools"]
    mode: NotRequired[Literal["auto", "required"] | None]
    tools: Annotated[list[NamedParam], Field(min_length=1, max_length=MAX_TOOLS)]


class PlainFormatParam(TypedDict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormatParam(TypedDict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: Name
    schema: Schema
    strict: NotRequired[bool | None]


Item = Annotated[dict[str, object], PlainValidator(an_object, json_schema_input_type=ItemParam)]
Tool = Annotated[
    dict[str, object],
    PlainValidator(an_object, json_schema_input_type=FunctionToolParam | NamespaceParam),
]
Choice = Annotated[
    dict[str, object],
    PlainValidator(an_object, json_schema_input_type=FunctionChoiceParam | AllowedChoiceParam),
]
Format = Annotated[
    dict[str, object],
    PlainValidator(an_object, json_schema_input_type=PlainFormatParam | SchemaFormatParam),
]
