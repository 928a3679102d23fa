"""The bodies of /v1/chat/completions, /v1/completions, /tokenize and /detokenize.

Defaults are OpenAI's; SamplingParams checks the ranges.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from blockdraft.engine.request import MAX_BIASES, MAX_CHOICES, MAX_LOGPROBS, MAX_STOPS, SamplingParams
from blockdraft.errors import RequestError
from blockdraft.grammar.structured_output import Thinking
from blockdraft.server.api.chat.messages import Message, check_messages
from blockdraft.server.api.fields import (
    MAX_INT,
    MAX_MESSAGES,
    AnyBody,
    Speculative,
    SpeculativeField,
    StopString,
    StrictFields,
    TemplateKwargs,
    TokenId,
    Unsupported,
    empty,
    whole_fields,
)
from blockdraft.server.api.structured_output_fields import StructuredOutputFields
from blockdraft.server.api.tool_fields import ToolFields, Tools
from blockdraft.server.http.body import shown

# Arbitrary limits; the body's size bounds everything once more.
MAX_PROMPTS = 128
MAX_PROMPT_TOKENS = 1 << 20
MAX_SALT = 1024  # characters of a cache salt
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for /v1/completions
_TOKEN_ID = re.compile("(0|[1-9][0-9]{0,9})")  # one spelling per id, so that none occurs twice
_SAMPLING_NAMES = frozenset(item.name for item in fields(SamplingParams))

Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]

# ---- stop strings and biases

StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOPS)]
Stops = Annotated[
    StopStrings,
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=StopString | StopStrings,
    ),
    # Some clients send "" if their user left the field empty.
    AfterValidator(lambda stops: [stop for stop in stops if stop]),
]


def _token_biases(value: object) -> object:
    """Return keys as token ids; their values are checked later."""
    if not isinstance(value, dict):
        return value
    for key in value:
        if not (_TOKEN_ID.fullmatch(key) and int(key) <= MAX_INT):
            raise PydanticCustomError("token", "the key {key} is not a token id", {"key": shown(key)})
    return {int(key): bias for key, bias in value.items()}


Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[int, Bias],
    Field(max_length=MAX_BIASES),
    BeforeValidator(
        _token_biases,
        json_schema_input_type=Annotated[
            dict[str, float],
            WithJsonSchema(
                {
                    "type": "object",
                    "propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": MAX_BIASES,
                }
            ),
        ],
    ),
]
# ---- prompts

TokenList = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
TextList = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
TokenLists = Annotated[list[TokenList], Field(min_length=1, max_length=MAX_PROMPTS)]


def _prompts(value: object) -> list[str | list[int]]:
    """Return one prompt or many, as text or as token ids: always a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "send a string, token ids, or a list of one or the other")
    if all(isinstance(item, str) for item in value):
        _at_most(value, MAX_PROMPTS, "prompts")
        return list(value)
    if all(isinstance(item, list) and item for item in value):
        _at_most(value, MAX_PROMPTS, "prompts")
        return [_token_ids(item) for item in value]
    return [_token_ids(value)]


def _token_ids(value: list[object]) -> list[int]:
    _at_most(value, MAX_PROMPT_TOKENS, "tokens")
    for token in value:
        # A truth value is an int to Python.
        if type(token) is not int or not 0 <= token <= MAX_INT:
            raise PydanticCustomError("prompt", "a prompt is text, or a list of token ids of 0 or more")
    return value  # type: ignore[return-value]


def _at_most(value: list[object], limit: int, what: str) -> None:
    if len(value) > limit:
        raise PydanticCustomError(
            "size", "{count} {what}, at most {limit}", {"count": len(value), "what": what, "limit": limit}
        )


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts, json_schema_input_type=str | TextList | TokenList | TokenLists),
]

# ---- bodies


