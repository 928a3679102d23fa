"""A probe tells servers apart, and says why there is nothing to measure."""

import asyncio

import pytest

from blockdraft.bench.endpoint import Switches, probe, read_speculation
from blockdraft.bench.records import PLAIN, SPECULATIVE, Ask, Prompt, Speculation
from blockdraft.errors import BenchError
from tests.bench.stub import MODEL, Stub

KEY = "sk-very-secret"
COUNTERS = (
    'vllm:spec_decode_num_drafts_total{model_name="stub"} 4\n'
    'vllm:spec_decode_num_draft_tokens_total{model_name="stub"} 12\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="stub",position="0"} 3\n'
)


def look(stub, *args, **options):
    with stub.running() as url:
        return asyncio.run(probe(url, *args, **options))


def refusal(stub, *args, **options):
    with pytest.raises(BenchError) as error:
        look(stub, *args, **options)
    return str(error.value).replace(stub.url.removeprefix("http://"), "HOST")


def test_vllm_is_recognised():
    stub = Stub(owner="vllm", routes={"/version": {"version": "0.32.0"}, "/metrics": COUNTERS})
    endpoint = look(stub)
    assert (endpoint.kind, endpoint.version, endpoint.model) == ("vllm", "0.32.0", MODEL)
    assert (endpoint.max_model_len, endpoint.is_metered, endpoint.can_switch) == (4096, True, False)
    assert endpoint.switches == Switches(salt="cache_salt")


def test_sglang_is_recognised_behind_another_name():
    info = {"version": "0.5.9", "mem_fraction_static": 0.8, "speculative_draft_model_path": "z-lab/draft"}
    endpoint = look(Stub(owner="me", routes={"/get_server_info": info}))
    assert (endpoint.kind, endpoint.version, endpoint.drafter) == ("sglang", "0.5.9", "z-lab/draft")
    assert endpoint.switches.keeps_caches_out
    assert not endpoint.is_metered


def test_llama_cpp_is_recognised():
    params = {"temperature": 0.8, "top_k": 40, "n_predict": -1, "seed": 4294967295}
    props = {"build_info": "b9992", "default_generation_settings": {"n_ctx": 8192, "params": params}}
    card = {"id": "qwen", "owned_by": "llamacpp", "aliases": ["q"]}
    endpoint = look(Stub(routes={"/props": props, "/v1/models": {"data": [card]}}), model="q")
    assert (endpoint.kind, endpoint.version, endpoint.max_model_len) == ("llama.cpp", "b9992", 8192)
    assert endpoint.sampling == {"temperature": 0.8, "top_k": 40}
    asked = Ask(prompt=Prompt("p", "c", ("x",)), arm=PLAIN, max_tokens=1, cache_salt="s")
    assert endpoint.switches.fields(asked) == {"cache_prompt": False}


def test_an_unknown_server_is_asked_for_nothing_special():
    endpoint = look(Stub(owner="someone"))
    assert (endpoint.kind, endpoint.version) == ("unknown", None)
    for arm in (PLAIN, SPECULATIVE):
        asked = Ask(prompt=Prompt("p", "c", ("x",)), arm=arm, max_tokens=1, cache_salt="s")
        assert endpoint.switches.fields(asked) == {}
    assert not endpoint.switches.keeps_caches_out


def test_our_own_server_gets_a_salt_where_it_describes_one():
    fields = {"speculative": {}, "cache_salt": {}}
    description = {"components": {"schemas": {"ChatRequest": {"properties": fields}}}}
    endpoint = look(Stub(owner="blockdraft", routes={"/openapi.json": description}))
    assert endpoint.switches == Switches(plain={"speculative": False}, salt="cache_salt")


IDLE = 'vllm:num_requests_running{engine="0",model_name="stub"} 0.0\n'


@pytest.mark.parametrize(
    ("owner", "routes", "expected"),
    [
        ("vllm", {"/metrics": IDLE + COUNTERS}, True),
        ("vllm", {"/metrics": IDLE}, False),
        ("vllm", {"/metrics": "python_info 1.0\n"}, None),  # started not to count
        ("vllm", {}, None),
        ("sglang", {"/get_server_info": {"speculative_algorithm": "DFLASH"}}, True),
        ("sglang", {"/get_server_info": {"speculative_algorithm": None}}, False),
        ("sglang", {"/get_server_info": {}}, None),
        ("someone", {"/metrics": IDLE}, None),
        ("blockdraft", {"/metrics": IDLE + COUNTERS}, None),  # and no word of its drafter
    ],
)
def test_whether_a_server_drafts_is_known_where_it_says_so(owner, routes, expected):
    assert look(Stub(owner=owner, routes=routes)).is_speculative is expected


def test_counters_are_read():
    with Stub(routes={"/metrics": COUNTERS}).running() as url:
        assert asyncio.run(read_speculation(url)) == Speculation(4, 12, (3,))
    with Stub().running() as url:
        assert asyncio.run(read_speculation(url)) is None
    assert asyncio.run(read_speculation("http://127.0.0.1:1")) is None


def test_a_wrong_key_is_said_without_it():
    message = refusal(Stub(api_key="right"), KEY)
    assert message == "HOST does not accept the API key (HTTP 401): wrong key: Bearer ***"
    assert look(Stub(api_key=KEY), KEY).model == MODEL


def test_a_wrong_model_is_said_with_those_there_are():
    assert refusal(Stub(models=("a", "b")), model="c") == "HOST has no model 'c': it serves 'a', 'b'."
    assert refusal(Stub(models=("a", "b"))) == "HOST serves several models: name one of 'a', 'b'."
    assert look(Stub(models=("a", "b")), model="b").model == "b"


@pytest.mark.parametrize("answer", ["<html>Welcome</html>", {"data": "none"}, {}])
def test_what_is_no_such_server_is_said(answer):
    assert refusal(Stub(routes={"/v1/models": answer})).startswith("HOST is no OpenAI-compatible server")


def test_a_server_without_models_is_said():
    assert refusal(Stub(models=())) == "HOST serves no model: load one first."
