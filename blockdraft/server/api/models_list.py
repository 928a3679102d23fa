"""The answers of /v1/models: one model, in the shape that the client's API has."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from blockdraft.engine.info import EngineInfo
from blockdraft.server.api.messages.schemas import ModelInfo, ModelPage
from blockdraft.server.api.schemas import ModelCard, ModelList
from blockdraft.server.http.replies import VERSION_HEADER
from blockdraft.settings.model_source import public_id


def models_response(request: Request, card: ModelCard, info: EngineInfo) -> Response:
    """The list of models: one."""
    if VERSION_HEADER in request.headers:
        return JSONResponse(_page(_model_info(card, info), request.query_params))
    models: ModelList = {"object": "list", "data": [card]}
    return JSONResponse(models)


def model_response(request: Request, card: ModelCard, info: EngineInfo) -> Response:
    return JSONResponse(_model_info(card, info) if VERSION_HEADER in request.headers else card)


def model_card(name: str, created: int, info: EngineInfo) -> ModelCard:
    """The model as OpenAI's clients know it, with vLLM's fields."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "blockdraft",
        "root": public_id(info.target),
        "parent": None,
        "max_model_len": info.max_model_len,
        "permission": [],
    }


def _model_info(card: ModelCard, info: EngineInfo) -> ModelInfo:
    begun = datetime.fromtimestamp(card["created"], UTC)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": info.target_title,
        "created_at": begun.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _page(model: ModelInfo, query: Mapping[str, str]) -> ModelPage:
    """The only page: there is one model."""
    if model["id"] in (query.get("after_id"), query.get("before_id")):
        return {"data": [], "first_id": None, "last_id": None, "has_more": False}
    return {"data": [model], "first_id": model["id"], "last_id": model["id"], "has_more": False}
