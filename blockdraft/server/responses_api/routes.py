"""The routes of OpenAI's Responses API, over what is kept of earlier responses."""

from __future__ import annotations

import time
import uuid
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from blockdraft.errors import RequestError
from blockdraft.server.body import shown
from blockdraft.server.chat_host import ChatHost, renamed
from blockdraft.server.conversation import Conversation
from blockdraft.server.fields import ChatRequest
from blockdraft.server.nested import Nested
from blockdraft.server.responses import INVALID, error_response
from blockdraft.server.responses_api import schemas
from blockdraft.server.responses_api.fields import NAMES, ResponsesRequest
from blockdraft.server.responses_api.items import add_input, add_item
from blockdraft.server.responses_api.store import ResponseStore, StoredResponse
from blockdraft.server.responses_api.writer import ResponseWriter
from blockdraft.server.schemas import AnswerObject

PATH = "/v1/responses"


def routes(host: ChatHost) -> list[Route]:
    api = _ResponsesApi(host)
    return [
        Route(PATH, api.create, methods=["POST"]),
        Route(f"{PATH}/{{response_id}}", api.retrieve, methods=["GET"]),
        Route(f"{PATH}/{{response_id}}", api.delete, methods=["DELETE"]),
    ]


class _ResponsesApi:
    def __init__(self, host: ChatHost) -> None:
        self._host = host
        self._store = ResponseStore()

    async def create(self, request: Request) -> Response:
        asked = await self._host.read(request, ResponsesRequest)
        head: AnswerObject = {
            "id": f"resp_{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._host.name,
        }
        with renamed(NAMES):
            conversation = self._conversation(asked)
            ask = partial(self._ask, asked, conversation)
            writer = partial(ResponseWriter, asked, head, partial(self._keep, asked, conversation))
            answer = await self._host.converse(request, ask, head, writer)
        return self._host.tell(answer, asked)

    async def retrieve(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        stored = self._store.get(response_id)
        return _not_found(response_id) if stored is None else JSONResponse(stored.answer)

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if not self._store.remove(response_id):
            return _not_found(response_id)
        deleted: schemas.Deleted = {"id": response_id, "object": "response", "deleted": True}
        return JSONResponse(deleted)

    def _conversation(self, asked: ResponsesRequest) -> Conversation:
        """What was said before, without instructions: they were for that request."""
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

    def _ask(self, asked: ResponsesRequest, conversation: Conversation) -> ChatRequest:
        """What is said now goes into the conversation, too."""
        add_input(conversation, asked.input, self._store.item)
        return asked.chat(conversation)

    def _keep(self, asked: ResponsesRequest, conversation: Conversation, answer: schemas.Response) -> None:
        if not asked.store:
            return
        for item in answer["output"]:
            if item["type"] == "function_call" and item["status"] != "completed":
                continue  # half of a call: no template could show it
            add_item(conversation, Nested(dict(item), "output"), self._store.item)
        items = {item["id"]: item for item in answer["output"]}
        self._store.put(answer["id"], StoredResponse(answer, tuple(conversation.messages), items))


def _not_found(response_id: str) -> Response:
    return error_response(404, f"Response with id {shown(response_id)} not found.", INVALID)
