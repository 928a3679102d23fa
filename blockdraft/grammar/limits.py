"""Limits of structured output: characters, depth and kinds of values, checked before any work."""

from __future__ import annotations

import math
from collections.abc import Mapping

from blockdraft.errors import RequestError

MAX_GRAMMAR_CHARS = 1 << 19  # arbitrary
# The most text that a grammar may force in a row. Long forced text slows each step of all answers: llguidance
# tokenizes all of it again, 100,000 characters in 0.2 s.
MAX_RUN_CHARS = 1 << 15
MAX_DEPTH = 64  # of nested lists and objects, in a schema and in a request's body; arbitrary


def check_text(what: str, text: object, limit: int = MAX_GRAMMAR_CHARS) -> None:
    """Raise RequestError unless `text` is a non-empty, valid string within the limit."""
    if not isinstance(text, str) or not text:
        raise _refused(f"{what} must be a string that is not empty.")
    if len(text) > limit:
        raise _refused(f"{what} has {len(text)} characters, more than the {limit} allowed: shorten it.")
    _check_unicode(what, text)


def check_backslash(regex: str) -> None:
    """Raise RequestError if a regex ends with a backslash that escapes nothing: llguidance ignores it."""
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise _refused(f"the regex ends with a lone backslash: {regex[-40:]}. Escape it.")


def check_json(what: str, given: object) -> None:
    """Raise RequestError unless `given` is a JSON object, or a non-empty string, within the limits."""
    if isinstance(given, str):
        check_text(what, given)
    elif isinstance(given, Mapping):
        _check_values(what, given)
    else:
        raise _refused(f"{what} must be an object.")


def _check_values(what: str, given: Mapping[object, object]) -> None:
    """Check a JSON object level by level. Raise RequestError as soon as it is too large or too deep."""
    num_chars = 0
    level: list[object] = [given]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.keys()
                below += item.values()
                if not all(isinstance(key, str) for key in item):
                    raise _refused(f"{what} has a key that is not a string.")
            elif isinstance(item, list | tuple):
                below += item
            else:
                _check_scalar(what, item)
            num_chars += len(item) if isinstance(item, str) else 1
            if num_chars + len(below) > MAX_GRAMMAR_CHARS:
                raise _refused(f"{what} has more than {MAX_GRAMMAR_CHARS} characters: shorten it.")
        if not below:
            return
        level = below
    raise _refused(f"{what} nests deeper than {MAX_DEPTH} levels: flatten it.")


def _check_scalar(what: str, value: object) -> None:
    if isinstance(value, str):
        if len(value) > MAX_RUN_CHARS:
            raise _refused(f"{what} holds a string of more than {MAX_RUN_CHARS} characters: shorten it.")
        _check_unicode(what, value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _refused(f"{what} holds {value}, which JSON has no number for: send finite numbers.")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise _refused(f"{what} holds an integer of more than 64 bits.")
    elif value is not None:
        raise _refused(f"{what} holds a value that is not JSON.")


def _check_unicode(what: str, text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _refused(f"{what} is not Unicode (an unpaired surrogate): send whole characters.") from None


def _refused(why: str) -> RequestError:
    return RequestError(why, "structured_outputs")
