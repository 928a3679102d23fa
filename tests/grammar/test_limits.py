"""Limits of a output: of its size before any work, of time and memory in another process."""

import functools
import itertools
import json
import string
import time

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from blockdraft.errors import RequestError
from blockdraft.grammar import trial
from blockdraft.grammar.endless import check_end
from blockdraft.grammar.gbnf import is_gbnf, lark_of_gbnf
from blockdraft.grammar.guide import TOO_SLOW, Guide
from blockdraft.grammar.lark_text import LarkFacts, read_lark
from blockdraft.grammar.limits import MAX_DEPTH, MAX_GRAMMAR_CHARS, MAX_RUN_CHARS
from blockdraft.grammar.structured_output import MAX_CHOICES, StructuredOutputs
from blockdraft.grammar.vocabulary import Vocabulary
from blockdraft.text.tokenizer import Tokenizer, TokenizerParts
from tests.grammar import json_tokens
from tests.server.test_tool_grammars import byte_level

SIZE = 64
IDS = {"<think>": 55, "<eos>": json_tokens.EOS}
FULL = MAX_GRAMMAR_CHARS - 100
PATIENCE_S = 2.0  # a busy machine takes half of it; what is not linear takes minutes


@functools.cache
def vocabulary():
    return Vocabulary(json_tokens.tokenizer(), SIZE)


def matcher(**output):
    return vocabulary().matcher(StructuredOutputs(**output))[0]


def accepts(text, **output):
    made = matcher(**output)
    ids = list(json_tokens.ids(text))
    return made.try_consume_tokens(ids) == len(ids) and made.is_accepting()


def seconds_of(work):
    """Return this thread's CPU seconds: it holds the interpreter's lock no longer."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


# ---- size, before any work

DEEP = functools.reduce(lambda inner, _: {"type": "array", "items": inner}, range(MAX_DEPTH), {})


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"regex": "a" * (MAX_RUN_CHARS + 1)}, "32769 characters"),
        ({"grammar": "a" * (MAX_GRAMMAR_CHARS + 1)}, "524289 characters"),
        ({"choice": ["a" * 200] * 4096}, "819200 characters"),
        ({"choice": ["a" * (MAX_RUN_CHARS + 1)]}, "32769 characters"),
        ({"json": {"const": "a" * (MAX_RUN_CHARS + 1)}}, "more than 32768 characters"),
        ({"choice": ["a"] * 4097}, "1 to 4096 strings"),
        ({"json": "a" * (MAX_GRAMMAR_CHARS + 1)}, "524289 characters"),
        ({"json": {"enum": ["a" * 1000] * 600}}, "more than 524288 characters"),
        ({"json": {"enum": [0] * (MAX_GRAMMAR_CHARS + 1)}}, "more than 524288 characters"),
        ({"json": DEEP}, "nests deeper"),
        ({"json": {"const": float("nan")}}, "JSON has no number for"),
        ({"json": {"const": 1 << 70}}, "64 bits"),
        ({"json": {"const": {1, 2}}}, "that is not JSON"),
        ({"json": {3: "a"}}, "key"),
        ({"json": {"const": "\ud800"}}, "surrogate"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": ["\ud800"]}, "surrogate"),
        ({"json_object": True, "whitespace_pattern": ""}, "not empty"),
        ({"json_object": True, "whitespace_pattern": " ?x"}, "more than white space"),
        ({"json_object": True, "whitespace_pattern": "[^a]"}, "more than white space"),
        ({"json_object": True, "whitespace_pattern": " ]"}, "more than white space"),
        ({"regex": "a", "whitespace_pattern": " "}, "works with json"),
        ({}, "exactly one of"),
        ({"regex": "a", "json_object": True}, "exactly one of"),
    ],
    ids=itertools.count(),
)
def test_an_output_beyond_a_limit_is_refused_when_it_is_made(output, words):
    with pytest.raises(RequestError, match=words):
        StructuredOutputs(**output)


def test_the_depth_of_a_schema_in_a_text_is_limited_too():
    nested = '{"items": ' * 600 + "{}" + "}" * 600
    with pytest.raises(RequestError, match="nests deeper"):
        matcher(json=nested)


# ---- time and memory, in another process

BOMB = {"json": {"allOf": [{"type": "string", "pattern": f".*{i:03d}.*"} for i in range(40)]}}


@pytest.mark.slow
def test_an_output_that_takes_too_long_is_refused():
    with pytest.raises(RequestError, match="too complex"):
        matcher(**BOMB)


def test_an_output_that_would_overflow_the_stack_is_refused():
    """In the engine's process it would be the end of all answers."""
    chain = "".join(f'a{i}: a{i + 1} "x"\n' for i in range(6000))
    with pytest.raises(RequestError, match="too complex"):
        matcher(grammar=f'start: a0\n{chain}a6000: "b"')


