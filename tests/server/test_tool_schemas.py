"""Schemas of tools: what they mean, what a call is held to, and what a check finds, drawn at random."""

import json

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blockdraft.errors import RequestError
from blockdraft.tool_calls.checking import call_problem, problem_of
from blockdraft.tool_calls.lark import CallRules
from blockdraft.tool_calls.pieces import FunctionTool
from blockdraft.tool_calls.schemas import Schemas, find_reference
from tests.server.test_tool_grammars import BY_NAME, accepts, byte_level, read, written

NAMES = ("a", "b", "c d", "e:f")
TEXTS = st.text(st.characters(exclude_characters="<\n", exclude_categories=("Cs", "Cc")), max_size=4)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, -2.25]) | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)
LIMIT = st.integers(0, 3)


def some(**keywords):
    """A schema of some of these keywords."""
    return st.fixed_dictionaries({}, optional=keywords)


def schemas_of(inner):
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    listed = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(
            lambda one, other: {"type": "object", **one, **other},
            st.builds(lambda properties: {"properties": properties}, named),
            some(
                required=st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
                additionalProperties=inner | st.booleans(),
                minProperties=LIMIT,
                maxProperties=LIMIT,
            ),
        ),
        st.builds(
            lambda one: {"type": "array", **one},
            some(items=inner, prefixItems=listed, minItems=LIMIT, maxItems=LIMIT, uniqueItems=st.booleans()),
        ),
        st.builds(lambda parts: {"anyOf": parts}, listed),
        st.builds(lambda parts: {"oneOf": parts}, listed),
        st.builds(lambda parts: {"allOf": parts}, listed),
        st.builds(lambda part: {"not": part}, inner),
    )


