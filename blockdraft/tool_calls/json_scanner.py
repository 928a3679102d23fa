"""Scans JSON one character at a time, to find the end of a value, or its first error, at once."""

from __future__ import annotations

import re
from typing import Literal

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SPACE = " \t\r\n"
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Scans one object, array or string. Raises ValueError if the text is not JSON."""

    def __init__(self) -> None:
        self._open: list[str] = []  # the brackets that are open
        self._next: Literal["value", "first", "key", "colon", "end"] = "value"
        self._is_key = False
        self._in_string = False
        self._is_escape = False  # after a backslash
        self._num_hex = 0  # digits of a \\u escape that are still to come
        self._scalar = ""

    def push(self, character: str) -> bool:
        """Take a character; return whether it completes the value."""
        if self._in_string:
            return self._in_text(character)
        if self._scalar:
            if character not in ",]}" and character not in _SPACE:
                self._scalar += character
                return False
            self._end_scalar()
        if character in _SPACE:
            return False
        return self._outside(character)

    def _in_text(self, character: str) -> bool:
        if self._is_escape:
            _check(character in '"\\/bfnrtu')
            self._is_escape, self._num_hex = False, 4 if character == "u" else 0
        elif self._num_hex:
            _check(character in _HEX)
            self._num_hex -= 1
        elif character == "\\":
            self._is_escape = True
        elif character == '"':
            self._in_string = False
            return self._end_value() if not self._is_key else self._expect("colon")
        else:
            _check(character >= " ")
        return False

    def _outside(self, character: str) -> bool:
        if self._next == "colon":
            _check(character == ":")
            return self._expect("value")
        if self._next == "end":
            if character == ",":
                return self._expect("key" if self._open[-1] == "{" else "value")
            return self._close(character)
        if self._next == "first" and character in "}]":
            return self._close(character)
        is_key = self._next == "key" or (self._next == "first" and self._open[-1] == "{")
        if character == '"':
            self._in_string, self._is_key = True, is_key
            return False
        _check(not is_key)
        if character in "{[":
            self._open.append(character)
            return self._expect("first")
        _check(bool(self._open) and character in "-0123456789tfn")
        self._scalar = character
        return False

    def _expect(self, what: Literal["value", "first", "key", "colon", "end"]) -> bool:
        self._next = what
        return False

    def _close(self, character: str) -> bool:
        _check(character == {"{": "}", "[": "]"}[self._open.pop()])
        return self._end_value()

    def _end_scalar(self) -> None:
        _check(_SCALAR.fullmatch(self._scalar) is not None)
        self._scalar = ""
        self._end_value()

    def _end_value(self) -> bool:
        self._next = "end"
        return not self._open


def _check(is_right: bool) -> None:
    if not is_right:
        raise ValueError
