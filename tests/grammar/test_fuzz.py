"""Drawn structured outputs: each is refused in words or compiled within its budget, and can be written.

Whatever a client sends as a schema, a grammar, a regex, a choice or a tool, nothing else may happen: no other
exception, no long hold of the interpreter's lock, no step that keeps other answers waiting.
"""

import functools
import json
import random
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockdraft.errors import RequestError
from blockdraft.grammar import trial
from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.grammar.vocabulary import Vocabulary
from blockdraft.tool_calls.formats import FORMATS
from blockdraft.tool_calls.lark import CallRules
from blockdraft.tool_calls.pieces import FunctionTool
from tests.server.test_tool_grammars import byte_level

HELD_S = 1.0  # how long one request may hold the interpreter's lock, on a busy machine
STEP_S = 1.0  # how long one mask may take
MAX_BYTES = 512 << 20
WALK = 24  # tokens that are written of each structured output
# A quarter of what a server allows: grammars that cost too much then cost this test less.
SHORT = "import blockdraft.grammar.trial_worker as w; w.MAX_CPU_S = 0.5; w.main()"
BY_NAME = {one.name: one for one in FORMATS}


@functools.cache
def trials():
    return trial.Trials()


@functools.cache
def vocabulary():
    return Vocabulary(byte_level()[0], 300)


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch):
    monkeypatch.setattr(trial, "WORKER", (trial.WORKER[0], "-c", SHORT))
    monkeypatch.setattr("blockdraft.grammar.vocabulary.trials", trials)


def check(make, seed):
    """`make` gives a output: the whole way of a request, and some tokens of an answer."""
    begin = time.thread_time()
    matcher, refusal = None, "none"
    try:
        matcher, _ = vocabulary().matcher(make())
    except RequestError as error:
        refusal = str(error)
    assert 0 < len(refusal.strip()) < 1000
    assert time.thread_time() - begin < HELD_S
    if matcher is not None:
        assert all(one.num_bytes < MAX_BYTES for one in vocabulary()._kept.values())
        return walk(matcher, random.Random(seed))
    return None


def walk(matcher, chance):
    """Writes an answer; returns its text if it ended."""
    written = []
    (end_id,) = vocabulary().end_ids
    for _ in range(WALK):
        begin = time.thread_time()
        mask = matcher.compute_bitmask()
        forced = matcher.compute_ff_tokens()
        assert time.thread_time() - begin < STEP_S
        if matcher.is_error():  # a limit: the engine ends this answer alone
            return None
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0].tolist()
        assert allowed, "an answer that can neither go on nor end"
        assert not forced or allowed == forced[:1]
        token_id = end_id if end_id in allowed and chance.random() < 0.7 else chance.choice(allowed)
        if not matcher.consume_token(token_id):  # the same
            assert "too many" in matcher.get_error().lower()
            return None
        if token_id == end_id:
            return byte_level()[0].decode(written)
        written.append(token_id)
    return None


# ---- what is drawn

SIGNS = st.text(alphabet="abz09_ .*+?()[]{}|^$\\/-,:;=<>&~!#%@\"'\n\té\U0001f600\x00\x7f", max_size=24)
NUMBERS = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([2**31, 2**63 - 1, -(2**63), 2**64 - 1, 1e308, 1e-300, 0.5, 10**6, 65535]),
)
PIECES = st.sampled_from(
    [
        *(
            "a",
            "b",
            "[a-z]",
            "[^a]",
            ".",
            r"\d",
            r"\w",
            r"\s",
            r"\/",
            "/",
            r"\$",
            "$",
            "^",
            "|",
            "(",
            ")",
            "(?:",
        ),
        *(
            "*",
            "+",
            "?",
            "{3}",
            "{2,}",
            "{0,1000}",
            "{1000000}",
            "(a|b)*",
            "(?i)",
            "(?=a)",
            r"\b",
            r"\p{L}",
            "é",
        ),
        *(
            r"\x41",
            r"\u0041",
            "[",
            "]",
            "\\",
            '"',
            "\n",
            "(.*a){9}",
            ".*x.{30}",
            "(a?){50}",
            "[\\s\\S]*",
            r"\pL",
        ),
    ]
)
REGEXES = st.one_of(st.lists(PIECES, min_size=1, max_size=12).map("".join), SIGNS.filter(bool))
NAMES = st.one_of(
    st.sampled_from(["a", "b", "$ref", "é", "a b", "x-y", "", "~/", 'q"', "\\", "a:b", "{", "::="]), SIGNS
)
PLACES = st.sampled_from(
    ["#", "#/", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/items", "#/x", "http://x/y", ""]
)
SCALARS = st.one_of(NUMBERS, NAMES, st.booleans(), st.none())
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=2) | st.dictionaries(NAMES, v, max_size=2), max_leaves=4
)
TYPES = st.sampled_from(["string", "number", "integer", "boolean", "object", "array", "null"])


