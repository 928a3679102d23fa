"""Encodes message text so that it never becomes markup: a message's `<|im_end|>` stays plain characters.

A mark is put into every piece of markup in a message before the chat template sees it. The rendered text is
cut at the marks, and the pieces are encoded one by one, so the marks disappear and the text is unchanged.
"""

from __future__ import annotations

import re
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tokenizers

from blockdraft.text.piece_cache import PieceCache, can_cut, encoded

MANY_IDS = 1 << 12  # some milliseconds
MAX_CUT_CHARS = 1 << 16  # to cut a text takes some milliseconds with Python's lock held
OTHERS_WORDS = ("tools", "documents")  # template arguments that may hold untrusted text
# Special tokens around thoughts: templates look for them in the model's own messages.
_THOUGHTS = frozenset(("<think>", "</think>", "<|channel>", "<channel|>", "[THINK]", "[/THINK]"))
_THOUGHTS |= {"<seed:think>", "</seed:think>"}


class TextEncoder:
    """Encodes texts with one tokenizer. Safe to share between threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = PieceCache(tokenizer) if can_cut(tokenizer) else None
        self._adds_tokens = tokenizer.num_special_tokens_to_add(is_pair=False) > 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        adds_tokens = add_special_tokens and self._adds_tokens
        if self._pieces is None or adds_tokens or len(text) > MAX_CUT_CHARS:
            return encoded(self._tokenizer, text, add_special_tokens).ids
        return self._pieces.encode(text)


def decode_beside(tokenizer: tokenizers.Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Return the text of ids. Many ids are decoded as a batch: only that releases Python's lock."""
    if len(ids) <= MANY_IDS:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]


class Marked(NamedTuple):
    """The input of a template with marks, and the mark, which is in no message."""

    messages: list[Mapping[str, object]]
    options: dict[str, object]
    mark: str


class MessageText:
    """Marks messages, and encodes the text that a template renders from them."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, encoder: TextEncoder) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        # Some markup is not called special (Qwen's <think>), and some added tokens are plain runs of spaces.
        markup = {token.content for token in added if token.special or token.content.startswith("<")}
        self._begin = _beginnings(markup)
        self._begin_own = _beginnings({token.content for token in added if token.special} - _THOUGHTS)
        self._tokenizer, self._encoder = tokenizer, encoder
        self._joint = _joint(tokenizer)

    def mark(self, messages: Sequence[Mapping[str, object]], options: Mapping[str, object]) -> Marked:
        """Return copies with a mark in every piece of markup.

        The model's own messages keep the tags of thoughts and markup that is not special: templates look for
        them. Its tool calls do not keep them, as calls may repeat untrusted text.
        """
        mark = f"\ue000{secrets.token_hex(8)}\ue000"
        if self._begin is None or self._joint is None:
            return Marked(list(messages), dict(options), mark)
        marked: list[Mapping[str, object]] = [
            self._marked_message(message, mark) if isinstance(message, Mapping) else message
            for message in messages
        ]
        others = {name: _marked(options[name], self._begin, mark) for name in OTHERS_WORDS if name in options}
        return Marked(marked, {**options, **others}, mark)

    def encode(self, text: str, mark: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a rendered text after removing its marks."""
        first, *rest = text.split(mark)
        if not rest:
            return self._encoder.encode(text, add_special_tokens)
        # A tokenizer may treat the beginning of a text in its own way, but not text after a token.
        encoded = self._tokenizer.encode_batch(
            [first, *(f"{self._joint}{piece}" for piece in rest)], add_special_tokens=False
        )
        ids = [*encoded[0].ids, *(token_id for piece in encoded[1:] for token_id in piece.ids[1:])]
        return self._with_special_tokens(first, ids, len(encoded[0].ids)) if add_special_tokens else ids

    def _with_special_tokens(self, first: str, ids: list[int], num_first: int) -> list[int]:
        """Return the ids with the special tokens around them that the tokenizer puts around every text."""
        around = self._tokenizer.encode(first, add_special_tokens=True).ids
        num_before = next(
            (n for n in range(len(around) + 1) if around[n : n + num_first] == ids[:num_first]), len(around)
        )
        return [*around[:num_before], *ids, *around[num_before + num_first :]]

    def _marked_message(self, message: Mapping[str, object], mark: str) -> dict[str, object]:
        own = self._begin_own if message.get("role") == "assistant" else self._begin
        return {
            name: _marked(value, self._begin if name == "tool_calls" else own, mark)
            for name, value in message.items()
        }


def _marked(value: object, begin: re.Pattern[str] | None, mark: str) -> object:
    if isinstance(value, str):
        return value if begin is None else begin.sub(lambda found: found.group() + mark, value)
    if isinstance(value, Mapping):
        return {_marked(key, begin, mark): _marked(item, begin, mark) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_marked(item, begin, mark) for item in value]
    return value


def _beginnings(markup: set[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the first character of markup in a text; None without markup."""
    rest_of = defaultdict[str, list[str]](list)
    for text in sorted(filter(None, markup), key=len, reverse=True):
        rest_of[text[0]].append(re.escape(text[1:]))
    parts = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rest_of.items()]
    return re.compile("|".join(parts)) if parts else None


def _joint(tokenizer: tokenizers.Tokenizer) -> str | None:
    """Return a token that does not change how the text after it is encoded, or None."""
    added = tokenizer.get_added_tokens_decoder()
    texts = [token.content for token in added.values()]
    for token_id, token in added.items():
        is_plain = not (token.lstrip or token.rstrip or token.single_word) and bool(token.content.strip())
        is_alone = sum(text.startswith(token.content) for text in texts) == 1
        if not is_plain or not is_alone:
            continue
        if tokenizer.encode(token.content, add_special_tokens=False).ids == [token_id]:
            return token.content
    return None
