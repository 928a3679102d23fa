"""Sends one question to one server as a given form of request, and retries while the server is busy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self, TypeVar

import aiohttp

from blockdraft.bench import wire
from blockdraft.bench.endpoint import Endpoint
from blockdraft.bench.wire import Json, inside
from blockdraft.jsonl import as_object
from blockdraft.prove.questions import ProveQuestion

T = TypeVar("T")
Read = Callable[[aiohttp.ClientResponse], Awaitable[T]]
BUSY = (429, 503)  # statuses that mean: try again later
PATIENCE_S = 300.0  # longest time to retry one question; arbitrary
MAX_PAUSE_S = 30.0
NUM_TOP = 2  # likeliest tokens to request: enough to see how close a tie was


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a request. The default is not streamed, with one choice, with drafts and a new salt."""

    has_drafts: bool = True
    is_streamed: bool = False
    has_logprobs: bool = False
    num_choices: int = 1
    salt: str | None = None  # for the prefix cache; None for a new salt per request
    seed_step: int = 0  # added to the question's seed
    said: Mapping[str, float] | None = None  # None: the question's temperature, top_p 1


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer and the log-probabilities of the two likeliest tokens in its place."""

    text: str
    tops: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class GivenAnswer:
    """One answer."""

    text: str = ""  # including thoughts
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)  # empty if log-probabilities were not requested

    def add(self, part: Mapping[str, object], logprobs: object) -> None:
        """Add a message or a delta, with the log-probabilities of its tokens."""
        for name in ("reasoning_content", "reasoning", "content"):
            piece = part.get(name)
            self.text += piece if isinstance(piece, str) else ""
        entries = inside(logprobs, "content")
        for entry in entries if isinstance(entries, list) else ():
            tops = inside(entry, "top_logprobs")
            self.tokens.append(Token(str(inside(entry, "token")), tuple(_tops(tops))))


@dataclass(slots=True)
class Reply:
    """The answer to one request: its choices, or an error."""

    choices: list[GivenAnswer] = field(default_factory=list)
    id: str | None = None
    num_cached: int | None = None  # prompt tokens found in the prefix cache; None if not reported
    error: str | None = None


class _Busy(Exception):
    """The server is busy. `pause_s` is the pause that it requests, if any."""

    def __init__(self, text: str, pause_s: float | None) -> None:
        super().__init__(text)
        self.pause_s = pause_s


class Refused(Exception):
    """The server answered with an error."""


class Asker:
    """A client of one server, used as a context manager."""

    def __init__(self, endpoint: Endpoint, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.endpoint = endpoint
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._run = secrets.token_hex(4)
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # llama.cpp says keep-alive but closes the connection after a stream.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers=wire.headers(self._api_key),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, question: ProveQuestion, form: Form) -> Reply:
        read = _read_stream if form.is_streamed else _read_whole
        found = await self.post("/v1/chat/completions", self._body(question, form), read)
        return Reply(error=found) if isinstance(found, str) else found

    async def post(self, path: str, body: Json, read: Read[T]) -> T | str:
        """Return what `read` makes of the response, or an error. Retry a busy server for up to PATIENCE_S."""
        begin_s, pause_s = time.monotonic(), 1.0
        while True:
            try:
                return await self._exchange(path, body, read)
            except _Busy as busy:
                pause_s = min(busy.pause_s if busy.pause_s is not None else 2 * pause_s, MAX_PAUSE_S)
                if time.monotonic() + pause_s - begin_s > PATIENCE_S:
                    return self._line(f"{busy}; gave up after {PATIENCE_S:g} s")
                await asyncio.sleep(pause_s)
            except Refused as error:
                return self._line(str(error))
            except (aiohttp.ClientError, OSError, ValueError) as error:  # time-outs are OSErrors
                return self._line(wire.reason(error, wire.shown_host(self.endpoint.url), self._timeout_s))

    async def get(self, path: str) -> Json:
        """Return the JSON object at `path`; an empty one if there is none."""
        assert self._session is not None, "an asker is used as a context"
        with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
            async with self._session.get(self.endpoint.url + path) as response:
                return as_object(await response.read()) if response.status == 200 else {}
        return {}

    def _line(self, text: str) -> str:
        return wire.one_line(text, self._api_key)

    def _body(self, question: ProveQuestion, form: Form) -> Json:
        switches = self.endpoint.switches
        sampling = {"temperature": question.temperature, "top_p": 1.0} if form.said is None else form.said
        body: Json = {
            "model": self.endpoint.model,
            "messages": question.messages,
            "max_tokens": question.max_tokens,
            "seed": question.seed + form.seed_step,
            **sampling,
        }
        if form.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if form.has_logprobs:
            body |= {"logprobs": True, "top_logprobs": NUM_TOP}
        if form.num_choices > 1:
            body["n"] = form.num_choices
        if not form.has_drafts:
            body |= switches.plain
        if form.salt is None:
            body |= switches.uncached
        if switches.salt is not None:
            body[switches.salt] = form.salt or f"{self._run}-{next(self._numbers)}"
        return body

    async def _exchange(self, path: str, body: Json, read: Read[T]) -> T:
        assert self._session is not None, "an asker is used as a context"
        async with self._session.post(self.endpoint.url + path, json=body) as response:
            if response.status != 200:
                said = f"HTTP {response.status}: {wire.server_message(await response.read())}"
                if response.status in BUSY:
                    raise _Busy(said, _seconds(response.headers.get("retry-after")))
                raise Refused(said)
            return await read(response)


def _seconds(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None if it is missing or has a date."""
    return float(text) if text is not None and text.isdigit() else None


