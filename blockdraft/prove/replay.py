"""Repeats receipts, in this process or at a server, and compares the answers' tokens with `==`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from blockdraft.bench.endpoint import probe
from blockdraft.bench.wire import Json, inside
from blockdraft.engine.info import Fingerprint
from blockdraft.engine.receipt import Receipt
from blockdraft.engine.request import SamplingParams
from blockdraft.errors import BenchError, RequestError
from blockdraft.grammar.structured_output import StructuredOutputs, fields_of
from blockdraft.jsonl import as_object, read_rows
from blockdraft.prove.asking import Asker, Refused

if TYPE_CHECKING:  # they import torch
    from blockdraft.llm import LLM, DeltaStream

SHOWN = 5  # most differences to show
NEEDED = "the server returns no token ids, so nothing can be compared"
IS_OURS = "the fingerprints are equal, so the answers should be: please report it, with the receipt"


@dataclass(frozen=True, slots=True)
class Repeated:
    """The answer to one receipt's request, or why there is none."""

    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    error: str | None = None


Tell = Callable[[int], None]  # gets the number of receipts that were repeated


def read_receipts(path: Path, answer: str | None = None) -> list[Receipt]:
    """Return the receipts of a file, or those of one answer. Raise BenchError if a line is none."""
    receipts = []
    for row in read_rows(path, BenchError):
        try:
            receipts.append(Receipt.of(row.fields))
        except RequestError as error:
            raise row.error(str(error).rstrip(".?")) from None
    chosen = [one for one in receipts if answer in (None, one.id)]
    if not chosen:
        which = "no receipt" if answer is None else f"no receipt of the answer '{answer}'"
        raise BenchError(f"{path} has {which}: start the server with --receipts {path}.")
    return chosen


# ---- here


def repeat_here(receipts: Sequence[Receipt], llm: LLM, tell: Tell) -> Replay:
    """Repeat the receipts by an engine in this process."""
    from blockdraft.check.fingerprint import fingerprint

    begun, repeated = [_begin(receipt, llm) for receipt in receipts], []
    for number, stream in enumerate(begun, 1):
        repeated.append(stream if isinstance(stream, Repeated) else _collected(stream))
        tell(number)
    return Replay(receipts, repeated, fingerprint(llm.engine))


def _begin(receipt: Receipt, llm: LLM) -> DeltaStream | Repeated:
    problem = _too_long(receipt, llm.engine.plan.max_model_len)
    if problem is not None:
        return Repeated(error=problem)
    try:
        return llm.stream(receipt.prompt_ids, receipt.sampling)
    except RequestError as error:
        return Repeated(error=str(error))


def _collected(stream: DeltaStream) -> Repeated:
    deltas = list(stream)
    token_ids = tuple(token for delta in deltas for token in delta.token_ids)
    return Repeated(token_ids, deltas[-1].finish_reason or "")


def _too_long(receipt: Receipt, max_model_len: int | None) -> str | None:
    """Return why an answer does not fit into a context, or None if it does or the context is not known."""
    num_tokens = len(receipt.prompt_ids) + receipt.num_tokens
    if max_model_len is None or num_tokens <= max_model_len:
        return None
    return f"it has {num_tokens} tokens, but the context here is {max_model_len}: raise --max-model-len"


