"""Requests that do not say how to sample are sampled as the model's makers would."""

import json
import shutil
from dataclasses import replace

import pytest

from blockdraft import LLM, SamplingParams
from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.engine.sampling_defaults import sampling_defaults
from blockdraft.errors import ModelError
from blockdraft.server.api.chat.fields import ChatRequest, CompletionRequest
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from tests import tiny
from tests.server import pair
from tests.server.asking import ask

QWEN = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [2, 3],
    "repetition_penalty": 1.05,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "max_new_tokens": 2048,
}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def test_only_what_says_how_to_sample_is_taken():
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    assert sampling_defaults(QWEN, name="x") == expected
    assert sampling_defaults({}, name="x") == {}
    assert sampling_defaults(SMOLLM2.generation_file, name="default") == {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"temperature": "warm"}, "temperature = 'warm' is not a number"),
        ({"temperature": -1}, "temperature = -1 is outside"),
        ({"top_p": 0}, "top_p = 0.0 leaves no token"),
        ({"top_k": 2.5}, "top_k = 2.5 is not an integer"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0 is outside"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_a_way_out(raw, message):
    with pytest.raises(ModelError) as error:
        sampling_defaults(raw, name="some/model")
    assert str(error.value).startswith(f"'some/model': generation_config.json: {message}")
    assert "--sampling-defaults openai" in str(error.value)


@pytest.mark.parametrize(("kind", "body"), [(ChatRequest, CHAT), (CompletionRequest, {"prompt": "x"})])
def test_what_a_request_says_comes_first(kind, body):
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}

    def sampling(fields, defaults=defaults):
        found = kind.model_validate({**body, **fields}).sampling(defaults)
        return {name: getattr(found, name) for name in (*defaults, "min_p")}

    assert sampling({}) == {**defaults, "min_p": 0.0}
    assert sampling({"temperature": None}) == {**defaults, "min_p": 0.0}
    said = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "min_p": 0.5}
    assert sampling(said) == said
    plain = SamplingParams()
    assert kind.model_validate(body).sampling({}).temperature == plain.temperature == 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "target"
    shutil.copytree(tiny.TARGET, path)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 100.0, "top_k": 1}))
    return path


def test_a_folder_brings_its_own_and_openai_leaves_them_aside(folder):
    models = pair_of(folder)
    assert models.sampling == {"temperature": 100.0, "top_k": 1}
    assert pair_of(folder, sampling_defaults="openai").sampling == {}
    assert pair_of(tiny.TARGET).sampling == {}


def pair_of(target, **settings):
    asked = Settings(model=str(target), draft="none", device="cpu", max_model_len=128, **settings)
    return load_models(asked, lambda _: None)[0]


def test_the_server_and_the_library_take_them(folder):
    """At a temperature of 100 with one candidate the answers are the greedy ones."""
    llm = LLM(str(folder), "none", device="cpu", max_model_len=128)
    assert llm.default_sampling() == SamplingParams(temperature=100.0, top_k=1)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    wanted = llm.generate([[1, 2, 3]], greedy)[0].token_ids
    assert wanted == llm.generate([[1, 2, 3]])[0].token_ids[:12]
    streamed = (token for delta in llm.stream([1, 2, 3]) for token in delta.token_ids)
    assert wanted == tuple(streamed)[:12]
    models = replace(pair.models(), sampling=pair_of(folder).sampling)
    with pair.app_over(models) as app:
        body = {"prompt": [1, 2, 3], "max_tokens": 12, "return_token_ids": True}
        answers = [
            ask(app, "POST", "/v1/completions", json={**body, **said}).json()["choices"][0]["token_ids"]
            for said in ({"temperature": 0}, {}, {"seed": 5})
        ]
        assert answers[0] == answers[1] == answers[2]
        hot = ask(app, "POST", "/v1/completions", json={**body, "top_k": 0, "seed": 5}).json()
        assert hot["choices"][0]["token_ids"] != answers[0]
