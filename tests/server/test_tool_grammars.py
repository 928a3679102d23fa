"""Grammars of tool calls, as llguidance reads them: what they let through is what the readers read."""

import functools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.engine.request import StructuredOutputs
from blockdraft.errors import RequestError
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tools.formats import FORMATS
from blockdraft.tools.harmony import wrap_in_harmony
from blockdraft.tools.lark import CallForm
from blockdraft.tools.pieces import FunctionTool

llguidance = pytest.importorskip("llguidance")

SPECIAL = ["<eos>", *(tag for one in FORMATS[2:] for tag in one.tags)]
MARKUP = ["<tool_call>", "</tool_call>"]  # Qwen's are added tokens that are not special
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
        "is_exact": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string"}},
}
FORM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = (FunctionTool("f", "", SCHEMA, is_strict=True), FunctionTool("now", "", {}))
BY_NAME = {one.name: one for one in FORMATS}


@functools.cache
def byte_level(has_markup=True):
    """A tokenizer of bytes and of every format's tags."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    if has_markup:
        tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKUP])
    eos_id = tokenizer.token_to_id("<eos>")
    known = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=eos_id)
    return Tokenizer(TokenizerParts(tokenizer, None, None, "<eos>", (eos_id,))), known


@functools.cache
def matcher(grammar, has_markup=True):
    _, known = byte_level(has_markup)
    made = llguidance.LLMatcher(known, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not made.is_error(), made.get_error()
    return made


def accepts(grammar, text, has_markup=True):
    tokenizer, _ = byte_level(has_markup)
    trying = matcher(grammar, has_markup).deep_copy()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return trying.try_consume_tokens(ids) == len(ids) and trying.is_accepting()


def grammar_of(name, *, is_required=True, is_parallel=True, other=None, has_markup=True):
    form = CallForm(TOOLS, is_required, is_parallel and BY_NAME[name].is_parallel, other)
    return BY_NAME[name].grammar(form, byte_level(has_markup)[0])


def gemma_value(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(gemma_value, value))}]"
    return json.dumps(value)


def plain_value(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written(name, tool, arguments):
    """A call as a model of this format writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    if name == "hermes":
        return f'<tool_call>\n{{"name": "{tool}", "arguments": {text}}}\n</tool_call>'
    if name == "qwen_xml":
        parts = [f"<parameter={k}>\n{plain_value(v)}\n</parameter>\n" for k, v in arguments.items()]
        return f"<tool_call>\n<function={tool}>\n{''.join(parts)}</function>\n</tool_call>"
    if name == "gemma":
        parts = [f"{k}:{gemma_value(v)}" for k, v in sorted(arguments.items())]
        return f"<|tool_call>call:{tool}{{{','.join(parts)}}}<tool_call|>"
    if name == "harmony":
        return f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{text}"
    return f'{{"name": "{tool}", "{"parameters" if name == "llama" else "arguments"}": {text}}}'


def said(name, text):
    return f"<|channel|>final<|message|>{text}" if name == "harmony" else text


def read(name, text):
    reader = BY_NAME[name].reader({tool.name: tool for tool in TOOLS}, hidden=BY_NAME[name].tags)
    parsed = reader.push(text, is_last=True)
    return parsed.text, [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


_TEXTS = st.text(st.characters(exclude_characters="<", exclude_categories=("Cs", "Cc")), max_size=6)
ARGUMENTS = st.fixed_dictionaries(
    {"city": _TEXTS},
    optional={
        "days": st.integers(-(10**6), 10**6),
        "unit": st.sampled_from(["C", "F"]),
        "tags": st.lists(_TEXTS, max_size=2),
        "is_exact": st.booleans(),
    },
)
ORDER = list(SCHEMA["properties"])


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=12, deadline=None)
@given(arguments=ARGUMENTS)
def test_a_call_that_matches_its_schema_is_let_through_and_read(name, arguments):
    arguments = {key: arguments[key] for key in ORDER if key in arguments}
    text = written(name, "f", arguments)
    assert accepts(grammar_of(name), text)
    assert accepts(grammar_of(name, is_required=False), text)
    assert read(name, text) == ("", [("f", arguments)])


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_no_such_call_is_not_let_through(name):
    required, free = grammar_of(name), grammar_of(name, is_required=False)
    for wrong in ({}, {"city": "x", "days": "y"}, {"city": "x", "unit": "K"}, {"city": "x", "z": 1}):
        assert not accepts(required, written(name, "f", wrong)), wrong
        assert not accepts(free, written(name, "f", wrong)), wrong
    assert not accepts(required, written(name, "g", {"city": "x"}))
    assert not accepts(required, said(name, "hi"))
    assert accepts(free, said(name, "hi")), "a tool that is strict need not be called"
    assert accepts(required, written(name, "now", {}))


