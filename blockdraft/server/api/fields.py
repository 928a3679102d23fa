"""What requests may hold: one pydantic model per body, with a limit on everything that has a size.

The models are also the schemas of the OpenAPI document. Defaults are OpenAI's; SamplingParams has the last
word on ranges. A null field is one that was left out; fields nobody knows are ignored, as clients expect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic.config import JsonDict
from pydantic_core import ErrorDetails

from blockdraft.engine.request import MAX_CHOICES, MAX_LOGPROBS, MAX_STOPS, SamplingParams
from blockdraft.errors import RequestError
from blockdraft.server.api.field_types import (
    MAX_INT,
    MAX_PROMPT_TOKENS,
    Biases,
    Messages,
    Prompts,
    Stops,
    StrictFields,
    TemplateKwargs,
    TokenId,
    whole,
)
from blockdraft.server.api.structured_output_fields import FormFields
from blockdraft.server.api.template_messages import check_messages
from blockdraft.server.api.tool_fields import ToolFields, Tools
from blockdraft.server.http.body import parse_object, shown_name

MAX_SALT = 1024  # characters of a cache salt; arbitrary
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for /v1/completions

# Fields that would change the answer, with the values that ask for nothing.
Unsupported = Mapping[str, tuple[object, ...]]
_UNSUPPORTED: Unsupported = {
    **dict.fromkeys(("audio", "chat_template", "kv_transfer_params", "prompt_embeds"), ()),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "documents", "functions"), ([],)),
    **dict.fromkeys(("logits_processors",), ([],)),
    **dict.fromkeys(("truncate_prompt_tokens",), ()),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), ({},)),
    "function_call": ("none",),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "priority": (0,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "web_search_options": (),
}
_CHAT_ONLY = {"echo": (False,), "suffix": ("",)}
# Fields that ask for nothing an answer could show: to leave them out of account is to do what they say.
_HARMLESS = frozenset(
    {
        *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
        *("store", "user"),
    }
)
_IN_JSON = {  # for texts of pydantic that name classes and types of Python
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "Input should be an object"),
    "list_type": "Input should be an array",
}
_SAMPLING_NAMES = frozenset(item.name for item in fields(SamplingParams))
BodyT = TypeVar("BodyT", bound="AnyBody")


class AnyBody(StrictFields):
    """A whole body; any may name the model it is meant for."""

    UNSUPPORTED: ClassVar[Unsupported] = _UNSUPPORTED
    HARMLESS: ClassVar[frozenset[str]] = _HARMLESS  # they ask nothing of a server of one's own

    model: str | None = None
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names in the body that mean nothing here, `temprature` for one."""
        return self._ignored

    def check(self) -> None:
        """Raises RequestError for what no single field can tell."""


class StreamOptions(StrictFields):
    """What a stream carries beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


WIDTH_MARK = "x-width"  # in the schema of a block's width, whose limit is the engine's


class Speculative(StrictFields):
    """Speculation for this request: `width` is the block's width (1: none, null: the server's)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    width: Annotated[int, Field(ge=1, le=1024, json_schema_extra={WIDTH_MARK: True})] | None = None
    detail: bool = False


def _as_speculative(value: object) -> object:
    """False is no speculation, true the server's."""
    if isinstance(value, bool):
        return {} if value else {"width": 1}
    return {name: whole(item) for name, item in value.items()} if isinstance(value, dict) else value


SpeculativeField = Annotated[
    Speculative, BeforeValidator(_as_speculative, json_schema_input_type=bool | Speculative)
]


class _Generation(FormFields, AnyBody):
    """The fields of chat and plain completions alike."""

    # These five are the model's own where a request does not say.
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Biases = Field(default={})
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Stops = Field(default=[])
    stop_token_ids: list[TokenId] = Field(default=[], max_length=MAX_STOPS)
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
        _ = self.form  # raises if there are two

    def _sampling(
        self, defaults: Mapping[str, float], *, max_tokens: int | None, **last: int | None
    ) -> SamplingParams:
        """What the fields ask for; `last` is what the kind of request makes of some of them."""
        if max_tokens is not None and self.min_tokens > max_tokens:
            raise RequestError(
                f"'min_tokens' is {self.min_tokens}, more than the {max_tokens} tokens the answer may have.",
                "min_tokens",
            )
        given = {name: value for name, value in self if name in _SAMPLING_NAMES and value is not None}
        form = {"structured_outputs": self.form}
        last |= {"max_tokens": max_tokens, "width": self.speculative.width}
        return SamplingParams(**{**defaults, **given, **form, **last})


