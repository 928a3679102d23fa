"""Writes the answers of /v1/chat/completions and /v1/completions, whole or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from blockdraft.engine.request import Delta, TokenLogprobs
from blockdraft.server.fields import ChatRequest, CompletionRequest
from blockdraft.server.pieces import (
    Choice,
    DraftView,
    Piece,
    chat_logprobs,
    prompt_logprobs,
    request_metrics,
    text_logprobs,
)
from blockdraft.server.reasoning import Splitter, Tags, ThoughtCounter, begins_inside, continues_inside
from blockdraft.server.shapes import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    RequestMetrics,
    TextChoice,
    TextChunk,
    TextChunkChoice,
    TextCompletion,
    TextLogprobs,
    Usage,
)
from blockdraft.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Head:
    """What all objects of one answer repeat."""

    id: str
    created: int  # seconds since 1970
    model: str


def usage(choices: Items[Choice], prompts: Items[Items[int]]) -> Usage:
    """The cost so far. Cached tokens are known once the first choice of every prompt has ended."""
    firsts = {choice.prompt: choice.metrics for choice in reversed(choices)}
    known = [metrics.num_cached_tokens for metrics in firsts.values() if metrics is not None]
    num_prompt = sum(len(prompt) for prompt in prompts)
    num_output = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(known)} if len(known) == len(prompts) else None,
        "completion_tokens_details": {"reasoning_tokens": sum(c.num_reasoning_tokens for c in choices)},
    }


def _metrics(choices: Items[Choice]) -> RequestMetrics | None:
    """Of a single choice only: the times of several cannot be told apart."""
    metrics = choices[0].metrics
    if len(choices) > 1 or metrics is None:
        return None
    return request_metrics(metrics, choices[0].draft_steps)


def _drafts(
    asked: ChatRequest | CompletionRequest, tokenizer: Tokenizer, prompt_ids: Items[int]
) -> DraftView | None:
    if not asked.speculative.detail:
        return None
    return DraftView(tokenizer, prompt_ids, skip_special_tokens=asked.skip_special_tokens)


class ChatAnswer:
    """One chat completion, fed with the engine's deltas. `tags`: those of a thinking model."""

    def __init__(
        self,
        asked: ChatRequest,
        *,
        head: Head,
        tokenizer: Tokenizer,
        prompt_ids: Items[int],
        tags: Tags | None,
    ) -> None:
        self._asked = asked
        self._head = head
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._choices = [self._choice(index, tags) for index in range(asked.n)]

    def _choice(self, index: int, tags: Tags | None) -> Choice:
        drafts = _drafts(self._asked, self._tokenizer, self._prompt_ids)
        if tags is None:
            return Choice(index=index, prompt=0, drafts=drafts)
        if self._asked.continue_final_message:
            is_inside = continues_inside(self._asked.messages[-1])
        else:
            is_inside = begins_inside(self._tokenizer, self._prompt_ids)
        return Choice(
            index=index,
            prompt=0,
            splitter=Splitter(is_inside=is_inside),
            counter=ThoughtCounter(tags, self._tokenizer, is_inside=is_inside),
            drafts=drafts,
        )

    def take(self, prompt: int, delta: Delta) -> None:
        """Remember a delta for `whole`; `prompt` says which prompt it answers."""
        self._choices[delta.index].push(delta)

    def push(self, prompt: int, delta: Delta) -> ChatChunk | None:
        """Take a delta in. The chunk to stream, or None if it shows nothing."""
        choice = self._choices[delta.index]
        piece = choice.push(delta)
        reasoning = piece.reasoning if self._asked.include_reasoning else ""
        is_asked = (
            (self._asked.logprobs and piece.logprobs)
            or (self._asked.return_token_ids and piece.token_ids)
            or piece.draft is not None
        )
        if not (piece.text or reasoning or piece.finish_reason is not None or is_asked):
            return None
        content: ChatDelta = {}
        if reasoning:
            content["reasoning_content"] = content["reasoning"] = reasoning
        if piece.text or (piece.finish_reason is None and not reasoning):
            content["content"] = piece.text
        return self._chunk(
            [self._chunk_choice(choice.index, content, piece)], piece.finish_reason is not None
        )

    def _chunk_choice(self, index: int, content: ChatDelta, piece: Piece) -> ChatChunkChoice:
        part: ChatChunkChoice = {
            "index": index,
            "delta": content,
            "logprobs": chat_logprobs(piece.logprobs, self._tokenizer) if self._asked.logprobs else None,
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            part["stop_reason"] = piece.stop_reason
        if self._asked.return_token_ids:
            part["token_ids"] = list(piece.token_ids)
        if piece.draft is not None:
            part["draft"] = piece.draft
        return part

    def first_chunks(self) -> Iterator[ChatChunk]:
        """Say who speaks, before there is text."""
        for choice in self._choices:
            chunk = self._chunk(
                [
                    {
                        "index": choice.index,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ]
            )
            if self._asked.return_token_ids:
                chunk["prompt_token_ids"] = list(self._prompt_ids)
            yield chunk

    def last_chunk(self) -> ChatChunk | None:
        """The usage, if it was asked for."""
        if not self._asked.include_usage:
            return None
        chunk = self._chunk([])
        chunk["usage"] = usage(self._choices, [self._prompt_ids])
        if (metrics := _metrics(self._choices)) is not None:
            chunk["metrics"] = metrics
        return chunk

    def _chunk(self, choices: list[ChatChunkChoice], is_end: bool = False) -> ChatChunk:
        chunk: ChatChunk = {
            "id": self._head.id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }
        if self._asked.include_usage:
            is_running = self._asked.has_running_usage
            chunk["usage"] = usage(self._choices, [self._prompt_ids]) if is_running else None
        elif is_end and (metrics := _metrics(self._choices)) is not None:
            chunk["metrics"] = metrics
        return chunk

    def whole(self) -> ChatCompletion:
        """The complete answer, when all deltas are in."""
        answer: ChatCompletion = {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._whole_choice(choice) for choice in self._choices],
            "usage": usage(self._choices, [self._prompt_ids]),
            "metrics": _metrics(self._choices),
        }
        if self._asked.prompt_logprobs is not None:
            items = self._choices[0].prompt_logprobs or ()
            answer["prompt_logprobs"] = prompt_logprobs(items, self._asked.prompt_logprobs, self._tokenizer)
        if self._asked.return_token_ids:
            answer["prompt_token_ids"] = list(self._prompt_ids)
        return answer

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        text, reasoning = choice.text, choice.reasoning
        message: ChatMessage = {
            "role": "assistant",
            "content": None if reasoning and not text else text,
            "refusal": None,
        }
        if reasoning and self._asked.include_reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        if self._asked.speculative.detail:
            message["draft"] = choice.draft_steps
        answer: ChatChoice = {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs, self._tokenizer) if self._asked.logprobs else None,
            "finish_reason": choice.pieces[-1].finish_reason,
            "stop_reason": choice.pieces[-1].stop_reason,
        }
        if self._asked.return_token_ids:
            answer["token_ids"] = choice.token_ids
        return answer


