"""Chunks that differ by their text alone: what surrounds the text is compared, only the text is parsed.

Most chunks of an answer are of this kind, and one that is parsed as a whole costs three times as much.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

_MARK = "\x00 here \x00"  # no server writes this
_value_at = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class Surroundings:
    """All characters of an event but those of its text."""

    head: str
    tail: str

    def text_in(self, data: bytes) -> str | None:
        """Return the text of an event that has these surroundings; None: it has others."""
        try:
            event = data.decode()
            if not event.startswith(self.head):
                return None
            text, end = _value_at(event, len(self.head))
        except ValueError:
            return None
        is_alike = isinstance(text, str) and end + len(self.tail) == len(event) and event.endswith(self.tail)
        return text if is_alike else None


def surroundings(event: str, name: str) -> Surroundings | None:
    """Return what surrounds the text of `choices[0]`, or of its delta, in the field `name`; None: unclear."""
    found = event.find(f'"{name}"')
    start = event.find('"', found + len(name) + 2)
    if found < 0 or start < 0 or event[found + len(name) + 2 : start].strip() != ":":
        return None
    try:
        _, end = _value_at(event, start)
        head, tail = event[:start], event[end:]
        chunk = json.loads(head.removeprefix("data:") + json.dumps(_MARK) + tail)
        choice = chunk["choices"][0]
        is_there = choice.get("delta", choice).get(name) == _MARK
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return Surroundings(head, tail) if is_there else None
