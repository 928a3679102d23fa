"""Gemma 4's format: <|tool_call>call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>.

It is like JSON, but keys have no quotes, and strings stand between special tokens without any escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls import lark
from blockdraft.tool_calls.binding import ToolRules, terminal, text_patterns, unbound
from blockdraft.tool_calls.checking import as_json
from blockdraft.tool_calls.json_scanner import JsonScanner
from blockdraft.tool_calls.lark import CallRules, json_of, quoted, tag
from blockdraft.tool_calls.pieces import FunctionTool
from blockdraft.tool_calls.reading import AnswerReader, NotACall, Steps, TagFinder
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
MAX_DEPTH = 64  # of nested objects and lists; deeper ones count as broken


class GemmaReader(AnswerReader):
    """Reads Gemma's calls, and writes their arguments as JSON."""

    OPENING, CLOSING = (OPEN,), (CLOSE,)
    _QUOTE = TagFinder((QUOTE,))
    _schemas: Schemas  # the schemas of the tool that is called
    _odd_keys: dict[frozenset[int], list[str]]  # keys with characters that end other keys, by schema

    def _read(self) -> Steps[None]:
        """Read an answer. After thoughts, models sometimes forget the opening token of a call."""
        yield from self._try_call("")
        yield from super()._read()

    def _read_call(self, opening: str) -> Steps[None]:
        yield from self._skip_space()
        yield from self._expect("call:")
        name = (yield from self._take_up_to("{<\n")).strip()
        if name not in self._tools or (yield from self._peek()) != "{":
            raise NotACall
        self._begin(name)
        parameters = self._tools[name].parameters
        self._schemas, self._odd_keys = Schemas(parameters), {}
        try:
            yield from self._read_value(parameters, 0)
        except ValueError:
            yield from self._read_broken()
            return
        yield from self._skip_space()
        yield from self._take(CLOSE)

    def _read_value(self, schema: object, depth: int) -> Steps[None]:
        """Read one value and pass it on as JSON. Raises ValueError if it is invalid or nests too deep."""
        character = yield from self._skip_space()
        if depth > MAX_DEPTH:
            raise ValueError
        if character == "{":
            yield from self._read_object(schema, depth)
        elif character == "[":
            yield from self._read_list(schema, depth)
        elif character == '"':
            yield from self._read_json(JsonScanner(), is_argument=True)
        elif (yield from self._take(QUOTE)):
            yield from self._read_string()
        else:
            text = (yield from self._take_up_to(",]}<")).strip()
            self._argue(as_json(text, schema, self._schemas) if text else "")
            if not text:
                raise ValueError

    def _read_object(self, schema: object, depth: int) -> Steps[None]:
        """Read an object; its opening brace comes next."""
        if not (yield from self._opens("{", "}")):
            while True:
                key = yield from self._read_key(schema)
                known = None if key is None else self._schemas.member(schema, key)
                yield from self._read_value(known, depth + 1)
                if not (yield from self._goes_on()):
                    break
            yield from self._close("}")

    def _read_list(self, schema: object, depth: int) -> Steps[None]:
        """Read a list; its opening bracket comes next."""
        place = 0
        if not (yield from self._opens("[", "]")):
            while True:
                yield from self._read_value(self._schemas.item(schema, place), depth + 1)
                place += 1
                if not (yield from self._goes_on()):
                    break
            yield from self._close("]")

    def _opens(self, bracket: str, close: str) -> Steps[bool]:
        """Take the opening bracket. Return True if the closing one follows at once, and take it, too."""
        self._argue(bracket)
        self._at += 1
        if (yield from self._skip_space()) != close:
            return False
        yield from self._close(close)
        return True

    def _goes_on(self) -> Steps[bool]:
        """Take the comma before the next part, and return whether there was one."""
        if (yield from self._skip_space()) != ",":
            return False
        self._at += 1
        self._argue(", ")
        return True

    def _close(self, bracket: str) -> Steps[None]:
        if not (yield from self._take(bracket)):
            raise ValueError
        self._argue(bracket)

    def _read_key(self, schema: object) -> Steps[str | None]:
        """Read a key and its colon. Return None for a key in JSON quotes, whose schema is not looked up."""
        key: str | None = None
        character = yield from self._skip_space()
        if (yield from self._take(QUOTE)):
            key = yield from self._read_string()
        elif character == '"':
            yield from self._read_json(JsonScanner(), is_argument=True)
        elif (key := (yield from self._take_odd_key(schema))) is None:
            key = (yield from self._take_up_to(":,{}[]<")).strip()
            self._argue(json.dumps(key, ensure_ascii=False) if key else "")
        yield from self._skip_space()
        if not (yield from self._take(":")):
            raise ValueError
        self._argue(": ")
        return key

    def _take_odd_key(self, schema: object) -> Steps[str | None]:
        """Take an unquoted key with characters that end other keys; None if no such key comes next."""
        flat = self._schemas.flat(schema)
        if flat.key not in self._odd_keys:
            odd = [key for key in named(flat.keywords, "properties") if key and not BARE_KEY.fullmatch(key)]
            self._odd_keys[flat.key] = sorted(odd, key=len, reverse=True)
        for key in self._odd_keys[flat.key]:
            if (yield from self._take(f"{key}:")):
                self._at -= 1
                self._argue(json.dumps(key, ensure_ascii=False))
                return key
        return None

    def _read_string(self) -> Steps[str]:
        """Read the rest of a string after its opening quote."""
        found = []
        self._argue('"')
        while True:
            end, tag = self._QUOTE.find(self._buffer, self._at, self._is_over)
            found.append(self._buffer[self._at : end])
            self._argue(json.dumps(found[-1], ensure_ascii=False)[1:-1])
            self._at = end + len(tag or "")
            if tag is not None:
                self._argue('"')
                return "".join(found)
            if self._is_over:
                raise ValueError
            yield


