"""OpenAI's own client drives the server on a real port: every route and parameter, streamed and not."""

import functools
import json
from dataclasses import replace

import openai
import pytest
from pydantic import TypeAdapter

from blockdraft import __version__
from blockdraft.server.api.chat import schemas
from tests.server.pair import NAME, OPENING, PAIR, client_of, models, thinking_tokenizer

MESSAGES = [{"role": "user", "content": "t1 t2 t3"}]
CHAT = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 5}
TEXT = {"model": NAME, "prompt": "t1 t2 t3", "temperature": 0, "max_tokens": 5}
COUNT = " t4 t5 t6 t7 t8"


@pytest.fixture(scope="module")
def client():
    with client_of(models()) as client:
        yield client


def thinking_models(template=None):
    return replace(models(), tokenizer=thinking_tokenizer(template))


@pytest.fixture(scope="module")
def thinker():
    with client_of(thinking_models()) as client:
        yield client


@pytest.fixture(scope="module")
def opened_thinker():
    with client_of(thinking_models(OPENING)) as client:
        yield client


def chat(client, **fields):
    """A chat completion, checked against its described shape."""
    raw = client.chat.completions.with_raw_response.create(**{**CHAT, **fields})
    check_shape(schemas.ChatCompletion, json.loads(raw.text))
    return raw.parse()


def complete(client, **fields):
    raw = client.completions.with_raw_response.create(**{**TEXT, **fields})
    check_shape(schemas.TextCompletion, json.loads(raw.text))
    return raw.parse()


def chat_chunks(client, **fields):
    chunks = list(client.chat.completions.create(**{**CHAT, "stream": True, **fields}))
    for chunk in chunks:
        check_shape(schemas.ChatChunk, chunk.to_dict(exclude_unset=True))
    return chunks


def text_chunks(client, **fields):
    chunks = list(client.completions.create(**{**TEXT, "stream": True, **fields}))
    for chunk in chunks:
        check_shape(schemas.TextChunk, chunk.to_dict(exclude_unset=True))
    return chunks


adapter = functools.cache(TypeAdapter)


def check_shape(kind, value):
    adapter(kind).validate_python(value, extra="forbid")


def joined(chunks, field="content", index=0):
    choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
    return "".join(getattr(c.delta, field, None) or "" for c in choices)


def texts(chunks, index=0):
    return "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)


# ---- models and tokens


def test_models(client):
    assert [card.id for card in client.models.list()] == [NAME]
    card = client.models.retrieve(NAME)  # the name has a slash
    assert (card.id, card.max_model_len) == (NAME, 512)
    assert card.root == str(PAIR / "target")  # as it was given
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other/model")


def post(client, path, body):
    return client.post(f"http://{client.base_url.netloc.decode()}{path}", cast_to=object, body=body)


def get(client, path):
    return client.get(f"http://{client.base_url.netloc.decode()}{path}", cast_to=object)


def test_tokenize_and_detokenize_are_inverse(client):
    answer = post(client, "/tokenize", {"model": NAME, "prompt": "t1 t2 t3", "return_token_strs": True})
    assert answer == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [1, 2, 3],
        "token_strs": [" t1", " t2", " t3"],
    }
    assert post(client, "/tokenize", {"messages": MESSAGES})["tokens"] == [1, 2, 3]
    assert post(client, "/tokenize", {"messages": MESSAGES})["token_strs"] is None
    assert post(client, "/detokenize", {"tokens": [1, 2, 62]}) == {"prompt": " t1 t2<eos>"}


def test_tokenize_knows_the_generation_prompt(opened_thinker):
    for is_added, tokens in ((True, [1, 2, 3]), (False, [1, 2])):
        body = {"messages": [{"role": "user", "content": "t1 t2"}], "add_generation_prompt": is_added}
        assert post(opened_thinker, "/tokenize", body)["tokens"] == tokens


def test_the_server_tells_how_it_is(client):
    assert get(client, "/live") == get(client, "/health") == {"status": "ok"}
    assert get(client, "/ping") == {"status": "ok"}
    assert get(client, "/ready")["state"] == "ready"
    assert get(client, "/version") == {"version": __version__}
    assert get(client, "/server_info") == {"served_model_name": NAME, "version": __version__}


# ---- chat


