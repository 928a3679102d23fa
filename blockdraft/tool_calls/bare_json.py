"""Calls that are only JSON: Llama 3.1's, and those of models whose template has no tools.

A plain answer may begin with a brace, too. JSON is therefore a call only if it names a tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Items

from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls import lark
from blockdraft.tool_calls.json_calls import JsonCallReader
from blockdraft.tool_calls.lark import CallRules
from blockdraft.tool_calls.pieces import FunctionTool
from blockdraft.tool_calls.reading import NotACall, Steps

PYTHON_TAG = "<|python_tag|>"
FENCE = "```"


class BareJsonReader(JsonCallReader):
    """Reads calls at the start of an answer, with or without a code fence, and after Llama's python tag."""

    OPENING = (PYTHON_TAG,)

    def _read(self) -> Steps[None]:
        """Read an answer, which may begin with a call without an opening tag."""
        yield from self._try_call("")
        yield from super()._read()

    def _read_call(self, opening: str) -> Steps[None]:
        yield from self._skip_space()
        is_fenced = not opening and (yield from self._take(FENCE))
        if is_fenced:
            yield from self._take("json")
        yield from self._read_one()
        while (yield from self._read_next()):
            pass
        if is_fenced and (yield from self._skip_space()) == "`":
            yield from self._take(FENCE)

    def _read_one(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._expect("{")
        if not (yield from self._read_json_call()):
            yield from self._read_broken()

    def _read_next(self) -> Steps[bool]:
        """Read one more call after white space, a comma or a semicolon; return False if none follows."""
        self._mark = self._at
        try:
            if (yield from self._skip_space()) in (",", ";"):
                self._at += 1
            yield from self._read_one()
        except NotACall:
            self._at, self._mark = self._mark, None
            return False
        return True


def _grammar(wanted: CallRules, arguments_key: str, python_tag: str | None) -> str:
    """Return the grammar of a single call, as these models were not trained to write several."""
    if wanted.other is not None and (wanted.other.json is not None or wanted.other.json_object):
        return _call_or_json(wanted, wanted.other, arguments_key)
    starts, rules = ["json_call"], lark.json_call_rules(wanted, arguments_key)
    if not wanted.is_required and python_tag is not None:
        starts.append(f"{python_tag} json_call")
    if wanted.other is not None:
        starts.append("output")
        rules.append(f"output: {lark.output_rule(wanted.other)}")
    elif not wanted.is_required:
        starts.append("TEXT")
        rules.append(r"TEXT: /([^\s{`](?s:.*))?/")
    return "\n".join([f"start: {' | '.join(starts)}", *rules])


def _call_or_json(wanted: CallRules, other: StructuredOutputs, arguments_key: str) -> str:
    """Return a grammar of a call or JSON output. Both begin with a brace, so each is one whole rule."""
    rules = [f"output: {lark.json_of_output(other)}"]
    for number, tool in enumerate(wanted.tools):
        schema = _with_references_below(lark.arguments_of(tool, is_required=False), "#/$defs/tool")
        call = {
            "$defs": {"tool": schema},
            "type": "object",
            "properties": {"name": {"const": tool.name}, arguments_key: {"$ref": "#/$defs/tool"}},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        rules.append(f"call_{number}: {lark.json_of(call, is_strict=tool.is_strict)}")
    calls = (f"call_{number}" for number in range(len(wanted.tools)))
    return "\n".join([f"start: {' | '.join(calls)} | output", *rules])


def _with_references_below(value: object, place: str) -> object:
    """Return a root schema for use at `place`: its references lead there."""
    if isinstance(value, Mapping):
        changed = {key: _with_references_below(item, place) for key, item in value.items()}
        if isinstance(target := value.get("$ref"), str) and target.startswith("#"):
            changed["$ref"] = place + target[1:]
        return changed
    return [_with_references_below(item, place) for item in value] if isinstance(value, list) else value


def llama_grammar(wanted: CallRules, tokenizer: Tokenizer) -> str:
    has_tag = tokenizer.token_id(PYTHON_TAG) is not None
    return _grammar(wanted, "parameters", lark.tag(tokenizer, PYTHON_TAG) if has_tag else None)


def plain_grammar(wanted: CallRules, tokenizer: Tokenizer) -> str:
    return _grammar(wanted, "arguments", None)


def tools_as_messages(
    messages: Items[Mapping[str, object]], tools: Items[FunctionTool]
) -> list[dict[str, object]]:
    """Return messages with tools and calls as text, for templates that know only text messages."""
    told, is_result = list[dict[str, object]](), False
    for message in messages:
        if message.get("role") == "tool":
            said = f"Result of {message.get('name') or 'the call'}:\n{message['content']}"
            if is_result:  # results of parallel calls are one message
                told[-1]["content"] = f"{told[-1]['content']}\n\n{said}"
            else:
                told.append({"role": "user", "content": said})
        else:
            told.append(_with_calls_as_text(message))
        is_result = message.get("role") == "tool"
    if tools and told and told[0].get("role") in ("system", "developer"):
        told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{_introduction(tools)}"}
    elif tools:
        told.insert(0, {"role": "system", "content": _introduction(tools)})
    return told


def _with_calls_as_text(message: Mapping[str, object]) -> dict[str, object]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    lines = [str(message["content"])] if message.get("content") else []
    lines += [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(lines)}


def _introduction(tools: Items[FunctionTool]) -> str:
    lines = ["You can call these functions:"]
    for tool in tools:
        about = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters}
        lines.append(json.dumps(about, ensure_ascii=False))
    lines.append(
        "To call one, answer with nothing but a JSON object of its name and its arguments, such as "
        '{"name": "the function", "arguments": {"some parameter": "its value"}}. '
        "The result comes back in the next message. If no function helps, answer in plain text."
    )
    return "\n".join(lines)
