"""The grammar of calls in Gemma 4's format (tools/gemma.py reads it)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls.binding import (
    Lines,
    bound_values,
    no_value,
    overlap,
    refuse_unbound,
    terminal,
    text_patterns,
    unbound,
)
from blockdraft.tool_calls.lark import (
    CallRules,
    arguments_of,
    json_of,
    quoted,
    tag,
    tagged_grammar,
    text_pattern,
)
from blockdraft.tool_calls.pieces import FunctionTool
from blockdraft.tool_calls.schemas import (
    Flat,
    Part,
    Schemas,
    first_items,
    for_grammar,
    listed,
    named,
    other_items,
)

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
BARE_KEY = re.compile(r'[^\s:,{}\[\]<"]([^:,{}\[\]<\n]*[^\s:,{}\[\]<])?')  # any other needs quotes
_NUMBER_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def gemma_grammar(wanted: CallRules, tokenizer: Tokenizer) -> str:
    """Keys come in alphabetical order, as the template writes them; what is not required may be left out."""
    calls, lines = [], _any_value(tokenizer)
    for number, tool in enumerate(wanted.tools):
        schema = arguments_of(tool, is_required=wanted.is_required)
        rules = _Rules(tool, for_grammar(schema), tokenizer, f"call_{number}")
        calls.append(f"{quoted(tool.name)} {rules.start}")
        lines += rules.lines.all
    body = f'body: "call:" ({" | ".join(calls)}) {tag(tokenizer, CLOSE)}'
    return tagged_grammar(wanted, tokenizer, opening=OPEN, rules=[body, *lines], separator="")


def _any_value(tokenizer: Tokenizer) -> list[str]:
    """Rules for values of which nothing is known."""
    return [
        *_string_rules("string", [text_pattern(None)], tag(tokenizer, QUOTE)),
        r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
        "KEY: /[A-Za-z_][A-Za-z0-9_-]*/",
        'value: string | NUMBER | "true" | "false" | "null" | object | list',
        'object: "{" (KEY ":" value ("," KEY ":" value)*)? "}"',
        'list: "[" (value ("," value)*)? "]"',
    ]


def _string_rules(name: str, patterns: list[str], quote: str) -> Iterator[str]:
    """A string that matches all patterns, between quotes."""
    yield f"{name.upper()}: {terminal(patterns)}"
    if quote.startswith("<["):  # no text can be mistaken for it
        yield f"{name}: {quote} {name.upper()} {quote}"
    else:
        yield f"{name}: {quote} {name}_end"
        yield f"{name}_end[lazy]: {name.upper()} {quote}"


class _Rules:
    """Rules for the arguments of one tool: one for each schema in it, which others refer to by its name."""

    def __init__(self, tool: FunctionTool, schemas: Schemas, tokenizer: Tokenizer, name: str) -> None:
        self.lines = Lines(tool)
        self._tool, self._schemas, self._name = tool, schemas, name
        self._quote = tag(tokenizer, QUOTE)
        self._unbound: set[str] = set()
        self._names: dict[frozenset[int], str] = {}
        self._waiting: list[tuple[str, Flat]] = []
        self.start = self._rule({"allOf": [schemas.root, {"type": "object"}]})
        while self._waiting:
            rule, flat = self._waiting.pop()
            self._unbound |= unbound(flat)
            self.lines.add(f"{rule}: {self._value(rule, flat)}")
        refuse_unbound(tool, self._unbound, "gemma")

    def _rule(self, schema: object) -> str:
        """The name of the rule for a schema; it is written later, so that schemas may nest and refer."""
        flat = self._schemas.flat(schema)
        self._unbound |= flat.lost
        if not flat.key:
            return "value"
        if flat.key not in self._names:
            name = self._names[flat.key] = f"{self._name}_{len(self._names)}"
            self._waiting.append((name, flat))
        return self._names[flat.key]

    def _value(self, rule: str, flat: Flat) -> str:
        """The right side of the rule for a value."""
        keywords = flat.keywords
        values = bound_values(flat, self._schemas)
        if values is not None:
            written = [value for value in values if not _holds_quote(value)]
            self._unbound |= {"enum"} if len(written) < len(values) else set()
            return self._either(map(self._constant, written), flat)
        for name in ("anyOf", "oneOf"):
            if choices := listed(keywords, name):
                return self._choice(name, choices, keywords)
        types = sorted(self._schemas.types(keywords))
        if not types and "type" not in keywords:
            return "value"
        return self._either((self._typed(kind, f"{rule}_{kind}", keywords) for kind in types), flat)

    def _choice(self, name: str, choices: list[object], keywords: Part) -> str:
        """One of several schemas, each with what stands beside them."""
        if name == "oneOf" and overlap(choices, self._schemas):
            self._unbound.add(name)
        beside = {key: value for key, value in keywords.items() if key != name}
        return " | ".join(self._rule({"allOf": [beside, choice]}) for choice in choices)

    def _either(self, parts: Iterator[str], flat: Flat) -> str:
        if found := " | ".join(parts):
            return found
        raise no_value(self._tool, f"'{'enum' if 'enum' in flat.keywords else 'type'}' leaves no value")

    def _typed(self, kind: str, rule: str, keywords: Part) -> str:
        if kind == "object":
            return self._object(rule, keywords)
        if kind == "array":
            return self._list(rule, keywords)
        if kind == "string":
            for line in _string_rules(rule, text_patterns(keywords), self._quote):
                self.lines.add(line)
            return rule
        limits = {key: keywords[key] for key in _NUMBER_LIMITS if key in keywords}
        return f"({json_of({'type': kind, **limits})})"  # numbers and the like are those of JSON

    def _constant(self, value: object) -> str:
        return quoted_parts(_written(value), self._quote)

    def _object(self, rule: str, keywords: Part) -> str:
        """An object. In rule n the first n members are decided; `_more`: there is one, so a comma is due."""
        rest = keywords.get("additionalProperties", True)
        required = {name: rest for name in listed(keywords, "required") if isinstance(name, str)}
        members = sorted({**required, **named(keywords, "properties")}.items())
        if not members:
            return '"{" "}"' if rest is False else self._free_object(rest)
        for place, (key, schema) in enumerate(members):
            written = quoted_parts(f"{_written_key(key)}:", self._quote)
            value = f"{written} {self._rule(schema)} {rule}_{place + 1}_more"
            is_needed = key in required
            self.lines.add(f"{rule}_{place}: {value}{'' if is_needed else f' | {rule}_{place + 1}'}")
            skipped = "" if is_needed else f" | {rule}_{place + 1}_more"
            self.lines.add(f'{rule}_{place}_more: "," {value}{skipped}')
        self.lines.add(f'{rule}_{len(members)}: ""')
        self.lines.add(f'{rule}_{len(members)}_more: ""')
        return f'"{{" {rule}_0 "}}"'

    def _free_object(self, schema: object) -> str:
        """An object of any keys."""
        value = self._rule(schema)
        return "object" if value == "value" else f'"{{" (KEY ":" {value} ("," KEY ":" {value})*)? "}}"'

    def _list(self, rule: str, keywords: Part) -> str:
        """A list. In rule n the first n items are there, and the next has a schema of its own."""
        first, rest = first_items(keywords), other_items(keywords)
        least, most = (_count(keywords.get(name)) for name in ("minItems", "maxItems"))
        least = least or 0
        first = first if most is None else first[:most]
        if rest is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and least > most:
            raise no_value(self._tool, f"a list has at least {least} items and at most {most}")
        if most is None or most > len(first):
            self._tail(f"{rule}_{len(first)}", self._rule(rest), least - len(first), most, len(first))
        else:
            self.lines.add(f'{rule}_{len(first)}: ""')
        for place, schema in enumerate(first):
            comma = '"," ' if place else ""
            skipped = "" if place < least else ' | ""'
            self.lines.add(f"{rule}_{place}: {comma}{self._rule(schema)} {rule}_{place + 1}{skipped}")
        return f'"[" {rule}_0 "]"'

    def _tail(self, rule: str, item: str, least: int, most: int | None, num_before: int) -> None:
        """The items of a list behind the first ones, at least so many, and up to `most` in the whole list."""
        least = max(0, least)
        room = None if most is None else most - num_before
        more = f'("," {item})'
        if num_before:
            self.lines.add(f"{rule}: {_repeated(more, least, room)}")
            return
        others = _repeated(more, max(0, least - 1), None if room is None else room - 1)
        nothing = "" if least else ' | ""'
        self.lines.add(f"{rule}: {item} {others}{nothing}")


def _count(value: object) -> int | None:
    """A limit of a length; None for anything but a number from 0."""
    return (
        int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None
    )


def _repeated(part: str, least: int, most: int | None) -> str:
    if most == 0:
        return '""'
    if most is None:
        return f"{part}*" if least == 0 else f"{part}{{{least},}}"
    return f"{part}{{{least},{most}}}"


def _written(value: object) -> str:
    """A value in the format, with QUOTE for a quote."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        members = (f"{_written_key(key)}:{_written(item)}" for key, item in sorted(value.items()))
        return f"{{{','.join(members)}}}"
    return json.dumps(value)


def _written_key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else f"{QUOTE}{key}{QUOTE}"


def _holds_quote(value: object) -> bool:
    """Whether a string in a value holds what would end it."""
    return json.dumps(QUOTE)[1:-1] in json.dumps(value)


def quoted_parts(text: str, quote: str) -> str:
    """A text in which QUOTE stands for a token, as a part of a rule."""
    parts = [quoted(part) if part else "" for part in text.split(QUOTE)]
    return f" {quote} ".join(parts) or '""'
