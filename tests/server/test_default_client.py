"""OpenAI's client against the default model on a real port. Without the model these tests skip."""

import pytest

from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.settings.settings import Settings, cache_dir
from blockdraft.start.loading import load_models
from tests.server.pair import client_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (cache_dir() / SMOLLM2.gguf).exists(), reason="default model not fetched: blockdraft fetch"
    ),
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def client():
    models, plan = load_models(Settings(device="cpu", width=8, max_model_len=512), lambda _: None)
    with client_of(models, name="default", plan=plan) as client:
        yield client


def ask(client, **fields):
    return client.chat.completions.create(
        **{"model": "default", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 24, **fields}
    )


def test_it_answers_a_question_streamed_and_not(client):
    answer = ask(client, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(ANSWER)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == ANSWER
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_sampling_repeats_with_its_seed(client):
    fields = {"temperature": 1, "seed": 7, "n": 2, "top_p": 0.9, "extra_body": {"top_k": 40, "min_p": 0.01}}
    first, second = ([c.message.content for c in ask(client, **fields).choices] for _ in "ab")
    assert first == second


def test_a_stop_string_a_bias_and_a_penalty(client):
    assert ask(client, stop=["Paris"]).choices[0].message.content == "The capital of France is "
    token = client.post(
        f"http://{client.base_url.netloc.decode()}/tokenize",
        cast_to=object,
        body={"prompt": " Paris", "add_special_tokens": False},
    )["tokens"][0]
    assert "Paris" not in ask(client, logit_bias={str(token): -100}).choices[0].message.content
    ask(client, presence_penalty=1, frequency_penalty=1, extra_body={"repetition_penalty": 1.1})


def test_a_plain_completion_is_scored_and_continued(client):
    answer = client.completions.create(
        model="default", prompt="The capital of France is", max_tokens=2, temperature=0, echo=True, logprobs=1
    )
    assert answer.choices[0].text.startswith("The capital of France is Paris")
    assert answer.choices[0].logprobs.token_logprobs[0] is None


def test_every_route_of_tokens_and_models(client):
    root = f"http://{client.base_url.netloc.decode()}"
    tokens = client.post(f"{root}/tokenize", cast_to=object, body={"messages": QUESTION})["tokens"]
    text = client.post(f"{root}/detokenize", cast_to=object, body={"tokens": tokens})["prompt"]
    assert QUESTION[0]["content"] in text
    assert client.models.retrieve("default").max_model_len == 512


def test_without_speculation_the_words_are_the_same(client):
    plain = ask(client, extra_body={"speculative": False})
    assert plain.choices[0].message.content == ANSWER
    assert plain.metrics["speculative_decoding"] is None
