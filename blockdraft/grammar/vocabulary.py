"""Vocabulary: holds a model's tokens as llguidance reads them, and the grammars compiled for them."""

from __future__ import annotations

import functools
import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from blockdraft.errors import RequestError
from blockdraft.grammar.compiling import TokenSource, compile_text, read_tokens
from blockdraft.grammar.structured_output import StructuredOutputs, fields_of
from blockdraft.grammar.trial import key_of, trials
from blockdraft.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # imported with the first structured output, as most servers never see one
    from llguidance import LLMatcher, LLTokenizer

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')  # of JSON
NUM_COMPARED = 512  # tokens whose texts are compared: a misread kind of tokenizer shows in any sample
MAX_KEPT, MAX_KEPT_BYTES = 64, 256 << 20  # compiled grammars; an ordinary one takes some hundred kilobytes


@dataclass(frozen=True, slots=True)
class _Kept:
    matcher: LLMatcher
    may_roll_back: bool
    num_bytes: int


class Vocabulary:
    """Makes matchers. Any thread may use it. The first matcher takes some tenths of a second."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """`size`: number of ids in the model's head. Ids past the tokenizer's last are never allowed."""
        self._source = tokenizer
        self.size = size
        self.num_words = -(-size // 32)  # of a mask, 32 bits each
        self.end_ids = tuple(i for i in tokenizer.eos_ids if i < size)
        self._lock = Lock()
        self._reading = Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def matcher(self, output: StructuredOutputs) -> tuple[LLMatcher, bool]:
        """Return a matcher at the start of an answer, and if it can take back tokens.

        Raise RequestError if the structured output matches nothing or does not compile.
        """
        fields = fields_of(output)
        key = json.dumps(fields, default=dict)
        with self._lock:
            found = self._kept.pop(key, None)
        if found is None:
            found = self._compile(fields)
        with self._lock:
            self._kept[key] = found
            self._forget()
        return found.matcher.deep_copy(), found.may_roll_back

    def _forget(self) -> None:
        """Forget the least recently used grammars if there are too many, or if they take too much memory."""
        num_bytes = sum(one.num_bytes for one in self._kept.values())
        while len(self._kept) > MAX_KEPT or (num_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
            num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def _compile(self, fields: dict[str, object]) -> _Kept:
        with self._reading:
            tokens, read, key = self._tokens
        tried = trials().of(fields, tokens, key)
        return _Kept(compile_text(read, tried.text), tried.may_roll_back, tried.num_bytes)

    @functools.cached_property
    def _tokens(self) -> tuple[TokenSource, LLTokenizer, str]:
        """Return the tokens, llguidance's tokenizer, and their hash."""
        if not self.end_ids:
            raise RequestError(
                "this model has no end-of-sequence token, so structured output could not end.",
                "structured_outputs",
            )
        text = unspelled(self._source.as_json(), self._markup)
        tokens = TokenSource(text, self.size, self.end_ids, self._source.added_names)
        try:
            read = read_tokens(tokens)
        except ValueError as error:
            raise _unreadable(str(error).partition(":")[0]) from None  # without the long details
        self._compare(read)
        return tokens, read, key_of(tokens)

    @property
    def _markup(self) -> dict[str, int]:
        """Return the added tokens that llguidance treats as special, by name."""
        return {
            name: token_id
            for name, token_id in self._source.added_names.items()
            if token_id in self._source.special_ids or (name.startswith("<") and name.endswith(">"))
        }

    def _compare(self, read: LLTokenizer) -> None:
        source = self._source
        for name, token_id in self._markup.items():
            if token_id < self.size and not (read.is_special_token(token_id) and _spells(read, name)):
                raise _unreadable(f"it takes token {token_id}, {name!r}, for its text")
        for token_id in range(0, source.vocab_size, max(1, source.vocab_size // NUM_COMPARED)):
            text = None if read.is_special_token(token_id) else source.plain_text(token_id)
            if text is not None and read.decode_bytes([token_id]) != text.encode():
                raise _unreadable(f"it takes token {token_id}, {text!r}, for another text")


def unspelled(tokenizer: str, markup: Mapping[str, int]) -> str:
    """Return the tokenizer's JSON with special tokens renamed, so that no text spells them.

    Else llguidance would write the forced text "<|im_end|>" as the special token, which ends the answer.
    """
    hidden = {  # the new names have a character that does not exist, so no text has them
        json.dumps(name, ensure_ascii=False): json.dumps(f"<\U0010ffff{token_id}>", ensure_ascii=False)
        for name, token_id in markup.items()
    }
    return _STRINGS.sub(lambda found: hidden.get(found.group(), found.group()), tokenizer)


def _spells(read: LLTokenizer, name: str) -> bool:
    """Say if llguidance writes a token's name, given as text, without special tokens."""
    return not any(map(read.is_special_token, read.tokenize_str(name)))


def _unreadable(reason: str) -> RequestError:
    return RequestError(
        f"this model's tokenizer is of a kind that llguidance cannot read ({reason}): "
        "it cannot serve structured output.",
        "structured_outputs",
    )
