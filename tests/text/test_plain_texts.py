"""Texts of single tokens against the tokenizer's own decode: for every id, and in random sequences."""

from __future__ import annotations

import functools
import random

import pytest
from tokenizers import Regex, decoders
from tokenizers import Tokenizer as RustTokenizer

from blockdraft.checkpoints.dummy import byte_tokenizer
from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.text.detokenizer import Detokenizer
from blockdraft.text.plain_texts import PlainTexts
from blockdraft.text.tokenizer import Tokenizer
from tests.text import test_detokenizer as made
from tests.tiny import TARGET

KINDS = (*made.KINDS, "tokens per byte", "tests' pair", "default model")


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind in made.KINDS:
        return made.tokenizer_of(kind)
    if kind == "tokens per byte":
        return Tokenizer(byte_tokenizer(300))
    source = TARGET if kind == "tests' pair" else "default"
    return Tokenizer(open_checkpoint(source).tokenizer_parts())


@functools.cache
def without_table(kind: str) -> Tokenizer:
    """The same tokenizer, read through its decode alone."""
    tokenizer = tokenizer_of(kind)
    other = Tokenizer(TokenizerParts(tokenizer._tokenizer, None, None, None, ()))
    other.plain_texts = PlainTexts(lambda token_id: None)
    return other


def with_decoder(decoder: object, kind: str = "bpe") -> Tokenizer:
    rust = RustTokenizer.from_str(tokenizer_of(kind)._tokenizer.to_str())
    rust.decoder = decoder
    return Tokenizer(TokenizerParts(rust, None, None, None, ()))


def texts_of(tokenizer: Tokenizer) -> dict[int, str]:
    """The table, filled for every id and a few past the end."""
    found = {i: tokenizer.plain_texts[i] for i in range(tokenizer.vocab_size + 4)}
    return {token_id: text for token_id, text in found.items() if text is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_every_plain_token_adds_its_text_after_any_whole_character(kind: str):
    tokenizer = tokenizer_of(kind)
    texts = texts_of(tokenizer)
    assert len(texts) > 15, "the table is in use"
    draw, all_ids = random.Random(kind), list(texts)
    for token_id, text in texts.items():
        before = draw.choices(all_ids, k=draw.choice((1, 1, 2, 5)))
        expected = tokenizer.decode([*before, token_id], skip_special_tokens=False)
        assert tokenizer.decode(before, skip_special_tokens=False) + text == expected
        assert token_id not in tokenizer.special_ids


def check_streams(kind: str, num_sequences: int) -> None:
    """Every piece is what decoding the window gives, and together they are what decode adds."""
    tokenizer, bare = tokenizer_of(kind), without_table(kind)
    draw = random.Random(kind)
    texts = texts_of(tokenizer)
    plain, special = list(texts), sorted(tokenizer.special_ids)
    other = [i for i in range(tokenizer.vocab_size + 3) if i not in texts and i not in tokenizer.special_ids]
    bytes_first = sorted(other, key=lambda i: len(tokenizer._tokenizer.id_to_token(i) or "x" * 99))[:300]

    def token() -> int:
        pool = draw.choices((plain, bytes_first, other, special), (6, 3, 1, 1))[0]
        return draw.choice(pool or plain)

    for _ in range(num_sequences):
        ids = [token() for _ in range(draw.randrange(1, 24))]
        cut, skip = draw.randrange(len(ids)), draw.random() < 0.5
        streams = [Detokenizer(one, ids[:cut], skip_special_tokens=skip) for one in (tokenizer, bare)]
        streamed, at = "", cut
        while at < len(ids):
            block = ids[at : at + draw.choice((1, 1, 2, 4, 16))]
            mine, theirs = (stream.push(block) for stream in streams)
            assert mine == theirs, (ids, cut, skip)
            streamed, at = streamed + mine, at + len(block)
        last, theirs = (stream.flush() for stream in streams)
        assert last == theirs, (ids, cut, skip)
        assert streamed + last == made.added_text(tokenizer, ids[:cut], ids[cut:], skip), (ids, cut, skip)


@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens_stream_the_text_that_decode_adds(kind: str):
    check_streams(kind, 1_500)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_thousand_random_streams_are_what_decode_adds(kind: str):
    check_streams(kind, 100_000)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_tokens_are_streamed_without_decoding_again(kind: str, monkeypatch: pytest.MonkeyPatch):
    tokenizer = tokenizer_of(kind)
    ids = list(texts_of(tokenizer))[:50]
    stream = Detokenizer(tokenizer, ids[:1])
    expected = made.added_text(tokenizer, ids[:1], ids[1:], skip=True)
    monkeypatch.setattr(tokenizer, "decode", lambda *args, **kwargs: pytest.fail("decoded again"))
    assert "".join(stream.push((i,)) for i in ids[1:]) == expected


@pytest.mark.parametrize(
    "decoder",
    [
        None,  # tokens are joined by spaces
        decoders.WordPiece(cleanup=True),  # removes the space before "."
        decoders.BPEDecoder(suffix="a"),  # spares the last token
        decoders.CTC(),  # removes repeated tokens
        decoders.Strip(" ", 0, 1),  # what follows a space brings it back
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("th", "x")]),  # may span two tokens
        decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+"), "x")]),
        decoders.Sequence([decoders.Replace("▁", ""), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_where_a_tokens_text_depends_on_its_neighbours_there_is_no_table(decoder: object):
    assert not texts_of(with_decoder(decoder))
