"""Answers of a output: every one that ended by itself has it, and what cannot be one is refused in a line."""

import json
import re
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.engine.request import SamplingParams
from blockdraft.errors import RequestError
from blockdraft.grammar.endless import check_end
from blockdraft.grammar.structured_output import StructuredOutputs, Thinking
from blockdraft.grammar.vocabulary import Vocabulary
from blockdraft.text.tokenizer import Tokenizer
from tests import tiny
from tests.grammar import json_tokens
from tests.text.test_detokenizer import KINDS, tokenizer_of

RANDOM = SamplingParams(temperature=1.0, max_tokens=80, seed=3)
TOKENS = json_tokens.tokenizer()


def engine(drafter="trained", **plan):
    return tiny.engine(drafter, tokenizer=TOKENS, **plan)


def answer(output, *, thinking=None, drafter="trained", **params):
    asked = replace(RANDOM, structured_outputs=output, thinking=thinking, **params)
    (((token_ids, text, reason),),) = tiny.run(engine(drafter), [([3, 5, 7], asked)])
    return token_ids, text, reason


def check_output(output, text):
    if output.json is not None:
        jsonschema.validate(json.loads(text), output.json)
    elif output.json_object:
        assert isinstance(json.loads(text), dict)
    elif output.regex is not None:
        assert re.fullmatch(output.regex, text, re.DOTALL)
    elif output.choice is not None:
        assert text in output.choice
    else:
        assert re.fullmatch(r'[]abcx0-9,:["-]+', text)


def run_and_check(output, seed):
    _, text, reason = answer(output, seed=seed)
    if reason == "stop":
        check_output(output, text)
    return reason


@settings(max_examples=8, deadline=None, derandomize=True)
@given(output=json_tokens.outputs, seed=st.integers(0, 99))
def test_an_answer_that_ends_by_itself_has_its_output(output, seed):
    assert run_and_check(output, seed) in ("stop", "length")


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(schema=json_tokens.schemas, seed=st.integers(0, 99))
def test_a_thousand_schemas(schema, seed):
    run_and_check(StructuredOutputs(json=schema), seed)


def test_most_answers_of_a_bounded_output_end_by_themselves():
    """Else the tests above would look at nothing."""
    output = StructuredOutputs(json={"type": "array", "items": {"type": "boolean"}, "maxItems": 3})
    assert [answer(output, seed=seed)[2] for seed in range(8)].count("stop") == 8


def test_what_is_forced_is_drafted_and_every_accepted_count_occurs():
    made = engine(width=tiny.BLOCK)
    for count in range(tiny.BLOCK):
        output = StructuredOutputs(regex=f"([xy]{count * 'true'}){{6}}")
        made.add([3, 5, count], replace(RANDOM, structured_outputs=output, seed=count))
    deltas = tiny.drain(made)
    assert {len(delta.token_ids) for delta in deltas} == set(range(1, tiny.BLOCK + 1))
    alone = engine("none", width=tiny.BLOCK)  # no drafter: what is forced is all that is right
    alone.add([3, 5, 7], replace(RANDOM, structured_outputs=StructuredOutputs(choice=["true" * 9])))
    assert len(tiny.drain(alone)) == 2


def test_choices_of_one_request_have_an_output_each():
    output = StructuredOutputs(choice=["abc", "xy", "null"])
    (choices,) = tiny.run(engine(), [([3, 5, 7], replace(RANDOM, structured_outputs=output, n=6))])
    assert {text for _, text, _ in choices} <= {"abc", "xy", "null"}
    assert len({text for _, text, _ in choices}) > 1


def test_log_probabilities_are_the_models_own():
    output = StructuredOutputs(choice=["true"])
    made = engine(width=4)
    made.add([3, 5, 7], replace(RANDOM, structured_outputs=output, logprobs=2))
    items = [item for delta in tiny.drain(made) for item in delta.logprobs]
    assert len(items) == 2  # "true" and the end
    assert all(item.logprob < 0 for item in items)  # under the structured output they were certain


# ---- thoughts


