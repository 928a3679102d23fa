"""The client against a stub whose every figure is known, and against the real server."""

import asyncio
import statistics
import time

import pytest

from blockdraft import __version__
from blockdraft.bench.client import Client
from blockdraft.bench.endpoint import Switches, probe, read_speculation
from blockdraft.bench.records import PLAIN, SPECULATIVE, Ask, Prompt, Speculation
from blockdraft.bench.speculation import difference, read_chunk, read_metrics
from blockdraft.bench.wire import server_root
from blockdraft.errors import BenchError
from tests.bench.stub import MODEL, Script, Stub
from tests.server.asking import listening
from tests.server.pair import NAME, app_over, models

KEY = "sk-very-secret"


def ask(*turns, **fields):
    system = fields.pop("system", None)
    prompt = Prompt(id="p", category="c", turns=turns or ("hello",), system=system)
    return Ask(**{"prompt": prompt, "arm": SPECULATIVE, "max_tokens": 8, **fields})


def converse(url, asked, *, model=MODEL, **options):
    async def run():
        async with Client(url, model, clock=time.perf_counter, **{"timeout_s": 20, **options}) as client:
            return await client.converse(asked)

    return asyncio.run(run())


@pytest.fixture
def stub():
    stub = Stub()
    with stub.running():
        yield stub


def only(stub, asked=None, **options):
    (answer,) = converse(stub.url, asked or ask(), **options)
    return answer


# ---- what is measured


def test_times_are_those_of_the_server(stub):
    stub.script = Script(ttft_s=0.2, gap_s=0.05, num_chunks=9, tokens_per_chunk=3)
    # The machine may be busy with something else: the quickest of three.
    answer = min((only(stub) for _ in range(3)), key=lambda answer: answer.latency_s)
    assert answer.is_ok, answer.error
    assert answer.ttft_s == pytest.approx(0.2, abs=0.03)
    assert len(answer.gaps_s) == 8
    assert statistics.mean(answer.gaps_s) == pytest.approx(0.05, abs=0.005)
    assert answer.tpot_s == pytest.approx(8 * 0.05 / 26, rel=0.1)
    assert answer.latency_s == pytest.approx(0.6, abs=0.05)
    assert answer.planned_s <= answer.sent_s < answer.first_s < answer.end_s


def test_tokens_come_from_usage_and_not_from_chunks(stub):
    stub.script = Script(num_chunks=4, tokens_per_chunk=5, prompt_tokens=17)
    answer = only(stub)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (17, 20, 0)
    assert (answer.text, answer.finish_reason) == ("w0 w1 w2 w3 ", "length")


@pytest.mark.parametrize(
    "fields", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")]
)
def test_thoughts_count_as_text_once(stub, fields):
    stub.script = Script(num_chunks=4, num_thoughts=3, thought_fields=fields)
    answer = only(stub)
    assert (answer.thinking, answer.text, len(answer.gaps_s)) == ("w0 w1 w2 ", "w3 ", 3)


def test_tool_calls_are_timed(stub):
    stub.script = Script(num_chunks=3, num_tool_calls=3)
    answer = only(stub)
    assert answer.is_ok
    assert answer.first_s is not None
    assert len(answer.gaps_s) == 2


def test_first_token_is_the_first_thought(stub):
    stub.script = Script(ttft_s=0.1, gap_s=0.2, num_chunks=2, num_thoughts=1)
    assert only(stub).ttft_s < 0.2


def test_raw_prompts_go_to_completions(stub):
    answer = only(stub, ask("Once upon", is_raw=True))
    assert answer.text == "w0 w1 w2 w3 "
    assert stub.bodies[0]["prompt"] == "Once upon"
    assert "messages" not in stub.bodies[0]


def test_streams_with_carriage_returns_and_keep_alives_are_read(stub):
    for line_end in ("\r\n", "\n: still here\n"):
        stub.script = Script(line_end=line_end)
        assert only(stub).text == "w0 w1 w2 w3 "


# ---- what is asked


def test_turns_carry_the_answers_before_them(stub):
    stub.script = Script(num_chunks=1)
    answers = converse(stub.url, ask("one", "two", "three", system="be kind"))
    assert [(answer.turn, answer.error) for answer in answers] == [(0, None), (1, None), (2, None)]
    assert [answer.planned_s for answer in answers[1:]] == [answer.end_s for answer in answers[:-1]]
    roles = [(message["role"], message["content"]) for message in stub.bodies[2]["messages"]]
    assert roles == [
        ("system", "be kind"),
        ("user", "one"),
        ("assistant", "w0 "),
        ("user", "two"),
        ("assistant", "w0 "),
        ("user", "three"),
    ]


