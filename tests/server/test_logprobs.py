"""Log-probabilities of tokens that are parts of a character, as OpenAI's client and lm-eval read them."""

import asyncio
import json
from dataclasses import replace

import openai
import pytest
import tokenizers
from tokenizers import decoders

from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.engine.request import Delta, TokenLogprobs
from blockdraft.engine.streams import EventLoopOutlet, Stream
from blockdraft.server.api.chat import answers
from blockdraft.server.api.chat.answers import TextAnswer
from blockdraft.server.api.chat.fields import CompletionRequest
from blockdraft.server.api.chat.logprobs import TextOffsets, text_logprobs
from blockdraft.server.api.fields import parse
from blockdraft.server.api.streaming import AnswerEvents, respond
from blockdraft.server.http.large_json import in_slices
from blockdraft.text.tokenizer import Tokenizer
from tests.server.pair import NAME, byte_tokenizer, client_of, models

ASKED = {"model": NAME, "prompt": [1, 2, 3], "temperature": 0, "max_tokens": 5, "logprobs": 12}
TEXT = "\N{GRINNING FACE} x \ufffd y"
TOKENS = ["bytes:\\xf0\\x9f", "bytes:\\x98\\x80", " x", "bytes: \\xe2\\x82", " y"]


@pytest.fixture(scope="module")
def client():
    with client_of(replace(models(), tokenizer=byte_tokenizer())) as client:
        yield client


def test_each_token_has_a_name_of_its_own_and_the_likeliest_keeps_its_value(client):
    choice = client.completions.create(**ASKED).choices[0]
    assert choice.text == TEXT
    assert choice.logprobs.tokens == TOKENS
    rows = zip(TOKENS, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True)
    for token, logprob, top in rows:
        assert len(top) == 12
        assert max(top, key=top.get) == token  # lm-eval's test of greedy
        assert top[token] == logprob


def test_offsets_are_those_of_the_text_streamed_and_not(client):
    whole = client.completions.create(**ASKED).choices[0]
    assert whole.logprobs.text_offset == [0, 0, 1, 3, 5]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**ASKED, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == TEXT
    streamed = [offset for chunk in chunks if chunk.logprobs for offset in chunk.logprobs.text_offset]
    assert streamed == whole.logprobs.text_offset


def test_offsets_of_an_echo_count_the_characters_of_the_prompt(client):
    choice = client.completions.create(**{**ASKED, "prompt": [9, 4, 5, 62, 10]}, echo=True).choices[0]
    assert choice.text.startswith(" t9\N{GRINNING FACE} t10")
    assert choice.logprobs.text_offset[:6] == [0, 3, 3, 4, 4, 8]


def test_chat_gives_the_bytes_themselves(client):
    asked = {"model": NAME, "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    messages = [{"role": "user", "content": "Ġt1 Ġt2 Ġt3"}]
    answer = client.chat.completions.create(**asked, messages=messages)
    entries = answer.choices[0].logprobs.content
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw == "\N{GRINNING FACE} x ".encode() + b"\xe2\x82 y"
    assert [entry.token for entry in entries] == [token.removeprefix("bytes:") for token in TOKENS]
    assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in entries)


