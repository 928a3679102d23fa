"""The objects that answer requests of the Responses API, in OpenAI's shapes."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from blockdraft.server.api.schemas import CompletionDetails

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(TypedDict):
    """A text of the model."""

    type: Literal["output_text"]
    text: str
    annotations: list[object]
    logprobs: list[object]


class ReasoningText(TypedDict):
    """A thought of the model."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(TypedDict):
    """Text of the model."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(TypedDict):
    """Thoughts of the model; `encrypted_content` is there on request."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[object]
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


class FunctionCallItem(TypedDict):
    """A function call, with the function's namespace if it has one; the arguments are JSON."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


Item = MessageItem | ReasoningItem | FunctionCallItem


class InputDetails(TypedDict):
    """Prompt tokens found in the prefix cache; writing to it is free."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(TypedDict):
    """The cost of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class Incomplete(TypedDict):
    """Why an answer stopped early."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(TypedDict):
    """Why an answer failed."""

    code: Literal["server_error"]
    message: str


class Response(TypedDict):
    """The answer of /v1/responses, and how far it has come in the events of a stream."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: dict[str, object]
    tool_choice: str | dict[str, object]
    tools: list[dict[str, object]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class Deleted(TypedDict):
    """The answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputText(TypedDict):
    """A text for the model."""

    type: Literal["input_text"]
    text: str


class InputMessageItem(TypedDict):
    """A message of the user, the system or a developer."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["user", "system", "developer"]
    content: list[InputText]


class FunctionOutputItem(TypedDict):
    """The result of a function."""

    id: str
    type: Literal["function_call_output"]
    status: ItemStatus
    call_id: str
    output: str


InputItem = InputMessageItem | FunctionOutputItem | Item


class InputItems(TypedDict):
    """The answer of /v1/responses/{id}/input_items: a page of a response's input items."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    """The answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Numbered(TypedDict):
    """The fields that every event has."""

    sequence_number: int


class ResponseEvent(Numbered):
    """The state of the whole answer."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response


class ItemEvent(Numbered):
    """An item begins or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class InItem(Numbered):
    """The place of an event in the answer."""

    item_id: str
    output_index: int


class PartEvent(InItem):
    """A part of an item begins or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText | ReasoningText


class TextDeltaEvent(InItem):
    """More text."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[object]


class TextDoneEvent(InItem):
    """All of a text."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[object]


class ReasoningDeltaEvent(InItem):
    """More thoughts."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDoneEvent(InItem):
    """All of a thought."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDeltaEvent(InItem):
    """More of the arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(InItem):
    """All arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


Event = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
)
