"""The texts of tokens that do not depend on their neighbours: a stream need not decode these again.

Which decoders work like that is known by name: a decoder that is not listed here has no plain tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import decoders


class PlainTexts(dict[int, str | None]):
    """Token id → the text it adds behind a whole character; None: decode it with its neighbours.

    An entry is made when a token is first seen: a start does not wait for the whole vocabulary.
    """

    def __init__(self, find: Callable[[int], str | None]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._find(token_id)
        return text


def decodes_apart(decoder: decoders.Decoder | None) -> bool:
    """Whether a token that is whole text, and not the first one, adds the same text wherever it stands.

    Such decoders map token by token, and look across only to join bytes to characters, or at the very
    beginning, where one space may be dropped.
    """
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    num_stripped = sum(part["start"] for part in parts if part["type"] == "Strip")
    return num_stripped <= 1 and all(map(_is_apart, parts))


def _is_apart(part: dict[str, object]) -> bool:
    if part["type"] == "Replace":
        # A longer pattern may match across two tokens; an empty text would not count as the first one.
        pattern = part["pattern"]
        return isinstance(pattern, dict) and len(pattern.get("String", "")) == 1 and bool(part["content"])
    if part["type"] == "Strip":
        return part["stop"] == 0
    return part["type"] in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace")