def test_a_space_that_only_the_beginning_of_a_text_loses_is_part_of_a_name():
    """Decoders of SentencePiece drop it: alone, two tokens would have one name."""
    vocabulary = {"▁the": 0, "the": 1, "<0xE2>": 2, "▁a": 3}
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="the"))
    spaces = decoders.Replace("▁", " ")
    rust.decoder = decoders.Sequence(
        [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(TokenizerParts(rust, None, None, None, ()))
    items = [(0, TokenLogprobs(0, -1.0, ((1, -0.5), (0, -1.0)))), (3, TokenLogprobs(3, -2.0, ((2, -0.1),)))]
    offsets = TextOffsets(tokenizer, [])
    found = text_logprobs(items, num_top=2, offsets=offsets, tokenizer=tokenizer)
    assert found["top_logprobs"] == [{"the": -0.5, " the": -1.0}, {"bytes:\\xe2": -0.1, " a": -2.0}]
    assert found["text_offset"] == [0, 3]


# ---- answers that are large


def scored_answer(num_prompts, num_tokens, **fields):
    """An answer that echoes prompts with their log-probabilities, and the streams that bring them."""
    tokenizer, ids = models().tokenizer, [number % 60 for number in range(num_tokens)]
    body = {"prompt": [ids] * num_prompts, "echo": True, "logprobs": 5, "max_tokens": 0, **fields}
    asked = parse(CompletionRequest, json.dumps(body).encode())
    answer = TextAnswer(
        asked,
        head={"id": "cmpl-1", "created": 1, "model": NAME, "system_fingerprint": "bd-1"},
        tokenizer=tokenizer,
        prompts=[ids] * num_prompts,
        texts=[tokenizer.decode(ids)] * num_prompts,
    )
    scores = [TokenLogprobs(token, -1.5, tuple((token + k, -k / 7) for k in range(5))) for token in ids]
    scored = (None, *scores[1:])
    delta = Delta("r", 0, "", (1,), prompt_logprobs=scored, finish_reason="length", ends_request=True)
    outlet = EventLoopOutlet(asyncio.get_running_loop())
    streams = [Stream(f"r{number}", outlet, lambda request_id: None) for number in range(num_prompts)]
    for stream in streams:
        stream.put(delta)
    return answer, streams


async def body_of(response):
    if isinstance(response, AnswerEvents):
        text = response.events.first
        while not response.events.is_over:
            text += await response.events.next_text()
        return text
    return response.body.decode()


async def num_turns(work):
    """The result, and how often the event loop came round meanwhile."""
    turns, is_over = 0, False

    async def tick():
        nonlocal turns
        while not is_over:
            turns += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.ensure_future(tick())
    await asyncio.sleep(0.01)
    before = turns
    found = await work
    is_over = True
    await ticking
    return found, turns - before


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_the_event_loop_goes_on_while_a_large_answer_is_written(is_stream):
    async def write():
        writer, streams = scored_answer(6, 2000)
        return await body_of(await respond(writer, streams, is_stream=is_stream))

    async def watched():
        return await num_turns(write())

    text, turns = asyncio.run(watched())
    assert text.count('"top_logprobs"') == 6
    assert turns > 10


def test_a_large_answer_says_what_a_small_one_does(monkeypatch):
    async def answer():
        writer, streams = scored_answer(2, 900)
        whole = json.loads(await body_of(await respond(writer, streams, is_stream=False)))
        writer, streams = scored_answer(2, 900, stream=True)
        events = (await body_of(await respond(writer, streams, is_stream=True))).split("\n\n")
        expected, streams = scored_answer(2, 900)
        monkeypatch.setattr(answers, "LARGE_ANSWER", 1 << 30)
        for prompt, stream in enumerate(streams):
            expected.take(prompt, stream.take())
        return whole, events, expected.whole()

    whole, events, expected = asyncio.run(answer())
    assert whole == json.loads(json.dumps(expected))
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert events[-2:] == ["data: [DONE]", ""]
    assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [
        choice["logprobs"] for choice in whole["choices"]
    ]


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": []},
        [1.5, None, True, '\u00e9\n"'],
        list(range(700)),
        {"a": [{"b": (1, 2)}] * 300},
        [[[]] * 257],
    ],
    ids=str,
)
def test_json_in_slices_is_json(value):
    assert "".join(in_slices(value)) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True, "logprobs": 20}, "logprobs"), ({"prompt_logprobs": 20}, "prompt_logprobs")],
)
def test_more_log_probabilities_than_an_answer_may_hold_are_refused(client, fields, param):
    asked = {"model": NAME, "prompt": [[1] * 400] * 64, "max_tokens": 0, "extra_body": fields}
    with pytest.raises(openai.BadRequestError, match="fewer prompts") as caught:
        client.completions.create(**asked)
    assert caught.value.param == param
