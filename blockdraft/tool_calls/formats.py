"""The formats of tool calls. A model's chat template or --tool-format selects one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls import bare_json, gemma, harmony, json_calls, qwen_xml
from blockdraft.tool_calls.bare_json import BareJsonReader
from blockdraft.tool_calls.json_calls import HermesReader
from blockdraft.tool_calls.lark import CallRules
from blockdraft.tool_calls.qwen_xml import QwenXmlReader
from blockdraft.tool_calls.reading import AnswerReader
from blockdraft.tool_calls.thoughts import Tags


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one model family writes tool calls."""

    name: str
    reader: type[AnswerReader]
    grammar: Callable[[CallRules, Tokenizer], str]
    tags: tuple[str, ...]  # the reader needs them, even if they are special tokens
    is_parallel: bool = True  # models were trained to make several calls in one answer
    has_template: bool = True  # the chat template shows tools; False: they are described in a message
    # Returns the tags around thoughts, if the format's reader reads thoughts as well.
    find_thoughts: Callable[[Tokenizer], Tags | None] | None = None
    # Adds what the format writes around every answer to a structured output.
    wrap_output: Callable[[StructuredOutputs, Tokenizer], StructuredOutputs] = lambda output, tokenizer: (
        output
    )


FORMATS = (
    ToolFormat("hermes", HermesReader, json_calls.hermes_grammar, (json_calls.OPEN, json_calls.CLOSE)),
    ToolFormat("qwen_xml", QwenXmlReader, qwen_xml.qwen_xml_grammar, (qwen_xml.OPEN, qwen_xml.CLOSE)),
    ToolFormat("gemma", gemma.GemmaReader, gemma.gemma_grammar, (gemma.OPEN, gemma.CLOSE, gemma.QUOTE)),
    ToolFormat(
        "harmony",
        harmony.HarmonyReader,
        harmony.harmony_grammar,
        harmony.TAGS,
        is_parallel=False,
        find_thoughts=harmony.find_harmony_thoughts,
        wrap_output=harmony.wrap_in_harmony,
    ),
    ToolFormat("llama", BareJsonReader, bare_json.llama_grammar, (bare_json.PYTHON_TAG,), is_parallel=False),
    ToolFormat("plain", BareJsonReader, bare_json.plain_grammar, (), is_parallel=False, has_template=False),
)
_BY_NAME = {one.name: one for one in FORMATS}


def find_format(tokenizer: Tokenizer, asked: str = "auto") -> ToolFormat:
    """Return the format of a model; `asked` is the value of --tool-format."""
    return _BY_NAME[_guess(tokenizer.chat_template or "") if asked == "auto" else asked]


def _guess(template: str) -> str:
    """Return the name of the format whose tags a chat template writes."""
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return "harmony"
    if "tools" not in template:
        return "plain"
    for mark, name in (
        (gemma.OPEN, "gemma"),
        (qwen_xml.FUNCTION, "qwen_xml"),
        (json_calls.OPEN, "hermes"),
        (bare_json.PYTHON_TAG, "llama"),
        ('"parameters": ', "llama"),
    ):
        if mark in template:
            return name
    return "plain"
