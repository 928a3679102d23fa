"""Answers the questions of a chat with a model in this process, or with a server."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from blockdraft.errors import RequestError

if TYPE_CHECKING:
    from blockdraft.bench.endpoint import Endpoint
    from blockdraft.engine.request import Metrics, SamplingParams
    from blockdraft.llm import LLM

Message = dict[str, object]
SILENCE_S = 600.0  # limit without data from the server; equal to our server's own limit
OVERFLOW = "context_length_exceeded"  # OpenAI's error code


@dataclass(slots=True)
class AnswerFigures:
    """Tokens, seconds and drafts of an answer. `steps` is None if unknown."""

    num_tokens: int = 0
    seconds: float = 0.0
    steps: int | None = None
    drafted: int = 0
    accepted: int = 0
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """A piece of an answer. The last one has the figures. The first `num_drafts` of `tokens` were drafts."""

    text: str = ""
    thought: str = ""
    tokens: tuple[str, ...] = ()
    num_drafts: int = 0
    figures: AnswerFigures | None = None


class Answerer(Protocol):
    """Answers a chat. After a BlockdraftError or Ctrl-C it can answer the next question."""

    @property
    def name(self) -> str: ...
    @property
    def has_drafts(self) -> bool:
        """Return whether the model reports which tokens were drafts."""

    def answer(self, messages: Sequence[Message], *, with_drafts: bool) -> Iterator[ChatPiece]: ...


# ---- a model in this process


class LocalModel:
    """An engine in this process."""

    def __init__(self, llm: LLM, sampling: SamplingParams, name: str) -> None:
        self._llm, self._sampling = llm, sampling
        self.name = name
        self.has_drafts = llm.engine.models.draft_name is not None

    def answer(self, messages: Sequence[Message], *, with_drafts: bool) -> Iterator[ChatPiece]:
        from blockdraft.server.api.choices import DraftMarks
        from blockdraft.tool_calls.thoughts import Splitter, begins_inside, find_tags

        tokenizer = self._llm.tokenizer
        prompt_ids = tokenizer.encode_chat(messages)
        marks = DraftMarks(tokenizer, prompt_ids, skip_special_tokens=True) if with_drafts else None
        tags, splitter = find_tags(tokenizer), None
        if tags is not None and not tags.special:  # otherwise the text has no thoughts
            splitter = Splitter(tags, is_inside=begins_inside(tags, tokenizer, prompt_ids))
        with interrupts_between_steps() as check:
            for delta in self._llm.stream(prompt_ids, self._sampling):
                step = None if marks is None else marks.push(delta)
                thought, text = "", delta.text
                if splitter is not None:
                    thought, text = splitter.push(delta.text, delta.finish_reason is not None)
                yield ChatPiece(
                    text=text,
                    thought=thought,
                    tokens=() if step is None else tuple(step["tokens"]),
                    num_drafts=0 if step is None else step["accepted"],
                    figures=_local_figures(delta.metrics, delta.finish_reason),
                )
                check()


def _local_figures(metrics: Metrics | None, finish_reason: str | None) -> AnswerFigures | None:
    if metrics is None:
        return None
    return AnswerFigures(
        num_tokens=metrics.num_tokens,
        seconds=metrics.seconds,
        steps=metrics.steps,
        drafted=metrics.drafted,
        accepted=sum(metrics.accepted),
        finish_reason=finish_reason or "stop",
    )


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C until `check` is called between steps; a second Ctrl-C interrupts at once."""
    is_noted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_noted
        if is_noted:
            raise KeyboardInterrupt
        is_noted = True

    def check() -> None:
        if is_noted:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


# ---- a server's model


class RemoteModel:
    """A model of a server with OpenAI's chat completions API."""

    def __init__(self, endpoint: Endpoint, fields: Mapping[str, object], api_key: str | None) -> None:
        self._endpoint, self._fields, self._api_key = endpoint, fields, api_key
        self.name = f"{endpoint.model} at {urlsplit(endpoint.url).netloc.rpartition('@')[2]}"
        self.has_drafts = endpoint.kind == "blockdraft" and endpoint.is_speculative is not False

    def answer(self, messages: Sequence[Message], *, with_drafts: bool) -> Iterator[ChatPiece]:
        body: Message = {"model": self._endpoint.model, "messages": messages, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self._fields}
        if with_drafts:
            body["speculative"] = {"detail": True}
        begin_s = time.monotonic()
        parts = urlsplit(self._endpoint.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=SILENCE_S)
        try:
            figures, num_chunks = AnswerFigures(), 0
            for chunk in self._chunks(connection, body):
                piece = _read_chunk(chunk, figures)
                num_chunks += bool(piece.text)
                yield piece
            figures.seconds = time.monotonic() - begin_s
            figures.num_tokens = figures.num_tokens or num_chunks  # without usage, count chunks as tokens
            yield ChatPiece(figures=figures)
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{self.name} cannot be reached: {error or type(error).__name__}.") from None
        finally:
            connection.close()

    def _chunks(self, connection: http.client.HTTPConnection, body: Message) -> Iterator[Message]:
        from blockdraft.bench.wire import headers

        path = urlsplit(self._endpoint.url).path + "/v1/chat/completions"
        content = {"content-type": "application/json", "accept": "text/event-stream"}
        connection.request("POST", path, json.dumps(body), headers(self._api_key) | content)
        response = connection.getresponse()
        if response.status != 200:
            raise self._error(response.read())
        for line in response:
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if chunk.get("error"):
                raise self._error(data)
            yield chunk

    def _error(self, body: bytes) -> RequestError:
        from blockdraft.bench.wire import inside, one_line, server_message
        from blockdraft.jsonl import as_object

        message = server_message(body)
        code = inside(as_object(body), "error", "code")
        is_overflow = code == OVERFLOW or "maximum context length" in message
        return RequestError(one_line(message, self._api_key), code=OVERFLOW if is_overflow else None)


def _read_chunk(chunk: Message, figures: AnswerFigures) -> ChatPiece:
    """Return the piece of an answer in one chunk, and note its figures."""
    from blockdraft.bench.speculation import read_chunk
    from blockdraft.bench.wire import inside

    used = inside(chunk, "usage", "completion_tokens")
    figures.num_tokens = used if isinstance(used, int) else figures.num_tokens
    speculation = read_chunk(chunk)
    if speculation is not None:
        figures.steps, figures.drafted = speculation.steps, speculation.drafted
        figures.accepted = sum(speculation.accepted)
    choices = chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    figures.finish_reason = choice.get("finish_reason") or figures.finish_reason
    delta, draft = choice.get("delta") or {}, choice.get("draft") or {}
    return ChatPiece(
        text=delta.get("content") or "",
        thought=delta.get("reasoning_content") or delta.get("reasoning") or "",
        tokens=tuple(draft.get("tokens", ())),
        num_drafts=draft.get("accepted", 0),
    )
