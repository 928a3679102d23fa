"""Compiles structured output with llguidance. Every function here is slow for a long grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockdraft.errors import RequestError
from blockdraft.grammar.endless import NOTHING, check_end
from blockdraft.grammar.gbnf import is_gbnf, lark_of_gbnf
from blockdraft.grammar.lark_text import LarkFacts, quoted, read_lark
from blockdraft.grammar.limits import MAX_RUN_CHARS, check_json
from blockdraft.grammar.structured_output import StructuredOutputs

if TYPE_CHECKING:  # imported with the first structured output, as most servers never see one
    from llguidance import LLMatcher, LLTokenizer

TOO_LONG = f"it forces more than {MAX_RUN_CHARS} bytes in a row: shorten its texts and repeats."
# Limits on one grammar; the other limits are llguidance's own.
MAX_LEXER_STATES, MAX_GRAMMAR_SIZE = 50_000, 200_000
# Parser items of one mask, for which all answers wait: an object of 2,000 optional names needs most of them,
# and an item of ambiguous rules takes up to 20 microseconds. The search for forced tokens has the same limit.
MAX_ITEMS = 10_000


@dataclass(frozen=True, slots=True)
class TokenSource:
    """A model's tokens, in values that can be sent to another process."""

    json: str  # as `tokenizers` writes it
    size: int  # ids that the model's head has
    end_ids: tuple[int, ...]
    names: Mapping[str, int]  # ids of added tokens by their text


@dataclass(frozen=True, slots=True)
class WrittenGrammar:
    """A grammar as llguidance reads it."""

    text: str
    lark: LarkFacts | None = None  # if a client sent a grammar


def write_grammar(output: StructuredOutputs, tokens: TokenSource) -> WrittenGrammar:
    """Return the grammar of `output`. Raise RequestError if llguidance cannot read it."""
    try:
        return _write(output, tokens)
    except RecursionError:
        raise _refused("it nests too deep: flatten it.") from None


def _write(output: StructuredOutputs, tokens: TokenSource) -> WrittenGrammar:
    from llguidance import LLMatcher

    if output.regex is not None:
        return WrittenGrammar(LLMatcher.grammar_from_regex(output.regex))
    if output.choice is not None:
        return WrittenGrammar(
            LLMatcher.grammar_from_lark("start: " + "\n  | ".join(map(quoted, output.choice)))
        )
    if output.grammar is not None:
        lark = lark_of_gbnf(output.grammar) if is_gbnf(output.grammar) else output.grammar
        facts = read_lark(lark, tokens.names.get, tokens.size)
        return WrittenGrammar(LLMatcher.grammar_from_lark(facts.text), facts)
    schema = {"type": "object"} if output.json is None else _schema(output.json)
    return WrittenGrammar(LLMatcher.grammar_from_json_schema(with_options(schema, output)))


def with_options(schema: Mapping[str, object], output: StructuredOutputs) -> dict[str, object]:
    """Return the schema with options for the layout of the JSON. Keep a client's own coerce_one_of."""
    options: dict[str, object] = {"lenient": output.is_lenient}
    own = schema.get("x-guidance")
    if isinstance(own, Mapping) and own.get("coerce_one_of") is True:
        options["coerce_one_of"] = True
    if output.whitespace_pattern is None:
        options |= {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    else:  # `\s` is more than JSON's white space
        options["whitespace_pattern"] = output.whitespace_pattern.replace(r"\s", r"[ \n\r\t]")
    return {**schema, "x-guidance": options}


def _schema(given: str | Mapping[str, object]) -> Mapping[str, object]:
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise _refused(f"the JSON schema is not JSON: {error}.") from None
    if not isinstance(schema, Mapping):
        raise _refused("the JSON schema is not an object.")
    check_json("the JSON schema", schema)
    check_end(schema)
    return schema


def compile_text(tokens: LLTokenizer, text: str) -> LLMatcher:
    """Return the matcher of a grammar, at the start of an answer.

    Raise RequestError if the grammar does not compile, matches nothing, or forces too much text.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=MAX_ITEMS,
        step_max_items=MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokens, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some limits apply only with the first mask
    if matcher.is_error():
        raise _refused(f"this structured output is not possible: {error_of(matcher)}")
    if forces_too_much(matcher):
        raise _refused(f"this structured output is not possible: {TOO_LONG}")
    forced = matcher.compute_ff_tokens()
    if matcher.validate_tokens(forced) < len(forced):  # characters that the tokenizer cannot write
        raise _refused(f"this structured output is not possible: {NOTHING}")
    return matcher


def forces_too_much(matcher: LLMatcher) -> bool:
    """Say if the text that must come next is so long that every step would be slow."""
    return len(matcher.compute_ff_bytes()) > MAX_RUN_CHARS


def error_of(matcher: LLMatcher) -> str:
    """Return llguidance's error message, with the place in the grammar, or our own clearer one."""
    error = matcher.get_error().removesuffix("<non-verbose/>").strip()
    if error.startswith("panic:"):  # it counts symbols and the like in 16 bits
        return "it has more parts than llguidance can count: make it simpler."
    return NOTHING if error == "NoExtensionBias" else error[:500]


def read_tokens(tokens: TokenSource) -> LLTokenizer:
    """Return llguidance's tokenizer. Raise ValueError if it cannot read the tokens."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokens.json, n_vocab=tokens.size, eos_token=list(tokens.end_ids))


def _refused(why: str) -> RequestError:
    return RequestError(why, "structured_outputs")
