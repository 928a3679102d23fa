"""Receipts: what a server writes is repeated here and at servers, and what was not repeated is named."""

import asyncio
import json
from dataclasses import replace

import pytest

from blockdraft import LLM
from blockdraft.check.fingerprint import fingerprint
from blockdraft.cli.main import main
from blockdraft.engine.engine import Engine
from blockdraft.engine.info import Fingerprint
from blockdraft.engine.receipt import Receipt, digest_of_tokens, repeatable
from blockdraft.engine.request import SamplingParams
from blockdraft.errors import BenchError
from blockdraft.grammar.structured_output import StructuredOutputs, Thinking
from blockdraft.prove.replay import Repeated, Replay, ReplayOptions, read_receipts, repeat_at, repeat_here
from blockdraft.server.api.receipts import ReceiptBook
from blockdraft.server.app import make_app
from blockdraft.server.options import ServerOptions
from blockdraft.text.tokenizer import Tokenizer
from tests.grammar import json_tokens
from tests.server import pair
from tests.server.asking import ask, listening
from tests.server.remote import remote_engine

HERE = {"model": str(pair.PAIR / "target"), "draft": str(pair.PAIR / "draft"), "dtype": "float64"}
HERE |= {"device": "cpu", "max_model_len": 512}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOKENIZER = Tokenizer(replace(json_tokens.tokenizer()._parts, chat_template=TEMPLATE))
SHORT = {"max_tokens": 9, "temperature": 1.0}
PLAIN = Receipt(
    id="a",
    index=0,
    prompt_ids=(1, 2),
    sampling=SamplingParams(temperature=0.0, max_tokens=3, seed=5),
    num_tokens=3,
    finish_reason="length",
    digest=digest_of_tokens([7, 8, 9]),
    fingerprint=Fingerprint.of({"weights": "w", "device": "d"}),
    token_ids=(7, 8, 9),
)

# Bodies of /v1/completions, each with something that decides tokens.
BODIES = (
    {},
    {"temperature": 0.0},
    {"n": 3},
    {"prompt": ["ab", "abc1"], "n": 2},
    {"seed": -(2**63)},
    {"top_p": 0.9, "top_k": 11, "min_p": 0.01, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"7": 4.5}},
    {"stop": ["1", "{", "d"], "include_stop_str_in_output": True},
    {"stop_token_ids": [9, 12], "min_tokens": 2},
    {"ignore_eos": True, "max_tokens": 30},
    {"stream": True},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"speculative": {"width": 2}},
    {"cache_salt": "mine"},
    {"skip_special_tokens": False},
    {"structured_outputs": {"choice": ["abc", "b"]}},
    {"structured_outputs": {"choice": ["ab"]}, "thinking_tokens": {"close_ids": [6], "max_tokens": 3}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1], "x-odd": 1}}}},
)


def spelled(models, plan):
    """An engine whose tokenizer serves structured output, too."""
    return Engine(replace(models, tokenizer=TOKENIZER), plan)


