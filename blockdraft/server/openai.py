"""OpenAI's chat wire format: what a request may hold, and the objects that answer it. No HTTP here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError

from blockdraft.engine.request import Delta, Metrics, SamplingParams, TokenLogprobs
from blockdraft.engine.tokenizer import REPLACEMENT, Tokenizer
from blockdraft.errors import RequestError

Json = dict[str, object]

DONE = "data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # JSON has no -inf; vLLM's stand-in

# Fields that would change the answer, with the values that ask for nothing. Null always asks for nothing.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),  # without tools, auto is none
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class FieldError(RequestError):
    """A request field that cannot be used; `param` is its name, as in OpenAI's errors."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of POST /v1/chat/completions. Defaults are OpenAI's; ranges are SamplingParams'."""

    model_config = ConfigDict(strict=True, extra="ignore")

    messages: list[dict[str, object]]
    model: str | None = None
    max_tokens: int | None = None  # the old name of max_completion_tokens, which wins
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    n: int = 1
    logprobs: bool = False
    top_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> SamplingParams:
        """RequestError for values out of range."""
        is_new = self.max_completion_tokens is not None
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={_token_id(key): value for key, value in self.logit_bias.items()},
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            max_tokens=self.max_completion_tokens if is_new else self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


def parse_chat(body: bytes) -> ChatRequest:
    """Read a request, or say with RequestError what is wrong with it."""
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON ({error}): send a JSON object.") from None
    if not isinstance(fields, dict):
        raise RequestError(f"the body is a JSON {type(fields).__name__}: send an object.")
    given = {name: value for name, value in fields.items() if value is not None}
    for name, neutral in _UNSUPPORTED.items():
        if name in given and given[name] not in neutral:
            raise FieldError(f"'{name}' is not supported yet: leave it out.", name)
    try:
        chat = ChatRequest.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FieldError(f"'{where}': {first['msg']}.", str(first["loc"][0])) from None
    if chat.top_logprobs is not None and not chat.logprobs:
        raise FieldError("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    if chat.stream_options is not None and not chat.stream:
        raise FieldError("'stream_options' needs 'stream': true.", "stream_options")
    return chat


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 11):
        raise FieldError(f"logit_bias has the key '{key}': use token ids, as strings.", "logit_bias")
    return int(key)


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(data: Json) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def usage(metrics: Items[Metrics]) -> Json:
    """The cost of all choices together; their prompt counts once."""
    num_prompt = metrics[0].num_prompt_tokens
    num_output = sum(item.num_tokens for item in metrics)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": metrics[0].num_cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class Answer:
    """Writes the objects of one answer, which all repeat its id, time and model."""

    id: str
    created: int  # seconds since 1970
    model: str
    tokenizer: Tokenizer
    has_logprobs: bool
    has_usage: bool

    def completion(self, deltas: Items[Delta]) -> Json:
        """The whole answer, made of all deltas of all choices."""
        num_choices = 1 + max(delta.index for delta in deltas)
        choices = [[d for d in deltas if d.index == index] for index in range(num_choices)]
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(mine) for mine in choices],
            "usage": usage([mine[-1].metrics for mine in choices if mine[-1].metrics is not None]),
        }

    def first_chunk(self, index: int) -> Json:
        """Says who speaks, before there is text."""
        return self._chunk([_chunk_choice(index, {"role": "assistant", "content": ""})])

    def chunk(self, delta: Delta) -> Json:
        logprobs = self._logprobs(delta.logprobs)
        content: Json = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        return self._chunk([_chunk_choice(delta.index, content, logprobs, delta.finish_reason)])

    def usage_chunk(self, metrics: Items[Metrics]) -> Json:
        return {**self._chunk([]), "usage": usage(metrics)}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head("chat.completion.chunk"), "choices": choices}
        return {**chunk, "usage": None} if self.has_usage else chunk

    def _choice(self, deltas: Items[Delta]) -> Json:
        text = "".join(delta.text for delta in deltas)
        return {
            "index": deltas[0].index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs([item for delta in deltas for item in delta.logprobs]),
            "finish_reason": deltas[-1].finish_reason,
        }

    def _logprobs(self, items: Iterable[TokenLogprobs]) -> Json | None:
        if not self.has_logprobs:
            return None
        content = [
            {
                **self._token(item.token_id, item.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in item.top],
            }
            for item in items
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        # A token may be a part of a character: then its bytes are not those of its text.
        spelled = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": max(MIN_LOGPROB, logprob), "bytes": spelled}


def _chunk_choice(
    index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None
) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
