"""The routes of Anthropic's Messages API."""

from __future__ import annotations

import time
import uuid
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from blockdraft.server.api.fields import renamed
from blockdraft.server.api.host import ApiHost
from blockdraft.server.api.messages.fields import NAMES, CountTokensRequest, MessagesRequest
from blockdraft.server.api.messages.schemas import TokenCount
from blockdraft.server.api.messages.writer import MessageWriter
from blockdraft.server.api.schemas import AnswerObject


def routes(host: ApiHost) -> list[Route]:
    async def create(request: Request) -> Response:
        asked = await host.read(request, MessagesRequest)
        head: AnswerObject = {
            "id": f"msg_{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": host.name,
        }
        with renamed(NAMES):
            answer = await host.converse(request, asked.chat, head, partial(MessageWriter, asked, head))
        return host.tell(answer, asked)

    async def count_tokens(request: Request) -> Response:
        asked = await host.read(request, CountTokensRequest)
        with renamed(NAMES):
            count: TokenCount = {"input_tokens": await host.num_prompt_tokens(request, asked.chat)}
        return host.tell(JSONResponse(count), asked)

    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
