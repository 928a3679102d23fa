"""What may bind an answer, a form and thoughts in front of it: as users say it and as llguidance reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from blockdraft.errors import RequestError
from blockdraft.grammar.limits import MAX_RUN_CHARS, check_backslash, check_json, check_text

MAX_CHOICES = 4096  # of `choice`; arbitrary
# A regex of JSON's white space and nothing else: its characters, escaped or not, sets, groups and repeats.
_BLANK = r"(?:[ \n\r\t]|\\[nrts]|\\x(?:20|0[9aAdD]))"
_WHITESPACE = re.compile(
    rf"(?:{_BLANK}|\[{_BLANK}++\]|\(\?:|[()|*+?]|\{{[0-9]{{1,4}}(?:,[0-9]{{0,4}})?\}})*+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form that an answer must have: exactly one of these. Names and meanings are vLLM's."""

    json: str | Mapping[str, object] | None = None  # a JSON schema
    json_object: bool = False  # any JSON object
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None  # Lark in llguidance's dialect, or GBNF
    is_lenient: bool = False  # keywords of a schema that are not known bind nothing; else they are refused
    # Of JSON: a regex of the white space that may stand between its parts. None: a blank behind each comma
    # and colon, as Python writes JSON. White space without a bound lets small models write blanks for ever.
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        """Checks the size of everything, so that nobody works with a form that is too large."""
        self._check_one()
        if self.json is not None:
            check_json("the JSON schema", self.json)
        if self.grammar is not None:
            check_text("'grammar'", self.grammar)
        for name in ("regex", "whitespace_pattern"):
            if (text := getattr(self, name)) is not None:
                check_text(f"'{name}'", text, MAX_RUN_CHARS)
        self._check_whitespace()
        if self.regex is not None:
            check_backslash(self.regex)
        if self.choice is not None:
            _check_choice(self.choice)

    def _check_one(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] * self.json_object
        if len(given) != 1:
            names = " and ".join(given) if given else "nothing"
            raise RequestError(
                f"structured_outputs has {names}: give one of json, json_object, regex, choice and grammar.",
                "structured_outputs",
            )
        if self.whitespace_pattern is not None and given[0] not in ("json", "json_object"):
            raise RequestError(
                f"whitespace_pattern is for JSON, and the form is '{given[0]}': leave it out.",
                "structured_outputs",
            )

    def _check_whitespace(self) -> None:
        pattern = self.whitespace_pattern
        if pattern is not None and not _WHITESPACE.fullmatch(pattern):
            raise RequestError(
                f"whitespace_pattern is '{pattern[:40]}', which is no regex of white space alone: "
                r"use one such as '[ \n]{0,4}'.",
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


def _check_choice(choice: object) -> None:
    if not isinstance(choice, tuple | list) or not 1 <= len(choice) <= MAX_CHOICES:
        raise RequestError(f"'choice' is not a list of 1 to {MAX_CHOICES} texts.", "structured_outputs")
    for one in choice:
        check_text("an entry of 'choice'", one, MAX_RUN_CHARS)
    check_text("'choice'", "".join(choice))


def fields_of(form: StructuredOutputs) -> dict[str, object]:
    """A form as JSON can hold it; `StructuredOutputs(**fields)` is the form again."""
    return {name: value for name in form.__slots__ if (value := getattr(form, name)) not in (None, False)}
