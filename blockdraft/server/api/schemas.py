"""The objects that all APIs answer with: usage, the model, and the state of the server.

They are plain dictionaries, whose types mypy checks, and the schemas of the OpenAPI document.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from blockdraft.engine.request import FinishReason
from blockdraft.server.engine_link.replica import ReplicaStatus
from blockdraft.server.http.replies import Health

AnswerEnd = FinishReason | Literal["tool_calls"]


class PromptDetails(TypedDict):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """Tokens of the answer that are thoughts."""

    reasoning_tokens: int


class Usage(TypedDict):
    """The cost of all choices together; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None
    completion_tokens_details: CompletionDetails


class AnswerObject(TypedDict):
    """The fields that every object of one answer repeats; `created` is in seconds since 1970.

    Equal fingerprints, requests and seeds give equal tokens. With null, answers cannot be repeated.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class ModelCard(TypedDict):
    """The model that is served; `id` is its name in requests, `root` its id on the hub or its path."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    permission: list[str]


class ModelList(TypedDict):
    """The models that are served. There is only one."""

    object: Literal["list"]
    data: list[ModelCard]


class Version(TypedDict):
    """The server's version."""

    version: str


class Status(TypedDict):
    """The state of the engine (/live), and of the server (/health)."""

    status: Health


class StartPhase(TypedDict):
    """One phase of the start."""

    name: str
    state: Literal["waiting", "running", "done", "skipped", "failed"]
    seconds: float | None
    detail: str | None
    progress: float | None


class AnswerFingerprint(TypedDict):
    """Everything that decides an answer's tokens. `id` is `system_fingerprint`, or null for a `reason`."""

    id: str | None
    parts: dict[str, str]
    reason: str


class Start(TypedDict):
    """The progress of the start."""

    state: Literal["starting", "ready", "failed", "draining"]
    seconds: float
    phases: list[StartPhase]
    warnings: list[str]
    chosen: list[str]  # choices for a GGUF file given by its path (drafter, weights, sampling), and why
    error: str | None
    sampling: NotRequired[dict[str, float]]  # defaults for requests that do not set them
    fingerprint: NotRequired[AnswerFingerprint]
    speculation: NotRequired[str]  # whether drafts pay off now; before the first answer, at the start
    replicas: NotRequired[list[ReplicaStatus]]
