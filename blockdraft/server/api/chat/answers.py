"""Writes the answers of /v1/chat/completions and /v1/completions, whole or as a stream of chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import ClassVar

from blockdraft.engine.request import Delta, TokenLogprobs
from blockdraft.server.api.chat import schemas
from blockdraft.server.api.chat.fields import ChatRequest, CompletionRequest
from blockdraft.server.api.chat.logprobs import TextOffsets, chat_logprobs, prompt_logprobs, text_logprobs
from blockdraft.server.api.chat.prepare import PreparedChat, draft_marks
from blockdraft.server.api.choices import AnswerChoice, AnswerPiece, ToolCallPiece, request_metrics
from blockdraft.server.api.receipts import OnEnd
from blockdraft.server.api.schemas import AnswerObject, Usage
from blockdraft.server.api.streaming import Writer
from blockdraft.server.http.large_json import LARGE_ANSWER, MadeLate, event_in_slices, size_of
from blockdraft.server.http.replies import DONE, error_body, event, json_of
from blockdraft.text.tokenizer import Tokenizer

Json = dict[str, object]
TEXT_GOES_HERE = "\ue000text\ue000"  # a chunk's text, found nowhere else in the chunk


class AnswerWriter(Writer):
    """One answer, made of the engine's deltas: its choices, and the objects around them."""

    KIND: ClassVar[str]  # `object` of a whole answer
    CHUNK_KIND: ClassVar[str]  # and of a chunk

    def __init__(
        self,
        asked: ChatRequest | CompletionRequest,
        *,
        head: AnswerObject,
        tokenizer: Tokenizer,
        prompts: Items[Items[int]],
        choices: list[AnswerChoice],
        on_end: OnEnd | None = None,
    ) -> None:
        self._on_end = on_end
        self._options = asked
        self._head = head
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._choices = choices  # all of the first prompt, then all of the second, and so on
        self._shows_more = asked.return_token_ids or asked.has_running_usage  # in every chunk
        self._size = 0  # of the deltas that `take` got
        self._around_text: dict[int, tuple[str, str]] = {}  # by choice: an event before and after its text

    def take(self, prompt: int, delta: Delta) -> None:
        self._push(self._choice(prompt, delta), delta)
        self._size += size_of(delta)

    def _push(self, choice: AnswerChoice, delta: Delta) -> None:
        choice.push(delta)
        if delta.finish_reason is not None and self._on_end is not None and not choice.is_dropped:
            self._on_end(choice, delta.finish_reason)

    def whole(self) -> Json:
        made = map(self._whole_choice, self._choices)
        choices = list(made) if self._size <= LARGE_ANSWER else MadeLate(made)
        return self._object(self.KIND, choices) | {"usage": self.usage(), "metrics": self._metrics()}

    def event(self, prompt: int, delta: Delta) -> str | None:
        choice = self._choice(prompt, delta)
        ahead = [] if choice.pieces else self._first_chunks(choice)
        self._push(choice, delta)
        piece = choice.pieces[-1]
        if self._is_text_only(piece):
            return self._text_event(choice, piece)
        chunk = self._news(choice, piece)
        chunks = ahead if chunk is None else [*ahead, chunk]
        # A prompt has many log-probabilities, and no call may hold the interpreter's lock for long.
        written = event if delta.prompt_logprobs is None else event_in_slices
        return "".join(map(written, chunks)) or None

    @property
    def first_choice(self) -> AnswerChoice:
        """Return the first choice; Responses and Messages have no others."""
        return self._choices[0]

    def _choice(self, prompt: int, delta: Delta) -> AnswerChoice:
        return self._choices[prompt * self._options.n + delta.index]

    def _is_text_only(self, piece: AnswerPiece) -> bool:
        """Return whether the piece's chunk differs from others of its choice only by its text."""
        if piece.is_first or piece.finish_reason is not None or not piece.text:
            return False
        if piece.reasoning or piece.tool_calls:
            return False
        return not (self._shows_more or piece.logprobs or piece.draft)

    def _text_event(self, choice: AnswerChoice, piece: AnswerPiece) -> str:
        """Return the event of a piece that is only text; what surrounds the text is made once per choice."""
        if choice.index not in self._around_text:
            marked = event(self._chunk(self._part(choice, replace(piece, text=TEXT_GOES_HERE))))
            before, _, after = marked.partition(json_of(TEXT_GOES_HERE))
            self._around_text[choice.index] = before, after
        before, after = self._around_text[choice.index]
        return before + json_of(piece.text) + after

    def _news(self, choice: AnswerChoice, piece: AnswerPiece) -> Json | None:
        """Return the chunk of a piece; None if it has nothing to send."""
        is_end = piece.finish_reason is not None
        has_ids = self._options.return_token_ids and bool(piece.token_ids)
        if not (is_end or has_ids or piece.draft is not None or self._has_news(choice, piece)):
            return None
        part = self._part(choice, piece)
        if is_end:
            part["stop_reason"] = piece.stop_reason
            part["seed"] = choice.seed
        if self._options.return_token_ids:
            part["token_ids"] = list(piece.token_ids)
        if piece.draft is not None:
            part["draft"] = piece.draft
        return self._chunk(part, is_end=is_end)

    def end(self) -> str:
        last = self.last_chunk()
        return DONE if last is None else event(last) + DONE

    def failed(self, message: str) -> str:
        return event(error_body(message, kind="server_error")) + DONE

    def last_chunk(self) -> Json | None:
        """Return the chunk with the usage; None if the request does not ask for usage."""
        if not self._options.include_usage:
            return None
        chunk = self._object(self.CHUNK_KIND, []) | {"usage": self.usage()}
        return chunk if (metrics := self._metrics()) is None else chunk | {"metrics": metrics}

    def _first_chunks(self, choice: AnswerChoice) -> list[Json]:
        """Return the chunks to send before a choice's first piece."""
        return []

    @abstractmethod
    def _has_news(self, choice: AnswerChoice, piece: AnswerPiece) -> bool:
        """Return whether the piece has text to send, or log-probabilities that the request asks for."""

    @abstractmethod
    def _part(self, choice: AnswerChoice, piece: AnswerPiece) -> schemas.ChunkChoice:
        """Return a piece as part of a chunk, without the fields that both kinds of answers share."""

    @abstractmethod
    def _whole_choice(self, choice: AnswerChoice) -> schemas.ChatChoice | schemas.TextChoice: ...

    def _chunk(self, part: schemas.ChunkChoice, *, is_end: bool = False) -> Json:
        chunk = self._object(self.CHUNK_KIND, [part])
        if self._options.include_usage:
            chunk["usage"] = self.usage() if self._options.has_running_usage else None
        elif is_end and (metrics := self._metrics()) is not None:
            chunk["metrics"] = metrics
        return chunk

    def _object(self, kind: str, choices: Items[Mapping[str, object]] | MadeLate) -> Json:
        head = self._head
        return {
            "id": head["id"],
            "object": kind,
            "created": head["created"],
            "model": head["model"],
            "system_fingerprint": head["system_fingerprint"],
            "choices": choices,
        }

    def usage(self) -> Usage:
        """Return the usage so far. Cached tokens are known when the first choice of each prompt has ended."""
        firsts = {choice.prompt: choice.metrics for choice in reversed(self._choices)}
        known = [metrics.num_cached_tokens for metrics in firsts.values() if metrics is not None]
        num_prompt = sum(len(prompt) for prompt in self._prompts)
        num_output = sum(choice.num_tokens for choice in self._choices)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in self._choices)
        is_known = len(known) == len(self._prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(known)} if is_known else None,
            "completion_tokens_details": {"reasoning_tokens": num_reasoning},
        }

    def _metrics(self) -> schemas.RequestMetrics | None:
        """Return the figures of all choices; None until all have ended, or if nothing was generated."""
        found = [choice.metrics for choice in self._choices if choice.metrics is not None]
        if len(found) < len(self._choices) or self._choices[0].is_dropped:
            return None
        return request_metrics(found, [step for choice in self._choices for step in choice.draft_steps])