class StreamOptions(StrictFields):
    """Options of a stream: usage in it."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Generation(StructuredOutputFields, AnyBody):
    """The fields of chat and plain completions alike."""

    # These five are the model's own where a request does not say.
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Biases = empty(dict)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Stops = empty(list)
    stop_token_ids: list[TokenId] = empty(list, max_length=MAX_STOPS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, le=MAX_INT)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT)
    priority: int = Field(default=0, ge=-MAX_INT, le=MAX_INT)  # lower numbers go first
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    speculative: SpeculativeField = Speculative()

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_running_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' needs 'stream': true.", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "'prompt_logprobs' cannot be streamed: set 'stream' to false.", "prompt_logprobs"
            )
        _ = self.structured_output  # raises if there are two

    def _sampling(
        self, defaults: Mapping[str, float], *, max_tokens: int | None, **last: object
    ) -> SamplingParams:
        """Return the sampling parameters; `last` are the ones that depend on the kind of request."""
        given: dict[str, Any] = dict(defaults)
        for name in self.model_fields_set & _SAMPLING_NAMES:
            if (value := getattr(self, name)) is not None:
                given[name] = value
        given |= last
        given["max_tokens"], given["width"] = max_tokens, self.speculative.width
        given["structured_outputs"] = self.structured_output
        return SamplingParams(**given)


class ChatRequest(ToolFields, _Generation):
    """The body of POST /v1/chat/completions. Other APIs translate to it."""

    UNSUPPORTED: ClassVar[Unsupported] = {**AnyBody.UNSUPPORTED, "echo": (False,), "suffix": ("",)}

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    split_special_tokens: bool = True  # transformers' name: markup in a message's text is text
    chat_template_kwargs: TemplateKwargs = empty(dict)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)  # the old name; the next one wins
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0, le=MAX_INT)
    verbosity: Literal["low", "medium", "high"] | None = None

    @property
    def template_kwargs(self) -> Mapping[str, object]:
        """Return variables for the chat template. Some templates can switch thoughts on and off."""
        wishes: dict[str, object] = {}
        if self.verbosity is not None:
            wishes["verbosity"] = self.verbosity
        if self.reasoning_effort is not None:
            wishes["enable_thinking"] = self.reasoning_effort != "none"
        if self.reasoning_effort not in (None, "none"):
            wishes["reasoning_effort"] = self.reasoning_effort
        return {**wishes, **self.chat_template_kwargs}

    def check(self) -> None:
        super().check()
        is_explicit = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if self.continue_final_message and is_explicit:
            raise RequestError(
                "'continue_final_message' replaces the generation prompt: "
                "set 'add_generation_prompt' to false.",
                "continue_final_message",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
        self.check_tools()
        check_messages(self.messages)

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        is_new = self.max_completion_tokens is not None
        return self._sampling(
            defaults,
            max_tokens=self.max_completion_tokens if is_new else self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class ThinkingTokens(StrictFields):
    """The tokens around the thoughts before an answer; structured output does not restrict the thoughts."""

    open_ids: list[TokenId] = empty(list, max_length=MAX_STOPS)
    close_ids: list[TokenId] = Field(min_length=1, max_length=MAX_STOPS)
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_INT)

    @property
    def thinking(self) -> Thinking:
        ids = {"open_ids": tuple(self.open_ids), "close_ids": tuple(self.close_ids)}
        return Thinking(**ids, max_tokens=self.max_tokens)


class CompletionRequest(_Generation):
    """The body of POST /v1/completions."""

    prompt: Prompts
    thinking_tokens: Annotated[ThinkingTokens, BeforeValidator(whole_fields)] | None = None
    max_tokens: int = Field(default=DEFAULT_COMPLETION_TOKENS, ge=0, le=MAX_INT)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    add_special_tokens: bool = True
    suffix: str | None = None

    @property
    def is_scoring(self) -> bool:
        """Return whether the request asks only for the prompt (echo or scores), not for an answer."""
        return self.max_tokens == 0

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n):
            raise RequestError("'best_of' must equal 'n': every choice is returned.", "best_of")

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        asked = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            asked = max(self.logprobs, asked or 0)
        return self._sampling(
            defaults,
            max_tokens=max(1, self.max_tokens),
            logprobs=self.logprobs,
            prompt_logprobs=asked,
            thinking=None if self.thinking_tokens is None else self.thinking_tokens.thinking,
        )


def _either(one: str, other: str) -> JsonDict:
    """Return the schema of a body that has the field `one`, and not `other` (which may be null)."""
    return {"required": [one], "properties": {one: {"not": {"type": "null"}}, other: {"type": "null"}}}


class TokenizeRequest(AnyBody):
    """The body of POST /tokenize: a prompt, or a conversation."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [_either("prompt", "messages"), _either("messages", "prompt")]}
    )

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    split_special_tokens: bool = True
    chat_template_kwargs: TemplateKwargs = empty(dict)
    tools: Tools = empty(list)
    return_token_strs: bool = False

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send 'prompt' or 'messages', and not both.", "prompt")
        check_messages(self.messages or [])


class DetokenizeRequest(AnyBody):
    """The body of POST /detokenize."""

    tokens: list[TokenId] = Field(max_length=MAX_PROMPT_TOKENS)
