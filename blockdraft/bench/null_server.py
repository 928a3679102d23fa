"""A server that computes nothing: every answer has the same events, at a known pace.

With it we measure the load generator itself. The server speaks minimal HTTP in its own process, so that it is
never slower than the client. Its first event contains the times when the request was read and answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import cast

Json = dict[str, object]

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_json_of = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class StreamPace:
    """The pace of an answer: chunk i is sent `ttft_s + i * gap_s` after the request was read."""

    ttft_s: float
    gap_s: float
    num_chunks: int
    tokens_per_chunk: int
    chunks_per_write: int = 1
    is_together: bool = False  # send the chunks of all streams at once, as an engine does after a step

    @property
    def num_tokens(self) -> int:
        return self.num_chunks * self.tokens_per_chunk

    @property
    def tpot_s(self) -> float:
        return (self.num_chunks - 1) * self.gap_s / (self.num_tokens - 1)


class Streamer(asyncio.Protocol):
    """One connection of the server."""

    def __init__(self, pace: StreamPace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._received = b""
        usage = {"prompt_tokens": 9, "completion_tokens": pace.num_tokens}
        end: Json = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        self._chunks = _event(_chunk(" one" * pace.tokens_per_chunk)) * pace.chunks_per_write
        self._end = _event(end) + _event({"usage": usage}) + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.lower().split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        if len(body) >= length:
            self._received = b""
            self._read_s = time.monotonic()
            self._start_s = self._loop.time() + self._pace.ttft_s
            if self._pace.is_together:
                self._start_s = math.ceil(self._start_s / self._pace.gap_s) * self._pace.gap_s
            self._loop.call_at(self._start_s, self._write, 0)

    def _write(self, number: int) -> None:
        if self._transport.is_closing():
            return
        if number == 0:
            self._transport.write(_HEAD + _event(_chunk(f"{self._read_s} {time.monotonic()} ")))
            number = 1
        else:
            self._transport.write(self._chunks)
            number += self._pace.chunks_per_write
        if number < self._pace.num_chunks:
            self._loop.call_at(self._start_s + number * self._pace.gap_s, self._write, number)
        else:
            self._transport.write(self._end)


def _chunk(text: str) -> Json:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    name = "chatcmpl-0123456789abcdef0123456789abcdef"
    return {"id": name, "object": "chat.completion.chunk", "created": 1, "model": "null", "choices": [choice]}


def _event(chunk: Json) -> bytes:
    return _framed(f"data: {_json_of(chunk)}\n\n".encode())


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextlib.contextmanager
def null_server(pace: StreamPace) -> Iterator[tuple[str, int]]:
    """Run the server; yield its address and its process id."""
    command = [sys.executable, "-m", "blockdraft.bench.null_server", json.dumps(asdict(pace))]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, encoding="utf-8", start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.stdin.close()  # the server ends when stdin closes; this also happens if we are killed


async def _serve(pace: StreamPace) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Streamer(pace), "127.0.0.1", 0, backlog=2048)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(StreamPace(**json.loads(sys.argv[1]))))
