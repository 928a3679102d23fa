"""The blocking Python API of one Engine. Threads may share an LLM: their requests run in one batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import SupportsIndex
from weakref import WeakValueDictionary

from blockdraft.check.fingerprint import fingerprint
from blockdraft.engine.recheck import Recheck
from blockdraft.engine.request import (
    Delta,
    FinishReason,
    Metrics,
    SamplingParams,
    TokenLogprobs,
    new_request_id,
)
from blockdraft.engine.turns import Turns
from blockdraft.errors import RequestError, warn_caller
from blockdraft.settings.known_names import as_our_settings
from blockdraft.settings.merge import merge_settings
from blockdraft.settings.settings import DEFAULTS
from blockdraft.start.start_engine import plain_engine

Prompt = str | Items[int]
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Result:
    """All n answers to one prompt; `text`, `token_ids` and so on belong to the first answer."""

    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    outputs: tuple[Completion, ...]

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.outputs[0].logprobs

    @property
    def metrics(self) -> Metrics:
        return self.outputs[0].metrics


class LLM:
    """A target with its drafter, ready to answer. `draft` may be None or "none".

    Keyword arguments are settings (docs/settings.md); vLLM's names work too (settings/known_names.py).
    `report` is called with lines of progress and `warn` with warnings for the user. Without `warn`, they are
    Python warnings.
    """

    def __init__(
        self,
        model: str = "default",
        draft: str | None = "auto",
        report: Callable[[str], None] = lambda _: None,
        warn: Callable[[str], None] | None = None,
        **settings: object,
    ) -> None:
        tell = warn if warn is not None else warn_caller
        settings = as_our_settings(settings, tell)
        for name, value in {"model": model, "draft": draft}.items():
            if value != DEFAULTS[name]:  # a default of this signature must not override the recipe
                settings[name] = value
        self.settings = merge_settings(settings, uses_environment=False).settings
        self.engine = plain_engine(self.settings, report, tell)
        self.tokenizer = self.engine.models.tokenizer
        self._recheck = Recheck(self.engine, self.settings.recheck)
        if self.settings.recheck > 0:
            self.engine.fingerprint = fingerprint(self.engine)  # for receipts of answers that differ
        self._turns = Turns()
        self._streams: WeakValueDictionary[str, DeltaStream] = WeakValueDictionary()  # by request id
        self._asked: set[str] = set()  # requests that the engine may have
        self._dropped: deque[str] = deque()  # requests whose stream is closed or gone
        self._is_stepping = False

    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
    ) -> list[Result]:
        """Complete raw prompts (strings or lists of token ids); return the results in the prompts' order."""
        listed = [prompts] if _is_one(prompts) else list(prompts)
        return self._run([self._encode(prompt) for prompt in listed], params)  # type: ignore[arg-type]

    def chat(
        self,
        conversations: Items[Message] | Items[Items[Message]],
        params: SamplingParams | Items[SamplingParams] | None = None,
        **template_kwargs: object,
    ) -> list[Result]:
        """Answer conversations (lists of {"role", "content"}) through the model's chat template."""
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        listed = [conversations] if is_one else list(conversations)
        encode = self.tokenizer.encode_chat
        return self._run([encode(messages, **template_kwargs) for messages in listed], params)  # type: ignore[arg-type]

    def stream(self, prompt: Prompt | Items[Message], params: SamplingParams | None = None) -> DeltaStream:
        """Return a stream of the deltas of one answer. Closing the stream aborts the request."""
        sampling = params if params is not None else self.default_sampling()
        is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        ids = self.tokenizer.encode_chat(prompt) if is_chat else self._encode(prompt)  # type: ignore[arg-type]
        return self._add(ids, sampling)

    def default_sampling(self) -> SamplingParams:
        """Return the sampling that the model's makers recommend, else the defaults."""
        return SamplingParams(**self.engine.models.sampling)  # type: ignore[arg-type]

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _add(self, prompt_ids: Items[int], params: SamplingParams) -> DeltaStream:
        """Add a request to the engine. If its queue is full, run steps until there is space.

        The stream exists before the request: if Ctrl-C interrupts this function, closing the stream ends the
        request.
        """
        stream = DeltaStream(self, params.n)
        self._streams[stream.request_id] = stream
        while True:
            with self._turns.asking():
                if not self.engine.has_work or self.engine.scheduler.has_room(params.n):
                    self._asked.add(stream.request_id)
                    self._recheck.pause()
                    self.engine.add(prompt_ids, params, stream.request_id)
                    return stream
            self._turns.step_unless(lambda: False, self._step)

    def _next(self, stream: DeltaStream) -> Delta:
        """Step the engine until this request has a delta. Other requests' deltas go to their own inboxes."""

        def step() -> None:
            if stream.request_id not in self.engine.live_ids:
                raise RequestError("the request ended early: a step was interrupted. Ask again.")
            self._step()

        while not stream.inbox:
            self._turns.step_unless(lambda: bool(stream.inbox), step)
        return stream.inbox.popleft()

    def _check_again(self) -> None:
        """Compute sampled answers again by plain decoding, until there is other work."""

        def is_over() -> bool:
            return self.engine.has_work or not self._recheck.num_waiting

        def step() -> None:
            self._recheck.step()

        while not is_over():
            self._turns.step_unless(is_over, step)

    def _drop(self, request_id: str) -> None:
        """Forget a stream. If Python calls this during a step, the next step ends the request."""
        if self._streams.pop(request_id, None) is not None:
            self._dropped.append(request_id)
            self._turns.if_free(self._end_dropped)

    def _end_dropped(self) -> None:
        """End every request whose stream is closed or gone."""
        while self._dropped:
            self._end(self._dropped.popleft())
        if len(self._asked) > len(self._streams):  # Ctrl-C came while a stream was closed
            for request_id in self._asked.difference(self._streams.keys()):
                self._end(request_id)

    def _end(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self._asked.discard(request_id)

    def _step(self) -> None:
        if self._is_stepping:  # a step was interrupted, and some of its deltas are lost
            self.engine.recover()
        self._is_stepping = True
        self._end_dropped()
        for delta in self.engine.step():
            if (stream := self._streams.get(delta.request_id)) is not None:
                stream.inbox.append(delta)
        self._is_stepping = False

    def _run(
        self, prompts: list[list[int]], params: SamplingParams | Items[SamplingParams] | None
    ) -> list[Result]:
        if params is None or isinstance(params, SamplingParams):
            params = [params if params is not None else self.default_sampling()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(params)} sampling parameters.")
        streams: list[DeltaStream] = []
        try:
            for prompt, sampling in zip(prompts, params, strict=True):
                streams.append(self._add(prompt, sampling))
            deltas = [list(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        rows = zip(prompts, params, deltas, strict=True)
        return [_result(prompt, sampling, pieces) for prompt, sampling, pieces in rows]


class DeltaStream:
    """An iterator over the deltas of one request. Closing or dropping it aborts the request."""

    _num_left = 0  # choices that have not ended; 0 until __init__ is complete

    def __init__(self, llm: LLM, num_choices: int) -> None:
        self.request_id = new_request_id()
        self.inbox: deque[Delta] = deque()  # deltas that were not read yet
        self._llm = llm
        self._num_left = num_choices

    def __iter__(self) -> DeltaStream:
        return self

    def __next__(self) -> Delta:
        if self._num_left == 0:
            self._llm._check_again()
            raise StopIteration
        try:
            delta = self._llm._next(self)
            self._num_left -= delta.finish_reason is not None
            if self._num_left == 0:
                self.close()
            return delta
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._num_left = 0
        self._llm._drop(self.request_id)

    def __del__(self) -> None:
        if self._num_left:
            self.close()


def _is_one(prompts: Prompt | Items[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], SupportsIndex))


def _result(prompt_ids: list[int], params: SamplingParams, deltas: list[Delta]) -> Result:
    outputs = []
    for index in range(params.n):
        mine = [delta for delta in deltas if delta.index == index]
        last = mine[-1]
        assert last.finish_reason is not None
        assert last.metrics is not None
        logprobs = tuple(item for delta in mine for item in delta.logprobs)
        outputs.append(
            Completion(
                text="".join(delta.text for delta in mine),
                token_ids=tuple(token for delta in mine for token in delta.token_ids),
                finish_reason=last.finish_reason,
                stop_reason=last.stop_reason,
                logprobs=None if params.logprobs is None else logprobs,
                metrics=last.metrics,
            )
        )
    prompt_logprobs = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs), None)
    return Result(tuple(prompt_ids), prompt_logprobs, tuple(outputs))