def test_a_conversation_ends_at_its_first_failed_turn(stub):
    stub.script = lambda number, body: Script(status=500, error={}) if number == 1 else Script()
    assert [answer.is_ok for answer in converse(stub.url, ask("one", "two", "three"))] == [True, False]


def test_the_body_says_what_the_ask_says(stub):
    fields = {"temperature": 0.7, "seed": 5, "ignores_eos": True, "thinking": False, "max_tokens": 33}
    only(stub, ask(**fields))
    body = stub.bodies[0]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["temperature"], body["seed"], body["ignore_eos"], body["max_tokens"]) == (0.7, 5, True, 33)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert set(body) & {"cache_salt", "speculative", "cache_prompt"} == set()


def test_switches_turn_speculation_off_and_caches_away(stub):
    stub.script = Script(histogram=(1, 2, 3))
    switches = Switches(plain={"speculative": False}, salt="cache_salt")
    plain = only(stub, ask(arm=PLAIN, cache_salt="a"), switches=switches)
    drafted = only(stub, ask(cache_salt="b"), switches=switches)
    again = only(stub, ask(cache_salt="b"), switches=switches)
    assert [body.get("speculative") for body in stub.bodies] == [False, None, None]
    assert [body["cache_salt"] for body in stub.bodies] == ["a", "b", "b"]
    assert (plain.speculation, drafted.speculation) == (None, Speculation(6, 12, (5, 3)))
    assert [answer.cached_tokens for answer in (plain, drafted, again)] == [0, 0, 9]


def test_a_switch_of_llama_cpp_needs_no_salt_field(stub):
    switches = Switches(uncached={"cache_prompt": False})
    only(stub, ask(cache_salt="x"), switches=switches)
    only(stub, ask(), switches=switches)
    assert [body.get("cache_prompt") for body in stub.bodies] == [False, None]
    assert "cache_salt" not in stub.bodies[0]


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/gate/7", "/gate/7/v1"])
def test_addresses_may_name_the_host_a_prefix_or_the_route(stub, path):
    (answer,) = converse(stub.url + path, ask())
    assert answer.is_ok
    assert server_root(stub.url + path).endswith("/gate/7") == ("gate" in path)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://u:pass@:1/?x=1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(BenchError, match="is not an address") as error:
        server_root(url)
    assert "pass" not in str(error.value)


# ---- what goes wrong


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(status=500, error={"error": {"message": "no\nmemory"}}), "HTTP 500: no memory"),
        (Script(status=429, error={"error": "slow down"}), "HTTP 429: slow down"),
        (Script(status=422, error={"detail": "bad field"}), "HTTP 422: bad field"),
        (Script(status=400, error={"object": "error", "message": "too long"}), "HTTP 400: too long"),
        (Script(failure="break"), "the stream broke off: the connection was closed."),
        (Script(failure="end"), "the stream ended without a finish_reason."),
        (Script(failure="half event"), "the stream broke off inside an event"),
        (Script(failure="error event"), "the server says in the stream: engine died"),
        (Script(failure="no JSON"), "malformed stream: an event is no JSON: '{oops}'"),
        (Script(failure="no event"), "malformed stream: no server-sent event: '<html>'"),
        (Script(failure="no done"), "the stream ended without [DONE]."),
        (Script(failure="no finish"), "the stream ended without a finish_reason."),
        (Script(has_usage=False), "the server sent no usage"),
    ],
)
def test_every_failure_is_an_answer_with_one_clear_line(stub, script, error):
    stub.script = script
    answer = only(stub)
    assert answer.error is not None
    assert answer.error.startswith(error)
    assert "\n" not in answer.error
    assert answer.end_s >= answer.sent_s


def test_what_came_before_a_failure_is_kept(stub):
    stub.script = Script(failure="break", fails_at=3, num_chunks=9)
    answer = only(stub)
    assert (answer.text, len(answer.gaps_s), answer.completion_tokens) == ("w0 w1 w2 ", 2, None)


def test_a_server_that_hangs_is_given_up(stub):
    stub.script = Script(failure="hang")
    answer = only(stub, timeout_s=0.3)
    assert answer.error.endswith("within 0.3 s.")
    assert answer.latency_s == pytest.approx(0.3, abs=0.1)


def test_an_unreachable_server_is_an_answer():
    (answer,) = converse("http://127.0.0.1:1", ask())
    assert answer.error == "cannot connect to 127.0.0.1:1: Connection refused."


