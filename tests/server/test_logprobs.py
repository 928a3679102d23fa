"""Log-probabilities of tokens that are parts of a character, as OpenAI's client and lm-eval read them."""

from dataclasses import replace

import pytest
import tokenizers
from tokenizers import decoders

from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.engine.request import TokenLogprobs
from blockdraft.server.logprobs import TextOffsets, text_logprobs
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
