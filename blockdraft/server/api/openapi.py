"""Builds the OpenAPI document from the models of requests and the schemas of answers."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from blockdraft import __version__
from blockdraft.server.api import fields, schemas
from blockdraft.server.api.chat import schemas as chat
from blockdraft.server.api.chat.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from blockdraft.server.api.fields import MAX_INT, TOKEN_MARK
from blockdraft.server.api.messages import schemas as messages
from blockdraft.server.api.messages.fields import CountTokensRequest, MessagesRequest
from blockdraft.server.api.responses import schemas as responses
from blockdraft.server.api.responses.fields import InputTokensRequest, ResponsesRequest
from blockdraft.server.api.responses.stored import MAX_PAGE
from blockdraft.server.http import replies

Json = dict[str, object]

_REFERENCE = "#/components/schemas/{model}"
_FAILURES = {
    400: "The request cannot be served as it was asked; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "The model or the response does not exist, or the server cannot do this.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    421: "The Host header names another server.",
    429: "The queue is full; Retry-After says when to come back.",
    431: "The address and the headers are too large.",
    503: "The engine is starting, stopping or has failed, or there are too many requests at once.",
    504: "No answer began in time.",
    529: "There are too many requests at once.",
}
_ANSWERS = {  # objects of these modules have no other properties
    name for module in (schemas, chat, replies, messages, responses) for name in vars(module)
}
_PARAMETER = re.compile(r"\{(\w+)\}")
_JSON = "application/json"


_TOKENS = (400, 401, 404, 408, 413, 415, 421, 431, 503, 504)
_GENERATION = (*_TOKENS, 429)
_PROBE = (421, 431, 503)
_STORED = (401, 404, *_PROBE)


@dataclass(frozen=True, slots=True)
class _Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: type | None  # None: the answer is text
    failures: tuple[int, ...] = _PROBE
    takes: type[fields.AnyBody] | None = None
    events: type | None = None  # of the stream, if the operation has one
    error: type = replies.Error
    parameters: tuple[Json, ...] = ()  # in the query and in headers
    is_served: bool = True  # False: every request is refused

    @property
    def failed(self) -> type:
        """Return the type of the answer with status 503: a probe's own, or an error for other operations."""
        return self.answer if self.answer in (schemas.Status, schemas.Start) else self.error

    @property
    def has_named_events(self) -> bool:
        """Return whether each event has a name and the stream has no final [DONE]."""
        return self.events not in (chat.ChatChunk, chat.TextChunk)


def _asked(name: str, *, where: str = "query", **schema: object) -> Json:
    """Return an optional parameter."""
    return {"name": name, "in": where, "required": False, "schema": schema}


def _post(
    path: str, summary: str, takes: type[fields.AnyBody], answer: type, events: object = None
) -> _Operation:
    """Return a POST operation; it generates an answer if it has `events`."""
    failures = _TOKENS if events is None else _GENERATION
    stream = cast(type | None, events)  # it may be a union
    if path.startswith("/v1/messages"):
        error = replies.MessageError
        return _Operation("post", path, summary, answer, (*failures, 529), takes, stream, error)
    return _Operation("post", path, summary, answer, failures, takes, stream)


def _get(path: str, summary: str, answer: object, failures: tuple[int, ...] = (), **more: Any) -> _Operation:  # noqa: ANN401
    return _Operation("get", path, summary, cast(type | None, answer), (*failures, *_PROBE), **more)