def gemma_grammar(wanted: CallRules, tokenizer: Tokenizer) -> str:
    """Return a grammar with keys in alphabetical order, as the template writes them."""
    calls, lines = [], _any_value(tokenizer)
    for number, tool in enumerate(wanted.tools):
        schema = lark.arguments_of(tool, is_required=wanted.is_required)
        rules = _Rules(tool, for_grammar(schema), tokenizer, f"call_{number}")
        calls.append(f"{quoted(tool.name)} {rules.start}")
        lines += rules.lines
    body = f'body: "call:" ({" | ".join(calls)}) {tag(tokenizer, CLOSE)}'
    return lark.tagged_grammar(wanted, tokenizer, opening=OPEN, rules=[body, *lines], separator="")


def _any_value(tokenizer: Tokenizer) -> list[str]:
    """Return the rules for values without a known schema."""
    return [
        *_string_rules("string", [lark.text_pattern(None)], tag(tokenizer, QUOTE)),
        r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
        "KEY: /[A-Za-z_][A-Za-z0-9_-]*/",
        'value: string | NUMBER | "true" | "false" | "null" | object | list',
        'object: "{" (KEY ":" value ("," KEY ":" value)*)? "}"',
        'list: "[" (value ("," value)*)? "]"',
    ]


def _string_rules(name: str, patterns: list[str], quote: str) -> Iterator[str]:
    """Yield the rules of a string that matches all patterns, between quotes."""
    yield f"{name.upper()}: {terminal(patterns)}"
    if quote.startswith("<["):  # a token, which no text can contain
        yield f"{name}: {quote} {name.upper()} {quote}"
    else:
        yield f"{name}: {quote} {name}_end"
        yield f"{name}_end[lazy]: {name.upper()} {quote}"


