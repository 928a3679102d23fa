"""ApiHost: answers the requests of every API with the engines; routes of chat and text completions."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Items
from datetime import UTC, datetime
from typing import ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from blockdraft.engine.info import EngineInfo
from blockdraft.engine.request import SamplingParams, Turn
from blockdraft.engine.streams import Stream
from blockdraft.errors import RequestError
from blockdraft.server.api.chat.answers import ChatAnswer, TextAnswer
from blockdraft.server.api.chat.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from blockdraft.server.api.chat.prepare import (
    Dialect,
    PreparedChat,
    check_prompts,
    check_tokens,
    echoed_texts,
    encode_prompts,
    find_dialect,
    prepare_chat,
    token_texts,
    tokenize,
)
from blockdraft.server.api.chat.schemas import Text, Tokens
from blockdraft.server.api.fields import BodyT, FieldAtFault, IgnoredFields, Renamed, parse
from blockdraft.server.api.messages.schemas import ModelInfo
from blockdraft.server.api.receipts import OnEnd, ReceiptBook
from blockdraft.server.api.schemas import AnswerObject, ModelCard
from blockdraft.server.api.streaming import Writer, respond
from blockdraft.server.engine_link.replicas import Replicas
from blockdraft.server.http.body import shown
from blockdraft.server.http.exchange import exchange_of
from blockdraft.server.http.large_json import json_response
from blockdraft.server.http.replies import VERSION_HEADER
from blockdraft.server.http.routing import NotReady
from blockdraft.settings.model_source import public_id
from blockdraft.text.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")
Ask = Callable[[], ChatRequest]  # takes long for a long body
Client = tuple[str, ...]  # the key and the address of whoever asks
MakeWriter = Callable[[ChatAnswer], Writer]
LARGE_BODY_BYTES = 1 << 16  # larger bodies are parsed in a thread; arbitrary
SHORT_BODY_BYTES = 1 << 12  # its text is encoded at once: a thread would take longer to start
CLIENT_GONE = 499  # nginx's number; the client has gone and cannot read it


class ApiHost:
    """Answers the requests of all APIs with the engines.

    `name` is the model's name for clients; `tool_format` names its format of tool calls.
    """

    def __init__(
        self, engine: Replicas, name: str, tool_format: str, receipts: ReceiptBook | None = None
    ) -> None:
        self._receipts = receipts
        self.engine = engine
        self.name = name
        self._created = int(time.time())
        self._tool_format = tool_format
        self.ignored = IgnoredFields()
        self._find_dialect = functools.cache(find_dialect)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        """Return the list of models, which holds one model."""
        model, query = self._model(request), request.query_params
        if VERSION_HEADER not in request.headers:
            return JSONResponse({"object": "list", "data": [model]})
        is_here = model["id"] not in (query.get("after_id"), query.get("before_id"))
        data, name = ([model], model["id"]) if is_here else ([], None)
        return JSONResponse({"data": data, "first_id": name, "last_id": name, "has_more": False})

    async def model(self, request: Request) -> Response:
        model = self._model(request)
        self._check_model(request.path_params["model"])
        return JSONResponse(model)

    def _model(self, request: Request) -> ModelCard | ModelInfo:
        """Return the model as the client's API describes it."""
        _, info = self._ready()
        if VERSION_HEADER in request.headers:
            begun = datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return {"type": "model", "id": self.name, "display_name": info.target_title, "created_at": begun}
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "blockdraft",
            "root": public_id(info.target),
            "parent": None,
            "max_model_len": info.max_model_len,
            "permission": [],
        }

    def _ready(self) -> tuple[Tokenizer, EngineInfo]:
        tokenizer, info = self.engine.tokenizer, self.engine.engine_info
        if tokenizer is None or info is None:
            raise NotReady(self.engine.startup.state)
        return tokenizer, info

    def _dialect(self, tokenizer: Tokenizer) -> Dialect:
        return self._find_dialect(tokenizer, self._tool_format)

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self.name):
            raise RequestError(
                f"the model {shown(model or '')} does not exist: this server has '{self.name}'.",
                "model",
                code="model_not_found",
            )

    # ---- text and tokens

    async def tokenize(self, request: Request) -> Response:
        asked = await self.read(request, TokenizeRequest)
        tokenizer, info = self._ready()
        tokens = await run_in_threadpool(tokenize, asked, self._dialect(tokenizer))
        strings = None
        if asked.return_token_strs:
            strings = await run_in_threadpool(token_texts, tokens, tokenizer)
        answer: Tokens = {
            "count": len(tokens),
            "max_model_len": info.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
        return await json_response(lambda: answer, len(tokens))

    async def detokenize(self, request: Request) -> Response:
        asked = await self.read(request, DetokenizeRequest)
        tokenizer, info = self._ready()
        check_tokens(asked.tokens, info)
        decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
        with FieldAtFault("tokens"):
            answer: Text = {"prompt": await run_in_threadpool(decode, asked.tokens)}
        return JSONResponse(answer)

    # ---- completions

    async def chat(self, request: Request) -> Response:
        asked = await self.read(request, ChatRequest)
        head = self._head(request, asked, "chatcmpl")
        return self.ignored.tell(
            await self.converse(request, lambda: asked, head, lambda answer: answer), asked
        )

    async def converse(self, request: Request, ask: Ask, head: AnswerObject, writer: MakeWriter) -> Response:
        """Answer a conversation of any API."""
        size = len(await request.body())
        work = self._chat(ask, size, head, writer, request.state.client)
        return await self._answer(request, work)

    async def num_prompt_tokens(self, request: Request, ask: Ask) -> int:
        """Return the number of prompt tokens of a conversation."""
        return len((await self._prepare(ask, len(await request.body()))).prompt_ids)

    async def completions(self, request: Request) -> Response:
        asked, size = await self.read(request, CompletionRequest), len(await request.body())
        work = self._complete(asked, size, self._head(request, asked, "cmpl"), request.state.client)
        return self.ignored.tell(await self._answer(request, work), asked)

    async def _answer(self, request: Request, work: Coroutine[None, None, Response]) -> Response:
        response = await exchange_of(request.scope).while_connected(work)
        return Response(status_code=CLIENT_GONE) if response is None else response

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        body = await request.body()  # AuthLimits has checked its type and size
        if len(body) > LARGE_BODY_BYTES:
            asked = await run_in_threadpool(parse, kind, body)
        else:
            asked = parse(kind, body)
        self._ready()
        self._check_model(asked.model)
        return asked

    def _head(self, request: Request, asked: ChatRequest | CompletionRequest, prefix: str) -> AnswerObject:
        if asked.request_id is not None:
            request.state.request_id = asked.request_id
        name = f"{prefix}-{request.state.request_id}"
        return self.head(name)

    def head(self, name: str) -> AnswerObject:
        """Return the fields that all objects of one answer begin with."""
        _, info = self._ready()
        return {
            "id": name,
            "created": int(time.time()),
            "model": self.name,
            "system_fingerprint": info.fingerprint.id,
        }

    async def _chat(
        self, ask: Ask, size: int, head: AnswerObject, writer: MakeWriter, client: Client
    ) -> Response:
        prepared = await self._prepare(ask, size)
        turn = Turn(prepared.asked.priority, client)
        on_end = self._on_end(head, [prepared.prompt_ids], prepared.sampling)
        answer = ChatAnswer(prepared, head=head, on_end=on_end)
        with Renamed({"structured_outputs": prepared.output_field, "prompt": "messages"}):
            streams = await self._submit([prepared.prompt_ids], prepared.sampling, turn)
            num_prompt = len(prepared.prompt_ids)
            is_stream = prepared.asked.stream
            return await respond(writer(answer), streams, is_stream=is_stream, num_prompt_tokens=num_prompt)

    def _on_end(
        self, head: AnswerObject, prompts: Items[Items[int]], sampling: SamplingParams
    ) -> OnEnd | None:
        """Return what is to be done when a choice has ended: write its receipt, or nothing."""
        if self._receipts is None:
            return None
        return self._receipts.writer(head, prompts, sampling, *self._ready())

    async def _prepare(self, ask: Ask, size: int) -> PreparedChat:
        """Return the request as the engine takes it; `size` is the body's size in bytes."""
        tokenizer, info = self._ready()
        dialect = self._dialect(tokenizer)
        if size > SHORT_BODY_BYTES:
            prepared = await run_in_threadpool(lambda: prepare_chat(ask(), dialect, info.sampling))
        else:
            asked = ask()
            # Grammars of tools and structured outputs take long: they must not hold up other requests.
            is_plain = not asked.tools and asked.structured_output is None
            work = functools.partial(prepare_chat, asked, dialect, info.sampling)
            prepared = work() if is_plain else await run_in_threadpool(work)
        fields = {"prompt": "messages", "scores": "prompt_logprobs"}
        check_prompts([prepared.prompt_ids], fields, prepared.sampling, info)
        return prepared

    async def _complete(
        self, asked: CompletionRequest, size: int, head: AnswerObject, client: Client
    ) -> Response:
        tokenizer, info = self._ready()
        sampling = asked.sampling(info.sampling)
        prompts = await _beside(size, encode_prompts, asked, tokenizer)
        scores = "logprobs" if asked.prompt_logprobs is None else "prompt_logprobs"
        check_prompts(prompts, {"prompt": "prompt", "scores": scores}, sampling, info)
        texts = await _beside(size, echoed_texts, asked, prompts, tokenizer)
        on_end = self._on_end(head, prompts, sampling)
        answer = TextAnswer(
            asked, head=head, tokenizer=tokenizer, prompts=prompts, texts=texts, on_end=on_end
        )
        with Renamed({"structured_outputs": asked.output_field}):
            streams = await self._submit(prompts, sampling, Turn(asked.priority, client))
            num_prompt = sum(map(len, prompts))
            return await respond(answer, streams, is_stream=asked.stream, num_prompt_tokens=num_prompt)

    async def _submit(self, prompts: Items[Items[int]], sampling: SamplingParams, turn: Turn) -> list[Stream]:
        """Queue all prompts or none: if one raises an error, the streams of the others are closed."""
        if len(prompts) == 1:
            return [await self.engine.submit(prompts[0], sampling, turn)]
        asked = [asyncio.ensure_future(self.engine.submit(one, sampling, turn)) for one in prompts]
        try:
            return list(await asyncio.gather(*asked))
        except BaseException:
            for one in asked:
                one.cancel()
            for found in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(found, Stream):
                    found.close()
            raise


async def _beside(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work`, in a thread if the body is long (`size` in bytes), so that it does not hold up streams."""
    if size <= SHORT_BODY_BYTES:
        return work(*args, **kwargs)
    return await run_in_threadpool(work, *args, **kwargs)