async def _read_whole(response: aiohttp.ClientResponse) -> Reply:
    body = as_object(await response.read())
    reply = Reply(id=_id(body), num_cached=_num_cached(body.get("usage")))
    for entry in _list(body.get("choices")):
        message, choice = inside(entry, "message"), GivenAnswer()
        choice.add(message if isinstance(message, dict) else {}, inside(entry, "logprobs"))
        choice.finish_reason = _reason(entry)
        reply.choices.append(choice)
    if not reply.choices:
        raise Refused("the answer has no choices.")
    return reply


async def _read_stream(response: aiohttp.ClientResponse) -> Reply:
    reply, choices = Reply(), dict[int, GivenAnswer]()
    async for data in _events(response.content):
        event = as_object(data)
        if "error" in event:
            raise Refused(wire.server_message(data))
        reply.id = reply.id or _id(event)
        cached = _num_cached(event.get("usage"))
        reply.num_cached = reply.num_cached if cached is None else cached
        for entry in _list(event.get("choices")):
            index, delta = inside(entry, "index"), inside(entry, "delta")
            choice = choices.setdefault(index if isinstance(index, int) else 0, GivenAnswer())
            choice.add(delta if isinstance(delta, dict) else {}, inside(entry, "logprobs"))
            choice.finish_reason = _reason(entry) or choice.finish_reason
    reply.choices = [choices[index] for index in sorted(choices)]
    if not reply.choices or any(choice.finish_reason is None for choice in reply.choices):
        raise Refused("the stream ended before its answer did.")
    return reply


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each event before [DONE]."""
    async for line in content:
        name, _, data = line.partition(b":")
        if name == b"data" and data.strip() not in (b"", b"[DONE]"):
            yield data.strip()


def _id(body: Json) -> str | None:
    found = body.get("id")
    return found if isinstance(found, str) and found else None


def _reason(entry: object) -> str | None:
    found = inside(entry, "finish_reason")
    return found if isinstance(found, str) else None


def _num_cached(usage: object) -> int | None:
    return wire.whole_number(inside(usage, "prompt_tokens_details", "cached_tokens"))


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _tops(entries: object) -> Iterable[tuple[str, float]]:
    for entry in _list(entries):
        logprob = inside(entry, "logprob")
        if isinstance(logprob, int | float):
            yield str(inside(entry, "token")), float(logprob)
