"""Reads a model's plain text as JSON values, and checks values against keywords that a grammar cannot bind.

`pattern` is not checked here, because a client's regex can take forever in Python.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping

from blockdraft.tool_calls.pieces import FunctionTool
from blockdraft.tool_calls.schemas import (
    Part,
    Schemas,
    first_items,
    listed,
    named,
    other_items,
    type_of,
    values_of,
)

MAX_CHECKS = 5_000  # comparisons with a schema for one call (some milliseconds); then the check gives up
MAX_CHARS = 80  # of a value in a problem

# Formats of strings, each a regex that Python and llguidance read alike.
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]{1,9})?(Z|z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,16}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+=?^_`{|}~-]{1,64}"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": r"P([0-9]{1,9}W|([0-9]{1,9}Y)?([0-9]{1,9}M)?([0-9]{1,9}D)?(T([0-9]{1,9}H)?([0-9]{1,9}M)?"
    r"([0-9]{1,9}(\.[0-9]{1,9})?S)?)?)",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}",
    "hostname": _HOST,
    "email": rf"{_ATOM}(\.{_ATOM}){{0,8}}@{_HOST}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]{0,31}:[A-Za-z0-9._~:?#@!$&'()*+,;=%\[\]/-]{1,2000}",
}
_COMPILED = {name: re.compile(pattern) for name, pattern in FORMATS.items()}


def problem_of(value: object, schema: object, schemas: Schemas) -> str | None:
    """Return the first problem of a value, with its place; None if there is none or it takes too long."""
    try:
        return next(_Check(schemas).problems(value, schema, ""), None)
    except RecursionError:
        return None


class _Check:
    """A check of one value, in a limited number of steps."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._num_left = MAX_CHECKS

    def problems(self, value: object, schema: object, where: str) -> Iterator[str]:
        keywords = self._schemas.flat(schema).keywords
        self._num_left -= 1 + sum(len(one) for one in keywords.values() if isinstance(one, list)) // 8
        if self._num_left < 0:
            raise RecursionError("the check would take too long")
        kind = type_of(value)
        yield from _own_problems(value, kind, keywords, where)
        yield from self._choices(value, keywords, where)
        if isinstance(value, Mapping):
            yield from self._in_object(value, keywords, where)
        elif isinstance(value, list):
            yield from self._in_list(value, keywords, where)

    def _fits(self, value: object, schema: object) -> bool:
        return next(self.problems(value, schema, ""), None) is None

    def _choices(self, value: object, keywords: Part, where: str) -> Iterator[str]:
        either = listed(keywords, "anyOf")
        if either and not any(self._fits(value, one) for one in either):
            yield f"{where}{_shown(value)} matches none of 'anyOf'"
        one_of = listed(keywords, "oneOf")
        if one_of and sum(self._fits(value, one) for one in one_of) != 1:
            yield f"{where}{_shown(value)} does not match exactly one of 'oneOf'"
        if "not" in keywords and self._fits(value, keywords["not"]):
            yield f"{where}{_shown(value)} matches what 'not' forbids"
        if "if" in keywords:
            branch = "then" if self._fits(value, keywords["if"]) else "else"
            yield from self.problems(value, keywords.get(branch, True), where)

    def _in_object(self, value: Mapping[str, object], keywords: Part, where: str) -> Iterator[str]:
        properties, patterns = named(keywords, "properties"), named(keywords, "patternProperties")
        for name in listed(keywords, "required"):
            if name not in value:
                yield f"{where}'{name}' is missing ('required')"
        for name, needed in named(keywords, "dependentRequired").items():
            missing = [one for one in needed if one not in value] if isinstance(needed, list) else []
            if name in value and missing:
                yield f"{where}'{missing[0]}' is missing ('dependentRequired')"
        rest = keywords.get("additionalProperties", True)
        for name, item in value.items():
            below = f"{where}{name}: "
            if name in properties:
                yield from self.problems(item, properties[name], below)
            elif rest is False and not patterns:
                yield f"{where}'{name}' is not a known property ('additionalProperties')"
            elif not patterns:
                yield from self.problems(item, rest, below)
            yield from self.problems(name, keywords.get("propertyNames", True), below)

    def _in_list(self, value: list[object], keywords: Part, where: str) -> Iterator[str]:
        first, rest = first_items(keywords), other_items(keywords)
        for place, item in enumerate(value):
            schema = first[place] if place < len(first) else rest
            yield from self.problems(item, schema, f"{where}[{place}]: ")
        num_different = len({json.dumps(item, sort_keys=True) for item in value})
        if keywords.get("uniqueItems") is True and num_different < len(value):
            yield f"{where}an item occurs twice ('uniqueItems')"
        if "contains" in keywords:
            count = sum(self._fits(item, keywords["contains"]) for item in value)
            least, most = keywords.get("minContains", 1), keywords.get("maxContains", len(value))
            if (
                isinstance(least, int | float)
                and isinstance(most, int | float)
                and not least <= count <= most
            ):
                yield f"{where}{count} items match 'contains'"


