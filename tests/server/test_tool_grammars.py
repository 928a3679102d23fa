"""Grammars of tool calls, as llguidance reads them: what they let through is what the readers read."""

import functools
import json
import time

import jsonschema
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.engine.request import StructuredOutputs
from blockdraft.errors import RequestError
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls.formats import FORMATS
from blockdraft.tool_calls.gemma import BARE_KEY
from blockdraft.tool_calls.harmony import wrap_in_harmony
from blockdraft.tool_calls.lark import CallRules
from blockdraft.tool_calls.pieces import FunctionTool

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
    form = CallRules(TOOLS, is_required, is_parallel and BY_NAME[name].is_parallel, other)
    return BY_NAME[name].grammar(form, byte_level(has_markup)[0])


def gemma_value(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(gemma_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{gemma_key(k)}:{gemma_value(v)}' for k, v in sorted(value.items()))}}}"
    return json.dumps(value)


def gemma_key(key):
    return key if BARE_KEY.fullmatch(key) else f'<|"|>{key}<|"|>'


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
        return f"<|tool_call>call:{tool}{gemma_value(arguments)}<tool_call|>"
    if name == "harmony":
        return f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{text}"
    return f'{{"name": "{tool}", "{"parameters" if name == "llama" else "arguments"}": {text}}}'


def said(name, text):
    return f"<|channel|>final<|message|>{text}" if name == "harmony" else text


def read(name, text, tools=TOOLS):
    reader = BY_NAME[name].reader({tool.name: tool for tool in tools}, hidden=BY_NAME[name].tags)
    spans = reader.push(text, is_last=True)
    calls = [span.call for span in spans if span.call is not None]
    said = "".join(span.text for span in spans if span.kind == "text")
    return said, [(call.name, json.loads(call.arguments)) for call in calls]


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
    form = CallRules((FunctionTool("f", "", {**schema, "additionalProperties": False}, True),), True, False)
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
    form = CallRules((FunctionTool("f", "", {**schema, "additionalProperties": False}, True),), True, False)
    grammar = BY_NAME[name].grammar(form, byte_level()[0])
    assert accepts(grammar, written(name, "f", {"a": right}))
    assert not accepts(grammar, written(name, "f", {"a": wrong}))


@pytest.mark.parametrize("name", BY_NAME)
def test_an_escaped_slash_in_a_regex_is_one_beside_tools_too(name):
    grammar = grammar_of(name, is_required=False, other=StructuredOutputs(regex=r"a\/b/c"))
    assert accepts(grammar, said(name, "a/b/c"))
    assert not accepts(grammar, said(name, "a/b"))


@pytest.mark.parametrize("name", BY_NAME)
def test_a_form_that_is_not_strict_stays_so_beside_tools(name):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    schema["required"] = ["a"]
    lenient, strict = StructuredOutputs(json=schema, is_lenient=True), StructuredOutputs(json=schema)
    tools = (FunctionTool("now", "", {}), TOOLS[0])  # strict tools, too
    grammar = BY_NAME[name].grammar(CallRules(tools, False, False, lenient), byte_level()[0])
    assert accepts(grammar, said(name, '{"a": [1, 1]}'))
    assert accepts(grammar, written(name, "f", {"city": "x"}))
    assert not accepts(grammar, written(name, "f", {"days": 1}))
    grammar = BY_NAME[name].grammar(CallRules(tools, False, False, strict), byte_level()[0])
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


# ---- schemas as tools have them

DEFINITIONS = {
    "Color": {"enum": ["red", "blue"], "title": "Color", "type": "string"},
    "Point": {
        "type": "object",
        "properties": {
            "x": {"type": "number", "minimum": 0},
            "c": {"$ref": "#/$defs/Color", "default": "red"},
        },
        "required": ["x"],
        "additionalProperties": False,
    },
    "Tree": {
        "type": "object",
        "properties": {
            "leaf": {"type": "integer"},
            "below": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
        },
        "additionalProperties": False,
    },
    "Cat": {
        "type": "object",
        "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
        "required": ["kind", "lives"],
        "additionalProperties": False,
    },
    "Dog": {
        "type": "object",
        "properties": {"kind": {"const": "dog"}},
        "required": ["kind"],
        "additionalProperties": False,
    },
}
NULL = {"type": "null"}
# the schema of a parameter, right values, wrong ones
PARTS = {
    "a reference": (
        {"$ref": "#/$defs/Point"},
        [{"x": 1}, {"x": 0.5, "c": "blue"}],
        [{}, {"x": -1}, {"x": 1, "c": "y"}],
    ),
    "an enum by reference": ({"$ref": "#/$defs/Color", "description": "d"}, ["red"], ["green", 5]),
    "allOf of one": ({"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"}, ["blue"], ["green"]),
    "allOf of two": ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5, "3"]),
    "an optional text": ({"anyOf": [{"type": "string"}, NULL]}, ["x", None, "5", "true"], []),
    "an optional enum": ({"anyOf": [{"$ref": "#/$defs/Color"}, NULL]}, ["red", None], ["green", 1]),
    "an optional date": (
        {"anyOf": [{"type": "string", "format": "date"}, NULL]},
        ["2026-01-31", None],
        ["soon", 3],
    ),
    "an optional object": ({"anyOf": [{"$ref": "#/$defs/Point"}, NULL]}, [{"x": 2}, None], [{"x": "2"}, 7]),
    "types": ({"type": ["integer", "string"]}, [5, "a"], [None, [1], 1.5]),
    "a list of lists": (
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        [[], [[1], []]],
        [[1], [["a"]]],
    ),
    "minItems": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2},
        [[1, 2], [1, 2, 3]],
        [[], [1]],
    ),
    "maxItems": (
        {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        [[], [1], [1, 2]],
        [[1, 2, 3]],
    ),
    "both": (
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1},
        [["a"]],
        [[], ["a", "b"]],
    ),
    "no items": ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    "prefixItems": (
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "minItems": 2,
            "maxItems": 2,
        },
        [[1, "a"]],
        [[1], ["a", 1], [1, "a", 2]],
    ),
    "prefixItems and items": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
        [[], [1], [1, "a", "b"]],
        [["a"], [1, 2]],
    ),
    "an enum of objects": (
        {"enum": [{"a": 1}, [1, "x"], None, "t"]},
        [{"a": 1}, [1, "x"], None, "t"],
        [{"a": 2}, [1]],
    ),
    "a const": ({"const": 5}, [5], [6, "6"]),
    "a union with a tag": (
        {
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "discriminator": {"propertyName": "kind"},
        },
        [{"kind": "dog"}, {"kind": "cat", "lives": 9}],
        [{"kind": "cat"}, {"kind": "cow"}],
    ),
    "a tree": (
        {"$ref": "#/$defs/Tree"},
        [{}, {"below": [{"leaf": 1}, {"below": []}]}],
        [{"below": [1]}, {"x": 1}],
    ),
    "a dictionary": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1, "b": 2}],
        [{"a": "x"}, 3],
    ),
    "required without a property": (
        {"type": "object", "properties": {}, "required": ["a"]},
        [{"a": "x"}],
        [{}],
    ),
    "a pattern and a length": (
        {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
        ["abc"],
        ["abcd", "A"],
    ),
    "date-time": ({"type": "string", "format": "date-time"}, ["2026-01-31T10:00:00Z"], ["2026-01-31", "x"]),
    "uuid": ({"type": "string", "format": "uuid"}, ["12345678-1234-1234-1234-123456789abc"], ["1234"]),
    "email": ({"type": "string", "format": "email"}, ["a.b@c.org"], ["a.b"]),
}


