"""The bodies of /v1/messages and /v1/messages/count_tokens, and the chat request that each one asks for."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from blockdraft.engine.request import MAX_STOPS
from blockdraft.errors import RequestError
from blockdraft.server.api.chat.fields import ChatRequest
from blockdraft.server.api.fields import (
    MAX_INT,
    MAX_MESSAGES,
    AnyBody,
    StopString,
    StrictFields,
    Unsupported,
    needs,
    validate,
    whole,
)
from blockdraft.server.api.messages.shapes import Text, Tool, Turn
from blockdraft.server.api.messages.turns import conversation_of, system_text
from blockdraft.server.api.tool_fields import MAX_TOOLS
from blockdraft.server.api.translation import function_tool
from blockdraft.server.http.body import Nested, all_of

Turns = Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
StopSequences = Annotated[list[StopString], Field(max_length=MAX_STOPS)]

# The field that each field of the chat request was made from.
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
    """Whether to think first, and for how many tokens at most."""

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
    """How much to think, and the structured output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ToolChoice(StrictFields):
    """Whether the model must call a tool, and which."""

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
    tools: Tools = Field(default=[])
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSettings | None = None
    output_config: OutputSettings = OutputSettings()

    def chat(self) -> ChatRequest:
        """The chat request. Raises RequestError with the name of one of its fields."""
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
        """Fields about thoughts. The template is told whether to think; "adaptive" leaves it to the model."""
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
    stop_sequences: StopSequences = Field(default=[])
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
    """A tool in the shape of chat completions."""
    if tool.get("type") not in (None, "custom"):
        raise tool.unknown("type", "send custom tools only, each with a name and an input_schema")
    return function_tool(tool, tool.name("name"), tool.object("input_schema"))
