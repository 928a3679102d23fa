"""Requests and answers. This module does not import torch."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from blockdraft.errors import RequestError
from blockdraft.grammar.structured_output import StructuredOutputs, Thinking
from blockdraft.settings.known_names import SAME
from blockdraft.settings.settings import suggestion

FinishReason = Literal["stop", "length", "abort"]

MAX_LOGPROBS = 20  # as OpenAI and vLLM
MAX_STOPS = 64  # stop strings, and separately stop token ids
MAX_BIASES = 1024
MAX_CHOICES = 128


_WHOLE, _NUMBERS = (int,), (int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling of one request. Names and meanings are vLLM's; `width` is ours."""

    n: int = 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: drawn from the engine's seed
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None  # None: up to the context limit
    logprobs: int | None = None  # 0: of the chosen token only; k: also of the k likeliest tokens
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    width: int | None = None  # None: the engine's; 1: no speculation for this request
    cache_salt: str | None = None  # share cached prefixes with requests of the same salt only
    structured_outputs: StructuredOutputs | None = None
    thinking: Thinking | None = None  # how the model marks its reasoning, for a schema or a budget

    def __new__(cls, **given: object) -> SamplingParams:
        """Raise RequestError for an unknown name, with a suggestion."""
        for name in given.keys() - _SAMPLING_NAMES:
            theirs = SAME.get(name)
            if theirs is not None and theirs[1] in cls.__slots__:
                raise RequestError(f"{theirs[0]}'s {name} is {theirs[1]} in SamplingParams.", name)
            hint = suggestion(name, cls.__slots__) or f": it has {', '.join(cls.__slots__)}."
            raise RequestError(f"SamplingParams has no field '{name}'{hint}", name)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, default, low, high in _RANGES:
            value = getattr(self, name)
            if value is not default:
                _check_range(name, value, low, high)
        if self.top_p == 0:
            raise RequestError("top_p = 0.0 leaves no token: use 0 < top_p <= 1, or temperature 0.")
        self._check_pairs()
        has_lists = (self.stop, self.stop_token_ids, self.logit_bias, self.cache_salt) != (None, (), {}, None)
        if has_lists:
            self._check_lists()

    def _check_pairs(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            text = f"min_tokens = {self.min_tokens} is more than max_tokens = {self.max_tokens}: lower it."
            raise RequestError(text, "min_tokens")
        if self.structured_outputs is not None and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise RequestError(
                f"{name} would continue an answer after its structured output has ended: leave it out.", name
            )

    def _check_lists(self) -> None:
        if not isinstance(self.stop, str | tuple | list | None):
            raise RequestError(f"stop = {self.stop!r} is neither a string nor a list of strings.")
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and self.cache_salt):
            raise RequestError(f"cache_salt = {self.cache_salt!r} is not a text of one character or more.")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise RequestError(f"stop_token_ids = {self.stop_token_ids!r} is not a list of token ids.")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias = {self.logit_bias!r} does not map token ids to numbers.")
        for token in self.stop_token_ids:
            _check_range("stop_token_ids entry", token, 0, 2**31)
        if len(self.stops) > MAX_STOPS or len(self.stop_token_ids) > MAX_STOPS:
            raise RequestError(f"more than {MAX_STOPS} stop strings or stop token ids.")
        if any(not isinstance(stop, str) or not stop for stop in self.stops):
            raise RequestError("a stop string is empty: remove it, it would end every answer at once.")
        if len(self.logit_bias) > MAX_BIASES:
            raise RequestError(f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_BIASES}.")
        for token, value in self.logit_bias.items():
            _check_range("logit_bias token", token, 0, 2**31)
            _check_range(f"logit_bias of token {token}", value, -100.0, 100.0)

    def __getstate__(self) -> tuple[object, ...]:
        """Pickle the values only, in a tenth of the time of dataclass's own way."""
        values: tuple[object, ...] = _SAMPLING_VALUES(self)
        return values

    def __setstate__(self, values: tuple[object, ...]) -> None:
        for name, value in zip(SamplingParams.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_LIMITS = {
    "n": (1, MAX_CHOICES),
    "temperature": (0.0, 100.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "top_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "min_tokens": (0, 2**31),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, 2**31),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "width": (1, 1024),
}
_DEFAULTS = {one.name: one.default for one in fields(SamplingParams)}
_RANGES = [(name, _DEFAULTS[name], low, high) for name, (low, high) in _LIMITS.items()]
_SAMPLING_NAMES = frozenset(SamplingParams.__slots__)
_SAMPLING_VALUES = attrgetter(*SamplingParams.__slots__)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if type(value) in (_WHOLE if type(low) is int else _NUMBERS) and low <= value <= high:
        return  # nearly always; NaN is in no range
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_whole = isinstance(low, int)
    if not is_number or not math.isfinite(value) or (is_whole and not isinstance(value, int)):
        kind = "an integer" if is_whole else "a number"
        raise RequestError(f"{name} = {value!r} is not {kind}.")
    if not low <= value <= high:
        raise RequestError(f"{name} = {value} is outside {low} to {high}.")


def check_limits(
    num_prompt_tokens: int, sampling: SamplingParams, *, max_model_len: int, most_context: int, block: int
) -> None:
    """Raise RequestError, naming the field, if a request can never run within these limits.

    `most_context`: the highest possible --max-model-len, for the advice in the error.
    """
    if not num_prompt_tokens:
        raise RequestError("the prompt is empty: give at least one token.", "prompt")
    if num_prompt_tokens >= max_model_len:
        raised = f", or start with --max-model-len {most_context}" if num_prompt_tokens < most_context else ""
        raise RequestError(
            # OpenAI's wording, which routers and agents match.
            f"This model's maximum context length is {max_model_len} tokens. However, the prompt has "
            f"{num_prompt_tokens} tokens, and the answer needs one more: shorten it{raised}.",
            "prompt",
            "context_length_exceeded",
        )
    if sampling.width is not None and sampling.width > block:
        raise RequestError(
            f"width = {sampling.width}, but this engine verifies at most {block} tokens per step.", "width"
        )


def check_vocabulary(prompt_ids: Sequence[int], sampling: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError, naming the field, if a token id is outside the vocabulary."""
    thinking = sampling.thinking
    for name, token_ids in (
        ("prompt", prompt_ids),
        ("thinking", () if thinking is None else (*thinking.open_ids, *thinking.close_ids)),
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name}: token id {token} is outside the vocabulary of {vocab_size} tokens.", name
                )


_PROCESS, _NUMBERS_OF_REQUESTS = secrets.token_hex(8), itertools.count()


def new_request_id() -> str:
    """Return an id that no other request of this process has."""
    return f"request-{_PROCESS}-{next(_NUMBERS_OF_REQUESTS):x}"


class Turn(NamedTuple):
    """What decides when a request gets its row."""

    priority: int = 0  # lower numbers go first, as vLLM's
    client: tuple[str, ...] = ()  # who asks, such as a key and an address: clients take turns


ANYONE = Turn()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, ready for the engine."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    turn: Turn = ANYONE


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability under the model, and the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Metrics:
    """The cost of an answer. `accepted[i]` counts the steps in which draft i + 1 was accepted.

    Drafts after the answer's end are not counted: each step delivered one token and its accepted drafts.
    """

    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    steps: int
    drafted: int
    accepted: tuple[int, ...]
    preemptions: int
    queue_s: float
    first_token_s: float
    seconds: float
    reached: tuple[int, ...] = ()  # [i]: steps that drafted draft i + 1 and accepted all before it
    is_cut: bool = False  # the answer ends inside its last block, whose delivered tokens are all drafts
    seed: int | None = None  # with this seed, a request for one choice gets the same tokens

    def __reduce__(self) -> tuple[type[Metrics], tuple[object, ...]]:
        """Pickle by position, which takes less than half as long as the default."""
        return Metrics, _METRICS_VALUES(self)

    @property
    def tokens_per_step(self) -> float:
        """Return the mean tokens committed per step, the sampled one included."""
        return self.num_tokens / self.steps if self.steps else 0.0


_METRICS_VALUES = attrgetter(*Metrics.__slots__)


def counted_width(width: int, num_committed: int, num_kept: int) -> int:
    """Return the width to count for a block; smaller if its answer ends inside, so kept = accepted + 1."""
    return width if num_kept == num_committed else max(num_kept, 1)


@dataclass(slots=True)
class Delta:
    """The tokens and text that one step adds to one choice. The last delta has a finish reason and metrics.

    The class is not frozen: a delta is made per row and step, and a frozen one takes five times as long.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once, with the first delta
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    metrics: Metrics | None = None
    ends_request: bool = False  # no choice of its request is left; EngineLoop sets it


_DELTA_VALUES = attrgetter(*Delta.__slots__)
Piece = tuple[str, int, str, tuple[int, ...]]  # the first values of a Delta; the others are the defaults


@dataclass(slots=True)
class Deltas:
    """The deltas of a step. Most say only which text and tokens an answer goes on with: these are pieces.

    To make a piece takes a quarter of a delta's time, and it is sent as it is.
    """

    pieces: list[Piece] = field(default_factory=list)
    others: list[Delta] = field(default_factory=list)

    def __iter__(self) -> Iterator[Delta]:
        yield from itertools.starmap(Delta, self.pieces)
        yield from self.others

    def __len__(self) -> int:
        return len(self.pieces) + len(self.others)

    def values(self) -> list[tuple[Any, ...]]:
        """Return the arguments of equal deltas, which pickle without Python code."""
        return [*self.pieces, *map(_DELTA_VALUES, self.others)]
