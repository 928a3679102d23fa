"""Holds conversations over HTTP and records when each event arrives.

Every failure becomes an Answer with an error. One thread may hold hundreds of streams, so much code here
keeps the client's own work out of the measured times. A request is encoded before its time begins, requests
that begin together are sent one after the other, and data is timed before it is parsed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Self

import aiohttp

from blockdraft.bench import wire
from blockdraft.bench.endpoint import Switches
from blockdraft.bench.records import Answer, Ask
from blockdraft.bench.stream import BadAnswer, Clock, StreamReader
from blockdraft.bench.wire import Json

OnAnswer = Callable[[Answer], None]

CONNECT_TIMEOUT_S = 10.0  # arbitrary
# Shorter than the servers' limit (uvicorn: 5 s): a connection must not be reused while the server closes it.
KEEP_ALIVE_S = 3.0
LINGER_S = 1.0  # longest wait for the end of a stream after its last event; arbitrary
# Event-loop turns between two requests that begin together: about the time to connect and write. So each
# request is sent before the next one begins, and data for other requests is read first.
BEGIN_TURNS = 8


class Client:
    """A client for one model of one server, used as a context manager.

    `clock` returns seconds; `timeout_s` is the limit of one turn.
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
        self.num_refused = 0  # failed connections in a row
        self._root = wire.server_root(url)
        self.host = wire.shown_host(self._root)
        self.api_key = api_key
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._beginning = asyncio.Lock()

    def __reduce__(self) -> tuple[Callable[..., Client], tuple[str, str]]:
        """Pickle the client: the other process gets a new client for the same server."""
        make = partial(Client, api_key=self.api_key, timeout_s=self._timeout_s, switches=self.switches)
        return make, (self._root, self.model)

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
        """Send the turns of a conversation until one fails. `on_answer` is called with each answer."""
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
        reader = StreamReader(answer, self.clock)
        try:
            await self._exchange(path, body, reader)
            reader.check_end()
        except BadAnswer as error:
            answer.error = wire.one_line(str(error), self.api_key)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # time-outs are OSErrors
            self.num_refused += wire.is_refusal(error)
            answer.error = wire.one_line(wire.reason(error, self.host, self._timeout_s), self.api_key)
        finally:
            reader.finish()
        return answer

    async def _exchange(self, path: str, body: bytes, reader: StreamReader) -> None:
        assert self._session is not None, "a client is used as a context"
        async with self._session.post(self._root + path, data=body) as response:
            self.num_refused = 0
            if response.status != 200:
                said = wire.server_message(await response.read())
                raise BadAnswer(f"HTTP {response.status}: {said}")
            content = response.content
            while not reader.is_done and (data := await content.readany()):
                reader.feed(data)
            if reader.is_done and not content.at_eof():
                # The connection can be reused only if the response is read to its end.
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