def strict_tool(schema, is_strict=True, is_required=True):
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"] if is_required else [],
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    }
    return FunctionTool("f", "", parameters, is_strict)


def grammar_for(name, tool):
    return BY_NAME[name].grammar(CallRules((tool,), True, False), byte_level()[0])


@pytest.mark.parametrize("name", ["gemma", "qwen_xml"])
@pytest.mark.parametrize("part", PARTS)
def test_a_call_of_a_strict_tool_has_its_schema(name, part):
    schema, right, wrong = PARTS[part]
    tool = strict_tool(schema)
    grammar, valid = grammar_for(name, tool), jsonschema.Draft202012Validator(tool.parameters)
    for value in right:
        assert valid.is_valid({"a": value}), "the test is wrong"
        text = written(name, "f", {"a": value})
        assert accepts(grammar, text), value
        assert read(name, text, [tool]) == ("", [("f", {"a": value})])
    for value in wrong:
        text = written(name, "f", {"a": value})
        if accepts(grammar, text):  # where a text has no quotes it may also be what is right
            ((_, arguments),) = read(name, text, [tool])[1]
            assert arguments != {"a": value}
            assert valid.is_valid(arguments)


def compiled(grammar):
    """JSON inside a call is llguidance's, and so is what it refuses."""
    made = llguidance.LLMatcher(byte_level()[1], llguidance.LLMatcher.grammar_from_lark(grammar))
    if made.is_error():
        raise RequestError(made.get_error(), "tools")


