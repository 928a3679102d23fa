"""Values that models write as plain text, typed by the schema of the parameter."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

_PYTHON = {"True": "true", "False": "false", "None": "null"}


def read_json(text: str) -> object:
    """The value of a JSON text. ValueError: it has none that can be written as JSON again.

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
        raise ValueError(f"{text} is no finite number")
    return value


def types_of(schema: object) -> frozenset[str]:
    """The JSON types that a schema allows as far as it says; empty: it does not."""
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(name for name in given if isinstance(name, str))
    listed = [part for key in ("anyOf", "oneOf") for part in _list(schema.get(key))]
    if listed:
        return frozenset().union(*map(types_of, listed))
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    return frozenset("string" if isinstance(value, str) else "other" for value in values)


def is_text(schema: object) -> bool:
    """Whether any text is a value, so that none need be looked at. What has no type is text."""
    return types_of(schema) <= {"string"}


def as_json(text: str, schema: object) -> str:
    """The value that a text stands for, as JSON: of the schema's types if it can be, else the text itself."""
    written = _PYTHON.get(text.strip(), text.strip())
    try:
        read_json(written)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if written.startswith('"') and "string" in types_of(schema):
        return json.dumps(text, ensure_ascii=False)  # the quotes are a part of it
    return written


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
