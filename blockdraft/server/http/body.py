"""Reads request bodies as plain JSON values, which are complete, limited in size, and unambiguous.

`Nested` reads objects inside a body, so that an error can say where they lie.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeVar

from blockdraft.errors import RequestError
from blockdraft.grammar.limits import MAX_DEPTH
from blockdraft.text.content import json_kind

T = TypeVar("T")
MAX_INTEGER_CHARS = 20  # 64 bits, sign included
_TOO_DEEP = f"nests deeper than {MAX_DEPTH} levels: flatten it."


def parse_object(body: bytes) -> dict[str, object]:
    """Return the JSON object in `body`. Raises RequestError.

    These are refused, too: names that occur twice (two parsers would read two requests), NaN and
    infinities, integers past 64 bits, text that is not Unicode, deep nesting.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 ({error.reason}, byte {error.start}).") from None
    fields = _loads(text, "the body", "the body is not valid JSON ({}): send a JSON object.")
    if not isinstance(fields, dict):
        raise RequestError(f"the body is {json_kind(fields)}: send a JSON object.")
    if not _is_surely_clean(text):
        for name, value in fields.items():
            _check_unicode(name, None)
            _check(value, name)
    return fields


def parse_text(text: str) -> object:
    """Return the JSON value of a text inside a body, by the same rules. Raises RequestError."""
    value = _loads(text, "the JSON in a text", "a text that should be JSON is not JSON ({}): correct it.")
    _check(value, None)
    return value


def _is_surely_clean(text: str) -> bool:
    r"""Return whether JSON cannot hold deep nesting (few brackets) or a part of a character (no `\u`)."""
    return "\\u" not in text and text.count("[") + text.count("{") <= MAX_DEPTH


def _loads(text: str, what: str, refusal: str) -> object:
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise RequestError(f"{what} {_TOO_DEEP}") from None
    except json.JSONDecodeError as error:
        raise RequestError(refusal.format(error)) from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RequestError(f"the body holds {shown(twice)} twice in one object: send it once.")
    return fields


def _refuse_constant(text: str) -> float:
    raise RequestError(f"the body holds {text}, which is not a JSON number: send finite numbers.")


def _integer(text: str) -> int:
    value = int(text) if len(text) <= MAX_INTEGER_CHARS else None
    if value is None or not -(2**63) <= value < 2**64:
        raise RequestError(f"the body holds the integer {text[:24]}…: integers may have 64 bits at most.")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError(f"the body holds the number {text[:24]}, which is too large for a 64-bit float.")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_integer, parse_float=_number
)


def _check(value: object, field: str | None) -> None:
    """Raise RequestError for deep nesting or invalid Unicode in a value; `field` is None in a nested text."""
    depth = 0
    for level in _levels(value):
        depth += 1
        for item in level:
            if isinstance(item, str):
                _check_unicode(item, field)
    if depth > MAX_DEPTH:
        where = "the JSON in a text" if field is None else shown(field)
        raise RequestError(f"{where} {_TOO_DEEP}", None if field is None else shown_name(field))


def is_too_deep(value: object) -> bool:
    """Return whether lists and objects nest deeper in a value than a request may."""
    return sum(1 for _ in _levels(value)) > MAX_DEPTH


def _levels(value: object) -> Iterator[list[object]]:
    """Yield the values and names at each depth, up to one level more than allowed."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        yield level
        below: list[object] = []
        for item in level:
            if isinstance(item, list):
                below.extend(item)
            elif isinstance(item, dict):
                below.extend(item)
                below.extend(item.values())
        if not below:
            return
        level = below


def _check_unicode(text: str, field: str | None) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = "a name or a text" if field is None else shown(field)
        raise RequestError(
            f"{where} is not valid Unicode (unpaired surrogate U+{ord(text[error.start]):04X}): "
            "send whole characters; in JSON an emoji is two \\u escapes.",
            None if field is None else shown_name(field),
        ) from None


def shown_name(text: str) -> str:
    """Return a client's text cut short for an error message, always valid Unicode."""
    return text[:64].encode(errors="replace").decode()


def shown(text: str) -> str:
    return f"'{shown_name(text)}'"


class Nested:
    """A JSON object and its place, such as `input.3.content.0`. A null field counts as missing."""

    def __init__(self, value: object, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise self.wrong(None, "an object is needed")
        self._value: Mapping[str, object] = value

    def wrong(self, name: str | None, text: str) -> RequestError:
        """Return an error about the field `name`, or about the object if `name` is None."""
        where = self.where if name is None else f"{self.where}.{name}"
        return RequestError(f"'{where}': {text}.", self.where.partition(".")[0])

    def __contains__(self, name: str) -> bool:
        return self._value.get(name) is not None

    def get(self, name: str) -> object:
        return self._value.get(name)

    def _typed(self, name: str, kind: type[T], what: str, default: object = None) -> T:
        value = self._value.get(name)
        value = default if value is None else value
        if not isinstance(value, kind):
            raise self.wrong(name, f"{what} is needed")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        return self._typed(name, str, "a string", default)

    def name(self, name: str) -> str:
        """Return a string that is not empty."""
        value = self.text(name)
        if not value:
            raise self.wrong(name, "it is empty")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return self._typed(name, bool, "true or false", default)

    def object(self, name: str) -> dict[str, object]:
        return self._typed(name, dict, "an object")

    def all(self, name: str) -> list[Nested]:
        """Return a list of objects."""
        value: list[object] = self._typed(name, list, "an array")
        return [Nested(item, f"{self.where}.{name}.{number}") for number, item in enumerate(value)]

    def text_or_all(self, name: str) -> str | list[Nested]:
        """Return a string or a list of objects."""
        value = self._value.get(name)
        if not isinstance(value, str | list):
            raise self.wrong(name, "a string or an array is needed")
        return value if isinstance(value, str) else self.all(name)

    def unknown(self, name: str, hint: str) -> RequestError:
        """Return an error about a value that this server does not support; `hint` says which it does."""
        value = self._value.get(name)
        given = shown(value) if isinstance(value, str) else json_kind(value)
        return self.wrong(name, f"{given} is not supported here: {hint}")


def all_of(value: list[dict[str, object]], field: str) -> list[Nested]:
    """Return a list of objects that is a field of the body."""
    return [Nested(item, f"{field}.{number}") for number, item in enumerate(value)]
