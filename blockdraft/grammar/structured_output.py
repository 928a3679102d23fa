"""StructuredOutputs restricts an answer to a schema, regex, choice or grammar; Thinking limits thoughts."""

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
    """Structured output: an answer must match exactly one of these. Names and meanings are vLLM's."""

    json: str | Mapping[str, object] | None = None  # a JSON schema
    json_object: bool = False  # any JSON object
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None  # Lark in llguidance's dialect, or GBNF
    is_lenient: bool = False  # unknown keywords of a schema are ignored; else they are refused
    # A regex of the white space between the parts of JSON. None: a blank after each comma and colon, as
    # Python writes JSON. With unlimited white space, small models write blanks for ever.
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        """Check the fields and all sizes, before any work."""
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
            names = " and ".join(given) if given else "none"
            raise RequestError(
                f"structured_outputs has {names} set: set exactly one of json, json_object, regex, choice "
                "and grammar.",
                "structured_outputs",
            )
        if self.whitespace_pattern is not None and given[0] not in ("json", "json_object"):
            raise RequestError(
                f"whitespace_pattern works with json and json_object, not with '{given[0]}': leave it out.",
                "structured_outputs",
            )

    def _check_whitespace(self) -> None:
        pattern = self.whitespace_pattern
        if pattern is not None and not _WHITESPACE.fullmatch(pattern):
            raise RequestError(
                f"whitespace_pattern is '{pattern[:40]}', which can match more than white space: "
                r"use one such as '[ \n]{0,4}'.",
                "structured_outputs",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The tokens around the thoughts before an answer. Structured output does not restrict the thoughts."""

    open_ids: tuple[int, ...] = ()  # (): the prompt has opened the thoughts; else the answer may open them
    close_ids: tuple[int, ...]
    max_tokens: int | None = None  # the engine closes the thoughts after this many tokens

    def __post_init__(self) -> None:
        if not self.close_ids:
            raise RequestError(
                "thinking has no close_ids, so thoughts would never end: give them.", "thinking"
            )
        if self.max_tokens is not None and self.max_tokens < 0:
            raise RequestError(f"thinking has max_tokens {self.max_tokens}: use 0 or more.", "thinking")


def _check_choice(choice: object) -> None:
    if not isinstance(choice, tuple | list) or not 1 <= len(choice) <= MAX_CHOICES:
        raise RequestError(f"'choice' must be a list of 1 to {MAX_CHOICES} strings.", "structured_outputs")
    for one in choice:
        check_text("an entry of 'choice'", one, MAX_RUN_CHARS)
    check_text("'choice'", "".join(choice))


def fields_of(output: StructuredOutputs) -> dict[str, object]:
    """Return the fields that are set, for JSON. `StructuredOutputs(**fields)` equals `output`."""
    return {name: value for name in output.__slots__ if (value := getattr(output, name)) not in (None, False)}
