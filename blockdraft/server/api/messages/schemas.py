"""The objects that answer requests of the Messages API, in Anthropic's shapes."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TokenCount(TypedDict):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class ModelInfo(TypedDict):
    """The model as Anthropic's clients know it; `created_at` is when the server started."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class ModelPage(TypedDict):
    """The answer of /v1/models to a request with the header `anthropic-version`."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageUsage(TypedDict):
    """The cost of a message; `input_tokens` counts the prompt tokens that were not in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"]


class TextBlock(TypedDict):
    """Text of the model."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """Thoughts of the model; the signature has no meaning, but clients require one."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    """A tool that the model called."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageAnswer(TypedDict):
    """The answer of /v1/messages, and without content the start of a stream."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(TypedDict):
    """The first event of a stream."""

    type: Literal["message_start"]
    message: MessageAnswer


class Ping(TypedDict):
    """An event without content, sent after the start of a message."""

    type: Literal["ping"]


class BlockStart(TypedDict):
    """A block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(TypedDict):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """More thoughts."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    """The end of the thoughts."""

    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    """More of the arguments of a call."""

    type: Literal["input_json_delta"]
    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(TypedDict):
    """A block goes on."""

    type: Literal["content_block_delta"]
    index: int
    delta: Delta


class BlockStop(TypedDict):
    """A block ends."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(TypedDict):
    """Why the model stopped."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    """The end of a message, with its usage."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(TypedDict):
    """The last event of a stream."""

    type: Literal["message_stop"]


MessageEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
