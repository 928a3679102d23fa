"""The grammar of calls in the format of Qwen3-Coder (tool_calls/qwen_xml.py reads it)."""

from __future__ import annotations

import json
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
from blockdraft.tool_calls.lark import CallRules, arguments_of, json_of, quoted, tag, tagged_grammar
from blockdraft.tool_calls.pieces import FunctionTool
from blockdraft.tool_calls.schemas import Flat, Part, Schemas, find_reference, for_grammar, listed, named

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_END = quoted(f"\n{END_PARAMETER}\n")


def qwen_xml_grammar(wanted: CallRules, tokenizer: Tokenizer) -> str:
    """Parameters come in the order of the schema; what is not required may be left out."""
    names = " | ".join(f"call_{number}" for number in range(len(wanted.tools)))
    rules = [f'body: "\\n<function=" ({names}) "</function>\\n" {tag(tokenizer, CLOSE)}']
    for number, tool in enumerate(wanted.tools):
        schema = arguments_of(tool, is_required=wanted.is_required)
        rules += _Call(tool, for_grammar(schema), f"call_{number}").lines.all
    rules += ['parameter: "<parameter=" /[^>\\n]+/ ">" text_value', *_text_rules("text_value", {})]
    return tagged_grammar(wanted, tokenizer, opening=OPEN, rules=rules, separator="\n")


class _Call:
    """Rules for the call of one tool, whose parameters have its schema."""

    def __init__(self, tool: FunctionTool, schemas: Schemas, name: str) -> None:
        self.lines = Lines(tool)
        self._tool, self._schemas = tool, schemas
        self._unbound: set[str] = set()
        parts = [quoted(f"{tool.name}>\n"), *self._parameters(name)]
        self.lines.add(f"{name}: {' '.join(parts)}")
        refuse_unbound(tool, self._unbound, "qwen_xml")

    def _parameters(self, name: str) -> Iterator[str]:
        flat = self._schemas.flat(self._schemas.root)
        keywords = flat.keywords
        self._unbound |= unbound(flat) | ({"anyOf", "oneOf", "enum", "const"} & keywords.keys())
        rest = keywords.get("additionalProperties", True)
        required = [key for key in listed(keywords, "required") if isinstance(key, str)]
        properties = {**dict.fromkeys(required, rest), **named(keywords, "properties")}
        if not properties and rest is not False:
            self._unbound |= {"additionalProperties"} if rest not in (True, {}) else set()
            yield "parameter*"
        in_order = [*named(keywords, "properties"), *required]
        for place, key in enumerate(dict.fromkeys(in_order)):
            rule = f"{name}_{place}"
            self._unbound |= {key} if ">" in key or "\n" in key else set()
            self.lines.add(f"{rule}: {quoted(f'{PARAMETER}{key}>')} {rule}_value")
            self._value(f"{rule}_value", properties[key])
            yield rule if key in required else f"{rule}?"

    def _value(self, name: str, schema: object) -> None:
        """A value with line ends and the closing tag. Text stands as it is, all else is JSON."""
        leaves = list(self._leaves(schema))
        rules = [f"{name}_{place}" for place in range(len(leaves))]
        self.lines.add(f"{name}: {' | '.join(rules)}")
        for rule, (leaf, flat) in zip(rules, leaves, strict=True):
            for line in self._leaf(rule, leaf, flat):
                self.lines.add(line)

    def _leaves(self, schema: object) -> Iterator[tuple[object, Flat]]:
        """The schemas that one may choose from where some of them are of texts; else the schema itself."""
        waiting, seen = [schema], set[frozenset[int]]()
        while waiting:
            part = waiting.pop(0)
            flat, types = self._schemas.flat(part), self._schemas.types(part)
            name = next((one for one in ("anyOf", "oneOf") if listed(flat.keywords, one)), None)
            if flat.key in seen and flat.key:
                continue
            seen.add(flat.key)
            if flat.keywords.get("type") == []:
                raise no_value(self._tool, "'type' leaves no value")
            if "enum" in flat.keywords or "const" in flat.keywords or (types and "string" not in types):
                yield part, flat
            elif name is not None:
                choices = listed(flat.keywords, name)
                if name == "oneOf" and overlap(choices, self._schemas):
                    self._unbound.add(name)
                beside = {key: value for key, value in flat.keywords.items() if key != name}
                waiting += [{"allOf": [beside, choice]} for choice in choices]
            elif len(types) > 1:
                waiting += [{**flat.keywords, "type": kind} for kind in sorted(types)]
            else:
                yield part, flat

    def _leaf(self, name: str, schema: object, flat: Flat) -> Iterator[str]:
        values = bound_values(flat, self._schemas)
        if values is not None:
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            written = [text for text in texts if END_PARAMETER not in text]
            self._unbound |= unbound(flat) | ({"enum"} if len(written) < len(texts) else set())
            if not written:
                raise no_value(self._tool, "'enum' leaves no value")
            yield f'{name}: "\\n" ({" | ".join(map(quoted, written))}) {_END}'
        elif self._schemas.types(schema) <= {"string"}:
            self._unbound |= unbound(flat)
            yield from _text_rules(name, flat.keywords)
        else:
            value = json_of(self._standing_alone(schema), is_strict=self._tool.is_strict)
            yield f'{name}: "\\n" ({value}) {_END}'

    def _standing_alone(self, schema: object) -> Mapping[str, object]:
        """A schema with the definitions that it refers to, and those that they refer to, and so on."""
        names: dict[str, str] = {}
        waiting: list[str] = []
        found = self._moved(schema, names, waiting)
        definitions: dict[str, object] = {}
        while waiting:
            ref = waiting.pop()
            definitions[names[ref]] = self._moved(find_reference(self._schemas.root, ref), names, waiting)
        own = found if isinstance(found, dict) else {}
        return {**own, "$defs": definitions} if definitions else own

    def _moved(self, part: object, names: dict[str, str], waiting: list[str]) -> object:
        """A copy of a schema whose references lead to `$defs`; new ones get a name and wait."""
        if isinstance(part, list):
            return [self._moved(one, names, waiting) for one in part]
        if not isinstance(part, Mapping):
            return part
        found = {
            key: self._moved(one, names, waiting) for key, one in part.items() if key not in _DEFINITIONS
        }
        ref = part.get("$ref")
        if isinstance(ref, str) and find_reference(self._schemas.root, ref) is None:
            self._unbound.add("$ref")
            del found["$ref"]
        elif isinstance(ref, str):
            if ref not in names:
                names[ref] = f"part_{len(names)}"
                waiting.append(ref)
            found["$ref"] = f"#/$defs/{names[ref]}"
        return found


_DEFINITIONS = ("$defs", "definitions")


def _text_rules(name: str, keywords: Part) -> Iterator[str]:
    yield f'{name}[lazy]: "\\n" {name.upper()} {_END}'
    yield f"{name.upper()}: {terminal(text_patterns(keywords))}"
