"""The routes of OpenAI's Responses API, and its stored responses."""

from __future__ import annotations

import secrets
from functools import partial
from typing import cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from blockdraft.errors import RequestError
from blockdraft.server.api.chat.fields import ChatRequest
from blockdraft.server.api.fields import MAX_INT, Renamed
from blockdraft.server.api.host import ApiHost
from blockdraft.server.api.responses import schemas
from blockdraft.server.api.responses.fields import NAMES, InputTokensRequest, ResponsesRequest, check_include
from blockdraft.server.api.responses.items import add_input, add_item
from blockdraft.server.api.responses.stored import (
    ResponseStore,
    StoredResponse,
    flag,
    input_page,
    is_half_a_call,
    number,
    replayed,
)
from blockdraft.server.api.responses.writer import ResponseWriter
from blockdraft.server.api.translation import Conversation
from blockdraft.server.http.body import Nested, shown
from blockdraft.server.http.replies import INVALID, error_response

PATH = "/v1/responses"
_NAMES = frozenset({"input_tokens", "compact"})  # paths that look like an id but are none


def routes(host: ApiHost) -> list[Route]:
    api = _ResponsesApi(host)
    return [
        Route(PATH, api.create, methods=["POST"]),
        Route(f"{PATH}/input_tokens", api.count, methods=["POST"]),
        Route(f"{PATH}/compact", api.compact, methods=["POST"]),
        Route(f"{PATH}/{{response_id}}", api.one, methods=["GET", "DELETE"]),
        Route(f"{PATH}/{{response_id}}/input_items", api.input_items, methods=["GET"]),
        Route(f"{PATH}/{{response_id}}/cancel", api.cancel, methods=["POST"]),
    ]


class _ResponsesApi:
    def __init__(self, host: ApiHost) -> None:
        self._host = host
        self._store = ResponseStore()

    async def create(self, request: Request) -> Response:
        asked = await self._host.read(request, ResponsesRequest)
        head = self._host.head(f"resp_{secrets.token_hex(16)}")
        with Renamed(NAMES):
            conversation = self._conversation(asked)
            ask = partial(self._ask, asked, conversation)
            writer = partial(ResponseWriter, asked, head, partial(self._keep, asked, conversation))
            answer = await self._host.converse(request, ask, head, writer)
        return self._host.ignored.tell(answer, asked)

    async def count(self, request: Request) -> Response:
        """Return the number of prompt tokens of a request."""
        asked = await self._host.read(request, InputTokensRequest)
        with Renamed(NAMES):
            conversation = self._conversation(asked)
            num_tokens = await self._host.num_prompt_tokens(request, partial(self._ask, asked, conversation))
        count: schemas.InputTokens = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return self._host.ignored.tell(JSONResponse(count), asked)

    async def compact(self, request: Request) -> Response:
        text = "this server does not compact conversations: send a shorter one, or begin a new one."
        return error_response(404, text, INVALID)

    async def one(self, request: Request) -> Response:
        """Return or delete a stored response."""
        response_id = request.path_params["response_id"]
        if response_id in _NAMES:
            raise HTTPException(405, headers={"Allow": "POST"})
        if request.method == "DELETE":
            if not self._store.remove(response_id):
                return _not_found(response_id)
            deleted: schemas.Deleted = {"id": response_id, "object": "response", "deleted": True}
            return JSONResponse(deleted)
        stored = self._store.get(response_id)
        if stored is None:
            return _not_found(response_id)
        query = request.query_params
        check_include(
            [*query.getlist("include"), *query.getlist("include[]")]
        )  # as OpenAI's client writes it
        if not flag(query, "stream"):
            return JSONResponse(stored.answer)
        after = None
        if "starting_after" in query:
            after = number(query, "starting_after", 0, least=0, most=MAX_INT)
        events = replayed(cast(schemas.Response, stored.answer), after)
        return Response(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def input_items(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        stored = self._store.get(response_id)
        if stored is None:
            return _not_found(response_id)
        answer = cast(schemas.Response, stored.answer)
        return JSONResponse(input_page(answer, stored.messages, request.query_params))

    async def cancel(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if self._store.get(response_id) is None:
            return _not_found(response_id)
        text = "only a response made with 'background': true can be cancelled, and this server makes none."
        return error_response(400, text, INVALID)

    def _conversation(self, asked: InputTokensRequest) -> Conversation:
        """Return the conversation so far, without instructions, which apply only to one request."""
        if asked.previous_response_id is None:
            return Conversation()
        stored = self._store.get(asked.previous_response_id)
        if stored is None:
            raise RequestError(
                f"Previous response with id {shown(asked.previous_response_id)} not found: this server "
                "keeps the latest ones only, and none that was made with 'store': false.",
                "previous_response_id",
                "previous_response_not_found",
            )
        return Conversation(stored.messages)

    def _ask(self, asked: InputTokensRequest, conversation: Conversation) -> ChatRequest:
        """Add the request's input to the conversation, and return the chat request."""
        if asked.input is not None:
            add_input(conversation, asked.input, self._store.item)
        return asked.chat(conversation)

    def _keep(self, asked: ResponsesRequest, conversation: Conversation, answer: schemas.Response) -> None:
        if not asked.store:
            return
        for item in answer["output"]:
            if is_half_a_call(item):
                continue
            add_item(conversation, Nested(dict(item), "output"), self._store.item)
        items = {item["id"]: item for item in answer["output"]}
        self._store.put(answer["id"], StoredResponse(answer, tuple(conversation.messages), items))


def _not_found(response_id: str) -> Response:
    return error_response(404, f"Response with id {shown(response_id)} not found.", INVALID)