def opened(**how):
    """An engine in this process."""
    llm = LLM(**HERE | how)
    llm.engine = spelled(llm.engine.models, llm.engine.plan)
    return llm


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server, and the file of its receipts."""
    path = tmp_path_factory.mktemp("receipts") / "receipts.jsonl"

    def make(startup):
        engine = spelled(pair.models(), pair.plan())
        engine.fingerprint = fingerprint(engine)
        return engine

    with path.open("a") as file, remote_engine(make) as engine:
        app = make_app(engine, name=pair.NAME, options=ServerOptions(), receipts=ReceiptBook(file))
        with listening(app) as (host, port):
            for body in BODIES:
                reply = ask(app, "POST", "/v1/completions", json={"prompt": [1, 2, 3], **SHORT, **body})
                assert reply.status_code == 200, reply.text
            chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 6}
            for route, body in (
                ("/v1/chat/completions", {**chat, "n": 2}),
                ("/v1/messages", chat),
                ("/v1/responses", {"input": "ab", "max_output_tokens": 6}),
            ):
                assert ask(app, "POST", route, json=body).status_code == 200
            scored = {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 1}
            assert ask(app, "POST", "/v1/completions", json=scored).status_code == 200
            yield f"http://{host}:{port}", path


def test_every_choice_has_a_receipt_and_a_scored_prompt_has_none(server):
    receipts = read_receipts(server[1])
    assert len(receipts) == len(BODIES) + 2 + 3 + 4
    assert len({(one.id, one.index) for one in receipts}) == len(receipts)
    assert {one.id.partition("-")[0].partition("_")[0] for one in receipts} == {
        "cmpl",
        "chatcmpl",
        "msg",
        "resp",
    }
    assert all(one.text is None and one.token_ids is None for one in receipts)


@pytest.mark.parametrize("how", [{}, {"draft": None}, {"width": 3, "max_num_seqs": 2, "page_size": 32}])
def test_receipts_are_repeated_here_at_any_width_and_batch(server, how):
    replay = repeat_here(read_receipts(server[1]), opened(**how), lambda done: None)
    assert replay.num_equal == len(replay.receipts), list(replay.lines())
    assert not list(replay.lines()), "the fingerprints are equal"


def test_receipts_are_repeated_at_a_server(server):
    told = []
    replay = asyncio.run(repeat_at(read_receipts(server[1]), ReplayOptions(url=server[0]), told.append))
    assert replay.num_equal == len(replay.receipts) == told[-1], list(replay.lines())
    assert not list(replay.lines())


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(
            temperature=0.3, seed=-5, logit_bias={3: -1.5}, stop=("a", "b"), stop_token_ids=(1, 2)
        ),
        SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object"}, is_lenient=True)),
        SamplingParams(structured_outputs=StructuredOutputs(choice=("a", "ä"))),
        SamplingParams(thinking=Thinking(open_ids=(1,), close_ids=(2, 3), max_tokens=9)),
    ],
)
def test_a_receipt_is_read_as_it_was_written(sampling):
    receipt = replace(PLAIN, sampling=repeatable(sampling, seed=2**63 - 1, most_tokens=11), prompt="x\n")
    again = Receipt.of(json.loads(receipt.as_line()))
    assert again.as_line() == receipt.as_line()
    assert replace(again, sampling=receipt.sampling) == receipt
    assert (again.sampling.seed, again.sampling.max_tokens) == (2**63 - 1, 11)


def test_a_receipt_has_what_decides_tokens_and_nothing_else():
    asked = SamplingParams(
        n=3, logprobs=2, prompt_logprobs=1, width=4, cache_salt="s", max_tokens=90, top_k=4
    )
    line = replace(PLAIN, sampling=repeatable(asked, seed=3, most_tokens=20)).as_line()
    assert json.loads(line)["sampling"] == {"top_k": 4, "seed": 3, "max_tokens": 20}
    assert line.endswith("}\n")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{}", "no receipt of format 1"),
        ('{"receipt": 2}', "no receipt of format 1"),
        ('{"receipt": 1}', "not whole ('sampling')"),
        (PLAIN.as_line().replace("[1,2]", '["1",2]'), "token ids are a list of integers"),
        (PLAIN.as_line().replace('"seed":5', '"sead":5'), "did you mean seed"),
        (PLAIN.as_line().replace('"seed":5', '"seed":"5"'), "seed = '5' is not an integer"),
    ],
)
def test_what_is_no_receipt_is_named_with_its_line(tmp_path, line, says):
    path = tmp_path / "receipts.jsonl"
    path.write_text(PLAIN.as_line() + line.strip() + "\n")
    with pytest.raises(BenchError, match="line 2") as caught:
        read_receipts(path)
    assert says in str(caught.value)


def test_an_answer_is_chosen_by_its_id_and_must_be_there(tmp_path):
    path = tmp_path / "receipts.jsonl"
    path.write_text(PLAIN.as_line() + replace(PLAIN, id="b").as_line())
    assert [one.id for one in read_receipts(path, "b")] == ["b"]
    with pytest.raises(BenchError, match="no receipt of the answer 'c'"):
        read_receipts(path, "c")


def lines_of(again, here=PLAIN.fingerprint, receipt=PLAIN):
    replay = Replay([receipt], [again], here)
    return [*replay.lines(), replay.verdict]


def test_a_difference_is_named_with_its_place_and_its_reason():
    other, equal = Repeated((7, 3, 9), "length"), Repeated((7, 8, 9), "length")
    first, second, verdict = lines_of(other)
    assert "token 2 was 8, here 3" in first
    assert "please report it" in second
    assert verdict == "0 of 1 answers were repeated token for token."
    (reason, _, _) = lines_of(other, Fingerprint.of({"weights": "w", "device": "e", "new": "1"}))
    assert "another fingerprint: device was d, here e; new was None, here 1" in reason
    assert lines_of(equal) == ["1 of 1 answers were repeated token for token."]
    fast = replace(PLAIN, fingerprint=Fingerprint(reason="it is fast"))
    assert "no fingerprint: it is fast" in lines_of(other, receipt=fast)[0]
    assert "no fingerprint here: too" in lines_of(other, Fingerprint(reason="too"))[0]
    assert "length after 3" in lines_of(Repeated((7, 8, 9), "stop"))[0], "the end is part of an answer"
    assert lines_of(Repeated(error="gone"))[0] == "failed: a, choice 0: gone"


def test_an_answer_that_does_not_fit_is_named(server):
    long = replace(PLAIN, prompt_ids=(1,) * 200)
    wide = replace(PLAIN, prompt_ids=(1, 9999))
    replay = repeat_here([long, wide], opened(max_model_len=200), lambda done: None)
    (_, first), (_, second) = replay.errors
    assert "203 tokens, but the context here is 200" in first
    assert "outside the vocabulary" in second


def test_receipts_that_cannot_be_written_fail_no_answer(caplog):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

    book = ReceiptBook(Full())
    book._append("line")
    book._append("line")
    assert caplog.text.count("No space left on device") == 1


def test_texts_are_kept_on_request(tmp_path):
    path = tmp_path / "receipts.jsonl"
    with path.open("a") as file, remote_engine(lambda _: spelled(pair.models(), pair.plan())) as engine:
        book = ReceiptBook(file, keeps_texts=True)
        app = make_app(engine, name=pair.NAME, options=ServerOptions(), receipts=book)
        reply = ask(app, "POST", "/v1/completions", json={"prompt": "ab", "return_token_ids": True}).json()
    (receipt,) = read_receipts(path)
    assert receipt.id == reply["id"]
    assert receipt.prompt == "ab"
    assert receipt.text.endswith(reply["choices"][0]["text"]), "special tokens are shown, too"
    assert receipt.token_ids == tuple(reply["choices"][0]["token_ids"])
    assert receipt.fingerprint.reason == "the start has not taken it"


def test_the_command_tells_equal_answers_from_others(server, tmp_path, capsys):
    path, result = tmp_path / "one.jsonl", tmp_path / "result.json"
    path.write_text(server[1].read_text())
    assert main(["replay", str(path), server[0], "--json", str(result)]) == 0
    assert "answers were repeated token for token." in capsys.readouterr().out
    assert json.loads(result.read_text())["different"] == []
    wrong = replace(read_receipts(path)[0], digest="0")
    path.write_text(wrong.as_line())
    assert main(["replay", str(path), server[0]]) == 1
    assert "please report it" in capsys.readouterr().out
    assert main(["replay", str(path), server[0], "--width", "3"]) == 2
    assert main(["replay", str(tmp_path / "none"), server[0]]) == 2
