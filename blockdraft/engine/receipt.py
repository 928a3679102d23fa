"""Receipts: what repeats an answer, and how to tell that it was repeated. One line of JSON per choice.

A receipt has the prompt's token ids, the sampling with the choice's own seed, the fingerprint of the engine
and a digest of the answer's tokens. With an equal fingerprint, an engine repeats the tokens bit for bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, fields, replace

from blockdraft.engine.info import Fingerprint
from blockdraft.engine.request import FinishReason, SamplingParams
from blockdraft.errors import RequestError
from blockdraft.grammar.structured_output import StructuredOutputs, Thinking, fields_of

VERSION = 1  # of the format
REPEATED: tuple[FinishReason, ...] = ("stop", "length")  # ends that repeat; others came from outside
_PLAIN = SamplingParams()
# How one of n choices is asked for again, and what decides no token.
_LEFT_OUT = ("n", "logprobs", "prompt_logprobs", "width", "cache_salt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The receipt of one choice. Texts and `token_ids`, which are the answer's, are kept on request."""

    id: str  # of the whole answer
    index: int  # of the choice
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams  # of this choice alone
    num_tokens: int
    finish_reason: str
    digest: str
    fingerprint: Fingerprint
    model: str = ""
    created: int = 0  # seconds since 1970
    prompt: str | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    def as_line(self) -> str:
        """Return the receipt as a line of JSON, with its line break."""
        line: dict[str, object] = {"receipt": VERSION}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "sampling":
                line["sampling"] = _sampling_fields(value)
            elif item.name == "fingerprint":
                line["fingerprint"] = asdict(value)
            elif value is not None:
                line[item.name] = value
        return json.dumps(line, separators=(",", ":")) + "\n"

    @classmethod
    def of(cls, line: Mapping[str, object]) -> Receipt:
        """Return the receipt of a line's fields. Raise RequestError if they make none."""
        if line.get("receipt") != VERSION:
            raise RequestError(f"this is no receipt of format {VERSION}: give a file that --receipts wrote.")
        given = {item.name: line[item.name] for item in fields(cls) if item.name in line}
        try:
            given["sampling"] = _sampling_of(given["sampling"])
            given["fingerprint"] = Fingerprint(**given["fingerprint"])  # type: ignore[arg-type]
            for name in ("prompt_ids", "token_ids"):
                if name in given:
                    given[name] = _token_ids(given[name])
            return cls(**given)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"the receipt is not whole ({error}): copy its line again.") from None

    def is_repeated_by(self, token_ids: Items[int], finish_reason: str) -> bool:
        return self.digest == digest_of_tokens(token_ids) and self.finish_reason == finish_reason


def digest_of_tokens(token_ids: Items[int]) -> str:
    """Return the SHA-256 of the ids, written in decimal with commas between."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def repeatable(sampling: SamplingParams, *, seed: int, most_tokens: int) -> SamplingParams:
    """Return the sampling that repeats one choice. `most_tokens` is what the context leaves for it."""
    asked = most_tokens if sampling.max_tokens is None else min(sampling.max_tokens, most_tokens)
    own = {name: getattr(_PLAIN, name) for name in _LEFT_OUT}
    return replace(sampling, **own, seed=seed, max_tokens=asked)


def _sampling_fields(sampling: SamplingParams) -> dict[str, object]:
    """Return the fields that differ from the defaults, for JSON."""
    found: dict[str, object] = {}
    for item in fields(sampling):
        value = getattr(sampling, item.name)
        if value != getattr(_PLAIN, item.name) and value not in ([], ()):
            found[item.name] = value
    if sampling.structured_outputs is not None:
        found["structured_outputs"] = fields_of(sampling.structured_outputs)
    if sampling.thinking is not None:
        found["thinking"] = asdict(sampling.thinking)
    return found


def _sampling_of(value: object) -> SamplingParams:
    given = dict(value)  # type: ignore[call-overload]
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputs(**given["structured_outputs"])
    if "thinking" in given:
        ids = {name: tuple(given["thinking"][name]) for name in ("open_ids", "close_ids")}
        given["thinking"] = Thinking(**{**given["thinking"], **ids})
    return SamplingParams(**given)


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise TypeError("token ids are a list of integers")
    return tuple(value)