class ChatRequest(ToolFields, _Generation):
    """The body of POST /v1/chat/completions. Other APIs put theirs into these words."""

    UNSUPPORTED: ClassVar[Unsupported] = {**_UNSUPPORTED, **_CHAT_ONLY}

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    split_special_tokens: bool = True  # transformers' name: markup spelled out in a message is text
    chat_template_kwargs: TemplateKwargs = Field(default={})
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)  # the old name of the next, which wins
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0, le=MAX_INT)
    verbosity: Literal["low", "medium", "high"] | None = None

    @property
    def template_kwargs(self) -> Mapping[str, object]:
        """Wishes that only a template can grant; some have a switch for thoughts instead of an effort."""
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
                "'continue_final_message' takes the place of the generation prompt: "
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


class CompletionRequest(_Generation):
    """The body of POST /v1/completions."""

    prompt: Prompts
    max_tokens: int = Field(default=DEFAULT_COMPLETION_TOKENS, ge=0, le=MAX_INT)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    add_special_tokens: bool = True
    suffix: str | None = None

    @property
    def is_scoring(self) -> bool:
        """Only the prompt is asked for."""
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
            defaults, max_tokens=max(1, self.max_tokens), logprobs=self.logprobs, prompt_logprobs=asked
        )


def _either(one: str, other: str) -> JsonDict:
    """The schema of a body that has the first field; the other may be there as null."""
    return {
        "required": [one],
        "properties": {one: {"not": {"type": "null"}}, other: {"type": "null"}},
    }


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
    chat_template_kwargs: TemplateKwargs = Field(default={})
    tools: Tools = Field(default=[])
    return_token_strs: bool = False

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send 'prompt' or 'messages', and not both.", "prompt")
        check_messages(self.messages or [])


class DetokenizeRequest(AnyBody):
    """The body of POST /detokenize."""

    tokens: list[TokenId] = Field(max_length=MAX_PROMPT_TOKENS)


def parse(kind: type[BodyT], body: bytes) -> BodyT:
    """Read a request, or say with RequestError what is wrong with it."""
    given = {name: whole(value) for name, value in parse_object(body).items() if value is not None}
    for name, neutral in kind.UNSUPPORTED.items():
        if name in given and not any(_is_same(given[name], one) for one in neutral):
            raise RequestError(f"'{name}' is not supported yet: leave it out.", name)
    asked = validate(kind, given)
    known = {*kind.model_fields, *kind.UNSUPPORTED, *kind.HARMLESS}
    asked._ignored = tuple(shown_name(name) for name in given if name not in known)
    return asked


def _is_same(value: object, other: object) -> bool:
    """Whether two values are one in JSON, where false is not 0."""
    return isinstance(value, bool) is isinstance(other, bool) and value == other


def validate(kind: type[BodyT], given: Mapping[str, object]) -> BodyT:
    """The fields as a request of this kind, or RequestError."""
    try:
        asked = kind.model_validate(given)
    except ValidationError as error:
        first = _likeliest(error.errors(include_url=False, include_input=False))
        where = ".".join(shown_name(str(part)) for part in _path(given, first))
        text = (
            _IN_JSON.get(first["type"], first["msg"]).replace("Dictionary", "Object").replace("List", "Array")
        )
        raise RequestError(f"'{where}': {text}.", shown_name(str(first["loc"][0]))) from None
    asked.check()
    return asked


def _path(given: object, error: ErrorDetails) -> Iterator[str | int]:
    """Where in the body an error lies. pydantic also names the kinds that a value might have been of."""
    value = given
    for number, part in enumerate(error["loc"]):
        is_missing = error["type"] == "missing" and number == len(error["loc"]) - 1
        if is_missing or (isinstance(value, Mapping) and part in value):
            value = value.get(part) if isinstance(value, Mapping) else None
            yield part
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
            yield part


def _likeliest(errors: list[ErrorDetails]) -> ErrorDetails:
    """Of a field that may be several things, what is wrong with the one that it comes nearest to."""
    same = (one for one in errors if one["loc"][:1] == errors[0]["loc"][:1])
    return max(same, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
