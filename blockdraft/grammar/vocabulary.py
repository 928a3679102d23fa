"""Vocabulary: a model's tokens as llguidance knows them, and what it has compiled for them."""

from __future__ import annotations

import re
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

from blockdraft.errors import RequestError
from blockdraft.grammar.form import StructuredOutputs, grammar_text
from blockdraft.grammar.guide import error_of
from blockdraft.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # it is imported with the first form: most servers never see one
    from llguidance import LLMatcher, LLTokenizer

NUM_COMPARED = 512  # tokens whose texts are compared: a kind that is misread is misread all over
MAX_KEPT = 64  # compiled forms; arbitrary: one of an ordinary schema takes some hundred kilobytes
# What one form may cost: llguidance's own limits, but for these.
MAX_LEXER_STATES, MAX_GRAMMAR_SIZE = 50_000, 200_000

# Parts of Lark that llguidance cannot take back (it says so), or takes back wrongly (1.9.1): ends of a rule
# that are no part of its text, and tokens by their ids, unless they are special.
_ENDS = re.compile(r"\b(max_tokens|stop)\s*=")
_IDS = re.compile(r"<\[([^\]]*)\]>")


class Vocabulary:
    """Any thread may ask it for matchers. The first asked for takes some tenths of a second."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """`size`: ids that the model's head has; those behind the tokenizer's are never allowed."""
        self._source = tokenizer
        self.size = size
        self.num_words = -(-size // 32)  # of a mask, 32 bits each
        self.end_ids = tuple(i for i in tokenizer.eos_ids if i < size)
        self._lock = Lock()
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, form: StructuredOutputs) -> LLMatcher:
        """At the start of an answer of this form. RequestError: nothing has this form, or it is no form."""
        text = grammar_text(form)
        with self._lock:
            found = self._compiled.pop(text, None)
        if found is None:
            found = self._compile(text)
        with self._lock:
            self._compiled[text] = found
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
            return found.deep_copy()

    def may_roll_back(self, form: StructuredOutputs) -> bool:
        """Whether the form's matcher can take back tokens that it was tried with."""
        tokens, text = self._tokens, form.grammar
        if text is None or tokens is None:
            return True
        ids = [one for listed in _IDS.findall(text) for one in listed.split(",")]
        are_special = (one.isdecimal() and tokens.is_special_token(int(one)) for one in ids)
        return _ENDS.search(text) is None and all(are_special)

    def _compile(self, text: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            if self._tokens is None:
                self._tokens = self._read_tokens()
        limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False
        )
        matcher = LLMatcher(self._tokens, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some limits are met with the first mask
        if matcher.is_error():
            raise RequestError(f"the form cannot be kept to: {error_of(matcher)}", "structured_outputs")
        return matcher

    def _read_tokens(self) -> LLTokenizer:
        if not self.end_ids:
            raise RequestError(
                "this model has no end-of-sequence token, so an answer of a form could not end.",
                "structured_outputs",
            )
        from llguidance import LLTokenizer

        try:
            tokens = LLTokenizer(self._source.as_json(), n_vocab=self.size, eos_token=list(self.end_ids))
        except ValueError as error:
            raise _unreadable(str(error).partition(":")[0]) from None  # behind it: all that it is made of
        for token_id in range(0, self._source.vocab_size, max(1, self._source.vocab_size // NUM_COMPARED)):
            text = None if tokens.is_special_token(token_id) else self._source.plain_texts[token_id]
            if text is not None and tokens.decode_bytes([token_id]) != text.encode():
                raise _unreadable(f"it takes token {token_id}, {text!r}, for another text")
        return tokens


def _unreadable(reason: str) -> RequestError:
    return RequestError(
        f"this model's tokenizer is of a kind that llguidance cannot read ({reason}): "
        "its answers can have no form.",
        "structured_outputs",
    )