PLAIN = {  # keywords whose values are no schemas
    "type": TYPES | st.lists(TYPES, max_size=3),
    "required": st.lists(NAMES, max_size=3),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", "minProperties"), NUMBERS),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "multipleOf"), NUMBERS),
    "pattern": REGEXES,
    "format": st.sampled_from(["date", "date-time", "email", "uuid", "ipv4", "uri", "nonsense", ""]),
    "enum": st.lists(VALUES, max_size=4),
    "const": VALUES,
    "$ref": PLACES,
    "uniqueItems": st.booleans(),
    "x-guidance": st.dictionaries(
        st.sampled_from(["lenient", "whitespace_pattern", "x"]), SCALARS, max_size=2
    ),
}
ONE, LISTED = ("items", "additionalProperties", "not"), ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs")


@st.composite
def schema(draw, depth=3):
    """Some keywords of a schema; few at once, so that many schemas are good ones."""
    if depth < 3 and draw(st.integers(0, 4)) == 0:
        return draw(st.booleans())
    found = {}
    deeper = (*ONE, *LISTED, *NAMED) if depth else ()
    for name in draw(st.lists(st.sampled_from([*PLAIN, *deeper, *deeper]), max_size=4)):
        if name in PLAIN:
            found[name] = draw(PLAIN[name])
        elif name in ONE:
            found[name] = draw(schema(depth - 1))
        elif name in LISTED:
            found[name] = draw(st.lists(schema(depth - 1), max_size=3))
        else:
            keys = {"properties": NAMES, "patternProperties": REGEXES, "$defs": st.sampled_from("ab")}[name]
            found[name] = draw(st.dictionaries(keys, schema(depth - 1), max_size=3))
    return found


SCHEMAS = schema()
LARK = st.sampled_from(
    [
        *(
            "start",
            "a",
            "B",
            ":",
            "|",
            " ",
            "\n",
            "(",
            ")",
            "[",
            "]",
            "?",
            "*",
            "+",
            "~",
            "&",
            "{2}",
            "{1,99999999}",
        ),
        *(
            '"x"',
            '"y"i',
            '"\\"',
            '"',
            "/a+/",
            "/b*/i",
            "/",
            "// c",
            "# <[9]>",
            "<[1]>",
            "<[299]>",
            "<[300]>",
            "<[1-9]>",
        ),
        *(
            "<[^3]>",
            "<[*]>",
            "<eos>",
            "<x>",
            "<[",
            "]>",
            "%json {}",
            '%json {"type": "object"}',
            "%ignore",
            "%import x",
        ),
        *(
            "%llguidance {}",
            '%regex {"substring_chars": "ab"}',
            "@a",
            "@1",
            "[max_tokens=3]",
            '[stop="x"]',
            "[lazy]",
        ),
        *(
            "[capture]",
            "[suffix=/x/]",
            ".1",
            "..",
            '"a".."z"',
            "->",
            "::",
            "_",
            "start: a\n",
            'a: "x" a | ""\n',
            "a: a a a | a a | /[a-z]/\n",
            "B: /q/\n",
        ),
    ]
)
GBNF = st.sampled_from(
    [
        *(
            "root ::= ",
            "\na ::= ",
            "\nb-c ::= ",
            "a",
            "b-c",
            "root",
            '"x"',
            '"\\n"',
            '"\\x41"',
            '"',
            "[a-z]",
            "[^\\]]",
            "[",
            "]",
        ),
        *(
            "(",
            ")",
            "|",
            "*",
            "+",
            "?",
            "{3}",
            "{2,}",
            "{1,4}",
            "{,2}",
            "{99999999}",
            ".",
            "# c\n",
            " ",
            "\n",
            "\\",
            "::=",
            "é",
        ),
    ]
)