def test_an_answer_ends_a_row_of_refusals(stub):
    async def run():
        async with Client(stub.url, MODEL, clock=time.perf_counter) as client:
            client.num_refused = 2
            await client.converse(ask())
            return client.num_refused

    assert asyncio.run(run()) == 0


def test_a_key_is_sent_and_never_shown(stub):
    stub.api_key = KEY
    assert only(stub, api_key=KEY).is_ok
    stub.api_key = "another"  # the stub repeats the key it was given
    assert only(stub, api_key=KEY).error == "HTTP 401: wrong key: Bearer ***"


# ---- drafts, in everybody's words


@pytest.mark.parametrize(
    ("chunk", "found"),
    [
        (
            {"usage": {"spec_verify_ct": 4, "spec_num_correct_drafts": 9, "spec_num_proposed_drafts": 12}},
            Speculation(4, 12, (9,), has_positions=False),
        ),
        (
            {
                "sglext": {
                    "spec_tokens_details": {
                        "spec_verify_ct": 6,
                        "spec_num_correct_drafts": 8,
                        "spec_num_proposed_drafts": 12,
                        "spec_correct_drafts_histogram": [1, 2, 3],
                    }
                }
            },
            Speculation(6, 12, (5, 3)),
        ),
        (
            {"timings": {"predicted_n": 20, "draft_n": 16, "draft_n_accepted": 12}},
            Speculation(7, 16, (12,), has_positions=False),
        ),
        ({"timings": {"predicted_n": 20}}, None),
        ({"metrics": {"speculative_decoding": None}, "usage": {"completion_tokens": 3}}, None),
    ],
)
def test_drafts_are_read_from_chunks(chunk, found):
    assert read_chunk(chunk) == found


VLLM = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 5.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="b"} 1000.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 45.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="1"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="2"} 2.0
"""
SGLANG = """sglang:spec_verify_calls_total{model_name="a"} 40
sglang:generation_tokens_total{model_name="a"} 130
sglang:num_requests_total{model_name="a"} 10
sglang:spec_num_draft_tokens{model_name="a"} 8
sglang:spec_accept_length{model_name="a"} NaN
"""


def test_drafts_are_read_from_counters():
    assert read_metrics(VLLM, "a") == Speculation(15, 45, (12, 6, 2))
    assert read_metrics(SGLANG) == Speculation(40, 280, (80,), has_positions=False)
    assert read_metrics("vllm:num_requests_running 1\nnonsense\n") is None


def test_counters_are_subtracted_unless_the_server_began_anew():
    before, after = Speculation(10, 30, (8, 2)), Speculation(15, 45, (12, 3, 1))
    assert difference(before, after) == Speculation(5, 15, (4, 1, 1))
    assert difference(Speculation(0, 0, (0,), has_positions=False), after) == after
    assert difference(after, before) is None
    assert difference(None, after) is None


# ---- the real server


def test_the_real_server_is_measured_with_and_without_speculation():
    with app_over(models()) as app, listening(app) as (host, port):
        url = f"http://{host}:{port}"
        assert asyncio.run(read_speculation(url, model=NAME)).steps == 0
        endpoint = asyncio.run(probe(f"{url}/v1"))
        assert (endpoint.kind, endpoint.version, endpoint.model) == ("blockdraft", __version__, NAME)
        assert (endpoint.max_model_len, endpoint.can_switch, endpoint.is_metered) == (512, True, True)
        assert (endpoint.title, endpoint.drafter) == ("target", "draft")  # of the pair, without the way there
        assert (endpoint.is_speculative, endpoint.notices) == (True, ())
        options = {"model": NAME, "switches": endpoint.switches}
        asked = ask("t1 t2 t3", max_tokens=24, ignores_eos=True, cache_salt="salt")
        (drafted,) = converse(url, asked, **options)
        (plain,) = converse(url, ask("t1 t2 t3", arm=PLAIN, max_tokens=24, ignores_eos=True), **options)
        (raw,) = converse(url, ask("t1 t2 t3", is_raw=True), **options)
    assert (drafted.error, plain.error, raw.error) == (None, None, None)
    assert drafted.text == plain.text != ""
    assert (drafted.completion_tokens, drafted.finish_reason, plain.speculation) == (24, "length", None)
    speculation = drafted.speculation
    # The prompt gives the first token; the last step may commit more than the answer still takes.
    assert 23 <= speculation.steps + sum(speculation.accepted) < 24 + 16
    assert len(drafted.gaps_s) < len(plain.gaps_s) == 23
    assert raw.completion_tokens == 8
