"""The records of a benchmark: prompts, requests and answers.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

Arm = Literal["speculative", "plain"]
PLAIN: Arm = "plain"
SPECULATIVE: Arm = "speculative"
NOT_SENT = "not sent: "  # prefix of the error of a request that was never sent
NOT_ENDED = "not ended: "  # prefix of the error of a request given up when the run was stopped


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation: the user's turns. The model answers each turn."""

    id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None

    def messages(self, said: Sequence[str] = ()) -> list[dict[str, object]]:
        """Return the chat up to the next user turn. `said` has the answers so far."""
        messages = [] if self.system is None else [("system", self.system)]
        for turn, answer in zip(self.turns, said, strict=False):
            messages += [("user", turn), ("assistant", answer)]
        messages.append(("user", self.turns[len(said)]))
        return [{"role": role, "content": content} for role, content in messages]


@dataclass(frozen=True, slots=True)
class Workload:
    """Named prompts and their source: a file with its hash, or "built in"."""

    name: str
    prompts: tuple[Prompt, ...]
    source: str
    is_raw: bool = False  # the first turn is a text to continue (/v1/completions), not a chat


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Requests arrive `concurrency` at a time, or `rate` per second in a Poisson process."""

    concurrency: int = 1
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One conversation as it is sent to one arm."""

    prompt: Prompt
    arm: Arm
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    is_raw: bool = False
    ignores_eos: bool = False  # every answer has exactly max_tokens
    cache_salt: str | None = None  # keeps prefix caches from recognising the prompt
    thinking: bool | None = None  # None for the model's default
    at_s: float | None = None  # seconds from the start of its block; None if it starts when a stream is free
    number: int = 0  # index of the conversation in its cell, equal in both arms
    original: Prompt | None = None  # the prompt without added context and salt; None if equal to `prompt`


@dataclass(frozen=True, slots=True)
class Speculation:
    """Counts of steps and drafts: of one answer, or of all answers in an interval of time.

    accepted[i] is the number of steps that accepted the draft at position i. Committed tokens per step are
    1 + sum(accepted) / steps: the bonus token counts.
    """

    steps: int
    drafted: int  # 0 if the server does not report it
    accepted: tuple[int, ...]
    has_positions: bool = True  # if False, `accepted` has one entry, the sum
    reached: tuple[int, ...] | None = None  # [i]: steps that drafted i and accepted all drafts before it


@dataclass(slots=True)
class Answer:
    """One turn of a conversation: a request and its answer."""

    ask: Ask
    turn: int
    planned_s: float  # planned sending time; for later turns, the end of the turn before
    sent_s: float  # actual sending time, also of requests that were given up
    first_s: float | None = None  # first delta with text or thinking
    end_s: float = 0.0  # time of the last byte, or of the error
    gaps_s: list[float] = field(default_factory=list)  # between deltas with text
    prompt_tokens: int | None = None  # the three counts come from the server's usage
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    text: str = ""
    thinking: str = ""
    finish_reason: str | None = None
    speculation: Speculation | None = None  # None if the server does not report it
    error: str | None = None  # one line; an answer with an error counts as a failure

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def is_sent(self) -> bool:
        return self.error is None or not self.error.startswith(NOT_SENT)

    @property
    def is_ended(self) -> bool:
        """Return whether the request has a result: it was sent and not given up."""
        return self.error is None or not self.error.startswith((NOT_SENT, NOT_ENDED))

    @property
    def num_events(self) -> int:
        """Return the number of deltas with text."""
        return 0 if self.first_s is None else 1 + len(self.gaps_s)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def latency_s(self) -> float:
        """Return the seconds from sending to the last byte."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token after the first, as `vllm bench serve` defines it."""
        if self.first_s is None or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.completion_tokens - 1)

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens of this answer per second of its latency."""
        if not self.completion_tokens or self.latency_s <= 0:
            return None
        return self.completion_tokens / self.latency_s


class Key(TypedDict):
    """The key of a cell of the report. The cell's baseline has an equal key."""

    workload: str
    category: str  # "all", or one class of the workload
    concurrency: int
    rate: float | None
    depth: int  # tokens of context put before each prompt
    temperature: float


@dataclass(frozen=True, slots=True)
class Block:
    """An interval in which one arm answered: from the first request to the last answer."""

    start_s: float
    end_s: float
    metered: Speculation | None = None  # difference of the server's /metrics before and after the block


@dataclass(slots=True)
class Group:
    """The answers of one cell, and the server's busy time."""

    key: Key
    arm: Arm
    answers: list[Answer]
    busy_s: float  # sum over the blocks of this arm, from first request to last answer
    metered: Speculation | None = None  # from the server's /metrics, if answers have no counts
    blocks: list[Block] = field(default_factory=list)
