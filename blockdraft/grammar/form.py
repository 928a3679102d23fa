"""What may bind an answer, a form and thoughts in front of it: as users say it and as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockdraft.errors import RequestError
from blockdraft.grammar.endless import check_end

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

MAX_FORM_CHARS = 1 << 19  # arbitrary; llguidance bounds what a grammar becomes
MAX_CHOICES = 4096  # of `choice`; arbitrary
# Between the parts of JSON. Unbounded, a small model may write blanks for ever.
WHITESPACE = r"[ \n\r\t]{1,32}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form that an answer must have: exactly one of these. Names and meanings are vLLM's."""

    json: str | Mapping[str, object] | None = None  # a JSON schema
    json_object: bool = False  # any JSON object
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None  # Lark in llguidance's dialect, or GBNF
    is_lenient: bool = False  # keywords of a schema that are not known bind nothing; else they are refused

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] * self.json_object
        if len(given) != 1:
            names = " and ".join(given) if given else "nothing"
            raise RequestError(
                f"structured_outputs has {names}: give one of json, json_object, regex, choice and grammar.",
                "structured_outputs",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The thoughts in front of an answer, which the form does not bind: how they begin and end, in tokens."""

    open_ids: tuple[int, ...] = ()  # (): the prompt has opened them; else the answer may begin with these
    close_ids: tuple[int, ...]
    max_tokens: int | None = None  # after so many the thoughts are closed for it

    def __post_init__(self) -> None:
        if not self.close_ids:
            raise RequestError("thinking without close_ids would never end.", "thinking")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise RequestError(f"{self.max_tokens} tokens to think are less than none.", "thinking")


def grammar_text(form: StructuredOutputs) -> str:
    """The form as llguidance reads it. RequestError: it can be no such form, whatever the tokenizer."""
    try:
        text = _grammar_text(form)
    except RecursionError:
        raise _refused("it nests too deep: flatten it.") from None
    if len(text) > MAX_FORM_CHARS:
        raise _refused(f"{len(text)} characters are more than the {MAX_FORM_CHARS} that a form may have.")
    return text


def _grammar_text(form: StructuredOutputs) -> str:
    if form.regex is not None:
        return _library().grammar_from_regex(_text("regex", form.regex))
    if form.choice is not None:
        return _library().grammar_from_lark(_lark_of_choice(form.choice))
    if form.grammar is not None:
        return _library().grammar_from_lark(_lark(_text("grammar", form.grammar)))
    schema = {"type": "object"} if form.json is None else _schema(form.json)
    options: JsonCompileOptions = {"whitespace_pattern": WHITESPACE, "lenient": form.is_lenient}
    return _library().grammar_from_json_schema(dict(schema), options)


def _library() -> type[LLMatcher]:
    """Imported when the first form comes: most servers never see one."""
    from llguidance import LLMatcher

    return LLMatcher


def _refused(why: str) -> RequestError:
    return RequestError(why, "structured_outputs")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _refused(f"'{name}' is not a text of one character or more.")
    return value


def _schema(given: str | Mapping[str, object]) -> Mapping[str, object]:
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise _refused(f"the JSON schema is not JSON: {error}.") from None
    if not isinstance(schema, Mapping):
        raise _refused(f"the JSON schema is {type(schema).__name__}, not an object.")
    check_end(schema)
    return schema


def _lark_of_choice(choice: tuple[str, ...] | list[str]) -> str:
    if not isinstance(choice, tuple | list) or not choice or len(choice) > MAX_CHOICES:
        raise _refused(f"'choice' is not a list of 1 to {MAX_CHOICES} texts.")
    texts = [json.dumps(_text("choice", one), ensure_ascii=False) for one in choice]
    return "start: " + "\n  | ".join(texts)


def _lark(text: str) -> str:
    """GBNF, llama.cpp's, has `::=`; all else is Lark."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except GbnfToLarkError as error:
        raise _refused(f"the GBNF grammar cannot be read: {error}.") from None
