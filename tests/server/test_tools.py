"""Tool calls in every format: read whole, byte by byte and cut anywhere, with the same result."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.tools.bare_json import BareJsonReader
from blockdraft.tools.hermes import HermesReader
from blockdraft.tools.pieces import FunctionTool

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object"},
        "is_exact": {"type": "boolean"},
    },
    "required": ["city"],
}
TOOLS = {name: FunctionTool(name, "", SCHEMA) for name in ("get_weather", "f")}


def read(reader, pieces, **options):
    """Text, thoughts, and the calls as (name, arguments), of an answer in these pieces."""
    reading = reader(TOOLS, **options)
    parts = [reading.push(piece, is_last=False) for piece in pieces] + [reading.push("", is_last=True)]
    calls = []
    for call in (call for part in parts for call in part.tool_calls):
        if call.id is not None:
            assert call.index == len(calls)
            assert len(call.id) == 29
            calls.append([call.name, ""])
        else:
            assert call.name is None
        calls[call.index][1] += call.arguments
    return (
        "".join(part.text for part in parts),
        "".join(part.reasoning for part in parts),
        [tuple(call) for call in calls],
    )


SAME = None  # the content is the whole text
HERMES = [
    # text, content, calls
    ("hello", SAME, []),
    (" \n", SAME, []),
    (
        'I look.\n\n<tool_call>\n{"name": "f", "arguments": {"city": "é\\"}<"}}\n</tool_call>\n',
        "I look.",
        [("f", '{"city": "é\\"}<"}')],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "get_weather"}</tool_call>',
        "",
        [("f", "{}"), ("get_weather", "{}")],
    ),
    ('<tool_call>{"arguments": {"a": [1, -2e3]}, "name": "f"}</tool_call>', "", [("f", '{"a": [1, -2e3]}')]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    # A brace too few, and an end without a closing tag, are forgiven.
    ('<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id": 7}</tool_call> so', "so", [("f", '{"a": 1}')]),
    # What is no call is content, to the last character.
    ("a <tool_call> b", SAME, []),
    ("<tool_call>", SAME, []),
    ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', SAME, []),
    ('x\n<tool_call>{"name": 3}</tool_call>\n', SAME, []),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', SAME, []),
    ('<tool_call>{"nam', SAME, []),
    ('<tool_call> <tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    # A call that goes wrong, or is cut off, behind its beginning keeps what was written.
    ('<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>!', "!", [("f", '{"a": oops}}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": "Par', "", [("f", '{"a": "Par')]),
]  # fmt: skip
BARE = [
    ("hello {", SAME, []),
    ('{"name": "f", "parameters": {"city": "x"}}', "", [("f", '{"city": "x"}')]),
    ('\n{"name": "f", "arguments": {}}; {"name": "f"}\n', "", [("f", "{}"), ("f", "{}")]),
    ('```json\n{"name": "f", "arguments": {}}\n```', "", [("f", "{}")]),
    ('<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (' {"city": "f"} and', SAME, []),
    ('{"name": "g", "parameters": {}}', SAME, []),
    ("```python\nx\n```", SAME, []),
    ('{"name": "f", "parameters": {"a": ]}} rest', "", [("f", '{"a": ]}} rest')]),
]  # fmt: skip
FORMATS = {HermesReader: HERMES, BareJsonReader: BARE}
CASES = [(reader, *case) for reader, cases in FORMATS.items() for case in cases]


@pytest.mark.parametrize(("reader", "text", "content", "calls"), CASES)
def test_an_answer_is_read_alike_however_it_is_cut(reader, text, content, calls):
    expected = (text if content is SAME else content, "", calls)
    assert read(reader, [text]) == expected
    assert read(reader, text) == expected
    for at in range(len(text)):
        assert read(reader, [text[:at], text[at:]]) == expected


def words(reader):
    """Parts of the format's answers in any order."""
    whole = [text for text, *_ in FORMATS[reader]]
    tags = [*reader.OPENING, *reader.CLOSING]
    parts = ['{"name": "f"', ', "arguments": ', "{", "}", '"', "\\", "\n", " ", "a", "<", ":", ",", "é", "1"]
    return st.lists(st.sampled_from([*whole, *tags, *parts]), max_size=8)


@pytest.mark.parametrize("reader", FORMATS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_text_is_read_alike_however_it_is_cut(reader, data):
    text = "".join(data.draw(words(reader)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(reader, [text])
    assert read(reader, pieces) == whole == read(reader, text)
    if not whole[2]:
        assert whole[0] == text, "without a call nothing is left out"


def test_arguments_are_passed_on_as_they_come():
    reading = HermesReader(TOOLS)
    assert reading.push('<tool_call>{"name": "f", "arguments"', is_last=False).tool_calls == ()
    (first,) = reading.push(': {"city": "Par', is_last=False).tool_calls
    assert (first.name, first.arguments) == ("f", '{"city": "Par')
    (second,) = reading.push("is", is_last=False).tool_calls
    assert (second.id, second.name, second.arguments) == (None, None, "is")


def test_of_calls_that_may_not_be_parallel_the_first_is_taken():
    text = HERMES[3][0]
    assert read(HermesReader, text, max_calls=1) == ("", "", [("f", "{}")])


def test_hidden_tags_are_never_shown():
    text = 'a<|python_tag|>print("x")'
    assert read(BareJsonReader, text) == (text, "", [])
    assert read(BareJsonReader, text, hidden=("<|python_tag|>",)) == ('aprint("x")', "", [])


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_VALUES = _SCALARS | st.text(max_size=8) | st.lists(_SCALARS | st.text(max_size=3), max_size=3)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=4), _VALUES, max_size=3))
def test_any_json_is_an_argument(value):
    arguments = json.dumps({"a": value, "b": {}}, ensure_ascii=False)
    for reader, text in (
        (HermesReader, f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'),
        (BareJsonReader, f'{{"name": "f", "parameters": {arguments}}}'),
    ):
        assert read(reader, [text]) == ("", "", [("f", arguments)])
