"""The format of Qwen3-Coder and Qwen3.5: each parameter between tags, its value as plain text.

<tool_call>
<function=f>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>

One line end in front of a value and one behind it belong to the tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tools.lark import CallForm, json_of, quoted, tag, tagged_grammar, text_pattern
from blockdraft.tools.pieces import FunctionTool
from blockdraft.tools.reading import AnswerReader, NotACall, Steps
from blockdraft.tools.tags import TagFinder
from blockdraft.tools.typed import as_json, is_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
NO_TOOL = FunctionTool("")
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class QwenXmlReader(AnswerReader):
    """Reads the format; the outer tag may be missing, as models forget it."""

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
        yield from self._read_parameters(self._tools[name])

    def _read_parameters(self, tool: FunctionTool) -> Steps[None]:
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
            yield from self._read_value(tool.properties.get(key))
            separator = ", "

    def _read_value(self, schema: object) -> Steps[None]:
        """Texts are passed on as they come, all else when it is complete."""
        yield from self._take("\n")
        is_passed, waiting = is_text(schema), ""
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
            self._argue(as_json(waiting.removesuffix("\n"), schema))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def qwen_xml_grammar(form: CallForm, tokenizer: Tokenizer) -> str:
    """Parameters come in the order of the schema; what is not required may be left out."""
    names = " | ".join(f"call_{number}" for number in range(len(form.tools)))
    rules = [f'body: "\\n<function=" ({names}) "</function>\\n" {tag(tokenizer, CLOSE)}']
    for number, tool in enumerate(form.tools):
        parts = [quoted(f"{tool.name}>\n")]
        if not (form.is_required or tool.is_strict) or not tool.properties:
            parts.append("parameter*")
        else:
            listed = tool.parameters.get("required")
            required = listed if isinstance(listed, list) else []
            for place, (key, schema) in enumerate(tool.properties.items()):
                rule = f"call_{number}_{place}"
                parts.append(rule if key in required else f"{rule}?")
                value = _value_rule(schema, tool)
                rules.append(f"{rule}: {quoted(f'<parameter={key}>')} {rule}_value")
                rules.append(f"{rule}_value{value}")
        rules.append(f"call_{number}: {' '.join(parts)}")
    rules += ['parameter: "<parameter=" /[^>\\n]+/ ">" text_value', f"text_value{_value_rule(None, NO_TOOL)}"]
    return tagged_grammar(form, tokenizer, opening=OPEN, rules=rules, separator="\n")


def _value_rule(schema: object, tool: FunctionTool) -> str:
    """What follows a rule's name: a value with line ends and the closing tag. What is no text is JSON."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return f': "\\n" ({" | ".join(map(quoted, values))}) "\\n</parameter>\\n"'
    if is_text(schema) or not isinstance(schema, Mapping):
        return rf"[lazy]: /\n{text_pattern(schema)}\n<\/parameter>\n/"
    root = tool.parameters
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f': "\\n" ({json_of({**shared, **schema}, is_strict=tool.is_strict)}) "\\n</parameter>\\n"'