def test_a_chat_completion(client):
    answer = chat(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        COUNT,
        "length",
    )
    assert not hasattr(choice.message, "reasoning_content")
    assert answer.model == NAME
    assert answer.usage.to_dict() == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1, "seed": 5, "max_tokens": 30},
        {"temperature": 1.5, "seed": 5, "n": 3, "max_completion_tokens": 20},
        {"stop": ["t7"]},
        {
            "temperature": 1,
            "seed": 1,
            "presence_penalty": 1,
            "frequency_penalty": 0.5,
            "logit_bias": {"9": 5},
        },
        {"temperature": 1, "seed": 2, "top_p": 0.9, "extra_body": {"top_k": 5, "min_p": 0.01}},
        {"extra_body": {"speculative": False}},
        {"extra_body": {"speculative": {"width": 3, "detail": True}}},
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(client, fields):
    whole = chat(client, **fields)
    chunks = chat_chunks(client, **fields)
    for choice in whole.choices:
        assert joined(chunks, index=choice.index) == choice.message.content
        last = [c for chunk in chunks for c in chunk.choices if c.index == choice.index][-1]
        assert last.finish_reason == choice.finish_reason


def test_usage_runs_along_when_asked(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chat_chunks(client, stream_options=options, extra_body={"speculative": False})
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == [0, 1, 2, 3, 4, 5, 5]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
    assert all(chunk.usage.prompt_tokens == 3 for chunk in chunks)


def test_cached_prompt_tokens_are_counted(client):
    long = [{"role": "user", "content": " ".join(f"t{i % 50}" for i in range(100))}]
    chat(client, messages=long)
    assert chat(client, messages=long).usage.prompt_tokens_details.cached_tokens > 0


def test_a_salt_keeps_prompts_apart(client):
    long = [{"role": "user", "content": " ".join(f"t{(7 * i + 3) % 50}" for i in range(100))}]

    def cached(salt):
        answer = chat(client, messages=long, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(salt) > 0 for salt in (None, "a", "a", "b", None)] == [False, False, True, False, True]


def test_logprobs(client):
    entries = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [entry.token for entry in entries] == COUNT.replace(" ", "| ").split("|")[1:]
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert all(entry.top_logprobs[0].logprob == entry.logprob <= 0 for entry in entries)
    assert bytes(entries[0].bytes) == b" t4"
    chunks = chat_chunks(client, logprobs=True, top_logprobs=3)
    streamed = [e for c in chunks for choice in c.choices if choice.logprobs for e in choice.logprobs.content]
    assert [e.to_dict() for e in streamed] == [e.to_dict() for e in entries]


def test_prompt_logprobs_and_token_ids(client):
    answer = chat(client, extra_body={"prompt_logprobs": 2, "return_token_ids": True})
    assert answer.prompt_token_ids == [1, 2, 3]
    assert answer.choices[0].token_ids == [4, 5, 6, 7, 8]
    first, second, third = answer.prompt_logprobs
    assert first is None
    assert second["2"]["decoded_token"] == " t2"
    assert third["3"]["rank"] in (1, 2, None)
    assert {entry["rank"] for entry in third.values()} >= {1, 2}
    chunks = chat_chunks(client, extra_body={"return_token_ids": True})
    assert chunks[0].prompt_token_ids == [1, 2, 3]
    assert [t for c in chunks for t in getattr(c.choices[0], "token_ids", [])] == [4, 5, 6, 7, 8]


def test_a_stop_string_can_stay_and_is_named(client):
    answer = chat(client, stop=" t6", extra_body={"include_stop_str_in_output": True})
    assert answer.choices[0].message.content == " t4 t5 t6"
    assert answer.choices[0].stop_reason == " t6"
    assert chat(client, extra_body={"stop_token_ids": [6]}).choices[0].stop_reason == 6


@pytest.mark.parametrize("stop", ["", [""], ["", " t6"]])
def test_an_empty_stop_string_stops_nothing(client, stop):
    expected = " t4 t5" if " t6" in stop else COUNT
    assert chat(client, stop=stop).choices[0].message.content == expected
    assert complete(client, stop=stop).choices[0].text == expected


def test_special_tokens_can_be_shown(client):
    fields = {"logit_bias": {"63": 100}, "max_tokens": 2}
    assert chat(client, **fields).choices[0].message.content == ""
    shown = chat(client, **fields, extra_body={"skip_special_tokens": False})
    assert shown.choices[0].message.content == "<mask><mask>"


def test_the_final_message_can_be_continued(client):
    messages = [*MESSAGES, {"role": "assistant", "content": "t4 t5"}]
    answer = chat(client, messages=messages, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content == " t6 t7 t8 t9 t10"


@pytest.fixture(scope="module")
def templated():
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{{ more }} {{ reasoning_effort }}"
    with client_of(thinking_models(template)) as client:
        yield client


def test_template_arguments_reach_the_template(templated):
    def prompt(**extra):
        messages = [{"role": "user", "content": "t1 t2"}]
        body = {**extra, "return_token_ids": True}
        return chat(templated, messages=messages, extra_body=body).prompt_token_ids

    assert prompt(chat_template_kwargs={"more": "t7 t8"}) == [1, 2, 7, 8]
    assert prompt() == [1, 2]
    # An effort is no word of this tokenizer: it becomes the unknown token, and is seen to arrive.
    assert len(prompt(reasoning_effort="high")) == len(prompt(reasoning_effort="none")) + 1


def test_markup_in_a_message_is_text_unless_it_is_asked_for(client):
    messages = [{"role": "user", "content": "t1 <eos> t2"}]

    def prompt(**extra):
        body = {**extra, "return_token_ids": True}
        return chat(client, messages=messages, extra_body=body).prompt_token_ids

    assert prompt() == [1, 0, 0, 2]  # two words that the tokenizer does not know
    assert prompt(split_special_tokens=False) == [1, 62, 2]
    assert post(client, "/tokenize", {"messages": messages})["tokens"] == [1, 0, 0, 2]
    body = {"messages": messages, "split_special_tokens": False}
    assert post(client, "/tokenize", body)["tokens"] == [1, 62, 2]
    assert post(client, "/tokenize", {"prompt": "t1 <eos> t2"})["tokens"] == [1, 62, 2], "a raw prompt"


# ---- plain completions


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("t1 t2 t3", [COUNT]),
        ([1, 2, 3], [COUNT]),
        (["t1 t2 t3", "t20 t21"], [COUNT, " t22 t23 t24 t25 t26"]),
        ([[1, 2, 3], [20, 21]], [COUNT, " t22 t23 t24 t25 t26"]),
    ],
)
def test_prompts_of_all_four_kinds(client, prompt, expected):
    answer = complete(client, prompt=prompt)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert answer.usage.completion_tokens == 5 * len(expected)
    assert answer.usage.prompt_tokens == (3 if len(expected) == 1 else 5)
    chunks = text_chunks(client, prompt=prompt, stream_options={"include_usage": True})
    assert [texts(chunks, index) for index in range(len(expected))] == expected
    assert chunks[-1].usage.to_dict() == {
        **answer.usage.to_dict(),
        "prompt_tokens_details": chunks[-1].usage.prompt_tokens_details.to_dict(),
    }


