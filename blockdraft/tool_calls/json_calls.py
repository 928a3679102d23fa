"""Calls written as JSON, {"name": "f", "arguments": {...}}, and Hermes' format.

Hermes' format, which Qwen3 and many others use, puts such calls between <tool_call> and </tool_call>.
"""

from __future__ import annotations

import json
import re

from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls.json_scanner import JsonScanner
from blockdraft.tool_calls.lark import CallRules, json_call_rules, tag, tagged_grammar
from blockdraft.tool_calls.reading import AnswerReader, NotACall, Steps

ARGUMENTS = ("arguments", "parameters")
_HALF = re.compile("[\ud800-\udfff]")  # lone surrogates, which cannot be sent as UTF-8
OPEN, CLOSE = "<tool_call>", "</tool_call>"
OTHERS = ("id", "type")  # an object with any other member is not a call


class JsonCallReader(AnswerReader):
    """Reads calls written as JSON; a format's subclass reads the tags around them."""

    def _read_json_call(self) -> Steps[bool]:
        """Read a call after its brace; members have any order. Return False if the arguments are invalid."""
        name, early = "", "{}"
        while (key := (yield from self._read_key())) is not None:
            if key == "name":
                name = yield from self._read_name()
            elif key in OTHERS:
                yield from self._skip_value()
            elif key not in ARGUMENTS:
                raise NotACall
            elif name and (yield from self._peek()) == "{":
                self._begin(name)
                return (yield from self._pass_arguments())
            else:
                early = yield from self._read_early()
        if not name:
            raise NotACall
        self._begin(name)
        self._argue(early)
        return True

    def _read_key(self) -> Steps[str | None]:
        """Read the name of the next member; return None at the end of the object."""
        if (yield from self._skip_space()) == ",":
            self._at += 1
            yield from self._skip_space()
        if (yield from self._take("}")):
            return None
        if (yield from self._peek()) != '"':
            raise NotACall
        key, _ = yield from self._read_value()
        if (yield from self._skip_space()) != ":":
            raise NotACall
        self._at += 1
        yield from self._skip_space()
        return str(key)

    def _read_name(self) -> Steps[str]:
        if (yield from self._peek()) != '"':
            raise NotACall
        name, _ = yield from self._read_value()
        if not isinstance(name, str) or name not in self._tools:
            raise NotACall
        return name

    def _pass_arguments(self) -> Steps[bool]:
        """Pass on the arguments as they come, and skip later members. Return False if they are not JSON."""
        try:
            yield from self._read_json(JsonScanner(), is_argument=True)
        except ValueError:
            return False
        self._mark = self._at  # anything but another member is text
        try:
            while (yield from self._read_key()) is not None:
                yield from self._skip_value()
        except NotACall:
            self._at = self._mark
        self._mark = None
        return True

    def _read_early(self) -> Steps[str]:
        """Read arguments that cannot be streamed: an object before the name, one in a string, or null."""
        character = yield from self._peek()
        if character == "n":
            yield from self._expect("null")
            return "{}"
        if character not in ("{", '"'):
            raise NotACall
        value, written = yield from self._read_value()
        if not isinstance(value, str):
            return written
        if not value.lstrip().startswith("{"):
            raise NotACall
        return _HALF.sub(lambda half: f"\\u{ord(half.group()):04x}", value)

    def _read_value(self) -> Steps[tuple[object, str]]:
        """Read a whole JSON value; return it and its text."""
        try:
            written = yield from self._read_json(JsonScanner(), is_argument=False)
            return json.loads(written), written
        except (ValueError, RecursionError):
            raise NotACall from None

    def _skip_value(self) -> Steps[None]:
        """Skip the value of a member that is not used."""
        if (character := (yield from self._peek())) and character in '{["':
            yield from self._read_value()
        else:
            yield from self._take_up_to(",}")


class HermesReader(JsonCallReader):
    """Reads Hermes' format."""

    OPENING, CLOSING = (OPEN,), (CLOSE,)

    def _read_call(self, opening: str) -> Steps[None]:
        yield from self._skip_space()
        yield from self._expect("{")
        if (yield from self._read_json_call()):
            yield from self._skip_space()
            yield from self._take(CLOSE)
        else:
            yield from self._read_broken()


def hermes_grammar(wanted: CallRules, tokenizer: Tokenizer) -> str:
    body = f'body: "\\n" json_call "\\n" {tag(tokenizer, CLOSE)}'
    rules = [body, *json_call_rules(wanted, "arguments")]
    return tagged_grammar(wanted, tokenizer, opening=OPEN, rules=rules, separator="\n")
