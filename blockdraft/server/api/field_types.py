"""The types of request fields that are more than a number or a truth value, each with its limit."""

from __future__ import annotations

import json
import re
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from blockdraft.engine.request import MAX_BIASES, MAX_STOPS
from blockdraft.server.api.chat.shapes import Message
from blockdraft.server.http.body import shown

# Arbitrary limits; the body's size bounds everything once more.
MAX_MESSAGES = 4096
MAX_PROMPTS = 128
MAX_PROMPT_TOKENS = 1 << 20
MAX_STOP_CHARS = 1024
MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_KWARGS_CHARS = 1 << 14
MAX_INT = 2**31 - 1
_TOKEN_ID = re.compile("(0|[1-9][0-9]{0,9})")  # one way to write each, so that none is given twice

_RESERVED_KWARGS = frozenset(
    {
        *("self", "messages", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"),
        *("tools", "add_special_tokens", "split_special_tokens"),
    }
)


class StrictFields(BaseModel):
    """An object in a body: nothing is converted, and what nobody knows is left out."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, populate_by_name=True)


def needs(name: str, value: str, other: str) -> JsonDict:
    """The schema of an object that must have another field where one has this value."""
    then: JsonDict = {"required": [other], "properties": {other: {"not": {"type": "null"}}}}
    return {"if": {"required": [name], "properties": {name: {"const": value}}}, "then": then}


def whole(value: object) -> object:
    """5.0 is an integer in JSON, and some clients have no other way to say 5; in lists too."""
    if isinstance(value, list) and any(isinstance(item, float | list) for item in value):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


TOKEN_MARK = "x-token"  # in the schema of a token's id, whose limit is the model's vocabulary
TokenId = Annotated[int, Field(ge=0, le=MAX_INT, json_schema_extra={TOKEN_MARK: True})]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
TokenList = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
TextList = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
TokenLists = Annotated[list[TokenList], Field(min_length=1, max_length=MAX_PROMPTS)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _token_biases(value: object) -> object:
    """Keys become token ids; values are checked behind this."""
    if not isinstance(value, dict):
        return value
    for key in value:
        if not (_TOKEN_ID.fullmatch(key) and int(key) <= MAX_INT):
            raise PydanticCustomError("token", "the key {key} is no token id", {"key": shown(key)})
    return {int(key): bias for key, bias in value.items()}


def _template_kwargs(value: dict[str, object]) -> dict[str, object]:
    if len(json.dumps(value)) > MAX_TEMPLATE_KWARGS_CHARS:
        raise PydanticCustomError(
            "size", "more than {limit} characters", {"limit": MAX_TEMPLATE_KWARGS_CHARS}
        )
    if wrong := _RESERVED_KWARGS & value.keys():
        raise PydanticCustomError("name", "{names} cannot be set here", {"names": ", ".join(sorted(wrong))})
    return value


Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[int, Bias],
    Field(max_length=MAX_BIASES),
    BeforeValidator(
        _token_biases,
        json_schema_input_type=Annotated[
            dict[str, float],
            WithJsonSchema(
                {
                    "type": "object",
                    "propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": MAX_BIASES,
                }
            ),
        ],
    ),
]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOPS)]
Stops = Annotated[
    StopStrings,
    BeforeValidator(_as_list, json_schema_input_type=StopString | StopStrings),
    # Clients with a field for it send "" where it was left empty.
    AfterValidator(lambda stops: [stop for stop in stops if stop]),
]
TemplateKwargs = Annotated[
    dict[str, object],
    Field(
        max_length=MAX_TEMPLATE_KWARGS,
        json_schema_extra={"propertyNames": {"not": {"enum": sorted(_RESERVED_KWARGS)}}},
    ),
    AfterValidator(_template_kwargs),
]


def _prompts(value: object) -> list[str | list[int]]:
    """One prompt or many, as text or as token ids: always a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "send a string, token ids, or a list of one or the other")
    if all(isinstance(item, str) for item in value):
        _at_most(value, MAX_PROMPTS, "prompts")
        return list(value)
    if all(isinstance(item, list) and item for item in value):
        _at_most(value, MAX_PROMPTS, "prompts")
        return [_token_ids(item) for item in value]
    return [_token_ids(value)]


def _token_ids(value: list[object]) -> list[int]:
    _at_most(value, MAX_PROMPT_TOKENS, "tokens")
    for token in value:
        # A truth value is an int to Python.
        if type(token) is not int or not 0 <= token <= MAX_INT:
            raise PydanticCustomError("prompt", "a prompt is text, or a list of token ids of 0 or more")
    return value  # type: ignore[return-value]


def _at_most(value: list[object], limit: int, what: str) -> None:
    if len(value) > limit:
        raise PydanticCustomError(
            "size", "{count} {what}, at most {limit}", {"count": len(value), "what": what, "limit": limit}
        )


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts, json_schema_input_type=str | TextList | TokenList | TokenLists),
]
