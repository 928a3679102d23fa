"""The format of Qwen3-Coder and Qwen3.5: each parameter between tags, its value as plain text.

<tool_call>
<function=f>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>

One line end before a value and one after it belong to the tags.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls.binding import ToolRules, terminal, text_patterns, unbound
from blockdraft.tool_calls.checking import as_json, is_text
from blockdraft.tool_calls.lark import CallRules, arguments_of, json_of, quoted, tag, tagged_grammar
from blockdraft.tool_calls.pieces import FunctionTool
from blockdraft.tool_calls.reading import AnswerReader, NotACall, Steps, TagFinder
from blockdraft.tool_calls.schemas import Flat, Part, Schemas, find_reference, for_grammar, listed, named

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_DEFINITIONS = ("$defs", "definitions")
_END = quoted(f"\n{END_PARAMETER}\n")


class QwenXmlReader(AnswerReader):
    """Reads Qwen's calls. The outer tag may be missing, as models sometimes forget it."""

    OPENING, CLOSING = (OPEN, FUNCTION), (CLOSE,)
    _END = TagFinder((END_PARAMETER,))

    def _read_call(self, opening: str) -> Steps[None]:
        if opening == OPEN:
            yield from self._skip_space()
            yield from self._expect(FUNCTION)
        name = yield from self._take_up_to(">\n")
        if name not in self._tools:
            raise NotACall
        yield from self._expect(">")
        self._begin(name)
        yield from self._read_parameters(Schemas(self._tools[name].parameters))

    def _read_parameters(self, schemas: Schemas) -> Steps[None]:
        separator = "{"
        while (yield from self._skip_space()):
            if (yield from self._take(END_FUNCTION)):
                self._argue("{}" if separator == "{" else "}")
                yield from self._skip_space()
                yield from self._take(CLOSE)
                return
            if not (yield from self._take(PARAMETER)):
                yield from self._read_broken()
                return
            key = yield from self._take_up_to(">")
            if not (yield from self._take(">")):
                self._argue(PARAMETER + key)
                return
            self._argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._read_value(schemas.member(schemas.root, key), schemas)
            separator = ", "

    def _read_value(self, schema: object, schemas: Schemas) -> Steps[None]:
        """Read a value. Text is passed on as it comes, any other value when it is complete."""
        yield from self._take("\n")
        is_passed, waiting = is_text(schema, schemas), ""
        self._argue('"' if is_passed else "")
        while True:
            end, found = self._END.find(self._buffer, self._at, self._is_over)
            waiting += self._buffer[self._at : end]
            self._at = end + len(found or "")
            if found is not None or self._is_over:
                break
            if is_passed:
                self._argue(_escaped(waiting.removesuffix("\n")))
                waiting = "\n" if waiting.endswith("\n") else ""
            yield
        if found is None:  # cut off
            self._argue(_escaped(waiting) if is_passed else waiting)
        elif is_passed:
            self._argue(_escaped(waiting.removesuffix("\n")) + '"')
        else:
            self._argue(as_json(waiting.removesuffix("\n"), schema, schemas))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def qwen_xml_grammar(wanted: CallRules, tokenizer: Tokenizer) -> str:
    """Return a grammar with parameters in the order of the schema; optional ones may be missing."""
    names = " | ".join(f"call_{number}" for number in range(len(wanted.tools)))
    rules = [f'body: "\\n<function=" ({names}) "</function>\\n" {tag(tokenizer, CLOSE)}']
    for number, tool in enumerate(wanted.tools):
        schema = arguments_of(tool, is_required=wanted.is_required)
        rules += _Call(tool, for_grammar(schema), f"call_{number}").lines
    rules += ['parameter: "<parameter=" /[^>\\n]+/ ">" text_value', *_text_rules("text_value", {})]
    return tagged_grammar(wanted, tokenizer, opening=OPEN, rules=rules, separator="\n")


class _Call(ToolRules):
    """The rules for a call of one tool."""

    def __init__(self, tool: FunctionTool, schemas: Schemas, name: str) -> None:
        super().__init__(tool, schemas)
        parts = [quoted(f"{tool.name}>\n"), *self._parameters(name)]
        self._add(f"{name}: {' '.join(parts)}")
        self._refuse_unbound("qwen_xml")

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
            self._add(f"{rule}: {quoted(f'{PARAMETER}{key}>')} {rule}_value")
            self._value(f"{rule}_value", properties[key])
            yield rule if key in required else f"{rule}?"

    def _value(self, name: str, schema: object) -> None:
        """Add the rules of a value, its line ends and its closing tag. Text is plain, the rest is JSON."""
        leaves = list(self._leaves(schema))
        rules = [f"{name}_{place}" for place in range(len(leaves))]
        self._add(f"{name}: {' | '.join(rules)}")
        for rule, (leaf, flat) in zip(rules, leaves, strict=True):
            self._add(*self._leaf(rule, leaf, flat))

    def _leaves(self, schema: object) -> Iterator[tuple[object, Flat]]:
        """Yield the alternatives of a schema if some are strings, else the schema itself."""
        waiting, seen = [schema], set[frozenset[int]]()
        while waiting:
            part = waiting.pop(0)
            flat, types = self._schemas.flat(part), self._schemas.types(part)
            if flat.key in seen and flat.key:
                continue
            seen.add(flat.key)
            if flat.keywords.get("type") == []:
                raise self._no_value("'type' leaves no value")
            if "enum" in flat.keywords or "const" in flat.keywords or (types and "string" not in types):
                yield part, flat
            elif choices := self._choices(flat.keywords):
                waiting += choices
            elif len(types) > 1:
                waiting += [{**flat.keywords, "type": kind} for kind in sorted(types)]
            else:
                yield part, flat

    def _leaf(self, name: str, schema: object, flat: Flat) -> Iterator[str]:
        values = self._values(flat, lambda value: END_PARAMETER not in _as_text(value))
        if values is not None:
            self._unbound |= unbound(flat)
            yield f'{name}: "\\n" ({" | ".join(quoted(_as_text(value)) for value in values)}) {_END}'
        elif self._schemas.types(schema) <= {"string"}:
            self._unbound |= unbound(flat)
            yield from _text_rules(name, flat.keywords)
        else:
            value = json_of(self._standing_alone(schema), is_strict=self._tool.is_strict)
            yield f'{name}: "\\n" ({value}) {_END}'

    def _standing_alone(self, schema: object) -> Mapping[str, object]:
        """Return a schema with all definitions that it needs, directly or indirectly."""
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
        """Return a copy of a schema with references to `$defs`; name new ones and add them to `waiting`."""
        if isinstance(part, list):
            return [self._moved(one, names, waiting) for one in part]
        if not isinstance(part, Mapping):
            return part
        kept = {key: one for key, one in part.items() if key not in _DEFINITIONS}
        found = {key: self._moved(one, names, waiting) for key, one in kept.items()}
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


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _text_rules(name: str, keywords: Part) -> Iterator[str]:
    yield f'{name}[lazy]: "\\n" {name.upper()} {_END}'
    yield f"{name.upper()}: {terminal(text_patterns(keywords))}"
