"""Turns the engine's deltas into pieces of an answer, with separate thoughts and tool calls, and counts.

There is one `AnswerChoice` per choice of a request. It keeps everything that a whole answer needs, so that
the same code makes streamed and whole answers.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from blockdraft.engine.request import Delta, Metrics, TokenLogprobs
from blockdraft.server.api.chat import schemas
from blockdraft.server.api.schemas import AnswerEnd
from blockdraft.text.detokenizer import Detokenizer
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls.checking import call_problem
from blockdraft.tool_calls.pieces import FunctionTool, Span
from blockdraft.tool_calls.pieces import ToolCallPiece as ToolCallPiece
from blockdraft.tool_calls.reading import AnswerReader, TagFilter
from blockdraft.tool_calls.thoughts import Splitter, ThoughtCounter

log = logging.getLogger(__name__)


@dataclass(slots=True)
class AnswerPiece:
    """The part of a choice that one step adds. Do not change it; frozen classes are slower to make."""

    spans: tuple[Span, ...]  # thoughts, text and calls in order; the next fields hold them by kind
    text: str
    reasoning: str
    tool_calls: tuple[ToolCallPiece, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    draft: schemas.DraftStep | None
    is_first: bool
    finish_reason: AnswerEnd | None
    stop_reason: str | int | None


@dataclass(slots=True)
class AnswerChoice:
    """One choice, collected delta by delta. Readers and counters that the request does not need are None."""

    index: int
    prompt: int  # which of the request's prompts
    markup: TagFilter | None = None  # removes special tokens that only the server needs
    splitter: Splitter | None = None
    reader: AnswerReader | None = None
    counter: ThoughtCounter | None = None
    drafts: DraftMarks | None = None
    tools: Mapping[str, FunctionTool] = field(default_factory=dict)  # calls of these are checked
    is_dropped: bool = False  # the request asks only for the prompt: the answer is not sent

    pieces: list[AnswerPiece] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    metrics: Metrics | None = None
    num_tokens: int = 0
    invalid_calls: list[schemas.InvalidCall] = field(default_factory=list)  # known when the answer is over

    def push(self, delta: Delta) -> AnswerPiece:
        """Return the piece that `delta` adds, and keep it."""
        is_last = delta.finish_reason is not None
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.metrics is not None:
            self.metrics = delta.metrics
        token_ids = () if self.is_dropped else delta.token_ids
        self.num_tokens += len(token_ids)
        if self.counter is not None:
            self.counter.push(token_ids)
        text, reasoning = "" if self.is_dropped else delta.text, ""
        calls: tuple[ToolCallPiece, ...] = ()
        spans = self._divide(text, is_last)
        if self.markup is not None or self.splitter is not None or self.reader is not None:
            text = "".join([span.text for span in spans if span.kind == "text"])
            reasoning = "".join([span.text for span in spans if span.kind == "reasoning"])
            calls = tuple([span.call for span in spans if span.call is not None])
        piece = AnswerPiece(
            spans=spans,
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            token_ids=token_ids,
            logprobs=() if self.is_dropped else delta.logprobs,
            draft=self.drafts.push(delta) if self.drafts is not None and token_ids else None,
            is_first=not self.pieces,
            finish_reason=self._end(delta),
            stop_reason=None if self.is_dropped else delta.stop_reason,
        )
        self.pieces.append(piece)
        if is_last and self.tools and delta.finish_reason != "length":
            self.invalid_calls = list(self._check_calls())
        return piece

    def _divide(self, text: str, is_last: bool) -> tuple[Span, ...]:
        """Split the text into spans of thoughts, text and calls; no span is empty."""
        reasoning = ""
        if self.markup is not None:
            text = self.markup.push(text, is_last)
        if self.splitter is not None:
            reasoning, text = self.splitter.push(text, is_last)
        if self.reader is not None:
            spans = self.reader.push(text, is_last)
        else:
            spans = (Span("text", text),) if text else ()
        return (Span("reasoning", reasoning), *spans) if reasoning else spans

    def _end(self, delta: Delta) -> AnswerEnd | None:
        """Return the finish reason: "tool_calls" if there was a call and the model ended the answer."""
        if delta.finish_reason is not None and self.is_dropped:
            return "length"
        if delta.finish_reason == "stop" and self.reader is not None and self.reader.num_calls:
            return "tool_calls"
        return delta.finish_reason

    @property
    def seed(self) -> int | None:
        """Return the seed that repeats this choice; None until it has ended."""
        return None if self.metrics is None else self.metrics.seed

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(piece.reasoning for piece in self.pieces)

    @property
    def tool_calls(self) -> list[schemas.ToolCall]:
        """Return the calls, joined from their pieces."""
        calls: list[schemas.ToolCall] = []
        for call in (call for piece in self.pieces for call in piece.tool_calls):
            if call.id is not None:
                function: schemas.CalledFunction = {"name": call.name or "", "arguments": ""}
                calls.append({"id": call.id, "type": "function", "function": function})
            calls[call.index]["function"]["arguments"] += call.arguments
        return calls

    def _check_calls(self) -> Iterator[schemas.InvalidCall]:
        """Yield the calls that do not match their tool's schema. They are sent, and reported as invalid."""
        for index, call in enumerate(self.tool_calls):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            problem = call_problem(arguments, self.tools[name])
            if problem is not None:
                log.warning("a call of '%s' does not match its schema: %s", name, problem)
                yield {"index": index, "error": problem}

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [item for piece in self.pieces for item in piece.logprobs]

    @property
    def draft_steps(self) -> list[schemas.DraftStep]:
        return [piece.draft for piece in self.pieces if piece.draft is not None]

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self.counter is None else self.counter.num_tokens


