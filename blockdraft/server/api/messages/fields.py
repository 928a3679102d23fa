"""The bodies of /v1/messages and /v1/messages/count_tokens, and their translation to a chat request."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator
from typing_extensions import TypedDict

from blockdraft.engine.request import MAX_STOPS
from blockdraft.errors import RequestError
from blockdraft.server.api.chat.fields import ChatRequest
from blockdraft.server.api.chat.messages import TextPartParam
from blockdraft.server.api.fields import (
    MAX_INT,
    MAX_MESSAGES,
    AnyBody,
    StopString,
    StrictFields,
    Unsupported,
    an_object,
    empty,
    needs,
    validate,
    whole,
)
from blockdraft.server.api.json_schemas import Schema
from blockdraft.server.api.tool_fields import MAX_TOOLS, ToolName
from blockdraft.server.api.translation import Conversation, function_tool
from blockdraft.server.http.body import Nested, all_of
from blockdraft.server.http.replies import json_of

Name = Annotated[str, Field(min_length=1)]


class ThinkingParam(TypedDict):
    """Thoughts of the model."""

    type: Literal["thinking"]
    thinking: str


class RedactedParam(TypedDict):
    """Thoughts that another server encrypted; they are ignored."""

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
    """Instructions, before all turns or as a reminder between them."""

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


# Claude Code puts billing data before its instructions. No model needs it, and prompts with different data
# would not share a cached prefix.
_BILLING = "x-anthropic-billing-header:"
_ONLY_TEXT = "only text, tool_use, tool_result and thinking"


def system_text(system: str | list[dict[str, object]] | None) -> str | None:
    if system is None or isinstance(system, str):
        return system
    texts = [_plain_text(block) for block in all_of(system, "system")]
    return "\n\n".join(text for text in texts if not text.startswith(_BILLING))


def conversation_of(messages: list[dict[str, object]]) -> Conversation:
    """Return the conversation. Marks for caching are ignored, as the server caches every prefix."""
    conversation = Conversation()
    for turn in all_of(messages, "messages"):
        role = turn.text("role")
        if role == "user":
            _add_user(conversation, _blocks(turn))
        elif role == "assistant":
            _add_assistant(conversation, _blocks(turn))
        elif role == "system":
            text = _joined(_blocks(turn))
            if conversation.messages:  # many templates accept a system message only in the first place
                conversation.add_user(f"<system-reminder>\n{text}\n</system-reminder>")
            else:
                conversation.say("system", text)
        else:
            raise turn.unknown("role", "user, assistant or system")
    return conversation


def _blocks(turn: Nested) -> list[Nested]:
    if "content" not in turn and turn.get("role") == "assistant":
        return []
    content = turn.text_or_all("content")
    if isinstance(content, str):
        return [Nested({"type": "text", "text": content}, f"{turn.where}.content")]
    return content


def _add_user(conversation: Conversation, blocks: list[Nested]) -> None:
    """Add a user's turn. Results of tools come first, as they answer the turn before."""
    rest = []
    for block in blocks:
        if block.get("type") == "tool_result":
            if not conversation.has_called(block.name("tool_use_id")):
                raise block.wrong("tool_use_id", "no earlier turn has made this call")
            content = block.text_or_all("content") if "content" in block else ""
            text = content if isinstance(content, str) else _joined(content)
            conversation.result(block.name("tool_use_id"), text)
        else:
            rest.append(block)
    if rest or not blocks:
        conversation.add_user(_joined(rest))


def _add_assistant(conversation: Conversation, blocks: list[Nested]) -> None:
    texts: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(block.text("text"))
            continue
        if texts:
            conversation.answer("".join(texts))
            texts = []
        if kind == "thinking":
            conversation.think(block.text("thinking"))
        elif kind == "tool_use":
            conversation.call(block.name("id"), block.name("name"), json_of(block.object("input")))
        elif kind != "redacted_thinking":  # the model cannot read it
            raise block.unknown("type", _ONLY_TEXT)
    if texts or not blocks:
        conversation.answer("".join(texts))


def _joined(blocks: list[Nested]) -> str:
    return "\n".join(_plain_text(block) for block in blocks)