@pytest.mark.parametrize("name", ["gemma", "qwen_xml"])
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "format": "ipv6"}, "format"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"x": {"type": "string", "format": "json-pointer"}}}, "format"),
        ({"type": "string", "not": {"const": "x"}}, "not"),
        ({"$ref": "#/$defs/Nobody"}, "$ref"),
        ({"$ref": "https://example.org/schema"}, "$ref"),
        ({"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]}, "pattern"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "uniqueItems": True}, "Items"),
        ({"type": "object", "minProperties": 2, "uniqueItems": True}, "Items"),
    ],
)
def test_what_a_grammar_cannot_bind_is_refused_for_a_strict_tool_and_for_no_other(name, schema, keyword):
    with pytest.raises(RequestError, match=r"'f' is strict|Unimplemented|Unknown format") as refusal:
        compiled(grammar_for(name, strict_tool(schema)))
    assert keyword in str(refusal.value)
    assert refusal.value.field == "tools"
    matcher(grammar_for(name, strict_tool(schema, is_strict=False)))


@pytest.mark.parametrize("name", ["gemma", "qwen_xml"])
@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "boolean"}, {"type": "string"}]},
        {"type": "string", "enum": [1, 2]},
        {"enum": []},
        {"allOf": [{"enum": ["a"]}, {"enum": ["b"]}]},
    ],
)
def test_a_schema_that_nothing_can_have_is_refused(name, schema):
    for is_strict in (True, False):
        with pytest.raises(RequestError, match="no arguments can match the schema of the function 'f'"):
            grammar_for(name, strict_tool(schema, is_strict=is_strict))


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("name", BY_NAME)
def test_a_grammar_grows_with_its_schema_and_no_faster(name):
    """Each level of a list doubled Gemma's once: 787 bytes were 84 MB."""
    sizes = [len(grammar_for(name, strict_tool(nested(depth)))) for depth in (7, 14, 28)]
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.1)
    deep = strict_tool(nested(28))
    text = written(name, "f", {"a": json.loads("[" * 28 + "3" + "]" * 28)})
    assert accepts(grammar_for(name, deep), text)
    assert read(name, text, [deep])[1][0][1] == {"a": json.loads("[" * 28 + "3" + "]" * 28)}


HOSTILE = {
    "every part twice": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)},
    "a choice of itself": {
        "d0": {
            "minProperties": 1,
            "anyOf": [{"$ref": "#/$defs/d0"}, {"properties": {"z": {"$ref": "#/$defs/d0"}}}],
        }
    },
    "pairs": {
        f"d{n}": {
            "type": "object",
            "properties": {"x": {"allOf": [{"$ref": f"#/$defs/d{n * k % 31}"} for k in (2, 3, 5)]}},
        }
        for n in range(31)
    },
    "a ring": {"d0": {"$ref": "#/$defs/d1"}, "d1": {"allOf": [{"$ref": "#/$defs/d0"}]}},
    "choices": {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2 + [{"type": "string"}]} for n in range(40)
    },
}


@pytest.mark.parametrize("name", ["gemma", "qwen_xml"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_small_schema_makes_a_small_grammar_in_no_time(name, kind):
    root = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": HOSTILE[kind]}
    tool = FunctionTool("f", "", root)
    start = time.process_time()
    grammar = grammar_for(name, tool)
    assert time.process_time() - start < 0.3
    assert len(grammar) < 50 * len(json.dumps(root))
    read(name, written(name, "f", {"a": {"x": {"x": 1}, "z": [{}]}}), [tool])


def test_definitions_that_many_parameters_share_do_not_multiply():
    many = {f"p{n}": {"type": "array", "items": {"$ref": "#/$defs/d"}} for n in range(400)}
    large = {"type": "object", "properties": {f"q{n}": {"type": "integer"} for n in range(400)}}
    tool = FunctionTool("f", "", {"type": "object", "properties": many, "$defs": {"d": large}})
    assert len(grammar_for("gemma", tool)) < 500_000
    with pytest.raises(RequestError, match="more than 524288 characters: make the schema smaller"):
        grammar_for("qwen_xml", tool)


ODD_KEYS = ["a:b", "a,b", "{", "a}b", "x[0]", "<tag", " a", "a ", 'say "hi"', "", "ü ö"]


def test_keys_with_the_marks_of_the_format_are_quoted_and_read_right():
    properties = {key: {"type": "integer"} for key in ODD_KEYS}
    nested_too = {
        **properties,
        "o": {"type": "object", "properties": properties, "additionalProperties": False},
    }
    tool = FunctionTool("f", "", {"type": "object", "properties": nested_too, "required": ["a:b"]}, True)
    arguments = {
        **{key: n for n, key in enumerate(ODD_KEYS)},
        "o": {key: n for n, key in enumerate(ODD_KEYS)},
    }
    text = written("gemma", "f", arguments)
    assert accepts(grammar_for("gemma", tool), text)
    assert read("gemma", text, [tool]) == ("", [("f", arguments)])
    bare = "<|tool_call>call:f{a:b:1,a,b:2,x[0]:3,o:{a:b:4,{:5}}<tool_call|>"
    expected = {"a:b": 1, "a,b": 2, "x[0]": 3, "o": {"a:b": 4, "{": 5}}
    assert read("gemma", bare, [tool]) == ("", [("f", expected)])
