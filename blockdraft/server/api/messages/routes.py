"""The routes of Anthropic's Messages API, and the writer of its answers."""

from __future__ import annotations

import secrets
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from blockdraft.errors import RequestError
from blockdraft.server.api.chat.answers import ChatAnswer
from blockdraft.server.api.fields import Renamed
from blockdraft.server.api.host import ApiHost
from blockdraft.server.api.messages import schemas
from blockdraft.server.api.messages.fields import NAMES, CountTokensRequest, MessagesRequest
from blockdraft.server.api.messages.schemas import TokenCount
from blockdraft.server.api.schemas import AnswerObject
from blockdraft.server.api.translation import AnswerPart, PartsWriter
from blockdraft.server.http.body import parse_object
from blockdraft.server.http.replies import message_error, named_event

SIGNATURE = "blockdraft"  # clients only send back signed thoughts; no one checks the signature


class MessageWriter(PartsWriter):
    """One message, made of the deltas of a chat answer."""

    def __init__(self, asked: MessagesRequest, head: AnswerObject, chat: ChatAnswer) -> None:
        super().__init__(head, chat)
        self._asked = asked
        self._hides_thoughts = asked.thinking is not None and asked.thinking.display == "omitted"

    def whole(self) -> schemas.MessageAnswer:
        return {**self._message(), "content": [self._block(part) for part in self._parts], **self._ending()}

    def end(self) -> str:
        last: schemas.MessageDelta = {
            "type": "message_delta",
            "delta": self._ending(),
            "usage": self._usage(),
        }
        return _event(last) + _event({"type": "message_stop"})

    def failed(self, message: str) -> str:
        return named_event("error", message_error(500, message))

    def _begin(self) -> str:
        return _event({"type": "message_start", "message": self._message()}) + _event({"type": "ping"})

    def _message(self) -> schemas.MessageAnswer:
        return {
            "id": self._head["id"],
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> schemas.MessageUsage:
        usage = self._chat.usage()
        details = usage["prompt_tokens_details"]
        num_cached = 0 if details is None else details["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
            "service_tier": "standard",
        }

    def _ending(self) -> schemas.MessageEnd:
        if self._last.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(self._last.stop_reason, str) and self._last.stop_reason in self._asked.stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._last.stop_reason}
        has_calls = any(part.kind == "call" for part in self._parts)
        return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}

    def _block(self, part: AnswerPart) -> schemas.Block:
        if part.kind == "text":
            return {"type": "text", "text": part.text}
        if part.kind == "reasoning":
            text = "" if self._hides_thoughts else part.text
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _input(part.text)}

    def _opened(self, part: AnswerPart) -> str:
        block: schemas.Block = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
        if part.kind == "text":
            block = {"type": "text", "text": ""}
        elif part.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        return _event({"type": "content_block_start", "index": part.index, "content_block": block})

    def _added(self, part: AnswerPart, text: str) -> str:
        if part.kind == "text":
            return _more(part, {"type": "text_delta", "text": text})
        if part.kind == "call":
            return _more(part, {"type": "input_json_delta", "partial_json": text})
        return "" if self._hides_thoughts else _more(part, {"type": "thinking_delta", "thinking": text})

    def _closed(self, part: AnswerPart) -> str:
        signed = _more(part, {"type": "signature_delta", "signature": SIGNATURE})
        stop = _event({"type": "content_block_stop", "index": part.index})
        return signed + stop if part.kind == "reasoning" else stop


def _more(part: AnswerPart, delta: schemas.Delta) -> str:
    return _event({"type": "content_block_delta", "index": part.index, "delta": delta})


def _event(data: schemas.MessageEvent) -> str:
    return named_event(data["type"], data)


def _input(arguments: str) -> dict[str, object]:
    """Return the arguments of a call. Invalid JSON is kept as text, under Anthropic's name for it."""
    try:
        return parse_object((arguments or "{}").encode())
    except RequestError:
        return {"INVALID_JSON": arguments}


def routes(host: ApiHost) -> list[Route]:
    async def create(request: Request) -> Response:
        asked = await host.read(request, MessagesRequest)
        head = host.head(f"msg_{secrets.token_hex(16)}")
        with Renamed(NAMES):
            answer = await host.converse(request, asked.chat, head, partial(MessageWriter, asked, head))
        return host.ignored.tell(answer, asked)

    async def count_tokens(request: Request) -> Response:
        asked = await host.read(request, CountTokensRequest)
        with Renamed(NAMES):
            count: TokenCount = {"input_tokens": await host.num_prompt_tokens(request, asked.chat)}
        return host.ignored.tell(JSONResponse(count), asked)

    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