def _plain_text(block: Nested) -> str:
    if block.get("type") != "text":
        raise block.unknown("type", _ONLY_TEXT)
    return block.text("text")


Turns = Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
StopSequences = Annotated[list[StopString], Field(max_length=MAX_STOPS)]

# For each field of the chat request, the field of the body that it was made from.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "thinking_token_budget": "thinking",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
}


class ThinkingSettings(StrictFields):
    """Whether the model thinks before its answer, and with how many tokens at most."""

    model_config = ConfigDict(json_schema_extra=needs("type", "enabled", "budget_tokens"))

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_INT), BeforeValidator(whole)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictFields):
    """Structured output: the JSON schema of the answer."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputSettings(StrictFields):
    """The effort of the thoughts, and the structured output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ToolChoice(StrictFields):
    """The tools that the model may or must call."""

    model_config = ConfigDict(json_schema_extra=needs("type", "tool", "name"))

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(min_length=1)] | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(AnyBody):
    """The body of POST /v1/messages/count_tokens."""

    UNSUPPORTED: ClassVar[Unsupported] = {"container": (), "mcp_servers": ([],)}
    HARMLESS = AnyBody.HARMLESS | {"cache_control", "diagnostics", "inference_geo", "speed"}

    messages: Turns
    system: str | list[Text] | None = None
    tools: Tools = empty(list)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSettings | None = None
    output_config: OutputSettings = OutputSettings()

    def chat(self) -> ChatRequest:
        """Return the chat request. A RequestError names a field of the chat request."""
        return validate(
            ChatRequest, {name: value for name, value in self._chat().items() if value is not None}
        )

    def _chat(self) -> dict[str, object]:
        conversation = conversation_of(self.messages)
        last = conversation.messages[-1] if conversation.messages else {"role": None}
        is_continued = last["role"] == "assistant" and "tool_calls" not in last
        return {
            "messages": conversation.rendered(system_text(self.system)),
            "continue_final_message": is_continued or None,
            "add_generation_prompt": False if is_continued else None,
            **self._tools(),
            **self._thinking(),
            "response_format": self._format,
        }

    def _tools(self) -> dict[str, object]:
        tools = [_function(tool) for tool in all_of(self.tools, "tools")]
        choice = self.tool_choice
        if not tools and choice is None:
            return {}
        if choice is None:
            return {"tools": tools}
        if choice.type == "tool" and not choice.name:
            raise RequestError("'tool_choice.name': name the tool that must be called.", "tool_choice")
        asked = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
        return {
            "tools": tools or None,
            "tool_choice": asked or {"type": "function", "function": {"name": choice.name}},
            "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
        }

    def _thinking(self) -> dict[str, object]:
        """Return the fields about thoughts. With "adaptive" the model decides whether to think."""
        asked = self.thinking
        if asked is None:
            return {"reasoning_effort": self._effort}
        if asked.type == "enabled" and asked.budget_tokens is None:
            raise RequestError("'thinking.budget_tokens': give the number of tokens to think.", "thinking")
        if asked.type == "disabled":
            return {"reasoning_effort": "none"}
        return {
            "thinking_token_budget": asked.budget_tokens,
            "chat_template_kwargs": {"enable_thinking": True},
            "reasoning_effort": self._effort,
        }

    @property
    def _effort(self) -> str | None:
        effort = self.output_config.effort
        return "xhigh" if effort == "max" else effort

    @property
    def _format(self) -> dict[str, object] | None:
        asked = self.output_config.format
        if asked is None:
            return None
        return {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": asked.schema_, "strict": True},
        }


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=MAX_INT)
    stop_sequences: StopSequences = empty(list)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT)
    stream: bool = False

    def check(self) -> None:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise RequestError("'max_tokens' must be greater than 'thinking.budget_tokens'.", "max_tokens")

    def _chat(self) -> dict[str, object]:
        return {
            **super()._chat(),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
        }


def _function(tool: Nested) -> dict[str, object]:
    """Return a tool in the shape of chat completions."""
    if tool.get("type") not in (None, "custom"):
        raise tool.unknown("type", "send custom tools only, each with a name and an input_schema")
    return function_tool(tool, tool.name("name"), tool.object("input_schema"))