class _Rules(ToolRules):
    """The rules for the arguments of one tool. Each schema in them has one rule, which others name."""

    def __init__(self, tool: FunctionTool, schemas: Schemas, tokenizer: Tokenizer, name: str) -> None:
        super().__init__(tool, schemas)
        self._name, self._quote = name, tag(tokenizer, QUOTE)
        self._names: dict[frozenset[int], str] = {}
        self._waiting: list[tuple[str, Flat]] = []
        self.start = self._rule({"allOf": [schemas.root, {"type": "object"}]})
        while self._waiting:
            rule, flat = self._waiting.pop()
            self._unbound |= unbound(flat)
            self._add(f"{rule}: {self._value(rule, flat)}")
        self._refuse_unbound("gemma")

    def _rule(self, schema: object) -> str:
        """Return the name of a schema's rule. The rule is added later, as schemas may refer to each other."""
        flat = self._schemas.flat(schema)
        self._unbound |= flat.lost
        if not flat.key:
            return "value"
        if flat.key not in self._names:
            name = self._names[flat.key] = f"{self._name}_{len(self._names)}"
            self._waiting.append((name, flat))
        return self._names[flat.key]

    def _value(self, rule: str, flat: Flat) -> str:
        keywords = flat.keywords
        # A string cannot hold its own closing quote.
        values = self._values(flat, lambda value: json.dumps(QUOTE)[1:-1] not in json.dumps(value))
        if values is not None:
            return " | ".join(quoted_parts(_written(value), self._quote) for value in values)
        if choices := self._choices(keywords):
            return " | ".join(map(self._rule, choices))
        types = sorted(self._schemas.types(keywords))
        if not types and "type" not in keywords:
            return "value"
        if not types:
            raise self._no_value("'type' leaves no value")
        return " | ".join(self._typed(kind, f"{rule}_{kind}", keywords) for kind in types)

    def _typed(self, kind: str, rule: str, keywords: Part) -> str:
        if kind == "object":
            return self._object(rule, keywords)
        if kind == "array":
            return self._list(rule, keywords)
        if kind == "string":
            self._add(*_string_rules(rule, text_patterns(keywords), self._quote))
            return rule
        limits = {key: keywords[key] for key in _NUMBER_LIMITS if key in keywords}
        return f"({json_of({'type': kind, **limits})})"  # numbers, booleans and null are as in JSON

    def _object(self, rule: str, keywords: Part) -> str:
        """Return the rule of an object, and add a rule for each place among its members, in order.

        Rule n comes after the first n members were written or left out. If at least one was written, rule
        n_more comes instead, in which the next member needs a comma.
        """
        rest = keywords.get("additionalProperties", True)
        required = {name: rest for name in listed(keywords, "required") if isinstance(name, str)}
        members = sorted({**required, **named(keywords, "properties")}.items())
        if not members:
            if rest is False:
                return '"{" "}"'
            value = self._rule(rest)
            return "object" if value == "value" else f'"{{" (KEY ":" {value} ("," KEY ":" {value})*)? "}}"'
        for place, (key, schema) in enumerate(members):
            written = quoted_parts(f"{_written_key(key)}:", self._quote)
            value = f"{written} {self._rule(schema)} {rule}_{place + 1}_more"
            is_needed = key in required
            self._add(f"{rule}_{place}: {value}{'' if is_needed else f' | {rule}_{place + 1}'}")
            skipped = "" if is_needed else f" | {rule}_{place + 1}_more"
            self._add(f'{rule}_{place}_more: "," {value}{skipped}')
        self._add(f'{rule}_{len(members)}: ""')
        self._add(f'{rule}_{len(members)}_more: ""')
        return f'"{{" {rule}_0 "}}"'

    def _list(self, rule: str, keywords: Part) -> str:
        """Return the rule of a list. Rule n comes after n items and reads the next, by its own schema."""
        first, rest = first_items(keywords), other_items(keywords)
        least, most = (_count(keywords.get(name)) for name in ("minItems", "maxItems"))
        least = least or 0
        first = first if most is None else first[:most]
        if rest is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and least > most:
            raise self._no_value(f"a list has at least {least} items and at most {most}")
        if most is None or most > len(first):
            self._tail(f"{rule}_{len(first)}", self._rule(rest), least - len(first), most, len(first))
        else:
            self._add(f'{rule}_{len(first)}: ""')
        for place, schema in enumerate(first):
            comma = '"," ' if place else ""
            skipped = "" if place < least else ' | ""'
            self._add(f"{rule}_{place}: {comma}{self._rule(schema)} {rule}_{place + 1}{skipped}")
        return f'"[" {rule}_0 "]"'

    def _tail(self, rule: str, item: str, least: int, most: int | None, num_before: int) -> None:
        """Add the rule of a list's items after the first `num_before`.

        There are at least `least` of them, and at most `most` items in the whole list.
        """
        least = max(0, least)
        room = None if most is None else most - num_before
        more = f'("," {item})'
        if num_before:
            self._add(f"{rule}: {_repeated(more, least, room)}")
            return
        others = _repeated(more, max(0, least - 1), None if room is None else room - 1)
        nothing = "" if least else ' | ""'
        self._add(f"{rule}: {item} {others}{nothing}")


def _count(value: object) -> int | None:
    """Return the limit of a length; None if `value` is not a number from 0."""
    is_limit = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return int(value) if is_limit else None  # type: ignore[call-overload]


def _repeated(part: str, least: int, most: int | None) -> str:
    if most == 0:
        return '""'
    if most is None:
        return f"{part}*" if least == 0 else f"{part}{{{least},}}"
    return f"{part}{{{least},{most}}}"


def _written(value: object) -> str:
    """Return a value as Gemma writes it, with QUOTE as the quote."""
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


def quoted_parts(text: str, quote: str) -> str:
    """Return a text as part of a rule; `quote` replaces QUOTE in it."""
    parts = [quoted(part) if part else "" for part in text.split(QUOTE)]
    return f" {quote} ".join(parts) or '""'
