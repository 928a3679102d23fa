"""Encodes texts piece by piece, and remembers the ids of each piece.

The words of a language and of a conversation recur. A lookup takes a tenth of the time of encoding.

A text is cut before a single space between two visible ASCII characters. No token of the tokenizers below
contains such a place: their split patterns match a space only as a match's first character or among other
white space. So the ids of a text are those of its pieces, and other tokenizers are not used here. The cut
drops the space; all pieces but the first are encoded with a space before them.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers
from tokenizers import models

MAX_PIECES = 1 << 16  # some 16 MB; arbitrary
LONG_TEXT_CHARS = 1 << 13  # some milliseconds
ENOUGH_PIECES = 1 << 13  # known ones, after which texts of mostly new pieces teach nothing; arbitrary
MAX_PIECE_CHARS = 64  # such as the markup between two messages with a word on each side; arbitrary
_CUT = re.compile(r"(?<=[!-~]) (?=[!-~])")
_VISIBLE = re.compile(r"[!-~](?:.*[!-~])?", re.DOTALL)  # a text that begins and ends with such a character
_SPACE_INSIDE = re.compile(r"[!-~] ")

_ENDINGS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_ANY_ENDING = f"(?i:{'|'.join(_ENDINGS)})"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The alternatives of split patterns. None matches a space after another character that is not white space.
_ALTERNATIVES = (
    *_ENDINGS,
    *(_ANY_ENDING, r" ?\p{L}+", r" ?\p{N}+", r"\p{N}", r"\p{N}{1,3}"),
    *(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"),
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ANY_ENDING}?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ANY_ENDING}?",
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
)


class PieceCache:
    """The known pieces of one tokenizer, for `can_cut(tokenizer)`. Safe to share between threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Tuples: Python's garbage collector does not visit those of numbers.
        self._known: dict[str, tuple[int, ...]] = {}  # pieces with cuts on both sides
        self._ends: dict[str, tuple[int, ...]] = {}  # first and last pieces, with the space before them

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        pieces, known = text.split(" "), self._known
        new = set(pieces[1:-1]).difference(known)
        is_cut = _ends_visible(pieces[0]) and _VISIBLE.match(pieces[-1])
        if not (is_cut and all(map(_VISIBLE.fullmatch, new))):
            pieces = _CUT.split(text)
            new = set(pieces[1:-1]).difference(known)
        if len(pieces) == 1:
            return list(self._encode_end(text))
        if 2 * len(new) > len(pieces) and len(known) > ENOUGH_PIECES:  # random text, another language
            ids: list[int] = encoded(self._tokenizer, text, False).ids
            return ids
        found = self._learn(list(new)) if new else {}
        if not new <= known.keys():  # long pieces are not kept
            known = {piece: found[piece] if piece in new else known[piece] for piece in set(pieces[1:-1])}
        ids = list(self._encode_end(pieces[0]))
        for piece in pieces[1:-1]:
            ids += known[piece]
        ids += self._encode_end(f" {pieces[-1]}")
        return ids

    def _encode_end(self, piece: str) -> tuple[int, ...]:
        """Return the ids of a text's first or last piece, and remember a short one."""
        ids = self._ends.get(piece)
        if ids is None:
            ids = tuple(encoded(self._tokenizer, piece, False).ids)
            if len(self._ends) >= MAX_PIECES:
                self._ends = {}
            if len(piece) <= MAX_PIECE_CHARS:
                self._ends[piece] = ids
        return ids

    def _learn(self, new: list[str]) -> dict[str, tuple[int, ...]]:
        """Return the ids of pieces with cuts on both sides, and remember short ones.

        They are encoded as one text, in a third of the time of a call for each.
        """
        joined = encoded(self._tokenizer, "".join([f" {piece}" for piece in new]), False)
        ids, starts = joined.ids, [start for start, _ in joined.offsets]
        found: dict[str, tuple[int, ...]] = {}
        at = end = 0
        for piece in new:
            begin = at
            end += len(piece) + 1
            while at < len(ids) and starts[at] < end:
                at += 1
            found[piece] = tuple(ids[begin:at])
        if len(self._known) + len(new) > MAX_PIECES:
            self._known = {}  # another dictionary, as texts that are being encoded still use the old one
        self._known.update((piece, found[piece]) for piece in new if len(piece) <= MAX_PIECE_CHARS)
        return found


def encoded(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
    """Encode a text. A long one is encoded as a batch: only that releases Python's lock."""
    if len(text) <= LONG_TEXT_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _ends_visible(piece: str) -> bool:
    return "!" <= piece[-1:] <= "~"


def can_cut(tokenizer: tokenizers.Tokenizer) -> bool:
    """Return whether the ids of a text are those of its pieces: False for a tokenizer of an unknown kind."""
    model, before = tokenizer.model, tokenizer.pre_tokenizer
    if not isinstance(model, models.BPE) or model.dropout or before is None:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    normalizer = tokenizer.normalizer
    if normalizer is not None and json.loads(normalizer.__getstate__())["type"] != "NFC":
        return False
    state = json.loads(before.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    if not all(map(_keeps_cuts, steps)) or not any(map(_cuts, steps)):
        return False
    return not any(
        token.lstrip or token.rstrip or token.single_word or _SPACE_INSIDE.search(token.content)
        for token in tokenizer.get_added_tokens_decoder().values()
    )


def _keeps_cuts(step: dict[str, Any]) -> bool:
    """Return whether a step of a pre-tokenizer treats both sides of a cut as if they were alone."""
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    return step["type"] == "Digits" or _cuts(step)


def _cuts(step: dict[str, Any]) -> bool:
    """Return whether a step cuts before every space after a visible character."""
    if step["type"] == "ByteLevel":
        return bool(step["use_regex"])
    if step["type"] != "Split" or (step["behavior"] != "Isolated" and not step["invert"]):
        return False
    return _is_known(step["pattern"].get("Regex", ""))


def _is_known(pattern: str) -> bool:
    """Return whether a pattern consists of known alternatives only."""
    rest = f"{pattern}|"
    while rest:
        begins = [one for one in _ALTERNATIVES if rest.startswith(f"{one}|")]
        if not begins:
            return False
        rest = rest[len(max(begins, key=len)) + 1 :]
    return bool(pattern)