OPENED = Thinking(close_ids=json_tokens.ids("</think>"))
MAY_OPEN = Thinking(open_ids=json_tokens.ids("<think>"), close_ids=json_tokens.ids("</think>"))
TRUE = StructuredOutputs(choice=["true"])
OPEN, CLOSE = json_tokens.ids("<think><" + "/think>")


@pytest.mark.parametrize("budget", [0, 1, 7, None])
@pytest.mark.parametrize("drafter", ["trained", "none"])
def test_the_output_begins_after_the_thoughts(budget, drafter):
    thinking = replace(OPENED, max_tokens=budget)
    token_ids, _, reason = answer(TRUE, thinking=thinking, drafter=drafter, max_tokens=150)
    thoughts = token_ids[: token_ids.index(CLOSE)]
    assert budget is None or len(thoughts) <= budget
    assert json_tokens.EOS not in thoughts
    assert TOKENS.decode(token_ids[len(thoughts) :]) == "true"
    assert reason == "stop"


def test_an_answer_may_think_or_not():
    """By a bias it does, and without it does not: both match it in the end."""
    biased = {"logit_bias": {OPEN: 100.0}, "temperature": 0.0}
    token_ids, text, _ = answer(TRUE, thinking=replace(MAY_OPEN, max_tokens=3), **biased)
    assert token_ids[0] == OPEN
    assert len(token_ids) == 7  # thoughts of three between the tags, the answer and its end
    assert text.endswith("true")
    token_ids, text, _ = answer(TRUE, thinking=MAY_OPEN, logit_bias={OPEN: -100.0})
    assert (OPEN in token_ids, text) == (False, "true")


def test_a_budget_needs_no_structured_output():
    token_ids, _, _ = answer(None, thinking=replace(OPENED, max_tokens=4), max_tokens=20)
    assert token_ids.index(CLOSE) <= 4
    assert len(token_ids) > 6


# ---- what is refused

REFUSED = [
    ({"json": "{"}, "not JSON"),
    ({"json": [1]}, "must be an object"),
    ({"json": False}, "must be an object"),
    ({"json": {"type": "strin"}}, "strin"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
    ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "nsatisfiable"),
    ({"json": {"$ref": "http://elsewhere/schema"}}, "elsewhere"),
    ({"json": {"dependentSchemas": {}}}, "dependentSchemas"),
    ({"regex": "(a"}, "unclosed"),
    ({"regex": "a\\"}, "lone backslash"),
    ({"regex": "\\\\\\"}, "lone backslash"),
    ({"regex": ""}, "regex"),
    ({"choice": []}, "choice"),
    ({"choice": [3]}, "choice"),
    ({"grammar": 'start: "a"\nother: ('}, "2("),
    ({"grammar": 'root ::= "a"\nother ::= ('}, "line 2"),
]


@pytest.mark.parametrize(("output", "words"), REFUSED)
def test_what_is_no_output_is_refused_in_words(output, words):
    made = engine()
    with pytest.raises(RequestError, match=re.escape(words)) as error:
        made.add([3], replace(RANDOM, structured_outputs=StructuredOutputs(**output)))
    assert error.value.field == "structured_outputs"
    assert not made.has_work


A_REF, B_REF = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["a"],
        },
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {
            **A_REF,
            "$defs": {"a": {"type": "array", "prefixItems": [B_REF], "minItems": 1}, "b": {"const": 1}},
        },
    ],
)
def test_a_schema_that_refers_to_itself_may_have_an_end(schema):
    check_end(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"anyOf": [A_REF, B_REF], "$defs": {"a": B_REF, "b": {"allOf": [A_REF]}}},
        {
            "oneOf": [A_REF],
            "$defs": {"a": {"type": "object", "properties": {"~/": A_REF}, "required": ["~/"]}},
        },
        {
            "$ref": "#/properties/~0~1",
            "type": "object",
            "properties": {"~/": {"$ref": "#"}},
        },
    ],
)
def test_a_schema_without_an_end_is_refused(schema):
    with pytest.raises(RequestError, match="always refers to itself"):
        check_end(schema)


