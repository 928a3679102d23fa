"""Forms as llguidance reads and compiles them. Everything here takes long for long forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockdraft.errors import RequestError
from blockdraft.grammar.endless import NOTHING, check_end
from blockdraft.grammar.form import StructuredOutputs
from blockdraft.grammar.gbnf import is_gbnf, lark_of_gbnf
from blockdraft.grammar.lark_text import LarkFacts, quoted, read_lark
from blockdraft.grammar.limits import MAX_RUN_CHARS, check_json

if TYPE_CHECKING:  # it is imported with the first form: most servers never see one
    from llguidance import LLMatcher, LLTokenizer

TOO_LONG = f"it forces more than {MAX_RUN_CHARS} bytes in a row: shorten its texts and repeats."
# The cost of one form: llguidance's own limits, but for these.
MAX_LEXER_STATES, MAX_GRAMMAR_SIZE = 50_000, 200_000
# Of one mask, for which all answers wait: an object of 2,000 optional names needs most of them, and one of
# ambiguous rules takes up to 20 microseconds. What a form forces is found so far at a time.
MAX_ITEMS = 10_000


@dataclass(frozen=True, slots=True)
class TokenSource:
    """A model's tokens, as this process and another can read them."""

    json: str  # as `tokenizers` writes it
    size: int  # ids that the model's head has
    end_ids: tuple[int, ...]
    names: Mapping[str, int]  # ids of added tokens, by how they are written


@dataclass(frozen=True, slots=True)
class WrittenForm:
    """A form as llguidance reads it."""

    text: str
    lark: LarkFacts | None = None  # of a form that is a grammar


def write_form(form: StructuredOutputs, tokens: TokenSource) -> WrittenForm:
    """RequestError: it can be no form."""
    try:
        return _write(form, tokens)
    except RecursionError:
        raise _refused("it nests too deep: flatten it.") from None


def _write(form: StructuredOutputs, tokens: TokenSource) -> WrittenForm:
    from llguidance import LLMatcher

    if form.regex is not None:
        return WrittenForm(LLMatcher.grammar_from_regex(form.regex))
    if form.choice is not None:
        return WrittenForm(LLMatcher.grammar_from_lark("start: " + "\n  | ".join(map(quoted, form.choice))))
    if form.grammar is not None:
        lark = lark_of_gbnf(form.grammar) if is_gbnf(form.grammar) else form.grammar
        facts = read_lark(lark, tokens.names.get, tokens.size)
        return WrittenForm(LLMatcher.grammar_from_lark(facts.text), facts)
    schema = {"type": "object"} if form.json is None else _schema(form.json)
    return WrittenForm(LLMatcher.grammar_from_json_schema(with_options(schema, form)))


def with_options(schema: Mapping[str, object], form: StructuredOutputs) -> dict[str, object]:
    """A schema that also says how its JSON is written. Of a client's own options one alone counts."""
    options: dict[str, object] = {"lenient": form.is_lenient}
    own = schema.get("x-guidance")
    if isinstance(own, Mapping) and own.get("coerce_one_of") is True:
        options["coerce_one_of"] = True
    if form.whitespace_pattern is None:
        options |= {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    else:  # `\s` is more than JSON's white space
        options["whitespace_pattern"] = form.whitespace_pattern.replace(r"\s", r"[ \n\r\t]")
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
    """At the start of an answer. RequestError: nothing has this form, or it is no form."""
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
        matcher.compute_bitmask()  # some limits are met with the first mask
    if matcher.is_error():
        raise _refused(f"the form cannot be kept to: {error_of(matcher)}")
    if forces_too_much(matcher):
        raise _refused(f"the form cannot be kept to: {TOO_LONG}")
    forced = matcher.compute_ff_tokens()
    if matcher.validate_tokens(forced) < len(forced):  # characters that the tokenizer cannot write
        raise _refused(f"the form cannot be kept to: {NOTHING}")
    return matcher


def forces_too_much(matcher: LLMatcher) -> bool:
    """Whether what must come next is so long that every step would take long."""
    return len(matcher.compute_ff_bytes()) > MAX_RUN_CHARS


def error_of(matcher: LLMatcher) -> str:
    """What is wrong in llguidance's words, with the place in the grammar; or in ours."""
    error = matcher.get_error().removesuffix("<non-verbose/>").strip()
    if error.startswith("panic:"):  # it counts symbols and the like in 16 bits
        return "it has more parts than llguidance can count: make it simpler."
    return NOTHING if error == "NoExtensionBias" else error[:500]


def read_tokens(tokens: TokenSource) -> LLTokenizer:
    """ValueError: llguidance cannot read them."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokens.json, n_vocab=tokens.size, eos_token=list(tokens.end_ids))


def _refused(why: str) -> RequestError:
    return RequestError(why, "structured_outputs")