def test_no_tokens_are_given_where_none_are_asked_for(client):
    answer = complete(client, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage.completion_tokens == 0
    assert texts(text_chunks(client, max_tokens=0)) == ""


def test_each_prompt_has_n_choices(client):
    fields = {"prompt": ["t1 t2", "t9"], "n": 2, "temperature": 1.5, "seed": 4, "max_tokens": 12}
    whole = complete(client, **fields, best_of=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    alone = complete(client, **{**fields, "prompt": "t9"})
    assert [c.text for c in whole.choices[2:]] == [c.text for c in alone.choices]
    chunks = text_chunks(client, **fields)
    assert [texts(chunks, index) for index in range(4)] == [c.text for c in whole.choices]


def test_sixteen_tokens_unless_told_otherwise(client):
    answer = client.completions.create(model=NAME, prompt="t1", temperature=0)
    assert answer.usage.completion_tokens == 16


def test_echo_repeats_the_prompt(client):
    assert complete(client, echo=True).choices[0].text == "t1 t2 t3" + COUNT
    assert complete(client, prompt=[1, 2, 3], echo=True).choices[0].text == " t1 t2 t3" + COUNT
    assert texts(text_chunks(client, echo=True)) == "t1 t2 t3" + COUNT


def test_legacy_logprobs(client):
    logprobs = complete(client, logprobs=2).choices[0].logprobs
    assert "".join(logprobs.tokens) == COUNT
    assert logprobs.text_offset == [0, 3, 6, 9, 12]
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 2
    chunks = text_chunks(client, logprobs=2, extra_body={"speculative": False})
    pieces = [c.logprobs for chunk in chunks for c in chunk.choices]
    assert len(pieces) == 5
    assert [o for piece in pieces for o in piece.text_offset] == logprobs.text_offset
    assert [t for piece in pieces for t in piece.token_logprobs] == logprobs.token_logprobs


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_prompt_can_be_scored(client, max_tokens):
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "prompt": [1, 2, 3]}
    (choice,) = complete(client, **fields).choices
    assert choice.logprobs.tokens == [" t1", " t2", " t3", " t4", " t5"][: 3 + max_tokens]
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert choice.text == "".join(choice.logprobs.tokens)
    assert choice.finish_reason == "length"
    pieces = [c.logprobs for chunk in text_chunks(client, **fields) for c in chunk.choices]
    assert [value for piece in pieces for value in piece.token_logprobs] == choice.logprobs.token_logprobs
    assert complete(client, **fields).usage.completion_tokens == max_tokens


# ---- thoughts


def test_thoughts_are_kept_apart(thinker):
    fields = {"messages": [{"role": "user", "content": "t1 t2"}], "max_tokens": 7}
    answer = chat(thinker, **fields)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.reasoning) == (" t4 t5 ", " t4 t5 ")
    assert message.content == " t7 t8 t9"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    chunks = chat_chunks(thinker, **fields)
    assert joined(chunks, "reasoning_content") == joined(chunks, "reasoning") == " t4 t5 "
    assert joined(chunks) == " t7 t8 t9"