def test_unknown_keywords_bind_nothing_where_that_is_asked_for():
    output = StructuredOutputs(json={"type": "boolean", "dependentSchemas": {}}, is_lenient=True)
    assert answer(output)[1] in ("true", "false")


@pytest.mark.parametrize("name", ["min_tokens", "ignore_eos"])
def test_what_would_go_on_behind_the_output_is_refused(name):
    with pytest.raises(RequestError, match=name):
        SamplingParams(structured_outputs=TRUE, **{name: 1 if name == "min_tokens" else True})


def test_an_output_that_becomes_too_much_ends_its_own_answer_alone(monkeypatch):
    """As when its parser meets a limit half-way."""
    made = engine()
    lost = made.add([3, 5], replace(RANDOM, structured_outputs=StructuredOutputs(regex="[ab]{99}")))
    kept = made.add([3, 5], replace(RANDOM, structured_outputs=StructuredOutputs(choice=["abc" * 9])))
    deltas = [*made.step(), *made.step()]
    sequence = next(one for one in made.scheduler.running if one.request.id == lost)
    sequence.guide._matcher.consume_token(TOKENS.encode("x")[0])  # never allowed: the matcher breaks
    deltas += tiny.drain(made)
    ends = {delta.request_id: delta for delta in deltas if delta.finish_reason is not None}
    assert ends[lost].finish_reason == "abort"
    assert "structured output" in ends[lost].stop_reason
    assert "".join(delta.text for delta in deltas if delta.request_id == kept) == "abc" * 9


def test_a_model_without_an_end_has_no_structured_outputs():
    endless = Tokenizer(TokenizerParts(TOKENS._tokenizer, None, None, None, ()))
    with pytest.raises(RequestError, match="end-of-sequence"):
        tiny.engine(tokenizer=endless).add([3], replace(RANDOM, structured_outputs=TRUE))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_that_is_read_can_write_an_output(kind):
    """One is misread (its spaces), and refused instead of writing other texts than it seems to."""
    tokens = tokenizer_of(kind)._tokenizer
    ended = Tokenizer(TokenizerParts(tokens, None, None, None, (0,)))
    vocabulary, output = Vocabulary(ended, tokens.get_vocab_size()), StructuredOutputs(choice=["at ö"])
    if kind == "unigram":
        with pytest.raises(RequestError, match="for another text"):
            vocabulary.matcher(output)
        return
    spelled = ["a", "t", "Ġ", "Ã", "¶"] if kind == "byte_level" else ["a", "t", "▁", "<0xC3>", "<0xB6>"]
    matcher, _ = vocabulary.matcher(output)
    assert matcher.consume_tokens([tokens.token_to_id(piece) for piece in spelled])
    assert matcher.is_accepting()


def test_a_tokenizer_that_cannot_be_read_is_said_to_be():
    with pytest.raises(RequestError, match="llguidance cannot read"):
        tiny.engine().add([3], replace(RANDOM, structured_outputs=TRUE))


# ---- what llguidance cannot take back


@pytest.mark.parametrize(
    "grammar",
    [
        'start: (a ",")*\na[max_tokens=2]: /[a-f0-9]+/',
        'start: (a "true")*\na[stop="x"]: /[a-f]*/',
        f'start: (/[a-f]/ <[{json_tokens.ids(":")[0]}]> "true")*',
    ],
    ids=["max_tokens", "stop", "id"],
)
def test_a_rule_that_cannot_be_taken_back_binds_a_block_as_it_binds_plain_decoding(grammar):
    asked = replace(RANDOM, structured_outputs=StructuredOutputs(grammar=grammar))
    jobs = [([3, 5, 7], replace(asked, seed=seed)) for seed in range(4)]
    plain = tiny.run(engine(), [(ids, replace(job, width=1)) for ids, job in jobs])
    assert tiny.run(engine(), [(ids, replace(job, width=tiny.BLOCK)) for ids, job in jobs]) == plain
    assert all(reason in ("stop", "length") for ((_, _, reason),) in plain)


def test_thoughts_of_tokens_that_are_none_are_refused():
    thinking = Thinking(close_ids=(10**6,), max_tokens=0)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine().add([3, 5, 7], replace(RANDOM, thinking=thinking))