def test_a_schema_as_deep_as_may_be_is_compiled():
    assert matcher(json=DEEP["items"])


def test_an_output_past_its_time_is_refused_and_the_next_one_is_tried(monkeypatch):
    """The worker has a hundredth of its time."""
    short = "import blockdraft.grammar.trial_worker as w; w.MAX_CPU_S = 0.02; w.main()"
    monkeypatch.setattr(trial, "WORKER", (trial.WORKER[0], "-c", short))
    tokens, _, key = vocabulary()._tokens
    asked = trial.Trials()
    with pytest.raises(RequestError, match="too complex"):
        asked.of(BOMB, tokens, key)
    assert asked.of({"regex": "a"}, tokens, key).may_roll_back


def test_systems_without_limits_end_the_worker_where_an_output_takes_too_long(monkeypatch):
    """macOS cannot bound a process's memory, and Windows has neither `fork` nor `resource`."""
    elsewhere = (
        "import os, sys; sys.platform = 'win32'; sys.modules['resource'] = None; del os.fork\n"
        "import blockdraft.grammar.trial_worker as w; w.main()"
    )
    monkeypatch.setattr(trial, "WORKER", (trial.WORKER[0], "-c", elsewhere))
    tokens, _, key = vocabulary()._tokens
    asked = trial.Trials()
    assert asked.of({"regex": "a"}, tokens, key).may_roll_back
    monkeypatch.setattr(trial, "MAX_WALL_S", 0.1)
    monkeypatch.setattr(trial, "GRACE_S", 0.0)
    with pytest.raises(RequestError, match="too complex"):
        asked.of(BOMB, tokens, key)
    monkeypatch.undo()
    assert asked.of({"regex": "a"}, tokens, key).may_roll_back


def test_an_interrupted_trial_does_not_answer_the_next_one():
    tokens, _, key = vocabulary()._tokens
    asked = trial.Trials()
    first = asked.of({"regex": "a"}, tokens, key)
    late = {"output": {"regex": "b"}, "key": key, "number": 0}
    asked._process.stdin.write(json.dumps(late) + "\n")
    assert asked.of({"regex": "a"}, tokens, key).text == first.text


def test_a_worker_that_has_died_is_replaced():
    tokens, _, key = vocabulary()._tokens
    asked = trial.Trials()
    asked.of({"regex": "a"}, tokens, key)
    asked._process.kill()
    asked._process.wait()
    assert asked.of({"regex": "a"}, tokens, key).may_roll_back


def test_compiled_outputs_are_kept_within_a_number_of_bytes(monkeypatch):
    made, compiled = Vocabulary(json_tokens.tokenizer(), SIZE), matcher(regex="a")
    monkeypatch.setattr("blockdraft.grammar.vocabulary.MAX_KEPT_BYTES", 100)
    monkeypatch.setattr("blockdraft.grammar.trial.Trials.of", lambda *_: trial.TriedGrammar("{}", True, 60))
    monkeypatch.setattr("blockdraft.grammar.vocabulary.compile_text", lambda *_: compiled)
    for text in "ab":
        made.matcher(StructuredOutputs(regex=text))
    assert list(made._kept) == ['{"regex": "b"}']


def test_an_answer_ends_where_its_output_forces_too_much():
    """To write it as tokens anew in each step would keep all other answers waiting."""
    made, _ = vocabulary().matcher(StructuredOutputs(regex="x|ya{40000}"))
    guide = Guide(made, None, end_ids=vocabulary().end_ids, num_words=vocabulary().num_words)
    guide.advance(json_tokens.ids("y"))
    assert "32768 bytes" in guide.error


