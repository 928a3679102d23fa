"""Hermes' format, which Qwen3 and many others use: JSON between <tool_call> and </tool_call>."""

from __future__ import annotations

from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls.json_calls import JsonCallReader
from blockdraft.tool_calls.lark import CallRules, json_call_rules, tag, tagged_grammar
from blockdraft.tool_calls.reading import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesReader(JsonCallReader):
    """Reads the format."""

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
