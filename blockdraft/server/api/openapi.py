"""The OpenAPI document, made of the models that read requests and the schemas that answer them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from blockdraft import __version__
from blockdraft.server.api import fields, schemas
from blockdraft.server.api.chat import fields as chat_fields
from blockdraft.server.api.chat import schemas as chat_schemas
from blockdraft.server.api.fields import MAX_INT, TOKEN_MARK
from blockdraft.server.api.messages import fields as message_fields
from blockdraft.server.api.messages import schemas as message_schemas
from blockdraft.server.api.responses import fields as response_fields
from blockdraft.server.api.responses import schemas as response_schemas
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
    name
    for module in (schemas, chat_schemas, replies, message_schemas, response_schemas)
    for name in vars(module)
}
_PARAMETER = re.compile(r"\{(\w+)\}")
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class _Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: type | None  # None: text
    takes: type[fields.AnyBody] | None = None
    events: type | None = None  # of the stream, where there is one
    failures: tuple[int, ...] = ()
    error: type = replies.Error
    has_named_events: bool = False  # each event has a name, and no [DONE] follows the last
    parameters: tuple[Json, ...] = ()  # in the query and in headers
    is_served: bool = True  # False: every request is refused

    @property
    def failed(self) -> type:
        """The answer with status 503: for probes their own, for all others an error."""
        return self.answer if self.answer in (schemas.Status, schemas.Start) else self.error


def _asked(name: str, *, where: str = "query", **schema: object) -> Json:
    """An optional parameter."""
    return {"name": name, "in": where, "required": False, "schema": schema}


_MODELS_ERROR = cast(type, replies.Error | replies.MessageError)
_VERSION = _asked(replies.VERSION_HEADER, where="header", type="string")
_TOKENS = (400, 401, 404, 408, 413, 415, 421, 431, 503, 504)
_GENERATION = (*_TOKENS, 429)
_PROBE = (421, 431, 503)
_OPERATIONS = (
    _Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Answer a conversation.",
        takes=chat_fields.ChatRequest,
        answer=chat_schemas.ChatCompletion,
        events=chat_schemas.ChatChunk,
        failures=_GENERATION,
    ),
    _Operation(
        method="post",
        path="/v1/completions",
        summary="Continue a prompt.",
        takes=chat_fields.CompletionRequest,
        answer=chat_schemas.TextCompletion,
        events=chat_schemas.TextChunk,
        failures=_GENERATION,
    ),
    _Operation(
        method="post",
        path="/v1/responses",
        summary="Answer a conversation and store it: OpenAI's Responses API.",
        takes=response_fields.ResponsesRequest,
        answer=response_schemas.Response,
        events=cast(type, response_schemas.Event),  # a union
        failures=_GENERATION,
        has_named_events=True,
    ),
    _Operation(
        method="get",
        path="/v1/responses/{response_id}",
        summary="A stored response.",
        answer=response_schemas.Response,
        events=cast(type, response_schemas.Event),
        failures=(400, 401, 404, *_PROBE),
        has_named_events=True,
        parameters=(
            _asked("stream", type="boolean"),
            _asked("starting_after", type="integer", minimum=0, maximum=MAX_INT),
        ),
    ),
    _Operation(
        method="get",
        path="/v1/responses/{response_id}/input_items",
        summary="The input items of a response.",
        answer=response_schemas.InputItems,
        failures=(400, 401, 404, *_PROBE),
        parameters=(
            _asked("limit", type="integer", minimum=1, maximum=MAX_PAGE),
            _asked("order", enum=["asc", "desc"]),
            _asked("after", type="string"),
        ),
    ),
    _Operation(
        method="post",
        path="/v1/responses/{response_id}/cancel",
        summary="Always refused: no response runs in the background.",
        answer=response_schemas.Response,
        failures=(400, 401, 404, 413, 415, *_PROBE),
        is_served=False,
    ),
    _Operation(
        method="post",
        path="/v1/responses/input_tokens",
        summary="The number of tokens of a conversation.",
        takes=response_fields.InputTokensRequest,
        answer=response_schemas.InputTokens,
        failures=_TOKENS,
    ),
    _Operation(
        method="post",
        path="/v1/responses/compact",
        summary="Always refused: this server does not compact conversations.",
        answer=response_schemas.Response,
        failures=(401, 404, 413, 415, *_PROBE),
        is_served=False,
    ),
    _Operation(
        method="delete",
        path="/v1/responses/{response_id}",
        summary="Delete a stored response.",
        answer=response_schemas.Deleted,
        failures=(401, 404, *_PROBE),
    ),
    _Operation(
        method="post",
        path="/v1/messages",
        summary="Answer a conversation: Anthropic's Messages API.",
        takes=message_fields.MessagesRequest,
        answer=message_schemas.MessageAnswer,
        events=cast(type, message_schemas.MessageEvent),  # a union
        failures=(*_GENERATION, 529),
        error=replies.MessageError,
        has_named_events=True,
    ),
    _Operation(
        method="post",
        path="/v1/messages/count_tokens",
        summary="The number of tokens of a conversation.",
        takes=message_fields.CountTokensRequest,
        answer=message_schemas.TokenCount,
        failures=(*_TOKENS, 529),
        error=replies.MessageError,
    ),
    _Operation(
        method="get",
        path="/v1/models",
        summary="The served model, in OpenAI's shape, or in Anthropic's if the request has its header.",
        answer=cast(type, schemas.ModelList | message_schemas.ModelPage),
        failures=(401, *_PROBE),
        error=_MODELS_ERROR,
        parameters=(_VERSION,),
    ),
    _Operation(
        method="get",
        path="/v1/models/{model}",
        summary="One model.",
        answer=cast(type, schemas.ModelCard | message_schemas.ModelInfo),
        failures=(401, 404, *_PROBE),
        error=_MODELS_ERROR,
        parameters=(_VERSION,),
    ),
    _Operation(
        method="post",
        path="/tokenize",
        summary="The tokens of a prompt or of a conversation.",
        takes=chat_fields.TokenizeRequest,
        answer=chat_schemas.Tokens,
        failures=_TOKENS,
    ),
    _Operation(
        method="post",
        path="/detokenize",
        summary="The text of tokens.",
        takes=chat_fields.DetokenizeRequest,
        answer=chat_schemas.Text,
        failures=_TOKENS,
    ),
    _Operation("get", "/live", "Is the process alive?", schemas.Status, failures=_PROBE),
    _Operation("get", "/health", "Are requests answered?", schemas.Status, failures=_PROBE),
    _Operation("get", "/ready", "Has the start finished?", schemas.Start, failures=_PROBE),
    _Operation("get", "/ping", "An alias of /health.", schemas.Status, failures=_PROBE),
    _Operation("post", "/ping", "An alias of /health.", schemas.Status, failures=_PROBE),
    _Operation("get", "/version", "The server's version.", schemas.Version, failures=_PROBE),
    _Operation("get", "/metrics", "Counters in Prometheus' text format.", None, failures=_PROBE),
    _Operation("get", "/openapi.json", "This document.", dict[str, object], failures=_PROBE),
)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that the engine sets for some fields."""

    block: int  # tokens that a step verifies at most
    vocab_size: int