def sentences(pieces, start):
    return st.tuples(st.sampled_from([start, ""]), st.lists(pieces, max_size=20)).map(
        lambda drawn: drawn[0] + " ".join(drawn[1])
    )


GRAMMARS = st.one_of(sentences(LARK, "start: "), sentences(GBNF, "root ::= "), SIGNS)
CHOICES = st.lists(NAMES | st.sampled_from(["<eos>", "<|call|>", "\x7f", "a" * 3000]), max_size=6)
BLANKS = st.lists(st.sampled_from([" ", r"\n", r"\s", "[", "]", "(", ")", "|", "*", "+", "?", "{2}"])).map(
    "".join
)
OUTPUTS = st.one_of(
    st.builds(
        lambda schema, lenient: {"json": schema, "is_lenient": lenient},
        SCHEMAS | SCHEMAS.map(json.dumps) | SIGNS,
        st.booleans(),
    ),
    st.just({"json_object": True}),
    st.builds(lambda text: {"json_object": True, "whitespace_pattern": text}, BLANKS | REGEXES),
    REGEXES.map(lambda text: {"regex": text}),
    CHOICES.map(lambda texts: {"choice": texts}),
    GRAMMARS.map(lambda text: {"grammar": text}),
)
TOOL_NAMES = st.sampled_from(["f", "g-1", "get_weather", "a" * 64])
TOOLS = st.lists(
    st.builds(FunctionTool, TOOL_NAMES, st.just(""), SCHEMAS, st.booleans()),
    min_size=1,
    max_size=3,
    unique_by=lambda tool: tool.name,
)
OTHERS = st.none() | OUTPUTS.filter(
    lambda output: "grammar" not in output and not isinstance(output.get("json"), str)
)
SEEDS = st.integers(0, 999)
quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
long = settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))


def check_output(output, seed):
    text = check(lambda: StructuredOutputs(**output), seed)
    if text is not None and (output.get("json_object") or "json" in output):
        json.loads(text)
    if text is not None and "choice" in output:
        assert text in output["choice"]


def check_tools(name, tools, is_required, other, seed):
    def make():
        output = None if other is None or is_required else StructuredOutputs(**other)
        asked = CallRules(tuple(tools), is_required, BY_NAME[name].is_parallel, output)
        return StructuredOutputs(grammar=BY_NAME[name].grammar(asked, byte_level()[0]))

    check(make, seed)


@quick
@given(output=OUTPUTS, seed=SEEDS)
def test_an_output_is_refused_or_can_be_written(output, seed):
    check_output(output, seed)


@pytest.mark.parametrize("name", BY_NAME)
@settings(quick, max_examples=6)
@given(tools=TOOLS, is_required=st.booleans(), other=OTHERS, seed=SEEDS)
def test_tools_are_refused_or_can_be_called(name, tools, is_required, other, seed):
    check_tools(name, tools, is_required, other, seed)


@pytest.mark.slow
@long
@given(output=OUTPUTS, seed=SEEDS)
def test_three_thousand_outputs_are_refused_or_can_be_written(output, seed):
    check_output(output, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
@settings(long, max_examples=500)
@given(tools=TOOLS, is_required=st.booleans(), other=OTHERS, seed=SEEDS)
def test_three_thousand_tools_are_refused_or_can_be_called(name, tools, is_required, other, seed):
    check_tools(name, tools, is_required, other, seed)