class ChatAnswer(AnswerWriter):
    """One chat completion."""

    KIND = "chat.completion"
    CHUNK_KIND = "chat.completion.chunk"

    def __init__(self, prepared: PreparedChat, *, head: AnswerObject, on_end: OnEnd | None = None) -> None:
        super().__init__(
            prepared.asked,
            head=head,
            tokenizer=prepared.dialect.tokenizer,
            prompts=[prepared.prompt_ids],
            choices=prepared.choices(),
            on_end=on_end,
        )
        self._asked = prepared.asked

    def whole(self) -> Json:
        asked, answer = self._asked, super().whole()
        if asked.prompt_logprobs is not None:
            items = self._choices[0].prompt_logprobs or ()
            answer["prompt_logprobs"] = prompt_logprobs(items, asked.prompt_logprobs, self._tokenizer)
        if asked.return_token_ids:
            answer["prompt_token_ids"] = list(self._prompts[0])
        return answer

    def _whole_choice(self, choice: AnswerChoice) -> schemas.ChatChoice:
        text, reasoning, calls = choice.text, choice.reasoning, choice.tool_calls
        message: schemas.ChatMessage = {
            "role": "assistant",
            "content": None if (reasoning or calls) and not text else text,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        if reasoning and self._asked.include_reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        if self._asked.speculative.detail:
            message["draft"] = choice.draft_steps
        answer: schemas.ChatChoice = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.pieces[-1].finish_reason,
            "stop_reason": choice.pieces[-1].stop_reason,
            "seed": choice.seed,
        }
        if self._asked.return_token_ids:
            answer["token_ids"] = choice.token_ids
        if choice.invalid_calls:
            answer["invalid_tool_calls"] = choice.invalid_calls
        return answer

    def _first_chunks(self, choice: AnswerChoice) -> list[Json]:
        """Return the chunk with the role. It waits for the first token, as clients time their first event."""
        part: schemas.ChatChunkChoice = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._chunk(part)
        if self._asked.return_token_ids:
            chunk["prompt_token_ids"] = list(self._prompts[0])
        return [chunk]

    def _has_news(self, choice: AnswerChoice, piece: AnswerPiece) -> bool:
        has_logprobs = self._asked.logprobs and bool(piece.logprobs)
        return has_logprobs or bool(piece.text or piece.tool_calls or self._reasoning(piece))

    def _part(self, choice: AnswerChoice, piece: AnswerPiece) -> schemas.ChatChunkChoice:
        delta: schemas.ChatDelta = {}
        if reasoning := self._reasoning(piece):
            delta["reasoning_content"] = delta["reasoning"] = reasoning
        if piece.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.tool_calls]
        if piece.text or (piece.finish_reason is None and not (reasoning or piece.tool_calls)):
            delta["content"] = piece.text
        part: schemas.ChatChunkChoice = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(piece.logprobs),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None and choice.invalid_calls:
            part["invalid_tool_calls"] = choice.invalid_calls
        return part

    def _reasoning(self, piece: AnswerPiece) -> str:
        return piece.reasoning if self._asked.include_reasoning else ""

    def _logprobs(self, items: Items[TokenLogprobs]) -> schemas.ChatLogprobs | None:
        return chat_logprobs(items, self._tokenizer) if self._asked.logprobs else None