class TextAnswer:
    """One plain completion of one or many prompts. `texts` are the prompts to repeat when echoed."""

    def __init__(
        self,
        asked: CompletionRequest,
        *,
        head: Head,
        tokenizer: Tokenizer,
        prompts: Items[Items[int]],
        texts: Items[str],
    ) -> None:
        self._asked = asked
        self._head = head
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._texts = texts
        self._choices = [
            Choice(
                index=prompt * asked.n + number,
                prompt=prompt,
                drafts=_drafts(asked, tokenizer, prompts[prompt]),
                is_dropped=asked.is_scoring,
            )
            for prompt in range(len(prompts))
            for number in range(asked.n)
        ]
        self._offsets = [0] * len(self._choices)  # of the text streamed so far

    def take(self, prompt: int, delta: Delta) -> None:
        """Remember a delta for `whole`; `prompt` says which prompt it answers."""
        self._choices[prompt * self._asked.n + delta.index].push(delta)

    def push(self, prompt: int, delta: Delta) -> TextChunk | None:
        """Take a delta in. The chunk to stream, or None if it shows nothing."""
        choice = self._choices[prompt * self._asked.n + delta.index]
        piece = choice.push(delta)
        text = self._echo(choice) + piece.text if piece.is_first else piece.text
        has_logprobs = self._asked.logprobs is not None and bool(piece.logprobs)
        has_ids = self._asked.return_token_ids and bool(piece.token_ids)
        is_shown = text or piece.finish_reason is not None or piece.draft is not None
        if not (is_shown or has_logprobs or has_ids):
            return None
        part: TextChunkChoice = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, piece.logprobs, has_prompt=piece.is_first),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            part["stop_reason"] = piece.stop_reason
        if self._asked.return_token_ids:
            part["token_ids"] = list(piece.token_ids)
            if piece.is_first:
                part["prompt_token_ids"] = list(self._prompts[prompt])
        if piece.draft is not None:
            part["draft"] = piece.draft
        return self._chunk([part], piece.finish_reason is not None)

    def first_chunks(self) -> Iterator[TextChunk]:
        """None: there is no role to announce."""
        return iter(())

    def last_chunk(self) -> TextChunk | None:
        """The usage, if it was asked for."""
        if not self._asked.include_usage:
            return None
        chunk = self._chunk([])
        chunk["usage"] = usage(self._choices, self._prompts)
        if (metrics := _metrics(self._choices)) is not None:
            chunk["metrics"] = metrics
        return chunk

    def _chunk(self, choices: list[TextChunkChoice], is_end: bool = False) -> TextChunk:
        chunk: TextChunk = {
            "id": self._head.id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }
        if self._asked.include_usage:
            chunk["usage"] = usage(self._choices, self._prompts) if self._asked.has_running_usage else None
        elif is_end and (metrics := _metrics(self._choices)) is not None:
            chunk["metrics"] = metrics
        return chunk

    def whole(self) -> TextCompletion:
        """The complete answer, when all deltas are in."""
        return {
            "id": self._head.id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._whole_choice(choice) for choice in self._choices],
            "usage": usage(self._choices, self._prompts),
            "metrics": _metrics(self._choices),
        }

    def _whole_choice(self, choice: Choice) -> TextChoice:
        asked = self._asked
        part: TextChoice = {
            "index": choice.index,
            "text": self._echo(choice) + choice.text,
            "logprobs": self._logprobs(choice, choice.logprobs, has_prompt=True),
            "finish_reason": choice.pieces[-1].finish_reason,
            "stop_reason": choice.pieces[-1].stop_reason,
        }
        if asked.return_token_ids:
            part["token_ids"] = choice.token_ids
            part["prompt_token_ids"] = list(self._prompts[choice.prompt])
        if asked.prompt_logprobs is not None:
            items = choice.prompt_logprobs or ()
            part["prompt_logprobs"] = prompt_logprobs(items, asked.prompt_logprobs, self._tokenizer)
        if asked.speculative.detail:
            part["draft"] = choice.draft_steps
        return part

    def _echo(self, choice: Choice) -> str:
        return self._texts[choice.prompt] if self._asked.echo else ""

    def _logprobs(
        self, choice: Choice, items: Items[TokenLogprobs], *, has_prompt: bool
    ) -> TextLogprobs | None:
        if self._asked.logprobs is None:
            return None
        rows: list[tuple[int, TokenLogprobs | None]] = [(item.token_id, item) for item in items]
        if has_prompt and self._asked.echo:
            prompt = zip(self._prompts[choice.prompt], choice.prompt_logprobs or (), strict=True)
            rows = [*prompt, *rows]
        logprobs = text_logprobs(
            rows,
            num_top=self._asked.logprobs,
            offset=self._offsets[choice.index],
            tokenizer=self._tokenizer,
        )
        self._offsets[choice.index] += sum(len(token) for token in logprobs["tokens"])
        return logprobs
