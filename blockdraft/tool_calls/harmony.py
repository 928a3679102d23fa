"""gpt-oss' format, harmony: an answer is a sequence of messages, each with a header that names its kind.

<|channel|>analysis<|message|>thoughts<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Paris"}<|call|>
<|start|>assistant<|channel|>final<|message|>the answer<|return|>

The library `openai-harmony` reads it too, but downloads a vocabulary, and a server may have no network.
This module therefore reads the format from text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls.json_scanner import JsonScanner
from blockdraft.tool_calls.lark import CallRules, arguments_of, json_of, output_rule, quoted, tag
from blockdraft.tool_calls.reading import AnswerReader, Steps, TagFinder
from blockdraft.tool_calls.thoughts import Tags

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
RECIPIENT = "to="
NAMESPACE = "functions."
MAX_HEADER = 512  # characters; a longer one is text


class HarmonyReader(AnswerReader):
    """Reads the format: thoughts, text and calls. The prompt ends with "<|start|>assistant"."""

    OPENING, CLOSING = (), (END, CALL, RETURN)
    _TAGS = TagFinder(TAGS)

    def _read(self) -> Steps[None]:
        has_thought = False
        while (header := (yield from self._read_header())) is not None:
            recipient = re.search(r"to=([^\s<]+)", header)
            channel = re.search(r"<\|channel\|>\s*([a-z]+)", header)
            name = recipient.group(1).removeprefix(NAMESPACE) if recipient is not None else ""
            if channel is not None and channel.group(1) == "analysis" and recipient is None:
                yield from self._read_body("\n" if has_thought else "", partial(self._add, "reasoning"))
                has_thought = True
            elif name in self._tools and (yield from self._skip_space()) in ("{", "<", ""):
                yield from self._read_call(name)
            else:  # a call of an unknown tool is content
                yield from self._read_body(f"{RECIPIENT}{name} " if name else "", self._say)
        if not self._is_behind_call:
            self._add("text", self._space)

    def _read_header(self) -> Steps[str | None]:
        """Read the header before the next message's text; None at the end of the answer.

        Text without a header counts as a message with an empty header. A header that is cut off is dropped,
        unless it may be text.
        """
        header = ""
        while True:
            if not header and (yield from self._skip_space()) == "":
                return None
            if not header and (yield from self._take(RECIPIENT)):
                header = RECIPIENT
            end, found = self._TAGS.find(self._buffer, self._at, self._is_over)
            text = self._buffer[self._at : end]
            if (text and not header) or len(header) + len(text) > MAX_HEADER:
                self._say(header + text)
                self._at = end
                return ""
            self._at = end + len(found or "")
            header += text
            if found == MESSAGE:
                return header
            if found in self.CLOSING or (found is None and self._is_over):
                self._say(header if header.startswith(RECIPIENT) and CHANNEL not in header else "")
                header = ""
            elif found is not None:
                header += found
            else:
                yield

    def _read_body(self, ahead: str, put: Callable[[str], None]) -> Steps[None]:
        """Pass on the text of a message and take the tag after it, unless that tag begins the next header."""
        put(ahead)
        while True:
            end, found = self._TAGS.find(self._buffer, self._at, self._is_over)
            put(self._buffer[self._at : end])
            self._at = end
            if found in (START, CHANNEL):
                return
            self._at += len(found or "")
            if found in self.CLOSING or (found is None and self._is_over):
                return
            if found is None:
                yield
            elif found not in self._hidden:
                put(found)

    def _read_call(self, opening: str) -> Steps[None]:
        """Read the arguments of a call; `opening` is the tool's name, from the header."""
        self._begin(opening)
        if (yield from self._peek()) != "{":
            self._argue("{}")
            return
        try:
            yield from self._read_json(JsonScanner(), is_argument=True)
        except ValueError:
            yield from self._read_broken()
        else:
            yield from self._read_body("", self._say)


def find_harmony_thoughts(tokenizer: Tokenizer) -> Tags | None:
    close_id = tokenizer.token_id(END)
    opening = f"{CHANNEL}analysis{MESSAGE}"
    if close_id is None or tokenizer.token_id(CHANNEL) is None:
        return None
    open_ids = tuple(tokenizer.encode(opening, add_special_tokens=False))
    return Tags(opening, END, open_ids, (close_id,), TAGS)


def _header(tokenizer: Tokenizer) -> str:
    """Return the rule of a header. A message names its author only if it follows thoughts."""
    return f'begin: ({tag(tokenizer, START)} "assistant")? {tag(tokenizer, CHANNEL)}'


def wrap_in_harmony(output: StructuredOutputs, tokenizer: Tokenizer) -> StructuredOutputs:
    """Return structured output as the final message; a client's grammar is returned unchanged."""
    rule = output_rule(output)
    if rule is None:
        return output
    start = f'start: begin "final" {tag(tokenizer, MESSAGE)} output'
    return StructuredOutputs(grammar="\n".join([start, _header(tokenizer), f"output: {rule}"]))


def harmony_grammar(wanted: CallRules, tokenizer: Tokenizer) -> str:
    """Return the grammar of one call; in this format a call ends the answer."""
    message = tag(tokenizer, MESSAGE)
    calls = " | ".join(f"call_{number}" for number in range(len(wanted.tools)))
    rules = [_header(tokenizer), f"call: {quoted(f'commentary {RECIPIENT}{NAMESPACE}')} ({calls})"]
    for number, tool in enumerate(wanted.tools):
        schema = arguments_of(tool, is_required=wanted.is_required)
        head = f'{quoted(tool.name + " ")} {tag(tokenizer, CONSTRAIN)} "json" {message}'
        rules.append(f"call_{number}: {head} ({json_of(schema, is_strict=tool.is_strict)})")
    other = None if wanted.other is None else output_rule(wanted.other)
    if wanted.is_required:
        start = "start: begin call"
    elif other is not None:
        start = f'start: begin call | begin "final" {message} output'
        rules.append(f"output: {other}")
    else:
        spoken = f'begin ("final" | "commentary") {message} TEXT'
        start = f"start: ({spoken} {tag(tokenizer, END)})* (begin call | {spoken})"
        rules.append("TEXT: /(?s:.*)/")
    return "\n".join([start, *rules])
