"""Grammars of tool calls, in llguidance's dialect of Lark.

Every format has its own rule for one call. The grammar around it is shared: it allows only calls, or free
text that becomes bound once a call begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from blockdraft.grammar.compiling import with_options
from blockdraft.grammar.lark_text import quoted as quoted  # for all formats
from blockdraft.grammar.limits import check_backslash
from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls.pieces import FunctionTool

_ESCAPED = re.compile(r"\\.|/", re.DOTALL)
_ENDED = re.compile(r"(?<!\\)(?:\\\\)*+\$\Z")  # by a `$` that no backslash escapes
ANY_OBJECT: Mapping[str, object] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallRules:
    """The calls that an answer may or must have, and its structured output without a call."""

    tools: tuple[FunctionTool, ...]  # the tools that may be called
    is_required: bool  # at least one call, and no text
    is_parallel: bool  # several calls may follow each other
    other: StructuredOutputs | None = None  # what an answer without a call must be; None: any text


def tag(tokenizer: Tokenizer, text: str) -> str:
    """Return a tag for a grammar: an added token by its id, as llguidance requires; any other tag as text."""
    token_id = tokenizer.token_id(text)
    return f"<[{token_id}]>" if token_id in tokenizer.added_ids else quoted(text)


def json_of(schema: Mapping[str, object], *, is_strict: bool = True) -> str:
    """Return a rule for JSON of a schema, spaced as in templates; if not strict, ignore unknown keywords."""
    return json_of_output(StructuredOutputs(json=schema, is_lenient=not is_strict))


def json_of_output(output: StructuredOutputs) -> str:
    schema = json.loads(output.json) if isinstance(output.json, str) else output.json
    return f"%json {json.dumps(with_options(dict(ANY_OBJECT if schema is None else schema), output))}"


def arguments_of(tool: FunctionTool, *, is_required: bool) -> Mapping[str, object]:
    """Return the tool's schema if it is strict or a call is required, else the schema of any object."""
    if not (tool.is_strict or is_required):
        return ANY_OBJECT
    return tool.parameters or _NO_ARGUMENTS


def text_pattern(schema: object) -> str:
    """Return a regex, without slashes around it, for text with a schema's pattern or length."""
    limits = schema if isinstance(schema, Mapping) else {}
    pattern = limits.get("pattern")
    if isinstance(pattern, str):
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        is_ended = _ENDED.search(pattern) is not None
        end = "" if is_ended else "(?s:.*)"
        return f"{begin}({_slashed(pattern.removeprefix('^')[: -1 if is_ended else None])}){end}"
    least, most = (limits.get(key) for key in ("minLength", "maxLength"))
    if isinstance(least, int) or isinstance(most, int):
        return f"(?s:.{{{least or 0},{'' if most is None else most}}})"
    return "(?s:.*)"


def _slashed(regex: str) -> str:
    """Return a regex that can stand between slashes: escape every slash that is not escaped yet."""
    check_backslash(regex)
    return _ESCAPED.sub(lambda found: "\\/" if found.group() == "/" else found.group(), regex)


def output_rule(output: StructuredOutputs) -> str | None:
    """Return structured output as the right side of a rule; None for a grammar, which cannot be nested."""
    if output.json is not None or output.json_object:
        return json_of_output(output)
    if output.regex is not None:
        return f"/{_slashed(output.regex)}/"
    if output.choice is not None:
        return " | ".join(map(quoted, output.choice))
    return None


def json_call_rules(wanted: CallRules, arguments_key: str) -> list[str]:
    """Return the rule `json_call`, written as in templates, and the rules of each tool's arguments."""
    rules = [f"json_call: {' | '.join(f'call_{number}' for number in range(len(wanted.tools)))}"]
    for number, tool in enumerate(wanted.tools):
        head = quoted(f'{{"name": "{tool.name}", "{arguments_key}": ')
        rules.append(f'call_{number}: {head} arguments_{number} "}}"')
        schema = arguments_of(tool, is_required=wanted.is_required)
        rules.append(f"arguments_{number}: {json_of(schema, is_strict=tool.is_strict)}")
    return rules


def tagged_grammar(
    wanted: CallRules, tokenizer: Tokenizer, *, opening: str, rules: list[str], separator: str
) -> str:
    """Return the grammar of calls that begin with a tag. `rules` define `body`: a call without that tag."""
    begin = tag(tokenizer, opening)
    other = None if wanted.other is None else output_rule(wanted.other)
    more = f"({quoted(separator)} {begin} body)*" if wanted.is_parallel else ""
    if wanted.is_required:
        first = [f"start: LINES? {begin} body {more}", r"LINES: /\n{1,2}/"]  # as after thoughts
    elif other is not None:
        first = [f"start: output | {begin} body {more}", f"output: {other}"]
    elif begin.startswith("<["):  # a token, which no text can contain
        repeated = "*" if wanted.is_parallel else "?"
        first = [f"start: TEXT ({begin} body TEXT){repeated}", "TEXT: /(?s:.*)/"]
    else:
        start = "start: (head body)* tail" if wanted.is_parallel else "start: head body | tail"
        first = [start, f"head[lazy]: TEXT {begin}", "tail: TEXT", "TEXT: /(?s:.*)/"]
    return "\n".join([*first, *rules])
