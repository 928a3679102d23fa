"""Gemma 4's format: <|tool_call>call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>.

It is JSON but for keys without quotes, and strings between tokens of their own, in which nothing is escaped.
"""

from __future__ import annotations

import json

from blockdraft.tool_calls.gemma_grammar import BARE_KEY, CLOSE, OPEN, QUOTE
from blockdraft.tool_calls.json_scanner import JsonScanner
from blockdraft.tool_calls.reading import AnswerReader, NotACall, Steps
from blockdraft.tool_calls.schemas import Schemas, named
from blockdraft.tool_calls.tags import TagFinder
from blockdraft.tool_calls.typed import as_json

MAX_DEPTH = 64  # of nested objects and lists; deeper ones count as broken


class GemmaReader(AnswerReader):
    """Reads the format, and writes the arguments as JSON."""

    OPENING, CLOSING = (OPEN,), (CLOSE,)
    _QUOTE = TagFinder((QUOTE,))
    _schemas: Schemas  # those of the tool that is called
    _odd_keys: dict[
        frozenset[int], list[str]
    ]  # keys that may hold what ends others, by their object's schema

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
        """Read one value and pass it on as JSON. Raises ValueError for an invalid or too deep one."""
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
        """An object whose brace is next."""
        if not (yield from self._opens("{", "}")):
            while True:
                key = yield from self._read_key(schema)
                known = None if key is None else self._schemas.member(schema, key)
                yield from self._read_value(known, depth + 1)
                if not (yield from self._goes_on()):
                    break
            yield from self._close("}")

    def _read_list(self, schema: object, depth: int) -> Steps[None]:
        """A list whose bracket is next."""
        place = 0
        if not (yield from self._opens("[", "]")):
            while True:
                yield from self._read_value(self._schemas.item(schema, place), depth + 1)
                place += 1
                if not (yield from self._goes_on()):
                    break
            yield from self._close("]")

    def _opens(self, bracket: str, close: str) -> Steps[bool]:
        """Take the opening bracket, and the closing one if it comes at once: then nothing is inside."""
        self._argue(bracket)
        self._at += 1
        if (yield from self._skip_space()) != close:
            return False
        yield from self._close(close)
        return True

    def _goes_on(self) -> Steps[bool]:
        """Take the comma in front of the next part, and return whether there was one."""
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
        """A key and the colon behind it; None: it is one that no schema is looked up for."""
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
        """A key of the schema that holds what ends other keys, should a model write it without quotes."""
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
        """A string whose opening quote is taken."""
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
