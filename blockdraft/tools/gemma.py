"""Gemma 4's format: <|tool_call>call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>.

It is JSON but for keys without quotes, and strings between tokens of their own, in which nothing is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tools.json_scanner import JsonScanner
from blockdraft.tools.lark import CallForm, arguments_of, json_of, quoted, tag, tagged_grammar, text_pattern
from blockdraft.tools.reading import AnswerReader, NotACall, Steps
from blockdraft.tools.tags import TagFinder
from blockdraft.tools.typed import as_json, types_of

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
_NUMBER_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_DEPTH = 64  # of nested objects and lists; deeper ones count as broken


class GemmaReader(AnswerReader):
    """Reads the format, and writes the arguments as JSON."""

    OPENING, CLOSING = (OPEN,), (CLOSE,)
    _QUOTE = TagFinder((QUOTE,))

    def _read(self) -> Steps[None]:
        """Behind thoughts the opening token is sometimes forgotten: the text itself shows what it is."""
        yield from self._try_call("")
        yield from super()._read()

    def _read_call(self, opening: str) -> Steps[None]:
        yield from self._skip_space()
        yield from self._expect("call:")
        name = (yield from self._take_up_to("{<\n")).strip()
        if name not in self._tools or (yield from self._peek()) != "{":
            raise NotACall
        self._begin(name)
        try:
            yield from self._read_value(0)
        except ValueError:
            yield from self._read_broken()
            return
        yield from self._skip_space()
        yield from self._take(CLOSE)

    def _read_value(self, depth: int) -> Steps[None]:
        """One value, passed on as JSON. ValueError: it is none, or too deep."""
        character = yield from self._skip_space()
        if depth > MAX_DEPTH:
            raise ValueError
        if character == "{":
            yield from self._read_list("}", depth)
        elif character == "[":
            yield from self._read_list("]", depth)
        elif character == '"':
            yield from self._read_json(JsonScanner(), is_argument=True)
        elif (yield from self._take(QUOTE)):
            yield from self._read_string()
        else:
            text = (yield from self._take_up_to(",]}<")).strip()
            self._argue(as_json(text, None) if text else "")
            if not text:
                raise ValueError

    def _read_list(self, close: str, depth: int) -> Steps[None]:
        """An object or a list, whose opening bracket is next."""
        self._argue(self._buffer[self._at])
        self._at += 1
        if (yield from self._skip_space()) != close:
            while True:
                if close == "}":
                    yield from self._read_key()
                yield from self._read_value(depth + 1)
                if (yield from self._skip_space()) != ",":
                    break
                self._at += 1
                self._argue(", ")
        if not (yield from self._take(close)):
            raise ValueError
        self._argue(close)

    def _read_key(self) -> Steps[None]:
        character = yield from self._skip_space()
        if (yield from self._take(QUOTE)):
            yield from self._read_string()
            yield from self._skip_space()
        elif character == '"':
            yield from self._read_json(JsonScanner(), is_argument=True)
            yield from self._skip_space()
        else:
            key = (yield from self._take_up_to(":,{}[]<")).strip()
            self._argue(json.dumps(key, ensure_ascii=False) if key else "")
        if not (yield from self._take(":")):
            raise ValueError
        self._argue(": ")

    def _read_string(self) -> Steps[None]:
        """A string whose opening quote is taken."""
        self._argue('"')
        while True:
            end, found = self._QUOTE.find(self._buffer, self._at, self._is_over)
            self._argue(json.dumps(self._buffer[self._at : end], ensure_ascii=False)[1:-1])
            self._at = end + len(found or "")
            if found is not None:
                self._argue('"')
                return
            if self._is_over:
                raise ValueError
            yield


def gemma_grammar(form: CallForm, tokenizer: Tokenizer) -> str:
    """Keys come in alphabetical order, as the template writes them; what is not required may be left out."""
    rules = _Rules(tokenizer)
    calls = []
    for tool in form.tools:
        schema = arguments_of(tool, is_required=form.is_required)
        calls.append(f"{quoted(tool.name)} {rules.object_of(schema, schema)}")
    body = f'body: "call:" ({" | ".join(calls)}) {tag(tokenizer, CLOSE)}'
    return tagged_grammar(form, tokenizer, opening=OPEN, rules=[body, *rules.lines], separator="")


class _Rules:
    """Rules for the values of a schema, as the format writes them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        quote = tag(tokenizer, QUOTE)
        self._quote = quote
        self._num_rules = 0
        self._known: dict[str, str] = {}  # rules of definitions, by their reference
        self.lines: list[str] = []
        self.lines += [
            f"string: {self._string(None)}",
            r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
            "KEY: /[A-Za-z_][A-Za-z0-9_-]*/",
            'value: string | NUMBER | "true" | "false" | "null" | object | list',
            'object: "{" (KEY ":" value ("," KEY ":" value)*)? "}"',
            'list: "[" (value ("," value)*)? "]"',
        ]

    def value_of(self, schema: object, root: Mapping[str, object]) -> str:
        """The right side of a rule for a value; any value, where the schema says it in other ways."""
        if not isinstance(schema, Mapping):
            return "value"
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._referred(reference, root)
        for key in ("anyOf", "oneOf"):
            if isinstance(listed := schema.get(key), list) and listed:
                return f"({' | '.join(self.value_of(part, root) for part in listed)})"
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values:
            return f"({' | '.join(map(self._constant, values))})"
        typed = [self._typed(name, schema, root) for name in sorted(types_of(schema))]
        return f"({' | '.join(typed)})" if typed else "value"

    def _typed(self, name: str, schema: Mapping[str, object], root: Mapping[str, object]) -> str:
        if name == "object":
            return self.object_of(schema, root)
        if name == "array":
            item = self.value_of(schema.get("items"), root)
            return f'"[" ({item} ("," {item})*)? "]"'
        if name == "string":
            return f"({self._string(schema)})"
        limits = {key: schema[key] for key in _NUMBER_LIMITS if key in schema}
        return f"({json_of({'type': name, **limits})})"  # numbers and the like are those of JSON

    def _string(self, schema: object) -> str:
        pattern = f"/{text_pattern(schema)}/"
        if self._quote.startswith("<["):  # no text can be mistaken for it
            return f"{self._quote} {pattern} {self._quote}"
        name = self._new_name()
        self.lines.append(f"{name}[lazy]: {pattern} {self._quote}")
        return f"{self._quote} {name}"

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            return f"{self._quote} {quoted(value)} {self._quote}"
        return quoted(json.dumps(value)) if not isinstance(value, dict | list) else "value"

    def _referred(self, reference: str, root: Mapping[str, object]) -> str:
        """A definition has one rule, which may refer to itself."""
        if reference not in self._known:
            self._known[reference] = name = self._new_name()
            found: object = root
            for part in reference.removeprefix("#").strip("/").split("/"):
                found = found.get(part) if isinstance(found, Mapping) and part else found
            self.lines.append(f"{name}: {self.value_of(found, root) if found is not root else 'value'}")
        return self._known[reference]

    def object_of(self, schema: Mapping[str, object], root: Mapping[str, object]) -> str:
        """An object. In rule n the first n members are decided; `_more`: there is one, so a comma is due."""
        properties, listed = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping) or not properties:
            is_closed = schema.get("additionalProperties") is False
            return '"{}"' if is_closed else "object"
        required = listed if isinstance(listed, list) else []
        members = sorted(properties.items())
        name = self._new_name()
        for place, (key, part) in enumerate(members):
            value = f"{quoted(key + ':')} {self.value_of(part, root)} {name}_{place + 1}_more"
            skip_first, skip_more = f" | {name}_{place + 1}", f" | {name}_{place + 1}_more"
            is_needed = key in required
            self.lines.append(f"{name}_{place}: {value}{'' if is_needed else skip_first}")
            self.lines.append(f'{name}_{place}_more: "," {value}{"" if is_needed else skip_more}')
        self.lines += [f'{name}_{len(members)}: ""', f'{name}_{len(members)}_more: ""']
        return f'"{{" {name}_0 "}}"'

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"part_{self._num_rules}"
