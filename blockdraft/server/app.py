"""The HTTP server: /health, /v1/models and /v1/chat/completions over one EngineLoop."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import closing

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from blockdraft.engine.loop import EngineLoop, EngineStopped, Stream
from blockdraft.engine.tokenizer import Tokenizer
from blockdraft.errors import BlockdraftError, CapacityError, RequestError
from blockdraft.server.openai import DONE, Answer, ChatRequest, FieldError, error_body, event, parse_chat

MAX_BODY_BYTES = 4 << 20
RETRY_AFTER_S = 1  # arbitrary: the queue moves once per step
CLIENT_GONE = 499  # nginx's number; nobody is left to read it


def make_app(*, loop: EngineLoop, tokenizer: Tokenizer, name: str, max_context: int) -> Starlette:
    """`name` is what clients call the model."""
    api = _Api(loop=loop, tokenizer=tokenizer, name=name, max_context=max_context)
    return Starlette(
        routes=[
            Route("/health", api.health),
            Route("/v1/models", api.models),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
        ],
        exception_handlers={
            HTTPException: _on_http,
            BlockdraftError: _on_user_error,
            EngineStopped: _on_stop,
            Exception: _on_bug,
        },
    )


class _Api:
    def __init__(self, *, loop: EngineLoop, tokenizer: Tokenizer, name: str, max_context: int) -> None:
        self.loop = loop
        self.tokenizer = tokenizer
        self.name = name
        self.max_context = max_context
        self.created = int(time.time())

    async def health(self, request: Request) -> Response:
        if self.loop.error is not None:
            return JSONResponse({"status": "failed"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        card = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "blockdraft",
            "root": self.name,
            "parent": None,
            "max_model_len": self.max_context,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def chat(self, request: Request) -> Response:
        asked = parse_chat(await _read_body(request))
        if asked.model not in (None, self.name):
            body = error_body(
                f"the model '{asked.model}' does not exist: this server has '{self.name}'.",
                kind="invalid_request_error",
                param="model",
                code="model_not_found",
            )
            return JSONResponse(body, status_code=404)
        return await _while_connected(request, self._answer(asked))

    async def _answer(self, asked: ChatRequest) -> Response:
        sampling = asked.sampling()
        # Long conversations take long to encode, and the other clients' streams must go on.
        prompt_ids = await run_in_threadpool(self.tokenizer.encode_chat, asked.messages)
        stream = await self.loop.submit(prompt_ids, sampling)
        answer = Answer(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.name,
            tokenizer=self.tokenizer,
            has_logprobs=asked.logprobs,
            has_usage=asked.include_usage,
        )
        if asked.stream:
            return _Events(_events(answer, stream, asked.n), stream)
        with closing(stream):
            return JSONResponse(answer.completion([delta async for delta in stream]))


class _Events(StreamingResponse):
    """Server-sent events of one stream, which is closed with the connection."""

    def __init__(self, content: AsyncIterator[str], stream: Stream) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._stream):
            await super().__call__(scope, receive, send)


async def _events(answer: Answer, stream: Stream, num_choices: int) -> AsyncIterator[str]:
    for index in range(num_choices):
        yield event(answer.first_chunk(index))
    metrics = {}
    try:
        async for delta in stream:
            if delta.metrics is not None:
                metrics[delta.index] = delta.metrics
            is_visible = delta.text or delta.finish_reason is not None
            if is_visible or (answer.has_logprobs and delta.logprobs):
                yield event(answer.chunk(delta))
    except EngineStopped as error:
        yield event(error_body(str(error), kind="server_error"))
    else:
        if answer.has_usage:
            yield event(answer.usage_chunk([metrics[index] for index in sorted(metrics)]))
    yield DONE


async def _read_body(request: Request) -> bytes:
    """The body, read only as far as it may go; a length that is announced is believed."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise HTTPException(413)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413)
    return bytes(body)


async def _while_connected(request: Request, work: Coroutine[None, None, Response]) -> Response:
    """The result of `work`, which is cancelled when the client goes away. The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=CLIENT_GONE)
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- errors, in OpenAI's shape

_HTTP_MESSAGES = {
    404: "no such path: this server has /health, /v1/models and /v1/chat/completions.",
    405: "this path takes another method: use POST for /v1/chat/completions, GET for the others.",
    413: f"the body is larger than {MAX_BODY_BYTES} bytes: shorten the conversation.",
}


def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = _HTTP_MESSAGES.get(error.status_code, error.detail)
    body = error_body(message, kind="invalid_request_error")
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def _on_user_error(request: Request, error: Exception) -> Response:
    message = str(error)
    if isinstance(error, CapacityError):
        body = error_body(message, kind="rate_limit_error", code="queue_full")
        return JSONResponse(body, status_code=429, headers={"retry-after": str(RETRY_AFTER_S)})
    if isinstance(error, RequestError):
        param = error.param if isinstance(error, FieldError) else None
        return JSONResponse(error_body(message, kind="invalid_request_error", param=param), status_code=400)
    return JSONResponse(error_body(message, kind="server_error"), status_code=500)


def _on_stop(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(str(error), kind="server_error"), status_code=503)


def _on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises the error again behind this answer, so that the server's log has the traceback."""
    body = error_body("internal error: see the server's log.", kind="server_error")
    return JSONResponse(body, status_code=500)