def _own_problems(value: object, kind: str, keywords: Part, where: str) -> Iterator[str]:
    """Yield the problems that do not depend on the schemas inside this one."""
    given = keywords.get("type")
    types = [given] if isinstance(given, str) else given if isinstance(given, list) else [kind]
    if kind not in types and not (kind == "integer" and "number" in types):
        yield f"{where}{_shown(value)} is of type {kind}, not {' or '.join(map(str, types))}"
    values = values_of(keywords)
    # Types are compared, too: true is not 1.
    if values is not None and not any(type_of(one) == kind and value == one for one in values):
        yield f"{where}{_shown(value)} is not a listed value ('enum')"
    size = _measured(value)
    for name, (measure, is_right) in _LIMITS.items():
        limit, number = keywords.get(name), size.get(measure)
        if isinstance(limit, int | float) and number is not None and not is_right(number, limit):
            yield f"{where}{_shown(value)} breaks '{name}' {limit}"
    pattern = _COMPILED.get(str(keywords.get("format")))
    if isinstance(value, str) and pattern is not None and pattern.fullmatch(value) is None:
        yield f"{where}{_shown(value)} does not have the format '{keywords['format']}'"


def _measured(value: object) -> dict[str, float]:
    if isinstance(value, str | list | Mapping):
        return {{"string": "length", "array": "items"}.get(type_of(value), "properties"): len(value)}
    return {"value": value} if isinstance(value, int | float) and not isinstance(value, bool) else {}


def _is_multiple(number: float, step: float) -> bool:
    try:
        return step <= 0 or abs(number / step - round(number / step)) < 1e-9
    except OverflowError:  # an integer past the largest float
        return True


_LIMITS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": ("value", operator.ge),
    "maximum": ("value", operator.le),
    "exclusiveMinimum": ("value", operator.gt),
    "exclusiveMaximum": ("value", operator.lt),
    "multipleOf": ("value", _is_multiple),
    **{f"min{name}": (name.lower(), operator.ge) for name in ("Length", "Items", "Properties")},
    **{f"max{name}": (name.lower(), operator.le) for name in ("Length", "Items", "Properties")},
}


def _shown(value: object) -> str:
    if isinstance(value, list | Mapping):
        return "the list" if isinstance(value, list) else "the object"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"


# ---- values of plain text

_PYTHON = {"True": "true", "False": "false", "None": "null"}


def read_json(text: str) -> object:
    """Return the value of a JSON text. Raises ValueError also for NaN and lone surrogates."""
    try:
        value: object = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if "\\u" in text:  # the only way to write a lone surrogate
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
    """Return whether values of the schema are text: its type is string or not given."""
    return schemas.types(schema) <= {"string"}


def as_json(text: str, schema: object, schemas: Schemas) -> str:
    """Return the JSON in a text; the text as a JSON string if it holds none or the schema wants text."""
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
    """Return why a call's arguments do not match the tool's schema; None if they match or it is unknown."""
    try:
        value = read_json(arguments)
    except ValueError:
        return "the arguments are not valid JSON"
    return problem_of(value, {"allOf": [tool.parameters, {"type": "object"}]}, Schemas(tool.parameters))