def test_thoughts_that_the_template_opens(opened_thinker):
    fields = {"messages": [{"role": "user", "content": "t1 t2"}]}
    answer = chat(opened_thinker, **fields)
    assert answer.choices[0].message.reasoning_content == " t4 t5 "
    assert answer.choices[0].message.content == " t7 t8"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    chunks = chat_chunks(opened_thinker, **fields)
    assert (joined(chunks, "reasoning"), joined(chunks)) == (" t4 t5 ", " t7 t8")


def test_thoughts_that_do_not_end_leave_no_content(opened_thinker):
    message = (
        chat(opened_thinker, max_tokens=2, messages=[{"role": "user", "content": "t1 t2"}]).choices[0].message
    )
    assert (message.reasoning_content, message.content) == (" t4 t5", None)


def test_thoughts_can_be_left_out(opened_thinker):
    fields = {"messages": [{"role": "user", "content": "t1 t2"}], "extra_body": {"include_reasoning": False}}
    message = chat(opened_thinker, **fields).choices[0].message
    assert message.content == " t7 t8"
    assert not hasattr(message, "reasoning_content")
    assert joined(chat_chunks(opened_thinker, **fields), "reasoning") == ""


def test_a_continued_message_may_stop_inside_its_thoughts(thinker):
    messages = [{"role": "user", "content": "t1"}, {"role": "assistant", "content": "t2 <think> t4"}]
    message = chat(thinker, messages=messages, extra_body={"continue_final_message": True}).choices[0].message
    assert (message.reasoning_content, message.content) == (" t5 ", " t7 t8 t9")


# ---- speculation


def test_every_answer_says_how_its_drafts_fared(client):
    answer = chat(client, max_tokens=40)
    metrics = answer.metrics
    assert metrics["tokens_per_second"] > 0
    assert metrics["time_to_first_token_ms"] > 0
    spec = metrics["speculative_decoding"]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    weighted = sum(i * count for i, count in enumerate(spec["acceptance_histogram"]))
    assert weighted == spec["num_accepted_draft_tokens"] > 0
    assert len(spec["acceptance_histogram"]) == spec["num_spec_tokens"] + 1
    assert len(spec["reached_by_position"]) == spec["num_spec_tokens"]
    assert sum(spec["reached_by_position"]) >= weighted
    assert spec["mean_acceptance_length"] == pytest.approx(1 + weighted / spec["num_spec_steps"], abs=1e-3)
    assert spec["draft_acceptance_rate"] == pytest.approx(weighted / spec["num_draft_tokens"], abs=1e-3)
    for options, where in (({}, -1), ({"stream_options": {"include_usage": True}}, -1)):
        chunks = chat_chunks(client, max_tokens=40, **options)
        assert chunks[where].metrics["speculative_decoding"] == spec
        assert not any(hasattr(chunk, "metrics") for chunk in chunks[:where])
    assert complete(client).metrics["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize(
    ("speculative", "num_spec_tokens"), [(False, None), ({"width": 1}, None), ({"width": 4}, 3)]
)
def test_speculation_is_set_per_request(client, speculative, num_spec_tokens):
    answer = chat(client, max_tokens=20, extra_body={"speculative": speculative})
    assert answer.choices[0].message.content == chat(client, max_tokens=20).choices[0].message.content
    spec = answer.metrics["speculative_decoding"]
    assert (spec and spec["num_spec_tokens"]) == num_spec_tokens


