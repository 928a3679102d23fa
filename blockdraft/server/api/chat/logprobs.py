"""Log-probabilities as chat answers and plain completions show them; every token has a unique name.

A token may be a part of a character, and then has bytes but no text. It is written as OpenAI does:
`\\xf0\\x9f` in chat answers, `bytes:\\xf0\\x9f` in plain completions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Items
from typing import NamedTuple

from blockdraft.engine.request import TokenLogprobs
from blockdraft.server.api.chat import schemas
from blockdraft.text.detokenizer import Detokenizer
from blockdraft.text.tokenizer import REPLACEMENT, Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no -inf; vLLM's stand-in
NUM_SPELLED = 1 << 16  # tokens whose texts are remembered: some 20 MB


def chat_logprobs(items: Items[TokenLogprobs], tokenizer: Tokenizer) -> schemas.ChatLogprobs:
    return {
        "content": [
            {
                **_chance(item.token_id, item.logprob, tokenizer),
                "top_logprobs": [_chance(token_id, logprob, tokenizer) for token_id, logprob in item.top],
            }
            for item in items
        ],
        "refusal": None,
    }


def _chance(token_id: int, logprob: float, tokenizer: Tokenizer) -> schemas.TokenChance:
    spelled = _spell(token_id, tokenizer)
    return {"token": spelled.name, "logprob": max(MIN_LOGPROB, logprob), "bytes": list(spelled.raw)}


def text_logprobs(
    items: Items[tuple[int, TokenLogprobs | None]],
    *,
    num_top: int,
    offsets: TextOffsets,
    tokenizer: Tokenizer,
) -> schemas.TextLogprobs:
    """Return the lists for `items` (token ids with log-probabilities); `offsets` finds where each begins."""
    return {
        "tokens": [_text_name(token_id, tokenizer) for token_id, _ in items],
        "token_logprobs": [None if item is None else max(MIN_LOGPROB, item.logprob) for _, item in items],
        "top_logprobs": [None if item is None else _top(item, num_top, tokenizer) for _, item in items],
        "text_offset": [offsets.push(token_id) for token_id, _ in items],
    }


def _top(item: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the log-probabilities of the likeliest tokens and of the chosen one."""
    pairs = (*item.top[:num_top], (item.token_id, item.logprob))
    return {_text_name(token_id, tokenizer): max(MIN_LOGPROB, logprob) for token_id, logprob in pairs}


def prompt_logprobs(
    items: Items[TokenLogprobs | None], num_top: int, tokenizer: Tokenizer
) -> schemas.PromptLogprobs:
    return [None if item is None else _ranked(item, num_top, tokenizer) for item in items]


def _ranked(item: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, schemas.RankedLogprob]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(item.top, start=1)}
    pairs = {item.token_id: item.logprob, **dict(item.top[:num_top])}
    return {
        str(token_id): {
            "logprob": max(MIN_LOGPROB, logprob),
            "rank": ranks.get(token_id),
            "decoded_token": _alone(token_id, tokenizer),
        }
        for token_id, logprob in pairs.items()
    }


class TextOffsets:
    """Finds each token's place in the text; a part of a character begins where the character does.

    `start` is the place of the first token. `echo` is the text, if it is known already, as for an echoed
    prompt: special tokens that it does not contain have no length.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        before_ids: Items[int],
        *,
        start: int = 0,
        skip_special_tokens: bool = True,
        echo: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, before_ids, skip_special_tokens and echo is None)
        self._num_chars = start
        self._echo = echo

    def push(self, token_id: int) -> int:
        begin, spelled = self._num_chars, _spell(token_id, self._tokenizer)
        is_special = token_id in self._tokenizer.special_ids
        if self._echo is not None and is_special and not self._echo.startswith(spelled.name, begin):
            return begin
        self._num_chars += len(self._detokenizer.push((token_id,)))
        # An invalid character is decoded with the next token, but is no part of that token.
        return max(begin, self._num_chars - len(spelled.name)) if spelled.is_text else begin


class _Spelled(NamedTuple):
    name: str
    raw: bytes
    is_text: bool  # False: a part of a character, whose bytes are written out


@functools.lru_cache(maxsize=NUM_SPELLED)
def _spell(token_id: int, tokenizer: Tokenizer) -> _Spelled:
    alone = _alone(token_id, tokenizer)
    raw = tokenizer.bytes_of(token_id) if REPLACEMENT in alone else None
    if raw is not None and raw != alone.encode():
        return _Spelled("".join(map(_shown_byte, raw)), raw, is_text=False)
    # Decode it after another token: some decoders drop a space from the first token.
    text = tokenizer.decode([token_id, token_id], skip_special_tokens=False)[len(alone) :]
    return _Spelled(text, text.encode(), is_text=True)


@functools.lru_cache(maxsize=NUM_SPELLED)
def _alone(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _shown_byte(byte: int) -> str:
    return chr(byte) if 0x20 <= byte < 0x7F and byte != ord("\\") else f"\\x{byte:02x}"


def _text_name(token_id: int, tokenizer: Tokenizer) -> str:
    spelled = _spell(token_id, tokenizer)
    return spelled.name if spelled.is_text else f"bytes:{spelled.name}"
