"""Tool calls in every format: read whole, byte by byte and cut anywhere, with the same result."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.engine.request import Delta
from blockdraft.server.api.choices import AnswerChoice
from blockdraft.server.api.messages.fields import MessagesRequest
from blockdraft.server.api.messages.routes import MessageWriter
from blockdraft.settings.settings import TOOL_FORMATS
from blockdraft.tool_calls.bare_json import BareJsonReader
from blockdraft.tool_calls.formats import FORMATS as KNOWN
from blockdraft.tool_calls.gemma import GemmaReader
from blockdraft.tool_calls.harmony import TAGS, HarmonyReader
from blockdraft.tool_calls.json_calls import HermesReader
from blockdraft.tool_calls.pieces import FunctionTool
from blockdraft.tool_calls.qwen_xml import QwenXmlReader
from tests.server.scripted import ScriptedChat, taken

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
    spans = [span for piece in pieces for span in reading.push(piece, is_last=False)]
    spans += reading.push("", is_last=True)
    calls = []
    for call in (span.call for span in spans if span.call is not None):
        if call.id is not None:
            assert call.index == len(calls)
            assert len(call.id) == 29
            calls.append([call.name, ""])
        else:
            assert call.name is None
        calls[call.index][1] += call.arguments
    return (
        "".join(span.text for span in spans if span.kind == "text"),
        "".join(span.text for span in spans if span.kind == "reasoning"),
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
XML = [
    ("hello", SAME, []),
    (
        "So:\n<tool_call>\n<function=f>\n<parameter=city>\nNew\nYork <b>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "So:",
        [("f", '{"city": "New\\nYork <b>", "days": 3}')],
    ),
    ("<function=f><parameter=city>x</parameter></function>", "", [("f", '{"city": "x"}')]),
    ("<tool_call><function=f>\n</function></tool_call>\n" * 2, "", [("f", "{}"), ("f", "{}")]),
    (
        "<tool_call><function=f><parameter=is_exact>\nTrue\n</parameter>"
        '<parameter=options>{"a": [1]}</parameter><parameter=tags>oops</parameter></function></tool_call>!',
        "!",
        [("f", '{"is_exact": true, "options": {"a": [1]}, "tags": "oops"}')],
    ),
    # Texts stay texts, whatever they look like, and parameters that nobody declared are texts.
    ("<function=f><parameter=city>5</parameter></function>", "", [("f", '{"city": "5"}')]),
    ("<function=f><parameter=x>5</parameter></function>", "", [("f", '{"x": "5"}')]),
    ("<function=f><parameter=city>\n\n a \n\n</parameter></function>", "", [("f", '{"city": "\\n a \\n"}')]),
    ("<tool_call>\n<function=g>\n</function></tool_call>", SAME, []),
    ("<tool_call>\n<fun", SAME, []),
    ("<function=f", SAME, []),
    ('<tool_call>{"name": "f"}</tool_call>', SAME, []),
    ("<function=f>\njunk</function></tool_call>x", "x", [("f", "junk</function>")]),
    ("<function=f><parameter=city>Par", "", [("f", '{"city": "Par')]),
    ("<function=f><parameter=days>1", "", [("f", '{"days": 1')]),
    ("<function=f><parameter=ci", "", [("f", "<parameter=ci")]),
]  # fmt: skip
GEMMA = [
    ("hello", SAME, []),
    (
        'Ok. <|tool_call>call:f{city:<|"|>New "York"\n<|"|>,days:3,is_exact:true}<tool_call|>',
        "Ok.",
        [("f", '{"city": "New \\"York\\"\\n", "days": 3, "is_exact": true}')],
    ),
    ("<|tool_call>call:f{}<tool_call|><|tool_call>call:f{}<tool_call|>", "", [("f", "{}"), ("f", "{}")]),
    (
        '<|tool_call>call:f{options:{a:[1,<|"|>}<|"|>,{}],b:null},tags:[]}<tool_call|>',
        "",
        [("f", '{"options": {"a": [1, "}", {}], "b": null}, "tags": []}')],
    ),
    ('<|tool_call>call:f{<|"|>city<|"|>:"a", x: b}<tool_call|>.', ".", [("f", '{"city": "a", "x": "b"}')]),
    ("call:f{}<tool_call|>", "", [("f", "{}")]),  # its opening token was forgotten
    ("call:g{}<tool_call|>", SAME, []),
    ("<|tool_call>call:g{}<tool_call|>", SAME, []),
    ("<|tool_call>f{}", SAME, []),
    ("<|tool_call>call:f{a:}<tool_call|>x", "x", [("f", '{"a": }')]),
    ("<|tool_call>call:f{a}<tool_call|>", "", [("f", '{"a"}')]),
    ('<|tool_call>call:f{city:<|"|>Par', "", [("f", '{"city": "Par')]),
]  # fmt: skip
FORMATS = {HermesReader: HERMES, BareJsonReader: BARE, QwenXmlReader: XML, GemmaReader: GEMMA}
CASES = [(reader, *case) for reader, cases in FORMATS.items() for case in cases]


HARMONY = [
    # text, thoughts, content, calls
    ("<|channel|>final<|message|>Hi <b>.<|return|>", "", "Hi <b>.", []),
    (
        "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
        "Hm.\n",
        "Hi.",
        [],
    ),
    (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"city": "x"}<|call|>',
        "a\nb",
        "I look.",
        [("f", '{"city": "x"}')],
    ),
    (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", "", [("f", "{}")]),
    ("<|channel|>commentary to=functions.f<|message|><|call|>", "", "", [("f", "{}")]),
    ('<|channel|>commentary to=functions.g<|message|>{"a": 1}<|call|>', "", 'to=g {"a": 1}', []),
    ("<|channel|>commentary to=functions.f<|message|>plain<|call|>", "", "to=f plain", []),
    ('<|channel|>commentary to=functions.f<|message|>{"a": oops}<|call|>', "", "", [("f", '{"a": oops}')]),
    ('<|channel|>commentary to=functions.f<|message|>{"a', "", "", [("f", '{"a')]),
    ("plain text", "", "plain text", []),
    ("to=you", "", "to=you", []),
    ("<|channel|>fin", "", "", []),
    ("<|channel|>analysis<|message|>cut o", "cut o", "", []),
    ("<|channel|>final<|message|>a<|constrain|>b<|message|>c", "", "abc", []),
    ("to=" + "x" * 600 + "<|message|>y", "", "to=" + "x" * 600 + "y", []),
]  # fmt: skip


def harmony(pieces):
    text, thoughts, calls = read(HarmonyReader, pieces, hidden=TAGS)
    return thoughts, text, calls


@pytest.mark.parametrize(("text", "thoughts", "content", "calls"), HARMONY)
def test_harmony_is_read_alike_however_it_is_cut(text, thoughts, content, calls):
    assert harmony([text]) == (thoughts, content, calls)
    assert harmony(text) == (thoughts, content, calls)
    for at in range(len(text)):
        assert harmony([text[:at], text[at:]]) == (thoughts, content, calls)


_HARMONY_WORDS = [
    *TAGS,
    *(text for text, *_ in HARMONY[:-1]),
    " to=functions.f",
    "analysis",
    "{",
    "a",
    " ",
    "<",
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(_HARMONY_WORDS), max_size=8), st.data())
def test_any_harmony_is_read_alike_however_it_is_cut(words, data):
    text = "".join(words)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert harmony(pieces) == harmony([text]) == harmony(text)


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
    parts = [
        '<|"|>',
        "call:f{",
        "<function=f>",
        "<parameter=city>",
        "</parameter>",
        '{"name": "f"',
        ', "arguments": ',
        "{",
        "}",
        '"',
        "\\",
        "\n",
        " ",
        "a",
        "<",
        ":",
        ",",
        "é",
        "1",
    ]
    return st.lists(st.sampled_from([*whole, *tags, *parts]), max_size=8)


@pytest.mark.parametrize("reader", FORMATS)
@settings(max_examples=40, deadline=None)
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
    assert reading.push('<tool_call>{"name": "f", "arguments"', is_last=False) == ()
    ((_, _, first),) = reading.push(': {"city": "Par', is_last=False)
    assert (first.name, first.arguments) == ("f", '{"city": "Par')
    ((_, _, second),) = reading.push("is", is_last=False)
    assert (second.id, second.name, second.arguments) == (None, None, "is")


def parts_of(reader, pieces):
    """The parts of an answer as the newer APIs show them."""
    choice = AnswerChoice(index=0, prompt=0, reader=reader(TOOLS))
    found = [choice.push(Delta("", 0, text, (1,))) for text in pieces]
    found.append(choice.push(Delta("", 0, "", (), finish_reason="stop")))
    asked = MessagesRequest(messages=[{}], max_tokens=1)
    message = MessageWriter(asked, {"id": "", "model": ""}, ScriptedChat())
    return [
        (block["type"], *[value for name, value in block.items() if name in ("text", "thinking", "input")])
        for block in taken(message, found)["content"]
    ]


@pytest.mark.parametrize(
    ("reader", "text", "expected"),
    [
        (HermesReader, HERMES[9][0], [("tool_use", {"a": 1}), ("text", "so")]),
        (
            HermesReader,
            f"Well {HERMES[3][0]} so {HERMES[8][0]}",
            [("text", "Well"), *[("tool_use", {})] * 2, ("text", "so"), ("tool_use", {"a": 1})],
        ),
        (
            HarmonyReader,
            "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>",
            [("text", "a"), ("thinking", "b"), ("tool_use", {})],
        ),
    ],
)
def test_text_and_calls_keep_their_order_however_they_are_cut(reader, text, expected):
    assert parts_of(reader, [text]) == expected
    assert parts_of(reader, text) == expected
    for at in range(1, len(text)):
        assert parts_of(reader, [text[:at], text[at:]]) == expected, text[:at]


def test_of_calls_that_may_not_be_parallel_the_first_is_taken():
    text = HERMES[3][0]
    assert read(HermesReader, text, max_calls=1) == ("", "", [("f", "{}")])


def test_hidden_tags_are_never_shown():
    text = 'a<|python_tag|>print("x")'
    assert read(BareJsonReader, text) == (text, "", [])
    assert read(BareJsonReader, text, hidden=("<|python_tag|>",)) == ('aprint("x")', "", [])


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "[1, NaN]", '["\\ud800"]', "[" * 5000]
)
def test_what_is_no_json_stays_text(value):
    xml = f"<function=f><parameter=days>{value}</parameter></function>"
    assert read(QwenXmlReader, [xml]) == ("", "", [("f", json.dumps({"days": value}))])
    if "[" not in value:
        gemma = f"<|tool_call>call:f{{days:{value}}}<tool_call|>"
        assert read(GemmaReader, [gemma]) == ("", "", [("f", json.dumps({"days": value}))])


def test_half_a_character_in_arguments_that_came_as_a_text_stays_an_escape():
    written = json.dumps({"name": "f", "arguments": '{"city": "\ud800"}'})
    expected = ("", "", [("f", '{"city": "\\ud800"}')])
    assert read(HermesReader, [f"<tool_call>{written}</tool_call>"]) == expected


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


def test_the_setting_knows_every_format():
    assert ("auto", *(one.name for one in KNOWN)) == TOOL_FORMATS
