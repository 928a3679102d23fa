"""Which format a model writes tool calls in: found from its chat template, or set by --tool-format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blockdraft.engine.request import StructuredOutputs
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tools import bare_json, hermes
from blockdraft.tools.lark import CallForm
from blockdraft.tools.reading import AnswerReader
from blockdraft.tools.thoughts import Tags


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's way to write tool calls."""

    name: str
    reader: type[AnswerReader]
    grammar: Callable[[CallForm, Tokenizer], str]
    tags: tuple[str, ...]  # a reader has to see them, also where they are special tokens
    is_parallel: bool = True  # models were trained to make several calls in one answer
    has_template: bool = True  # the chat template shows tools; False: they are described in a message
    # Where thoughts are a part of the format and the reader's: what stands around them.
    find_thoughts: Callable[[Tokenizer], Tags | None] | None = None

    def wrap_form(self, form: StructuredOutputs, tokenizer: Tokenizer) -> StructuredOutputs:
        """A form as the whole answer has it, with what the format writes around every answer."""
        return form


FORMATS = (
    ToolFormat("hermes", hermes.HermesReader, hermes.hermes_grammar, (hermes.OPEN, hermes.CLOSE)),
    ToolFormat(
        "llama", bare_json.BareJsonReader, bare_json.llama_grammar, (bare_json.PYTHON_TAG,), is_parallel=False
    ),
    ToolFormat(
        "plain", bare_json.BareJsonReader, bare_json.plain_grammar, (), is_parallel=False, has_template=False
    ),
)
_BY_NAME = {one.name: one for one in FORMATS}


def find_format(tokenizer: Tokenizer, asked: str = "auto") -> ToolFormat:
    """The format of this model. `asked` is the setting."""
    return _BY_NAME[_guess(tokenizer.chat_template or "") if asked == "auto" else asked]


def _guess(template: str) -> str:
    """A template that shows tools also shows how it writes calls."""
    if "tools" not in template:
        return "plain"
    if hermes.OPEN in template:
        return "hermes"
    if '"parameters": ' in template or bare_json.PYTHON_TAG in template:
        return "llama"
    return "plain"
