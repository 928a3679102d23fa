"""The objects that answer requests, in OpenAI's and vLLM's shapes.

They are plain dictionaries, whose types mypy checks, and the schemas of the OpenAPI document.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from blockdraft.server.api.schemas import AnswerEnd, AnswerObject, Usage


class TokenChance(TypedDict):
    """One token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TokenChance):
    """A token of the answer, and the likeliest tokens at its position."""

    top_logprobs: list[TokenChance]


class ChatLogprobs(TypedDict):
    """One entry per token of the answer, thoughts included."""

    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    """Log-probabilities of /v1/completions: four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(TypedDict):
    """A prompt token's log-probability; `rank` 1 is the likeliest, null is below the requested ones."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]


class DraftStep(TypedDict):
    """The texts of the tokens that one step committed; the first `accepted` of them were drafts."""

    tokens: list[str]
    accepted: int


class SpeculativeMetrics(TypedDict):
    """Acceptance of the drafts of one answer, as vLLM names it; `acceptance_histogram[i]` counts steps.

    `reached_by_position` is ours: for each position, the steps in which all earlier drafts were accepted.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    reached_by_position: list[int]
    per_step_accepted: NotRequired[list[int]]


class RequestMetrics(TypedDict):
    """The figures of all choices together, as vLLM names them. The time to the first token is counted from
    the end of queueing, not from arrival. `tokens_per_step` is ours: 1.0 is plain decoding.
    """

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None
    tokens_per_step: float | None
    speculative_decoding: SpeculativeMetrics | None


class Chunk(AnswerObject):
    """The fields that an event of a stream has in both kinds of answers."""

    usage: NotRequired[Usage | None]
    metrics: NotRequired[RequestMetrics]


class ChunkChoice(TypedDict):
    """The fields that a piece of a choice has in both kinds of answers; the last piece has `seed`."""

    index: int
    finish_reason: AnswerEnd | None
    stop_reason: NotRequired[str | int | None]
    seed: NotRequired[int | None]
    token_ids: NotRequired[list[int]]
    draft: NotRequired[DraftStep]


class CalledFunction(TypedDict):
    """A function and its arguments: a JSON object as text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class FunctionDelta(TypedDict):
    """The part of a call in one event; the first has the whole name."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A tool call in one event, with its number; the first event has its id."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatMessage(TypedDict):
    """The model's text and tool calls, and its thoughts under two names."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    draft: NotRequired[list[DraftStep]]


class InvalidCall(TypedDict):
    """A call that does not match its tool's schema: its index, and why."""

    index: int
    error: str


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: AnswerEnd | None
    stop_reason: str | int | None
    seed: int | None
    token_ids: NotRequired[list[int]]
    invalid_tool_calls: NotRequired[list[InvalidCall]]


class ChatCompletion(AnswerObject):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


class ChatDelta(TypedDict):
    """The part of a message in one event."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class ChatChunkChoice(ChunkChoice):
    """A piece of one answer."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None
    invalid_tool_calls: NotRequired[list[InvalidCall]]


class ChatChunk(Chunk):
    """One event of a streamed chat completion; the last may have no choices and only `usage`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[int]]


class TextChoice(TypedDict):
    """One continuation; `index` counts the choices of the first prompt, then of the second, and so on."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: AnswerEnd | None
    stop_reason: str | int | None
    seed: int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]
    draft: NotRequired[list[DraftStep]]


class TextCompletion(AnswerObject):
    """The answer of /v1/completions; `metrics` is null if the request asks for no token."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage
    metrics: RequestMetrics | None


class TextChunkChoice(ChunkChoice):
    """A piece of one continuation."""

    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: NotRequired[list[int]]


class TextChunk(Chunk):
    """One event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


class Tokens(TypedDict):
    """The answer of /tokenize; `token_strs` are the texts of the tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    """The answer of /detokenize."""

    prompt: str
