"""Checks clients' JSON schemas for simple mistakes, so that the error can name the field. The grammar
interprets the schema later, and refuses schemas that no value can match.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from blockdraft.errors import RequestError
from blockdraft.grammar.limits import check_backslash
from blockdraft.server.http.body import parse_text
from blockdraft.text.content import json_kind

T = TypeVar("T", list[object], dict[str, object])
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_ONE = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def _from_text(value: object) -> object:
    """Parse a schema that is given as JSON text, as vLLM allows."""
    if not isinstance(value, str):
        return value
    try:
        return parse_text(value)
    except RequestError as error:
        raise PydanticCustomError("schema", "{why}", {"why": str(error).rstrip(".")}) from None


def check_schema(schema: dict[str, object]) -> dict[str, object]:
    """Return the schema. Raises PydanticCustomError for unknown types and for parts that are not schemas."""
    waiting: list[object] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            wrong = {"found": json_kind(part)}
            raise PydanticCustomError(
                "schema", "{found} stands in the JSON schema where a schema must be", wrong
            )
        _check_type(part.get("type"))
        _check_pattern(part.get("pattern"))
        waiting.extend(_parts(part))
    return schema


def _check_type(given: object) -> None:
    names = given if isinstance(given, list) else [] if given is None else [given]
    for name in names:
        if not isinstance(name, str) or name not in _TYPES:
            wrong = {
                "name": name[:64] if isinstance(name, str) else json_kind(name),
                "types": ", ".join(sorted(_TYPES)),
            }
            raise PydanticCustomError("schema", "'{name}' is not a JSON type: use {types}", wrong)


def _check_pattern(given: object) -> None:
    if isinstance(given, str):
        try:
            check_backslash(given)
        except RequestError as error:
            raise PydanticCustomError("schema", "{why}", {"why": str(error).rstrip(".")}) from None


def _parts(schema: dict[str, object]) -> Iterator[object]:
    """Yield the schemas inside a schema."""
    for name in _ONE:
        if name in schema:
            found = schema[name]
            yield from found if isinstance(found, list) and name == "items" else [found]
    for name in _LISTED:
        if name in schema:
            yield from _checked(schema, name, list, "an array")
    for name in _NAMED:
        if name in schema:
            yield from _checked(schema, name, dict, "an object").values()


def _checked(schema: dict[str, object], name: str, kind: type[T], what: str) -> T:
    value = schema[name]
    if not isinstance(value, kind):
        wrong = {"name": name, "found": json_kind(value), "what": what}
        raise PydanticCustomError("schema", "{name} is {found}, not {what}", wrong)
    return value


def _shape() -> dict[str, object]:
    """Return a schema of schemas, only of their first level, for /openapi.json."""
    inner = {"type": ["object", "boolean"]}
    kind = {"enum": sorted(_TYPES)}
    return {
        "type": "object",
        "properties": {
            "type": {"anyOf": [kind, {"type": "array", "items": kind}, {"type": "null"}]},
            **dict.fromkeys(_ONE, inner),
            "items": {"anyOf": [inner, {"type": "array", "items": inner}]},
            **{name: {"type": "array", "items": inner} for name in _LISTED},
            **{name: {"type": "object", "additionalProperties": inner} for name in _NAMED},
        },
    }


Schema = Annotated[dict[str, object], AfterValidator(check_schema), WithJsonSchema(_shape())]
SchemaOrText = Annotated[Schema, BeforeValidator(_from_text, json_schema_input_type=str | Schema)]