@functools.cache
def large_vocabulary():
    """Return a vocabulary of bytes and all words of two and three letters, and the id of "aaa"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase
    words = ["".join(word) for size in (2, 3) for word in itertools.product(letters, repeat=size)]
    vocab = {text: number for number, text in enumerate([*alphabet, *words])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    eos_id = tokenizer.token_to_id("<eos>")
    source = Tokenizer(TokenizerParts(tokenizer, None, None, "<eos>", (eos_id,)))
    return Vocabulary(source, source.vocab_size), source.token_id("aaa")


def test_an_answer_ends_where_its_output_takes_too_long(monkeypatch):
    """Rules of many meanings take longer with each token, and all other answers wait for them."""
    monkeypatch.setattr("blockdraft.grammar.guide.MAX_STEP_S", 0.002)  # a server allows more
    words, token_id = large_vocabulary()
    made, _ = words.matcher(StructuredOutputs(grammar="start: e\ne: e e e | e e | /[a-z ]/"))
    by_drafts, by_tokens = (
        Guide(one, None, end_ids=words.end_ids, num_words=words.num_words)
        for one in (made.deep_copy(), made.deep_copy())
    )
    by_drafts.correct([token_id] * 40)
    by_tokens.advance([token_id] * 40)
    assert by_drafts.error == by_tokens.error == TOO_SLOW


@pytest.mark.parametrize(
    "output",
    [
        {"choice": [f"number {i}" for i in range(MAX_CHOICES)]},
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}},
    ],
    ids=["choice", "properties"],
)
def test_an_output_of_many_alternatives_is_written_to_its_end(output):
    text = output["choice"][-1] if "choice" in output else '{"p499": "a"}'
    made, _ = Vocabulary(byte_level()[0], 300).matcher(StructuredOutputs(**output))
    for token_id in byte_level()[0].encode(text):
        made.compute_bitmask()
        assert made.consume_token(token_id), made.get_error()
    assert made.is_accepting()


# ---- our own passes are linear


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" // ' + "<[" * (FULL // 2 - 10),
        'start: "a" ' + '\\"\n' * (FULL // 3 - 10),
        'start: "a" // "' + '\\"' * (FULL // 2 - 20),
        "start: /" + "\\/" * (MAX_RUN_CHARS // 2 - 2),
        "start: " + "<" * FULL,
        "start: " + "<[" * (FULL // 2),
        "start: " + "stop " * (FULL // 5),
        "stop" + " " * FULL,
    ],
    ids=itertools.count(),
)
def test_a_comment_or_anything_else_in_a_grammar_costs_little_time(text):
    assert seconds_of(lambda: read_lark(text, IDS.get, SIZE)) < PATIENCE_S


def test_references_cost_little_time():
    """A schema of 14,000 definitions, each of which refers to the next; and one where all refer to all."""
    chain = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"type": "null"}]} for i in range(7000)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**chain, "a7000": {"type": "null"}}}
    assert seconds_of(lambda: check_end(schema)) < PATIENCE_S
    every = [{"$ref": f"#/$defs/a{i}"} for i in range(60)]
    dense = {"anyOf": every, "$defs": {f"a{i}": {"allOf": every} for i in range(60)}}
    dense["$defs"]["b"] = {"allOf": [{"allOf": every} for _ in range(150)]}
    with pytest.raises(RequestError, match="always refers to itself"):
        check_end(dense)


@pytest.mark.parametrize(
    "text",
    [
        "root ::= a0\n" + "".join(f'a{i} ::= a{i + 1} | "x"\n' for i in range(9000)) + 'a9000 ::= "b"',
        'root ::= "a"\n#' + "c" * (FULL // 2),
        'root ::= "' + "c" * (MAX_RUN_CHARS // 2) + '"',
        "root ::= [" + "c" * (FULL // 8) + "]",
        "root ::= " + '"b" | ' * (FULL // 24) + '"b"',
    ],
    ids=itertools.count(),
)
def test_gbnf_costs_little_time(text):
    assert seconds_of(lambda: lark_of_gbnf(text)) < PATIENCE_S


# ---- tokens in Lark


def facts(text):
    return read_lark(text, IDS.get, SIZE)


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" // <[100000000000000000000]>',
        'start: "a" # <[99]> <nothing> [max_tokens=3]',
        '// "\nstart: "a"\n# /',
        'start: "<[99]> <nothing> stop=" /<[99]> \\/ max_tokens=/ "// \\" <[99]>"',
        'start: %json {"const": "<[99]> max_tokens="}',
    ],
)
def test_no_tokens_are_named_in_comments_strings_and_expressions(text):
    assert facts(text) == LarkFacts(text, frozenset(), has_ends=False, has_other_ids=False)


def test_a_comment_with_a_token_that_is_none_harms_nothing():
    assert accepts("a", grammar='start: "a" // <[100000000000000000000]> <[')


def test_tokens_are_numbers_wherever_they_are_named():
    found = facts('start: <think> a <[1,2]> <eos>\na[stop="x"]: <[3-9]>')
    assert found.text == f'start: <[55]> a <[1,2]> <[{json_tokens.EOS}]>\na[stop="x"]: <[3-9]>'
    assert found.token_ids == {55, 1, 2, json_tokens.EOS}
    assert found.has_ends
    assert found.has_other_ids


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("start: <[64]>", r"<\[64\]>: this model's tokens are 0 to 63"),
        ("start: <[100000000000000000000]>", "number too large"),
        ("start: <nothing>", "<nothing>, which is not a token of this model"),
        ("start: <[]>", "empty token range"),
        ('start: "a', "lexer error"),
        ('begin: "a"', "start"),
        ("start: other", "other"),
        ('start: "a"{5,2}', "5"),
        ('start: "a"{99999999999999999999}', "number too large"),
        ('start: "a" %', "lexer error"),
        ('start: "' + "a" * MAX_RUN_CHARS + '"', "more than 32768 characters"),
        ("start: /" + "a" * MAX_RUN_CHARS + "/", "more than 32768 characters"),
        ("start: /(ab){20000}/", "forces more than 32768 bytes in a row"),
        ('start: %json {"type": "strin"}', "strin"),
    ],
)
def test_a_mistake_in_lark_is_named(text, words):
    with pytest.raises(RequestError, match=words):
        matcher(grammar=text)


def test_a_choice_may_hold_any_character():
    tokenizer, _ = byte_level()
    text = "".join(map(chr, range(1, 0x80)))
    made, _ = Vocabulary(tokenizer, 300).matcher(StructuredOutputs(choice=[text, "\U0010ffff"]))
    assert made.try_consume_tokens(tokenizer.encode(text)) == len(text)
    assert made.is_accepting()


# ---- GBNF


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("root ::= foo", "line 1: the rule 'foo' is not defined"),
        ('\nother ::= "a"', "the rule 'root'"),
        ('root ::= "a', "line 1: '\"a' is a text without"),
        ('root ::= "a\\', "is a text without"),
        ('root ::= "a\\"', "is a text without"),
        ('root ::= "a"\nb ::= [a', "line 2: '\\[a' is a set without"),
        ("root ::= []", "empty set"),
        ('root ::= "a"{1000000000}', "more than 1048576 times"),
        ('root ::= "a"{' + "9" * 10_000 + "}", "is not {"),
        ('root ::= "a"{3,2}', "maximum below"),
        ('root ::= "a"{,2}', "is not {"),
        ('root ::= ("a"', "'\\(' without"),
        ('root ::= "a")', "'\\)' without"),
        ("root ::= *", "repeats nothing"),
        ('root ::= "a" | +', "repeats nothing"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
        ('root ::= "\\q"', "not an escape"),
        ('root ::= "\\uD800"', "not an escape"),
        ('root ::= "\\xZZ"', "not an escape"),
        ('root ::= "a" & "b"', "'&' means nothing"),
        ('root ::= "x"\n"a" ::= "b"', "where a name belongs"),
        ('"a"\nroot ::= "b"', "begins with a rule"),
        ("root ::= " + "(" * 25 + '"a"' + ")" * 25, "nests too deep"),
        ("root ::= root", "Unsatisfiable|nothing can match it"),
        ("root ::= [z-a]", "invalid character class range"),
    ],
)
def test_a_mistake_in_gbnf_is_named(text, words):
    with pytest.raises(RequestError, match=words):
        matcher(grammar=text)


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ('root ::= "a" | "b" "c"*', ["a", "b", "bcc"], ["ac", "c"]),
        ('root ::= ("a" | )? # nothing\n  "x"', ["x", "ax"], ["aax", ""]),
        ('root ::= a-b{2} start\na-b ::= [ab]\nstart ::= "x"', ["abx"], ["ax", "abbx"]),
        ('root ::= aB a-b\naB ::= "a"\na-b ::= "b"', ["ab"], ["ba"]),
        ('root ::= [^a-c"] [\\x61\\u0062] [a\\-]', ["xa-", "xba"], ["aa-", "xc-", "xab"]),
        ("root ::= [-a] [a-]", ["-a", "--"], ["b-"]),
        ('root ::= "a"+? "\\"" .', ['"x', 'aa"y'], ['"', "a"]),
        ('root ::= "x" ("a" b){0,0} b{0} [c]{0}\nb ::= "b"', ["x"], ["xab", "xb", "xc"]),
        ('root ::= "a"{1,2} "b"{2,}', ["abb", "aabbb"], ["ab", "aaabb"]),
        ('root ::=\n  "a"\n  | item\nitem ::= "b" root', ["a", "ba"], ["b"]),
    ],
)
def test_gbnf_means_what_llama_cpp_means(text, right, wrong):
    assert [accepts(one, grammar=text) for one in right] == [True] * len(right)
    assert not any(accepts(one, grammar=text) for one in wrong)


@pytest.mark.parametrize("text", ['start: "root ::= x"', 'start: "x" // a ::= b', "start: /a ::=/ # ::="])
def test_lark_may_hold_the_sign_of_gbnf(text):
    assert not is_gbnf(text)
    assert is_gbnf("# a comment\n" + '\n root\n::= "x"')


def test_signs_that_mean_something_in_lark_are_escaped():
    assert lark_of_gbnf('root ::= "\\t/\\\\" [/\\]]') == 'start: "\\t/\\\\" /[\\u{2F}\\u{5D}]/'


# ---- white space of JSON

PAIR = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (None, '{"a": [1, 2]}', ['{"a":[1,2]}', '{ "a": [1, 2]}', '{"a":  [1, 2]}', '{"a": [1, 2]}\n']),
        (r"[ \n]{1,2}", '{\n "a":[1,\n 2]}', ['{   "a":[1,2]}']),
        (r"\s*", '{   "a":[1, 2 ]}', ['{"a";[1]}']),
        (r"(?: |\n)?", '{"a": [1,2]}', ['{"a":  [1]}']),
        (r"[\x20\x0A]", '{"a": [1,2]}', ['{"a":  [1]}']),
    ],
)
def test_json_is_written_as_python_does_unless_other_white_space_is_asked_for(pattern, right, wrong):
    output = {"json": PAIR, "whitespace_pattern": pattern}
    assert accepts(right, **output)
    assert not any(accepts(one, **output) for one in wrong)


def test_options_in_a_schema_do_not_change_how_its_json_is_written():
    own = {"x-guidance": {"whitespace_pattern": "a", "item_separator": "b", "whitespace_flexible": True}}
    assert accepts('{"a": [1, 2]}', json={**PAIR, **own})
    assert not accepts('{a"a": [1, 2]}', json={**PAIR, **own})
    either = {"oneOf": [{"type": "integer"}, {"enum": ["a"]}], "x-guidance": {"coerce_one_of": True}}
    assert accepts("12", json=either)


# ---- special tokens as text


@pytest.mark.parametrize("text", ["<eos>", "<eos>a", "a<eos>", "<tool_call>", '"<|call|>"'])
def test_a_special_token_in_an_output_is_text(text):
    tokenizer, _ = byte_level()
    made, _ = Vocabulary(tokenizer, 300).matcher(StructuredOutputs(choice=[text]))
    forced = made.compute_ff_tokens()
    assert len(forced) == len(text)  # one token for each byte
    assert tokenizer.decode(forced) == text


def test_a_special_token_in_a_json_output_is_text():
    tokenizer, _ = byte_level()
    output = StructuredOutputs(json={"const": "<eos>"})
    assert tokenizer.decode(Vocabulary(tokenizer, 300).matcher(output)[0].compute_ff_tokens()) == '"<eos>"'


def test_an_answer_may_be_the_text_of_a_special_token():
    """The tiny pair's tokens cannot spell it: it is refused instead of an empty answer."""
    with pytest.raises(RequestError, match="nothing can match it"):
        matcher(choice=["<eos>"])
