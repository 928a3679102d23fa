"""Objects inside a request's body, read so that an error can say where they lie."""

from __future__ import annotations

from collections.abc import Mapping

from blockdraft.errors import RequestError
from blockdraft.server.http.body import shown
from blockdraft.text.content import json_kind


class Nested:
    """A JSON object and its place, written like `input.3.content.0`; a null field is not there."""

    def __init__(self, value: object, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise self.wrong(None, "an object is needed")
        self._value: Mapping[str, object] = value

    def wrong(self, name: str | None, text: str) -> RequestError:
        """The error for one of its fields, or for itself."""
        where = self.where if name is None else f"{self.where}.{name}"
        return RequestError(f"'{where}': {text}.", self.where.partition(".")[0])

    def __contains__(self, name: str) -> bool:
        return self._value.get(name) is not None

    def get(self, name: str) -> object:
        return self._value.get(name)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.wrong(name, "a string is needed")
        return value

    def name(self, name: str) -> str:
        """A string with something in it."""
        value = self.text(name)
        if not value:
            raise self.wrong(name, "it is empty")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._value.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false is needed")
        return value

    def object(self, name: str) -> dict[str, object]:
        value = self._value.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object is needed")
        return value

    def all(self, name: str) -> list[Nested]:
        """The objects of a list."""
        value = self._value.get(name)
        if not isinstance(value, list):
            raise self.wrong(name, "an array is needed")
        return [Nested(item, f"{self.where}.{name}.{number}") for number, item in enumerate(value)]

    def text_or_all(self, name: str) -> str | list[Nested]:
        """A string, or the objects of a list."""
        value = self._value.get(name)
        if not isinstance(value, str | list):
            raise self.wrong(name, "a string or an array is needed")
        return value if isinstance(value, str) else self.all(name)

    def unknown(self, name: str, hint: str) -> RequestError:
        """The error for a field whose value this server cannot take; `hint` says what it can."""
        value = self._value.get(name)
        given = shown(value) if isinstance(value, str) else json_kind(value)
        return self.wrong(name, f"{given} is not supported here: {hint}")


def all_of(value: list[dict[str, object]], field: str) -> list[Nested]:
    """The objects of a list that is a field of the body."""
    return [Nested(item, f"{field}.{number}") for number, item in enumerate(value)]
