"""The client holds conversations over HTTP and notes the time of everything that comes back.

Whatever goes wrong is an Answer with an error. Much here is about what the client itself adds to the times
it measures: one thread may hold hundreds of streams. The text of a request is made before its time begins,
requests that begin at once are sent one after the other, and what arrives is timed before it is parsed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Self

import aiohttp

from blockdraft.bench import wire
from blockdraft.bench.endpoint import Switches
from blockdraft.bench.records import Answer, Ask
from blockdraft.bench.speculation import read_chunk
from blockdraft.bench.wire import Json, inside, whole_number

Clock = Callable[[], float]
OnAnswer = Callable[[Answer], None]

CONNECT_TIMEOUT_S = 10.0  # arbitrary
# Less than servers keep an idle connection (uvicorn: 5 s): one that is about to be closed is not used again.
KEEP_ALIVE_S = 3.0
LINGER_S = 1.0  # for the end of a stream whose last event is in; arbitrary
# Turns of the event loop from one request to the next: about what connecting and writing take, so that of
# hundreds that begin at once each is on its way before the next, and what has arrived for others goes first.
BEGIN_TURNS = 8
_TEXTS = ("content", "text")
_THOUGHTS = ("reasoning_content", "reasoning")  # the same text under two names, where a server sends both
_DONE = b"[DONE]"
_FIELDS = (b"event:", b"id:", b"retry:", b":")  # of server-sent events, beside data


class Client:
    """One model of one server, used as a context.

    `clock` gives seconds; `timeout_s` is for a turn.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        clock: Clock = time.monotonic,
        timeout_s: float = 600.0,
        switches: Switches | None = None,
    ) -> None:
        self.model = model
        self.clock = clock
        self.switches = Switches() if switches is None else switches
        self.num_refused = 0  # connections in a row that did not come about
        self._root = wire.server_root(url)
        self.host = wire.shown_host(self._root)
        self.api_key = api_key
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._beginning = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S),
            headers={**wire.headers(self.api_key), "content-type": "application/json"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def converse(
        self, ask: Ask, *, planned_s: float | None = None, on_answer: OnAnswer | None = None
    ) -> list[Answer]:
        """Ask all turns of a conversation, up to the first that fails; `on_answer` gets each when it ends."""
        answers: list[Answer] = []
        for turn in range(1 if ask.is_raw else len(ask.prompt.turns)):
            messages = ask.prompt.messages([answer.text for answer in answers])
            planned_s = self.clock() if planned_s is None else planned_s
            answer = await self._turn(ask, turn, messages, planned_s)
            answers.append(answer)
            if on_answer is not None:
                on_answer(answer)
            if not answer.is_ok:
                break
            planned_s = answer.end_s
        return answers

    async def _turn(self, ask: Ask, turn: int, messages: list[Json], planned_s: float) -> Answer:
        path = "/v1/completions" if ask.is_raw else "/v1/chat/completions"
        body = json.dumps(self._body(ask, messages)).encode()
        async with self._beginning:
            for _ in range(BEGIN_TURNS):
                await asyncio.sleep(0)
        answer = Answer(ask=ask, turn=turn, planned_s=planned_s, sent_s=self.clock())
        reader = _Reader(answer, self.clock)
        try:
            await self._exchange(path, body, reader)
            reader.check_end()
        except _BadAnswer as error:
            answer.error = wire.one_line(str(error), self.api_key)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # time-outs are OSErrors
            self.num_refused += wire.is_refusal(error)
            answer.error = wire.one_line(wire.reason(error, self.host, self._timeout_s), self.api_key)
        finally:
            reader.finish()
        return answer

    async def _exchange(self, path: str, body: bytes, reader: _Reader) -> None:
        assert self._session is not None, "a client is used as a context"
        async with self._session.post(self._root + path, data=body) as response:
            self.num_refused = 0
            if response.status != 200:
                said = wire.server_message(await response.read())
                raise _BadAnswer(f"HTTP {response.status}: {said}")
            content = response.content
            while not reader.is_done and (data := await content.readany()):
                reader.feed(data)
            if reader.is_done and not content.at_eof():
                # Read to its end, a connection can be used again.
                try:
                    async with asyncio.timeout(LINGER_S):
                        await content.read()
                except (TimeoutError, aiohttp.ClientError):
                    response.close()

    def _body(self, ask: Ask, messages: list[Json]) -> Json:
        body: Json = {
            "model": self.model,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.is_raw:
            body["prompt"] = messages[-1]["content"]
        else:
            body["messages"] = messages
            if ask.thinking is not None:
                body["chat_template_kwargs"] = {"enable_thinking": ask.thinking}
        if ask.seed is not None:
            body["seed"] = ask.seed
        if ask.ignores_eos:
            body["ignore_eos"] = True
        return body | self.switches.fields(ask)


class _BadAnswer(Exception):
    """Raised for a reply that is no answer; its text becomes the Answer's error."""


class _Reader:
    """Takes the bytes of a stream in, and fills an Answer."""

    def __init__(self, answer: Answer, clock: Clock) -> None:
        self.is_done = False
        self._answer = answer
        self._clock = clock
        self._rest = b""
        self._last_s = answer.sent_s  # of the last bytes
        self._text_s = 0.0  # of the last delta with text
        self._has_usage = False
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def feed(self, data: bytes) -> None:
        self._last_s = self._clock()
        self._rest += data
        if b"\r" in self._rest:
            self._rest = self._rest.replace(b"\r\n", b"\n")
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            if data := _event_data(event):
                self._take(data)

    def _take(self, data: bytes) -> None:
        if data == _DONE:
            self.is_done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise _BadAnswer(f"malformed stream: an event is no JSON: {_shown(data)}") from None
        if not isinstance(chunk, dict):
            raise _BadAnswer(f"malformed stream: an event is no object: {_shown(data)}")
        if chunk.get("error") or chunk.get("object") == "error":
            raise _BadAnswer(f"the server says in the stream: {wire.server_message(data)}")
        choices = chunk.get("choices")
        if choices:
            self._choice(choices[0] if isinstance(choices, list) else choices, data)
        if chunk.get("usage"):
            self._usage(chunk["usage"])
        # Only the last chunks speak of the answer as a whole.
        if not choices or self._answer.finish_reason is not None:
            self._answer.speculation = read_chunk(chunk) or self._answer.speculation

    def _choice(self, choice: object, data: bytes) -> None:
        delta = choice.get("delta", choice) if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(delta, dict):
            raise _BadAnswer(f"malformed stream: a choice without a delta: {_shown(data)}")
        has_text = bool(delta.get("tool_calls"))
        for kept, names in ((self._texts, _TEXTS), (self._thoughts, _THOUGHTS)):
            for name in names:
                if (text := delta.get(name)) and isinstance(text, str):
                    kept.append(text)
                    has_text = True
                    break
        if has_text:
            self._stamp()
        if choice.get("finish_reason"):
            self._answer.finish_reason = str(choice["finish_reason"])

    def _stamp(self) -> None:
        answer, now_s = self._answer, self._last_s
        if answer.first_s is None:
            answer.first_s = now_s
        else:
            answer.gaps_s.append(now_s - self._text_s)
        self._text_s = now_s

    def _usage(self, usage: object) -> None:
        answer, completion_tokens = self._answer, whole_number(inside(usage, "completion_tokens"))
        if completion_tokens is None:
            return
        self._has_usage, answer.completion_tokens = True, completion_tokens
        answer.prompt_tokens = whole_number(inside(usage, "prompt_tokens"))
        answer.cached_tokens = whole_number(inside(usage, "prompt_tokens_details", "cached_tokens"))

    def check_end(self) -> None:
        """Raise _BadAnswer if the stream is over before it was complete."""
        if self._rest.strip() and not self.is_done:
            if _event_data(self._rest.strip()) != _DONE:
                raise _BadAnswer(f"the stream broke off inside an event: {_shown(self._rest)}")
            self.is_done = True
        if self._answer.finish_reason is None:
            raise _BadAnswer("the stream ended without a finish_reason.")
        if not self.is_done:
            raise _BadAnswer("the stream ended without [DONE].")
        if not self._has_usage:
            raise _BadAnswer("the server sent no usage: how many tokens the answer has is unknown.")

    def finish(self) -> None:
        """Note the end: of a complete answer its last byte, of a failed one the moment it was found out."""
        answer = self._answer
        answer.end_s = self._last_s if answer.is_ok else self._clock()
        answer.text, answer.thinking = "".join(self._texts), "".join(self._thoughts)


def _event_data(event: bytes) -> bytes:
    """Return the data of one server-sent event; empty: it has none."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    parts = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            parts.append(line[5:].strip())
        elif line.strip() and not line.startswith(_FIELDS):
            raise _BadAnswer(f"malformed stream: no server-sent event: {_shown(line)}")
    return b"\n".join(parts)


def _shown(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", "replace"))
