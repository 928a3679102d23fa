"""The body of /v1/responses, and its translation to a chat request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import ConfigDict, Field, PlainValidator
from pydantic.config import JsonDict
from typing_extensions import TypedDict

from blockdraft.errors import RequestError
from blockdraft.server.api.chat.fields import ChatRequest
from blockdraft.server.api.chat.messages import RefusalPartParam
from blockdraft.server.api.fields import (
    MAX_INT,
    MAX_MESSAGES,
    AnyBody,
    SpeculativeField,
    StrictFields,
    TemplateKwargs,
    Unsupported,
    an_object,
    empty,
    validate,
)
from blockdraft.server.api.json_schemas import Schema
from blockdraft.server.api.responses.items import full_name
from blockdraft.server.api.tool_fields import MAX_TOOLS, ToolName
from blockdraft.server.api.translation import Conversation, function_tool
from blockdraft.server.http.body import Nested, all_of

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
    """Functions of one namespace. The model knows each by a name that includes the namespace."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,62}$")]
    tools: list[FunctionToolParam]


class NamedParam(TypedDict):
    """The name of a function."""

    name: Name


class FunctionChoiceParam(TypedDict):
    """A function that must be called."""

    type: Literal["function"]
    name: Name


class AllowedChoiceParam(TypedDict):
    """The only tools that may be called."""

    type: Literal["allowed_tools"]
    mode: NotRequired[Literal["auto", "required"] | None]
    tools: Annotated[list[NamedParam], Field(min_length=1, max_length=MAX_TOOLS)]


class PlainFormatParam(TypedDict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormatParam(TypedDict):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    name: Name
    schema: Schema
    strict: NotRequired[bool | None]


Item = Annotated[dict[str, object], PlainValidator(an_object, json_schema_input_type=ItemParam)]
Tool = Annotated[
    dict[str, object], PlainValidator(an_object, json_schema_input_type=FunctionToolParam | NamespaceParam)
]
Choice = Annotated[
    dict[str, object],
    PlainValidator(an_object, json_schema_input_type=FunctionChoiceParam | AllowedChoiceParam),
]
Format = Annotated[
    dict[str, object], PlainValidator(an_object, json_schema_input_type=PlainFormatParam | SchemaFormatParam)
]


MAX_ID = 128  # characters of an id
MAX_METADATA = 16  # as OpenAI
_TEXT: JsonDict = {"type": "string"}

Function = dict[str, object]
Objects = list[dict[str, object]]
Input = str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["auto", "none", "required"] | Choice
Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA)]
Includes = Annotated[list[str], Field(max_length=64)]

_SCHEMA_NAMES = ("name", "description", "schema", "strict")  # of `text.format`, in addition to its type

# For each field of the chat request, the field of the body that it was made from.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "verbosity": "text",
    "reasoning_effort": "reasoning",
}