def _call_delta(piece: ToolCallPiece) -> schemas.ToolCallDelta:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function: schemas.FunctionDelta = {"name": piece.name or "", "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


class TextAnswer(AnswerWriter):
    """One plain completion of one or many prompts. `texts` are the prompts as text, for an echo."""

    KIND = CHUNK_KIND = "text_completion"

    def __init__(
        self,
        asked: CompletionRequest,
        *,
        head: AnswerObject,
        tokenizer: Tokenizer,
        prompts: Items[Items[int]],
        texts: Items[str],
        on_end: OnEnd | None = None,
    ) -> None:
        choices = [
            AnswerChoice(
                index=prompt * asked.n + number,
                prompt=prompt,
                drafts=draft_marks(asked, tokenizer, prompts[prompt]),
                is_dropped=asked.is_scoring,
            )
            for prompt in range(len(prompts))
            for number in range(asked.n)
        ]
        super().__init__(
            asked, head=head, tokenizer=tokenizer, prompts=prompts, choices=choices, on_end=on_end
        )
        self._asked = asked
        self._texts = texts
        self._offsets: dict[int, TextOffsets] = {}  # by choice, from its first piece on

    def _whole_choice(self, choice: AnswerChoice) -> schemas.TextChoice:
        asked = self._asked
        part: schemas.TextChoice = {
            "index": choice.index,
            "text": self._echo(choice) + choice.text,
            "logprobs": self._logprobs(choice, choice.logprobs, has_prompt=True),
            "finish_reason": choice.pieces[-1].finish_reason,
            "stop_reason": choice.pieces[-1].stop_reason,
            "seed": choice.seed,
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

    def _has_news(self, choice: AnswerChoice, piece: AnswerPiece) -> bool:
        has_logprobs = self._asked.logprobs is not None and bool(piece.logprobs)
        return has_logprobs or bool(piece.text or (piece.is_first and self._echo(choice)))

    def _part(self, choice: AnswerChoice, piece: AnswerPiece) -> schemas.TextChunkChoice:
        part: schemas.TextChunkChoice = {
            "index": choice.index,
            "text": self._echo(choice) + piece.text if piece.is_first else piece.text,
            "logprobs": self._logprobs(choice, piece.logprobs, has_prompt=piece.is_first),
            "finish_reason": piece.finish_reason,
        }
        if self._asked.return_token_ids and piece.is_first:
            part["prompt_token_ids"] = list(self._prompts[choice.prompt])
        return part

    def _echo(self, choice: AnswerChoice) -> str:
        return self._texts[choice.prompt] if self._asked.echo else ""

    def _logprobs(
        self, choice: AnswerChoice, items: Items[TokenLogprobs], *, has_prompt: bool
    ) -> schemas.TextLogprobs | None:
        if self._asked.logprobs is None:
            return None
        rows = [(item.token_id, item) for item in items]
        found = self._table(rows, self._offsets_of(choice))
        if not (has_prompt and self._asked.echo):
            return found
        ids, echo = self._prompts[choice.prompt], self._echo(choice)
        prompt = list(zip(ids, choice.prompt_logprobs or (), strict=True))
        ahead = self._table(prompt, TextOffsets(self._tokenizer, (), echo=echo))
        return {
            "tokens": ahead["tokens"] + found["tokens"],
            "token_logprobs": ahead["token_logprobs"] + found["token_logprobs"],
            "top_logprobs": ahead["top_logprobs"] + found["top_logprobs"],
            "text_offset": ahead["text_offset"] + found["text_offset"],
        }

    def _table(
        self, rows: Items[tuple[int, TokenLogprobs | None]], offsets: TextOffsets
    ) -> schemas.TextLogprobs:
        assert self._asked.logprobs is not None
        return text_logprobs(rows, num_top=self._asked.logprobs, offsets=offsets, tokenizer=self._tokenizer)

    def _offsets_of(self, choice: AnswerChoice) -> TextOffsets:
        if choice.index not in self._offsets:
            self._offsets[choice.index] = TextOffsets(
                self._tokenizer,
                self._prompts[choice.prompt],
                start=len(self._echo(choice)),
                skip_special_tokens=self._asked.skip_special_tokens,
            )
        return self._offsets[choice.index]
