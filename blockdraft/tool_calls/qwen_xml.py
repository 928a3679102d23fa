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

from blockdraft.tool_calls.qwen_xml_grammar import (
    CLOSE,
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    OPEN,
    PARAMETER,
)
from blockdraft.tool_calls.reading import AnswerReader, NotACall, Steps
from blockdraft.tool_calls.schemas import Schemas
from blockdraft.tool_calls.tags import TagFinder
from blockdraft.tool_calls.typed import as_json, is_text


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
        """Texts are passed on as they come, all else when it is complete."""
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
