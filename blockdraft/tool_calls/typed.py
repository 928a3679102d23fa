"""Turns plain text of models into JSON values, by the schema of the parameter."""

from __future__ import annotations

import json
import math

from blockdraft.tool_calls.checking import problem_of
from blockdraft.tool_calls.pieces import FunctionTool
from blockdraft.tool_calls.schemas import Schemas

_PYTHON = {"True": "true", "False": "false", "None": "null"}


def read_json(text: str) -> object:
    """The value of a JSON text. Raises ValueError if it could not be written as JSON again.

    Python reads more than JSON: NaN, Infinity, numbers past the largest float, halves of characters.
    """
    try:
        value: object = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if "\\u" in text:  # no other way to write half a character
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it nests too deep") from None
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def is_text(schema: object, schemas: Schemas) -> bool:
    """Whether every text is a valid value. Without a type it is."""
    return schemas.types(schema) <= {"string"}


def as_json(text: str, schema: object, schemas: Schemas) -> str:
    """The value of a text, as JSON: the JSON in it, unless only the text itself matches the schema."""
    types = schemas.types(schema)
    plain = json.dumps(text, ensure_ascii=False)
    if types == {"string"}:
        return plain
    written = _PYTHON.get(text.strip(), text.strip())
    try:
        value = read_json(written)
    except ValueError:
        return plain
    if "string" in types and (isinstance(value, str) or problem_of(value, schema, schemas) is not None):
        return plain  # quotes are a part of the text
    return written


def call_problem(arguments: str, tool: FunctionTool) -> str | None:
    """Why the arguments of a call do not match the tool's schema; None if they match, or it is unknown."""
    try:
        value = read_json(arguments)
    except ValueError:
        return "the arguments are not valid JSON"
    return problem_of(value, {"allOf": [tool.parameters, {"type": "object"}]}, Schemas(tool.parameters))