LEAVES = st.one_of(
    st.sampled_from([{}, {"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}]),
    st.sampled_from([{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y", "description": "d"}, {"$ref": "#"}]),
    st.builds(lambda more: {"type": "string", **more}, some(minLength=LIMIT, maxLength=LIMIT)),
    st.builds(
        lambda kind, more: {"type": kind, **more},
        st.sampled_from(["integer", "number"]),
        some(minimum=LIMIT, maximum=LIMIT, exclusiveMinimum=LIMIT, multipleOf=st.integers(1, 3)),
    ),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, VALUES),
)
ANY_SCHEMA = st.recursive(LEAVES, schemas_of, max_leaves=6)


def is_valid(value, schema):
    """Return the library's answer, or None if it has none."""
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(value)
    except (RecursionError, jsonschema.exceptions.SchemaError):
        return None
    except BaseException as error:  # a RecursionError inside the library's Rust code becomes a panic
        if type(error).__name__ != "PanicException":
            raise
        return None


@settings(max_examples=20, deadline=None)
@given(schema=ANY_SCHEMA, x=ANY_SCHEMA, y=ANY_SCHEMA, value=VALUES)
def test_a_check_finds_what_the_library_finds(schema, x, y, value):
    root = {**schema, "$defs": {"x": x, "y": y}}
    expected = is_valid(value, root)
    assume(expected is not None)
    flat = Schemas(root).flat(root)
    problem = problem_of(value, root, Schemas(root))
    if problem is not None:
        assert not expected, problem
    elif not expected:
        assert "lost" in _all_lost(root) or flat.lost, "only what cannot be merged may pass"


def _all_lost(root):
    """Return whether any part of a schema holds what cannot be merged."""
    schemas, waiting = Schemas(root, 10**6), [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting.extend(part.values())
            if schemas.flat(part).lost:
                return ["lost"]
        elif isinstance(part, list):
            waiting.extend(part)
    return []


def values_for(schema):
    """Values of a schema that has no choices."""
    kind = schema["type"]
    if kind == "object":
        required = {name: values_for(schema["properties"][name]) for name in schema["required"]}
        optional = {
            name: values_for(part) for name, part in schema["properties"].items() if name not in required
        }
        return st.fixed_dictionaries(required, optional=optional)
    if kind == "array":
        return st.lists(values_for(schema["items"]), min_size=schema["minItems"], max_size=schema["maxItems"])
    simple = {"string": TEXTS, "integer": st.integers(-99, 99), "boolean": st.booleans(), "null": st.none()}
    return simple[kind]


def plain_schemas(inner):
    objects = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=3).flatmap(
        lambda properties: st.builds(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            },
            st.lists(st.sampled_from(sorted(properties)), unique=True),
        )
    )
    lists = st.builds(
        lambda item, least, more: {
            "type": "array",
            "items": item,
            "minItems": least,
            "maxItems": least + more,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    return objects | lists


PLAIN = st.recursive(
    st.sampled_from([{"type": kind} for kind in ("string", "integer", "boolean", "null")]),
    plain_schemas,
    max_leaves=5,
)
TOOL_SCHEMA = st.dictionaries(st.sampled_from(NAMES), PLAIN, min_size=1, max_size=3).map(
    lambda properties: {
        "type": "object",
        "properties": properties,
        "required": sorted(properties)[:1],
        "additionalProperties": False,
    }
)


def in_order(value, schema):
    """Members as the schema has them, which is how a grammar lets them through."""
    if isinstance(value, dict):
        parts = schema["properties"]
        return {name: in_order(value[name], parts[name]) for name in parts if name in value}
    return [in_order(item, schema["items"]) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=6, deadline=None)
@given(data=st.data(), schema=TOOL_SCHEMA)
def test_arguments_of_a_schema_are_let_through_and_come_back(name, data, schema):
    arguments = in_order(data.draw(values_for(schema)), schema)
    tool = FunctionTool("f", "", schema, is_strict=True)
    text = written(name, "f", arguments)
    grammar = BY_NAME[name].grammar(CallRules((tool,), True, False), byte_level()[0])
    assert accepts(grammar, text)
    assert read(name, text, [tool]) == ("", [("f", arguments)])
    assert call_problem(json.dumps(arguments), tool) is None


@pytest.mark.parametrize("name", ["gemma", "qwen_xml"])
@settings(max_examples=15, deadline=None)
@given(schema=ANY_SCHEMA, x=ANY_SCHEMA, y=ANY_SCHEMA, value=VALUES)
def test_what_a_strict_grammar_lets_through_has_the_schema(name, schema, x, y, value):
    root = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": {"x": x, "y": y}}
    tool = FunctionTool("f", "", {**root, "additionalProperties": False}, is_strict=True)
    try:
        grammar = BY_NAME[name].grammar(CallRules((tool,), True, False), byte_level()[0])
        text = written(name, "f", {"a": value})
        is_let_through = accepts(grammar, text)
    except (RequestError, AssertionError):  # it cannot be bound, which was said
        return
    expected = is_valid({"a": value}, tool.parameters)
    if is_let_through and expected is not None:
        ((_, arguments),) = read(name, text, [tool])[1]
        assert is_valid(arguments, tool.parameters), grammar


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        ("#", "root"),
        ("#/$defs/a~1b", 1),
        ("#/$defs/c%20d", 2),
        ("#/anyOf/1", 4),
        ("#/anyOf/9", None),
        ("#/nowhere/at/all", None),
        ("other.json#/a", None),
        ("#anchor", None),
    ],
)
def test_references_are_json_pointers(reference, target):
    root = {"$defs": {"a/b": 1, "c d": 2}, "anyOf": [3, 4]}
    assert find_reference(root, reference) == (root if target == "root" else target)


def test_a_check_that_would_take_long_is_given_up():
    schema = {"$ref": "#/$defs/d0"}
    parts = {f"d{n}": {"anyOf": [{"items": {"$ref": f"#/$defs/d{n + 1}"}}] * 4} for n in range(30)}
    parts["d30"] = {"type": "string"}
    root = {**schema, "$defs": parts}
    value = 1
    for _ in range(30):
        value = [value]
    assert problem_of(value, root, Schemas(root)) is None