class DraftMarks:
    """Marks which tokens of each step were accepted drafts. The tokens' texts add up to the answer's text."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Items[int], *, skip_special_tokens: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens)

    def push(self, delta: Delta) -> schemas.DraftStep:
        tokens = [self._detokenizer.push((token_id,)) for token_id in delta.token_ids]
        if delta.finish_reason is not None:
            tokens[-1] += self._detokenizer.flush()
        is_cut = delta.metrics is not None and delta.metrics.is_cut
        return {"tokens": tokens, "accepted": len(tokens) if is_cut else len(tokens) - 1}


# ---- metrics


def request_metrics(found: Items[Metrics], steps: Items[schemas.DraftStep]) -> schemas.RequestMetrics:
    """Return the figures of all choices together, defined as vLLM does ("Per-Request Metrics" of its docs).

    Tokens and steps are summed. Times run from the first choice that began to the last that ended.
    """
    whole = found[0] if len(found) == 1 else _together(found)
    num_gaps = sum([max(0, one.num_tokens - 1) for one in found])
    decoding_s = sum([one.seconds - one.first_token_s for one in found])
    serving_s = whole.seconds - whole.queue_s
    return {
        "time_to_first_token_ms": _ms(whole.first_token_s - whole.queue_s),
        "generation_time_ms": _ms(whole.seconds - whole.first_token_s),
        "queue_time_ms": _ms(whole.queue_s),
        "mean_itl_ms": _ms(decoding_s / num_gaps) if num_gaps > 0 else None,
        "tokens_per_second": round(whole.num_tokens / serving_s, 3) if serving_s > 0 else None,
        "tokens_per_step": round(whole.num_tokens / whole.steps, 4) if whole.steps else None,
        "speculative_decoding": _speculative(whole, steps) if whole.drafted else None,
    }


def _together(found: Items[Metrics]) -> Metrics:
    """Return the sums of all choices; their times from the first that began to the last that ended."""
    return replace(
        found[0],
        num_tokens=sum([one.num_tokens for one in found]),
        steps=sum([one.steps for one in found]),
        drafted=sum([one.drafted for one in found]),
        accepted=_summed([one.accepted for one in found]),
        reached=_summed([one.reached for one in found]),
        queue_s=min([one.queue_s for one in found]),
        first_token_s=min([one.first_token_s for one in found]),
        seconds=max([one.seconds for one in found]),
    )


def _speculative(whole: Metrics, steps: Items[schemas.DraftStep]) -> schemas.SpeculativeMetrics:
    num_accepted = sum(whole.accepted)
    # at_least[i]: steps that accepted i drafts or more
    at_least = (whole.steps, *whole.accepted, 0)
    summary: schemas.SpeculativeMetrics = {
        "mean_acceptance_length": round(1 + num_accepted / whole.steps, 4),
        "draft_acceptance_rate": round(num_accepted / whole.drafted, 4),
        "acceptance_histogram": list(map(operator.sub, at_least, at_least[1:])),
        "num_spec_steps": whole.steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": whole.drafted,
        "num_spec_tokens": len(whole.accepted),
        "reached_by_position": list(whole.reached),
    }
    if steps:
        summary["per_step_accepted"] = [len(step["tokens"]) - 1 for step in steps]
    return summary


def _summed(rows: Items[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sums by position; positions missing in a shorter tuple count as zeros."""
    return tuple([sum(column) for column in zip_longest(*rows, fillvalue=0)])


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