@pytest.mark.parametrize("fields", [{}, {"stop": " t22"}, {"temperature": 1, "seed": 3}, {"n": 2, "seed": 1}])
def test_draft_detail_marks_every_token(client, fields):
    fields = {"max_tokens": 30, **fields, "extra_body": {"speculative": {"detail": True}}}
    answer = chat(client, **fields)
    chunks = chat_chunks(client, **fields)
    for choice in answer.choices:
        steps = choice.message.draft
        text = "".join(token for step in steps for token in step["tokens"])
        assert text.startswith(choice.message.content)  # a stop string is cut from the content only
        assert all(step["accepted"] == len(step["tokens"]) - 1 for step in steps[:-1])
        assert 0 <= steps[-1]["accepted"] <= len(steps[-1]["tokens"])
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert [c.draft for c in mine if hasattr(c, "draft")] == steps
    if len(answer.choices) == 1:
        accepted = [step["accepted"] for step in answer.choices[0].message.draft]
        spec = answer.metrics["speculative_decoding"]
        assert spec["per_step_accepted"] == [
            len(step["tokens"]) - 1 for step in answer.choices[0].message.draft
        ]
        assert sum(spec["per_step_accepted"]) == spec["num_accepted_draft_tokens"] <= sum(accepted)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 20])
def test_figures_count_the_tokens_that_were_delivered(client, max_tokens):
    answer = chat(client, max_tokens=max_tokens)
    metrics, spec = answer.metrics, answer.metrics["speculative_decoding"]
    assert answer.usage.completion_tokens == max_tokens
    if spec is None:
        assert metrics["tokens_per_step"] == 1
        return
    assert spec["mean_acceptance_length"] == metrics["tokens_per_step"]
    assert spec["num_accepted_draft_tokens"] + spec["num_spec_steps"] == max_tokens
    assert spec["num_accepted_draft_tokens"] <= spec["num_draft_tokens"]


def test_the_figures_of_several_choices_are_summed(client):
    one, two = chat(client, max_tokens=30).metrics, chat(client, max_tokens=30, n=2).metrics
    for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert two["speculative_decoding"][name] == 2 * one["speculative_decoding"][name] > 0
    assert two["tokens_per_step"] == one["tokens_per_step"] > 1
    assert two["generation_time_ms"] > 0
    chunks = chat_chunks(client, max_tokens=30, n=2)
    assert chunks[-1].metrics["tokens_per_step"] == two["tokens_per_step"]
    assert sum(hasattr(chunk, "metrics") for chunk in chunks) == 1


def test_an_answer_of_no_token_has_no_figures(client):
    assert complete(client, max_tokens=0, echo=True).metrics is None


def test_an_answer_cut_inside_its_last_block_ends_with_accepted_drafts(client):
    answer = chat(client, max_tokens=2, extra_body={"speculative": {"detail": True}})
    assert answer.choices[0].message.draft[-1] == {"tokens": [" t5"], "accepted": 1}


# ---- ids and errors


def test_a_request_id_comes_back(client):
    raw = client.chat.completions.with_raw_response.create(**CHAT, extra_headers={"X-Request-Id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().id == "chatcmpl-mine-1"
    raw = client.chat.completions.with_raw_response.create(**CHAT, extra_body={"request_id": "body-1"})
    assert (raw.headers["x-request-id"], raw.parse().id) == ("body-1", "chatcmpl-body-1")
    raw = client.chat.completions.with_raw_response.create(**CHAT, extra_headers={"X-Request-Id": "a b"})
    assert raw.headers["x-request-id"] not in ("", "a b")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "t1"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [64]}, "prompt"),
        ({"prompt": ["t1"] * 129}, "prompt"),
        ({"prompt": [1] * 600}, "prompt"),
        ({"suffix": "t9"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ],
)
def test_a_refused_completion_names_the_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**TEXT, **fields})
    assert caught.value.param == param


def test_a_prompt_past_the_context_has_the_code_that_agents_look_for(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**TEXT, "prompt": [1] * 512})
    assert caught.value.code == "context_length_exceeded"
    # LiteLLM and agents know the case by these words.
    assert "This model's maximum context length is 512 tokens. However, " in caught.value.message
    assert "512 tokens" in caught.value.message.partition("However")[2]
    assert complete(client, prompt=[1] * 511).usage.completion_tokens == 1
