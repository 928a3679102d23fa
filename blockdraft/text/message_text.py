"""Message text that never becomes markup: `<|im_end|>` in it is encoded as the characters it is written with.

A mark is put into every piece of markup before the chat template sees the message, and a second tokenizer
that knows the mark as a token cuts there. The mark's own id is left out, so what remains is the same text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import tokenizers

LONG_TEXT_CHARS = 1 << 13  # some milliseconds
MANY_IDS = 1 << 12  # some milliseconds
_MARK = "\ue000plain text\ue000"


def encode_beside(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """The ids of a text. `encode` holds Python's lock: other threads would wait for a long one."""
    if len(text) <= LONG_TEXT_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids


def decode_beside(tokenizer: tokenizers.Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of ids. `decode` holds Python's lock: other threads would wait for many."""
    if len(ids) <= MANY_IDS:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]


class MessageText:
    """Marks messages, and encodes what a template made of them."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        # Some markup is not called special (Qwen's <think>), and some added tokens are plain runs of spaces.
        markup = {token.content for token in added if token.special or token.content.startswith("<")}
        longest_first = sorted(markup, key=len, reverse=True)
        self._begin = re.compile(f"(?=(?:{'|'.join(map(re.escape, longest_first))}))(.)", re.DOTALL)
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.add_tokens([tokenizers.AddedToken(_MARK, normalized=False)])
        self._mark_id = self._tokenizer.token_to_id(_MARK)
        self._has_markup = bool(markup)

    def mark(self, message: Mapping[str, object]) -> Mapping[str, object]:
        """A copy whose texts hold no markup; the model's own words keep theirs, which templates look for."""
        if not self._has_markup or not isinstance(message, Mapping) or message.get("role") == "assistant":
            return message
        return {key: self._marked(value) for key, value in message.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = encode_beside(self._tokenizer, text, add_special_tokens)
        return [token_id for token_id in ids if token_id != self._mark_id]

    def _marked(self, value: object) -> object:
        if isinstance(value, str):
            return self._begin.sub(rf"\1{_MARK}", value)
        if isinstance(value, Mapping):
            return {key: self._marked(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._marked(item) for item in value]
        return value
