"""The HTTP server: OpenAI's routes, and those that tell how the server is, over one engine."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from blockdraft import __version__
from blockdraft.engine.loop import EngineLoop, Stream
from blockdraft.engine.request import SamplingParams
from blockdraft.server.answers import ChatAnswer, Head, TextAnswer
from blockdraft.server.backend import Backend, Info, LoopBackend
from blockdraft.server.body import FieldError, shown
from blockdraft.server.connection import respond, while_connected
from blockdraft.server.failures import HANDLERS, NotReady
from blockdraft.server.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Fields,
    TokenizeRequest,
    parse,
)
from blockdraft.server.guard import Guard
from blockdraft.server.openai import event
from blockdraft.server.openapi import openapi
from blockdraft.server.options import ServerOptions
from blockdraft.server.page import routes as page_routes
from blockdraft.server.prompts import (
    blaming,
    check_prompt,
    check_tokens,
    echoed_texts,
    encode_chat,
    encode_prompts,
    token_texts,
    tokenize,
)
from blockdraft.server.reasoning import find_tags
from blockdraft.server.shapes import ModelCard, ModelList, Status, Text, Tokens, Version
from blockdraft.text.tokenizer import Tokenizer

LARGE_BODY_BYTES = 1 << 16  # parsed beside the event loop; arbitrary
START_RETRY_AFTER_S = 5  # arbitrary: a start takes seconds to minutes


def make_app(
    loop: EngineLoop, *, name: str, options: ServerOptions, is_hanging: Callable[[], bool] = lambda: False
) -> ASGIApp:
    """The whole server; `name` is what clients call the model."""
    return Guard(make_api(LoopBackend(loop, is_hanging), name=name), options)


def make_api(backend: Backend, *, name: str) -> Starlette:
    """The routes over any backend, ready or not; they count on a Guard around them."""
    api = _Api(backend, name)
    return Starlette(
        routes=[
            Route("/health", api.health),
            Route("/ready", api.ready),
            Route("/ping", api.health, methods=["GET", "POST"]),
            Route("/version", api.version),
            Route("/metrics", api.metrics),
            Route("/openapi.json", api.openapi),
            Route("/v1/models", api.models),
            Route("/v1/models/{model:path}", api.model),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/detokenize", api.detokenize, methods=["POST"]),
            Route("/events", api.events),
            *page_routes(),
        ],
        exception_handlers=dict(HANDLERS),
    )


@dataclass(frozen=True, slots=True)
class _Ready:
    """What there is once the engine is ready."""

    tokenizer: Tokenizer
    info: Info


class _Api:
    def __init__(self, backend: Backend, name: str) -> None:
        self.backend = backend
        self.name = name
        self.created = int(time.time())
        self._find_tags = functools.cache(find_tags)

    # ---- how the server is

    async def health(self, request: Request) -> Response:
        is_alive = self.backend.error is None
        status: Status = {"status": "ok" if is_alive else "failed"}
        return JSONResponse(status, status_code=200 if is_alive else 503)

    async def ready(self, request: Request) -> Response:
        start = self.backend.start()
        if start["state"] == "ready":
            return JSONResponse(start)
        headers = {"retry-after": str(START_RETRY_AFTER_S)} if start["state"] == "starting" else None
        return JSONResponse(start, status_code=503, headers=headers)

    async def version(self, request: Request) -> Response:
        version: Version = {"version": __version__}
        return JSONResponse(version)

    async def metrics(self, request: Request) -> Response:
        body, content_type = self.backend.render_metrics(self.name)
        return Response(body, headers={"content-type": content_type})

    async def events(self, request: Request) -> Response:
        """What the live page shows, a server-sent event per second."""
        if request.method == "HEAD":  # Starlette would run the endless body and send none of it
            return Response(media_type="text/event-stream")
        lines = (event(data) async for data in self.backend.events())
        return StreamingResponse(lines, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi())

    async def models(self, request: Request) -> Response:
        cards: ModelList = {"object": "list", "data": [self._card(self._ready().info)]}
        return JSONResponse(cards)

    async def model(self, request: Request) -> Response:
        info = self._ready().info
        self._check_model(request.path_params["model"])
        return JSONResponse(self._card(info))

    def _card(self, info: Info) -> ModelCard:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "blockdraft",
            "root": self.name,
            "parent": None,
            "max_model_len": info.max_context,
            "permission": [],
        }

    def _ready(self) -> _Ready:
        tokenizer, info = self.backend.tokenizer, self.backend.engine_info
        if tokenizer is not None and info is not None:
            return _Ready(tokenizer, info)
        state = self.backend.start()["state"]
        if state == "starting":
            raise NotReady("the model is still loading: ask /ready how far it is.", START_RETRY_AFTER_S)
        raise NotReady(f"the server is {state}: ask /ready why.", None)

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self.name):
            raise FieldError(
                f"the model {shown(model or '')} does not exist: this server has '{self.name}'.",
                "model",
                code="model_not_found",
            )

    # ---- text and tokens

    async def tokenize(self, request: Request) -> Response:
        asked = await self._read(request, TokenizeRequest)
        ready = self._ready()
        tokens = await run_in_threadpool(tokenize, asked, ready.tokenizer)
        strings = None
        if asked.return_token_strs:
            strings = await run_in_threadpool(token_texts, tokens, ready.tokenizer)
        answer: Tokens = {
            "count": len(tokens),
            "max_model_len": ready.info.max_context,
            "tokens": tokens,
            "token_strs": strings,
        }
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        asked = await self._read(request, DetokenizeRequest)
        decode = functools.partial(self._ready().tokenizer.decode, skip_special_tokens=False)
        answer: Text = {"prompt": await run_in_threadpool(blaming("tokens", decode), asked.tokens)}
        return JSONResponse(answer)

    # ---- completions

    async def chat(self, request: Request) -> Response:
        asked = await self._read(request, ChatRequest)
        return await while_connected(request, self._chat(asked, self._head(request, asked, "chatcmpl")))

    async def completions(self, request: Request) -> Response:
        asked = await self._read(request, CompletionRequest)
        return await while_connected(request, self._complete(asked, self._head(request, asked, "cmpl")))

    async def _read(self, request: Request, kind: type[Fields]) -> Fields:
        content_type = request.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415)
        body = await request.body()  # Guard has seen to its size
        if len(body) > LARGE_BODY_BYTES:
            asked = await run_in_threadpool(parse, kind, body)
        else:
            asked = parse(kind, body)
        self._ready()
        self._check_model(asked.model)
        return asked

    def _head(self, request: Request, asked: ChatRequest | CompletionRequest, prefix: str) -> Head:
        if asked.request_id is not None:
            request.state.request_id = asked.request_id
        return Head(f"{prefix}-{request.state.request_id}", int(time.time()), self.name)

    async def _chat(self, asked: ChatRequest, head: Head) -> Response:
        ready = self._ready()
        sampling = asked.sampling(ready.info.sampling)
        check_tokens(asked, ready.info)
        # Long conversations take long to encode, and the other clients' streams must go on.
        prompt_ids = await run_in_threadpool(blaming("messages", encode_chat), asked, ready.tokenizer)
        check_prompt(prompt_ids, "messages", ready.info)
        answer = ChatAnswer(
            asked,
            head=head,
            tokenizer=ready.tokenizer,
            prompt_ids=prompt_ids,
            tags=self._find_tags(ready.tokenizer),
        )
        return await respond(answer, await self._submit([prompt_ids], sampling), is_stream=asked.stream)

    async def _complete(self, asked: CompletionRequest, head: Head) -> Response:
        ready = self._ready()
        sampling = asked.sampling(ready.info.sampling)
        check_tokens(asked, ready.info)
        prompts = await run_in_threadpool(blaming("prompt", encode_prompts), asked, ready.tokenizer)
        for prompt_ids in prompts:
            check_prompt(prompt_ids, "prompt", ready.info)
        texts = await run_in_threadpool(echoed_texts, asked, prompts, ready.tokenizer)
        answer = TextAnswer(asked, head=head, tokenizer=ready.tokenizer, prompts=prompts, texts=texts)
        return await respond(answer, await self._submit(prompts, sampling), is_stream=asked.stream)

    async def _submit(self, prompts: Items[Items[int]], sampling: SamplingParams) -> list[Stream]:
        """All of them or none, asked for at once: what one raises closes the streams of the others."""
        asked = [asyncio.ensure_future(self.backend.submit(prompt_ids, sampling)) for prompt_ids in prompts]
        try:
            return list(await asyncio.gather(*asked))
        except BaseException:
            for one in asked:
                one.cancel()
            for found in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(found, Stream):
                    found.close()
            raise