_MODELS_ERROR = cast(type, replies.Error | replies.MessageError)
_VERSION = (_asked(replies.VERSION_HEADER, where="header", type="string"),)
_RESPONSE = "/v1/responses/{response_id}"
_REPLAYED = (
    _asked("stream", type="boolean"),
    _asked("starting_after", type="integer", minimum=0, maximum=MAX_INT),
)
_PAGED = (
    _asked("limit", type="integer", minimum=1, maximum=MAX_PAGE),
    _asked("order", enum=["asc", "desc"]),
    _asked("after", type="string"),
)
_OPERATIONS = (
    _post("/v1/chat/completions", "Answer a conversation.", ChatRequest, chat.ChatCompletion, chat.ChatChunk),
    _post("/v1/completions", "Continue a prompt.", CompletionRequest, chat.TextCompletion, chat.TextChunk),
    _post(
        "/v1/responses",
        "Answer a conversation and store it: OpenAI's Responses API.",
        ResponsesRequest,
        responses.Response,
        responses.Event,
    ),
    _get(
        _RESPONSE,
        "A stored response.",
        responses.Response,
        (400, 401, 404),
        events=responses.Event,
        parameters=_REPLAYED,
    ),
    _get(
        f"{_RESPONSE}/input_items",
        "The input items of a response.",
        responses.InputItems,
        (400, 401, 404),
        parameters=_PAGED,
    ),
    _Operation(
        "post",
        f"{_RESPONSE}/cancel",
        "Always refused: no response runs in the background.",
        responses.Response,
        (400, 413, 415, *_STORED),
        is_served=False,
    ),
    _post(
        "/v1/responses/input_tokens",
        "The number of tokens of a conversation.",
        InputTokensRequest,
        responses.InputTokens,
    ),
    _Operation(
        "post",
        "/v1/responses/compact",
        "Always refused: this server does not compact conversations.",
        responses.Response,
        (413, 415, *_STORED),
        is_served=False,
    ),
    _Operation("delete", _RESPONSE, "Delete a stored response.", responses.Deleted, _STORED),
    _post(
        "/v1/messages",
        "Answer a conversation: Anthropic's Messages API.",
        MessagesRequest,
        messages.MessageAnswer,
        messages.MessageEvent,
    ),
    _post(
        "/v1/messages/count_tokens",
        "The number of tokens of a conversation.",
        CountTokensRequest,
        messages.TokenCount,
    ),
    _get(
        "/v1/models",
        "The served model, in OpenAI's shape, or in Anthropic's if the request has its header.",
        schemas.ModelList | messages.ModelPage,
        (401,),
        error=_MODELS_ERROR,
        parameters=_VERSION,
    ),
    _get(
        "/v1/models/{model}",
        "One model.",
        schemas.ModelCard | messages.ModelInfo,
        (401, 404),
        error=_MODELS_ERROR,
        parameters=_VERSION,
    ),
    _post("/tokenize", "The tokens of a prompt or of a conversation.", TokenizeRequest, chat.Tokens),
    _post("/detokenize", "The text of tokens.", DetokenizeRequest, chat.Text),
    _get("/live", "Is the process alive?", schemas.Status),
    _get("/health", "Are requests answered?", schemas.Status),
    _get("/ready", "Has the start finished?", schemas.Start),
    _get("/ping", "An alias of /health.", schemas.Status),
    _Operation("post", "/ping", "An alias of /health.", schemas.Status),
    _get("/version", "The server's version.", schemas.Version),
    _get("/server_info", "The model's name, for SGLang's router.", replies.ServerInfo),
    _get("/metrics", "Counters in Prometheus' text format.", None),
    _get("/openapi.json", "This document.", dict[str, object]),
)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that the engine sets for some fields."""

    block: int  # tokens that a step verifies at most
    vocab_size: int


@functools.cache
def openapi(limits: EngineLimits | None = None) -> Json:
    """Return the document. `limits` is None before the engine is ready; its limits are then left out."""
    adapters: list[tuple[type, JsonSchemaMode, TypeAdapter[object]]] = []
    for item in _OPERATIONS:
        if item.takes is not None:
            adapters.append((item.takes, "validation", TypeAdapter(item.takes)))
        for answer in (item.answer, item.events, item.error, item.failed):
            if answer is not None:
                adapters.append((answer, "serialization", TypeAdapter(answer)))
    found, definitions = TypeAdapter.json_schemas(adapters, ref_template=_REFERENCE)
    by_type = {kind: schema for (kind, _), schema in found.items()}
    components = definitions["$defs"]
    requests = {item.takes.__name__: item.takes for item in _OPERATIONS if item.takes is not None}
    for name, schema in components.items():
        if name in _ANSWERS:
            schema["additionalProperties"] = False
        elif name.endswith("Request"):
            _complete(schema, requests[name])
    _set_limits(components, limits)
    paths: dict[str, Json] = {}
    for item in _OPERATIONS:
        paths.setdefault(item.path, {})[item.method] = _operation(item, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "blockdraft", "version": __version__},
        "paths": paths,
        "components": {"schemas": dict(sorted(components.items()))},
    }


def _complete(schema: Json, kind: type[fields.AnyBody]) -> None:
    """Allow null for optional fields, and add unsupported fields with only their neutral values."""
    required = schema.get("required", [])
    properties = schema["properties"]
    assert isinstance(properties, dict)
    assert isinstance(required, list)
    for name, value in properties.items():
        if name not in required and {"type": "null"} not in value.get("anyOf", []):
            properties[name] = {"anyOf": [value, {"type": "null"}]}
    for name, neutral in kind.UNSUPPORTED.items():
        properties.setdefault(name, {"enum": [*neutral, None]})


def _set_limits(part: object, limits: EngineLimits | None) -> None:
    """Replace the marks in the schemas with the engine's limits."""
    if isinstance(part, dict):
        if part.pop(TOKEN_MARK, False) and limits is not None:
            part["maximum"] = limits.vocab_size - 1
        if part.pop(fields.WIDTH_MARK, False) and limits is not None:
            part["maximum"] = limits.block
    for item in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _set_limits(item, limits)


def _event(data: Json, error: Json, *, is_named: bool) -> Json:
    """Return the schema of a stream's event: a chunk, an error that ends the stream, or an unnamed [DONE]."""
    chunk: Json = {"type": "string", "contentMediaType": _JSON, "contentSchema": {"anyOf": [data, error]}}
    if is_named:
        named: Json = {"event": {"type": "string"}, "data": chunk}
        return {"type": "object", "required": ["event", "data"], "properties": named}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, chunk]}},
    }


def _operation(item: _Operation, by_type: Mapping[type, Json]) -> Json:
    content: Json = {"text/plain": {"schema": {"type": "string"}}}
    if item.answer is not None:
        content = {_JSON: {"schema": by_type[item.answer]}}
    if item.events is not None:
        one = _event(by_type[item.events], by_type[item.error], is_named=item.has_named_events)
        content["text/event-stream"] = {"schema": one}
    answers: Json = {"200": {"description": "OK", "content": content}} if item.is_served else {}
    for status in sorted(item.failures):
        failed = {"schema": by_type[item.failed if status == 503 else item.error]}
        answers[str(status)] = {"description": _FAILURES[status], "content": {_JSON: failed}}
    operation: Json = {
        "operationId": f"{item.method}{item.path.replace('/', '_').replace('.', '_')}",
        "summary": item.summary,
        "responses": answers,
    }
    if item.takes is not None:
        body = {"schema": by_type[item.takes]}
        operation["requestBody"] = {"required": True, "content": {_JSON: body}}
    text = {"type": "string", "minLength": 1}
    in_path: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in _PARAMETER.findall(item.path)
    ]
    if parameters := [*in_path, *item.parameters]:
        operation["parameters"] = parameters
    return operation