# ---- at a server


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How to ask a server."""

    url: str
    model: str | None = None
    api_key: str | None = None
    concurrency: int = 8
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise BenchError(f"--concurrency {self.concurrency} is not a positive number.")
        if not 0 < self.timeout_s < float("inf"):
            raise BenchError(f"--timeout {self.timeout_s} is not a positive number.")


async def repeat_at(receipts: Sequence[Receipt], options: ReplayOptions, tell: Tell) -> Replay:
    """Repeat the receipts at a server."""
    endpoint = await probe(options.url, options.api_key, options.model)
    repeated = [Repeated() for _ in receipts]
    numbers, num_done = iter(range(len(receipts))), 0
    async with Asker(endpoint, options.api_key, options.timeout_s) as asker:

        async def work() -> None:
            nonlocal num_done
            for number in numbers:
                repeated[number] = await _ask(receipts[number], asker)
                num_done += 1
                tell(num_done)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(options.concurrency, len(receipts))):
                tasks.create_task(work())
        return Replay(receipts, repeated, _fingerprint(await asker.get("/ready")))


async def _ask(receipt: Receipt, asker: Asker) -> Repeated:
    problem = _too_long(receipt, asker.endpoint.max_model_len)
    if problem is not None:
        return Repeated(error=problem)
    body = {"model": asker.endpoint.model, **_request(receipt)}
    found = await asker.post("/v1/completions", body, _read)
    return Repeated(error=found) if isinstance(found, str) else found


def _request(receipt: Receipt) -> Json:
    """Return the body of the completion that repeats an answer. Every field is given: no default applies."""
    sampling = receipt.sampling
    left_out = ("n", "logprobs", "prompt_logprobs", "width", "cache_salt", "structured_outputs", "thinking")
    body: Json = {item.name: getattr(sampling, item.name) for item in fields(SamplingParams)}
    body = {name: value for name, value in body.items() if name not in left_out}
    body |= {"prompt": receipt.prompt_ids, "return_token_ids": True, "stop": sampling.stops}
    if sampling.structured_outputs is not None:
        body |= _structured_output(sampling.structured_outputs)
    if sampling.thinking is not None:
        body["thinking_tokens"] = asdict(sampling.thinking)
    return body


def _structured_output(output: StructuredOutputs) -> Json:
    if not output.is_lenient:
        return {"structured_outputs": fields_of(output)}
    # Only OpenAI's field ignores unknown keywords of a schema.
    schema = {"name": "schema", "schema": output.json, "strict": False}
    body: Json = {"response_format": {"type": "json_schema", "json_schema": schema}}
    if output.whitespace_pattern is not None:
        body["guided_whitespace_pattern"] = output.whitespace_pattern
    return body


async def _read(response: aiohttp.ClientResponse) -> Repeated:
    choices = as_object(await response.read()).get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    token_ids = inside(choice, "token_ids")
    if not isinstance(token_ids, list):
        raise Refused(NEEDED)
    return Repeated(tuple(token_ids), str(inside(choice, "finish_reason")))


def _fingerprint(ready: Json) -> Fingerprint:
    found = ready.get("fingerprint")
    if not isinstance(found, dict):
        return Fingerprint(reason="the server has no fingerprint")
    return Fingerprint(found.get("id"), found.get("parts", {}), found.get("reason", ""))


# ---- the result


@dataclass(frozen=True, slots=True)
class Replay:
    """All receipts with their repeated answers, and the fingerprint of what repeated them."""

    receipts: Sequence[Receipt]
    repeated: Sequence[Repeated]
    fingerprint: Fingerprint

    @property
    def differences(self) -> list[tuple[Receipt, Repeated]]:
        return [
            (receipt, again)
            for receipt, again in zip(self.receipts, self.repeated, strict=True)
            if again.error is None and not receipt.is_repeated_by(again.token_ids, again.finish_reason)
        ]

    @property
    def errors(self) -> list[tuple[Receipt, str]]:
        pairs = zip(self.receipts, self.repeated, strict=True)
        return [(receipt, again.error) for receipt, again in pairs if again.error is not None]

    @property
    def num_equal(self) -> int:
        return len(self.receipts) - len(self.differences) - len(self.errors)

    @property
    def verdict(self) -> str:
        equal = f"{self.num_equal} of {len(self.receipts)} answers were repeated token for token"
        failed = f"; {len(self.errors)} requests failed" if self.errors else ""
        return f"{equal}{failed}."

    def lines(self) -> Iterator[str]:
        """Yield how the fingerprints differ, then the first differences and errors."""
        for reason, count in Counter(map(self.reason, self.receipts)).items():
            if reason != IS_OURS:
                yield f"{count} receipts: {reason}"
        for receipt, again in self.differences[:SHOWN]:
            yield f"different: {receipt.id}, choice {receipt.index}: {_difference(receipt, again)}"
        if any(self.reason(receipt) == IS_OURS for receipt, _ in self.differences):
            yield IS_OURS
        for receipt, error in self.errors[:SHOWN]:
            yield f"failed: {receipt.id}, choice {receipt.index}: {error}"

    def reason(self, receipt: Receipt) -> str:
        """Return why the answer to a receipt may differ here."""
        mine, here = receipt.fingerprint, self.fingerprint
        if mine.id is None:
            return f"no fingerprint: {mine.reason}"
        if here.id is None:
            return f"no fingerprint here: {here.reason}"
        if mine.id == here.id:
            return IS_OURS
        pairs = {name: (mine.parts.get(name), here.parts.get(name)) for name in {**mine.parts, **here.parts}}
        parts = [f"{name} was {was}, here {is_now}" for name, (was, is_now) in pairs.items() if was != is_now]
        return f"another fingerprint: {'; '.join(parts)}"

    def as_json(self) -> Json:
        return {
            "receipts": len(self.receipts),
            "equal": self.num_equal,
            "fingerprint": asdict(self.fingerprint),
            "different": [
                {"id": one.id, "index": one.index, "reason": self.reason(one), "token_ids": again.token_ids}
                for one, again in self.differences
            ],
            "failed": [{"id": one.id, "index": one.index, "error": error} for one, error in self.errors],
        }


def _difference(receipt: Receipt, again: Repeated) -> str:
    """Return where the repeated answer differs, as far as the receipt tells."""
    ends = f"{again.finish_reason} after {len(again.token_ids)} tokens"
    was = f"{receipt.finish_reason} after {receipt.num_tokens}"
    if receipt.token_ids is None or receipt.token_ids == again.token_ids:
        return f"ends by {ends}, was {was}"
    pairs = zip(receipt.token_ids, again.token_ids, strict=False)
    shorter = min(len(receipt.token_ids), len(again.token_ids))
    at = next((place for place, (mine, other) in enumerate(pairs) if mine != other), shorter)
    mine, other = receipt.token_ids[at : at + 1], again.token_ids[at : at + 1]
    return f"token {at + 1} was {_named(mine)}, here {_named(other)} (ends by {ends}, was {was})"


def _named(token_ids: tuple[int, ...]) -> str:
    return str(token_ids[0]) if token_ids else "the end"