class TextSettings(StrictFields):
    """The structured output of the text, and how verbose it is."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @property
    def known_format(self) -> dict[str, object]:
        """Return the requested format without unknown fields, which are neither shown nor stored."""
        given = self.format or {}
        names = _SCHEMA_NAMES if given.get("type") == "json_schema" else ()
        return {"type": "text"} | {name: given[name] for name in ("type", *names) if name in given}


class ReasoningSettings(StrictFields):
    """The effort of the thoughts. This server never summarizes them."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class InputTokensRequest(AnyBody):
    """The body of POST /v1/responses/input_tokens: the fields that make the prompt."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "top_logprobs": (0,),
    }
    HARMLESS = AnyBody.HARMLESS | {
        *("client_metadata", "max_tool_calls", "prompt_cache_options", "stream_options"),
        *("stream", "max_output_tokens", "temperature", "top_p", "include", "seed", "speculative"),
    }

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["input"], "properties": {"input": {"not": {"type": "null"}}}},
                {
                    "required": ["instructions"],
                    "properties": {"instructions": {"type": "string", "minLength": 1}},
                },
                {"required": ["previous_response_id"], "properties": {"previous_response_id": _TEXT}},
            ]
        }
    )

    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=MAX_ID)
    tools: Tools = empty(list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextSettings = TextSettings()
    reasoning: ReasoningSettings = ReasoningSettings()
    truncation: Literal["auto", "disabled"] = "disabled"  # with either, a prompt that is too long is refused
    chat_template_kwargs: TemplateKwargs | None = None

    def check(self) -> None:
        if self.input is None and not self.instructions and self.previous_response_id is None:
            raise RequestError("send 'input', or 'instructions', or a 'previous_response_id'.", "input")

    def chat(self, conversation: Conversation) -> ChatRequest:
        """Return the chat request. A RequestError names a field of the chat request."""
        given = self._chat(conversation)
        return validate(ChatRequest, {name: value for name, value in given.items() if value is not None})

    def _chat(self, conversation: Conversation) -> dict[str, object]:
        effort = self.reasoning.effort
        return {
            "messages": conversation.rendered(self.instructions),
            **self._tools(),
            "response_format": _format(self.text),
            "verbosity": self.text.verbosity,
            "reasoning_effort": "xhigh" if effort == "max" else effort,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    def _tools(self) -> dict[str, object]:
        tools = [_function(tool, namespace) for tool, namespace in _functions(all_of(self.tools, "tools"))]
        choice: str | Function | None = None if self.tool_choice == "auto" else self.tool_choice
        if isinstance(choice, dict):
            choice = _chosen(Nested(choice, "tool_choice"))
        is_single = None if self.parallel_tool_calls else False
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": is_single}


class ResponsesRequest(InputTokensRequest):
    """The body of POST /v1/responses."""

    input: Input
    store: bool = True
    stream: bool = False
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    include: Includes = empty(list)
    metadata: Metadata = empty(dict)
    user: str | None = None
    # Our own fields, as in chat completions.
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    speculative: SpeculativeField | None = None

    def check(self) -> None:
        check_include(self.include)

    @property
    def seals_thoughts(self) -> bool:
        return "reasoning.encrypted_content" in self.include

    def _chat(self, conversation: Conversation) -> dict[str, object]:
        return {
            **super()._chat(conversation),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "seed": self.seed,
            "speculative": self.speculative,
        }


def check_include(names: Iterable[str]) -> None:
    """Raise RequestError for a name that this server cannot include in answers."""
    if "message.output_text.logprobs" in names:
        text = "'include': 'message.output_text.logprobs' is not supported: ask chat completions for it."
        raise RequestError(text, "include")


def namespaces_of(tools: Objects) -> dict[str, tuple[str, str]]:
    """Return the namespace and name of each function that has a namespace, by full name."""
    found = _functions(all_of(tools, "tools"))
    return {full_name(space, tool.text("name")): (space, tool.text("name")) for tool, space in found if space}


def _functions(tools: list[Nested]) -> Iterator[tuple[Nested, str]]:
    """Yield each function with its namespace; "" if it has none."""
    for tool in tools:
        if tool.get("type") == "namespace":
            yield from ((inner, tool.name("name")) for inner in tool.all("tools"))
        else:
            yield tool, ""


def _function(tool: Nested, namespace: str) -> Function:
    """Return a tool in the shape of chat completions."""
    if tool.get("type") != "function":
        raise tool.unknown("type", "send functions only, as this server has no tools of its own")
    name = full_name(namespace, tool.name("name"))
    return function_tool(tool, name, tool.object("parameters") if "parameters" in tool else None)


def _chosen(choice: Nested) -> Function:
    """Return the choice as chat completions' `tool_choice`."""
    kind = choice.get("type")
    if kind == "function":
        return _named(choice)
    if kind != "allowed_tools":
        raise choice.unknown("type", "a function, or allowed_tools")
    allowed = {"mode": choice.text("mode", default="auto"), "tools": [*map(_named, choice.all("tools"))]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _named(tool: Nested) -> Function:
    return {"type": "function", "function": {"name": tool.name("name")}}


def _format(text: TextSettings) -> dict[str, object] | None:
    """Return the format as chat completions' `response_format`; None for plain text."""
    if text.format is None:
        return None
    asked = Nested(text.format, "text.format")
    kind = asked.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise asked.unknown("type", "text, json_object or json_schema")
    schema: dict[str, object] = {"name": asked.name("name"), "schema": asked.object("schema")}
    if "strict" in asked:
        schema["strict"] = asked.flag("strict", default=False)
    return {"type": "json_schema", "json_schema": schema}