@functools.cache
def openapi(limits: EngineLimits | None = None) -> Json:
    """The document. Without `limits` those of the engine are left out, as before it is ready."""
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
            _allow_null(schema)
            _refuse_unsupported(schema, requests[name])
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


def _allow_null(schema: Json) -> None:
    """Allow null for fields that may be left out."""
    required = schema.get("required", [])
    properties = schema["properties"]
    assert isinstance(properties, dict)
    assert isinstance(required, list)
    for name, value in properties.items():
        if name not in required and {"type": "null"} not in value.get("anyOf", []):
            properties[name] = {"anyOf": [value, {"type": "null"}]}


def _refuse_unsupported(schema: Json, kind: type[fields.AnyBody]) -> None:
    """Allow only neutral values for fields that are not supported."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    for name, neutral in kind.UNSUPPORTED.items():
        properties.setdefault(name, {"enum": [*neutral, None]})


def _set_limits(part: object, limits: EngineLimits | None) -> None:
    """Replace the marks in the schemas by the engine's limits."""
    if isinstance(part, dict):
        if part.pop(TOKEN_MARK, False) and limits is not None:
            part["maximum"] = limits.vocab_size - 1
        if part.pop(fields.WIDTH_MARK, False) and limits is not None:
            part["maximum"] = limits.block
    for item in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _set_limits(item, limits)


def _event(data: Json, error: Json, *, is_named: bool) -> Json:
    """One event of a stream: a chunk, an error that ends it early, or [DONE] where events have no names."""
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
    responses: Json = {"200": {"description": "OK", "content": content}} if item.is_served else {}
    for status in sorted(item.failures):
        failed = {"schema": by_type[item.failed if status == 503 else item.error]}
        responses[str(status)] = {"description": _FAILURES[status], "content": {_JSON: failed}}
    operation: Json = {
        "operationId": f"{item.method}{item.path.replace('/', '_').replace('.', '_')}",
        "summary": item.summary,
        "responses": responses,
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