@pytest.mark.parametrize("name", BY_NAME)
def test_lengths_patterns_and_ranges_bind(name):
    properties = {
        "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]$"},
        "city": {"type": "string", "minLength": 2, "maxLength": 4},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    }
    schema = {"type": "object", "properties": properties, "required": ["code", "city"]}
    form = CallForm((FunctionTool("f", "", {**schema, "additionalProperties": False}, True),), True, False)
    grammar = BY_NAME[name].grammar(form, byte_level()[0])
    assert accepts(grammar, written(name, "f", {"code": "AB/3", "city": "Rome", "days": 14}))
    assert accepts(grammar, written(name, "f", {"code": "AB/3", "city": "é\nx"}))
    right = {"code": "AB/3", "city": "Rome", "days": 3}
    for wrong in ({"code": "A"}, {"city": "x"}, {"city": "Vienna"}, {"days": 15}, {"days": 0}):
        assert not accepts(grammar, written(name, "f", right | wrong)), wrong


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^a\/b$", "a/b", "a\\/b"),
        (r"^a/b\\$", "a/b\\", "a/b"),
        (r"^5\$", "5$", "5"),
        (r"^5\$$", "5$", "5$6"),
        (r"\/", "x/y", "xy"),
    ],
)
def test_slashes_and_signs_behind_a_backslash_stand_for_themselves(name, pattern, right, wrong):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": pattern}},
        "required": ["a"],
    }
    form = CallForm((FunctionTool("f", "", {**schema, "additionalProperties": False}, True),), True, False)
    grammar = BY_NAME[name].grammar(form, byte_level()[0])
    assert accepts(grammar, written(name, "f", {"a": right}))
    assert not accepts(grammar, written(name, "f", {"a": wrong}))


@pytest.mark.parametrize("name", BY_NAME)
def test_an_escaped_slash_in_a_regex_is_one_beside_tools_too(name):
    grammar = grammar_of(name, is_required=False, other=StructuredOutputs(regex=r"a\/b/c"))
    assert accepts(grammar, said(name, "a/b/c"))
    assert not accepts(grammar, said(name, "a/b"))


def test_a_regex_that_ends_with_a_lone_backslash_is_refused():
    with pytest.raises(RequestError, match="lone backslash"):
        grammar_of("hermes", is_required=False, other=StructuredOutputs(regex="a\\"))


@pytest.mark.parametrize("name", BY_NAME)
def test_a_form_that_is_not_strict_stays_so_beside_tools(name):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    lenient, strict = StructuredOutputs(json=schema, is_lenient=True), StructuredOutputs(json=schema)
    tools = (FunctionTool("now", "", {}),)
    grammar = BY_NAME[name].grammar(CallForm(tools, False, False, lenient), byte_level()[0])
    assert accepts(grammar, said(name, '{"a": [1, 1]}'))
    grammar = BY_NAME[name].grammar(CallForm(tools, False, False, strict), byte_level()[0])
    with pytest.raises(AssertionError, match="uniqueItems"):
        matcher(grammar)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_white_space_of_a_form_is_the_same_beside_tools(name):
    free = StructuredOutputs(json=FORM, whitespace_pattern=r"[ \n]{1,4}")
    grammar = grammar_of(name, is_required=False, other=free)
    assert accepts(grammar, said(name, '{\n  "a":3}'))
    grammar = grammar_of(name, is_required=False, other=StructuredOutputs(json=FORM))
    assert accepts(grammar, said(name, '{"a": 3}'))
    assert not accepts(grammar, said(name, '{ "a": 3}'))
    assert not accepts(grammar, said(name, '{"a":3}'))


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "gemma"])
def test_several_calls_come_only_where_they_may(name):
    separator = "" if name == "gemma" else "\n"
    two = separator.join([written(name, "now", {})] * 2)
    assert read(name, two) == ("", [("now", {})] * 2)
    for is_required in (True, False):
        assert accepts(grammar_of(name, is_required=is_required), two)
        assert not accepts(grammar_of(name, is_required=is_required, is_parallel=False), two)


@pytest.mark.parametrize("name", ["hermes", "qwen_xml"])
def test_tags_that_are_plain_text_bind_as_well(name):
    for is_required in (True, False):
        grammar = grammar_of(name, is_required=is_required, has_markup=False)
        assert accepts(grammar, written(name, "f", {"city": "x"}), has_markup=False)
        assert not accepts(grammar, written(name, "f", {"days": 1}), has_markup=False)
        assert accepts(grammar, "hi <b>", has_markup=False) is not is_required


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(
    "other",
    [
        StructuredOutputs(json=FORM),
        StructuredOutputs(json_object=True),
        StructuredOutputs(regex='\\{"a": [0-9/]\\}'),
        StructuredOutputs(choice=['{"a": 3}', "no"]),
    ],
    ids=["json", "json_object", "regex", "choice"],
)
def test_an_answer_is_a_call_or_has_the_other_form(name, other):
    grammar = grammar_of(name, is_required=False, other=other)
    assert not accepts(grammar, said(name, "hi"))
    assert accepts(grammar, written(name, "now", {}))
    assert accepts(grammar, written(name, "f", {"city": "x", "tags": ["y"]}))
    if other.choice is not None:
        assert accepts(grammar, said(name, "no"))
    elif other.regex is None or name not in ("llama", "plain"):  # bare JSON and a regex that begins with {
        assert accepts(grammar, said(name, '{"a": 3}'))


def test_a_form_of_harmony_is_its_final_message():
    tokenizer, _ = byte_level()
    grammar = wrap_in_harmony(StructuredOutputs(choice=["yes", "no"]), tokenizer).grammar
    assert accepts(grammar, "<|channel|>final<|message|>yes")
    assert accepts(grammar, "<|start|>assistant<|channel|>final<|message|>no")
    assert not accepts(grammar, "<|channel|>commentary<|message|>no")
    assert not accepts(grammar, "yes")
    own = StructuredOutputs(grammar="start: /a/")
    assert wrap_in_harmony(own, tokenizer) == own
