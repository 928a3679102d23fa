"""Streamed text against `decode` of the whole, and stop strings against `find` in the whole."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from blockdraft.checkpoints.dummy import byte_tokenizer
from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.errors import RequestError
from blockdraft.text.detokenizer import Detokenizer, StopStrings, TextStream
from blockdraft.text.tokenizer import Tokenizer
from tests.properties import holds
from tests.tiny import TARGET

TEXTS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps.",
    "日本語のテキスト、中文文本、한국어 텍스트。日本語のテキスト。",
    "emoji 😀😀🎉 family 👨‍👩‍👧‍👦 flag 🇫🇷 skin 👍🏽 and e\u0301 n\u0303 combining",
    "tabs\tand\nnewlines  and   spaces \ufffd genuine replacement",
]
SPECIAL = ["<s>", "</s>"]


def byte_level() -> RustTokenizer:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def bpe_with_bytes() -> RustTokenizer:
    """Llama 2: ▁ by a normaliser, bytes for what is unknown, one leading space dropped."""
    pieces = ["<unk>", *SPECIAL, *BYTES, "▁", *"abcdehlostw.,", "▁a", "▁t", "th", "▁▁", "é"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(
        vocab=vocab, merges=[("▁", "a"), ("▁", "t"), ("t", "h"), ("▁", "▁")],
        unk_token="<unk>", byte_fallback=True, fuse_unk=True,
    )  # fmt: skip
    tokenizer = RustTokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return tokenizer


def unigram_with_bytes() -> RustTokenizer:
    """T5 and its like: Metaspace on both sides, here with bytes."""
    pieces = ["<unk>", *SPECIAL, *BYTES, "▁", *"abcdehlostw.,", "▁the", "▁a", "▁dog"]
    model = models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, True)
    tokenizer = RustTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    make = {"byte_level": byte_level, "bpe": bpe_with_bytes, "unigram": unigram_with_bytes}[kind]
    tokenizer = make()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens(["<tool€>"])
    return Tokenizer(TokenizerParts(tokenizer, None, None, None, ()))


KINDS = ("byte_level", "bpe", "unigram")


def byte_ids(kind: str, data: bytes) -> list[int]:
    """One token per byte."""
    tokenizer = tokenizer_of(kind)._tokenizer
    if kind == "byte_level":
        # The byte alphabet: printable bytes are themselves, the others follow from U+0100 on.
        keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in keep]
        names = {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(rest)}
    else:
        names = dict(enumerate(BYTES))
    ids = [tokenizer.token_to_id(names[byte]) for byte in data]
    assert None not in ids
    return [i for i in ids if i is not None]


@st.composite
def id_lists(draw: st.DrawFn, kind: str) -> list[int]:
    """Text, single bytes (broken UTF-8 among them), special tokens, any id, ids past the end."""
    tokenizer = tokenizer_of(kind)
    spaced = st.text(st.sampled_from("ab the. é€😀\u0301\u200d\ufffd日"), max_size=6)
    evil = st.sampled_from(list("😀€éA\ufffd".encode() + b"\xff\xed\xa0\xc0"))
    piece = st.one_of(
        spaced.map(lambda text: tokenizer.encode(text)),
        spaced.map(lambda text: byte_ids(kind, text.encode())),
        st.lists(evil, max_size=8).map(lambda data: byte_ids(kind, bytes(data))),
        st.sampled_from(sorted(tokenizer.special_ids)).map(lambda i: [i]),
        st.integers(0, tokenizer.vocab_size + 3).map(lambda i: [i]),
    )
    return [i for ids in draw(st.lists(piece, max_size=12)) for i in ids]


def split(draw: st.DrawFn, ids: list[int]) -> Iterator[list[int]]:
    at = 0
    while at < len(ids):
        size = draw(st.integers(1, 16))
        yield ids[at : at + size]
        at += size


def added_text(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    same = 0
    while same < min(len(before), len(whole)) and before[same] == whole[same]:
        same += 1
    return whole[same:]


@st.composite
def streams(draw: st.DrawFn, kind: str) -> tuple[list[int], list[list[int]]]:
    prompt, output = draw(id_lists(kind)), draw(id_lists(kind))
    return prompt, list(split(draw, output))


@pytest.mark.parametrize("kind", KINDS)
@holds(200, data=st.data(), skip=st.booleans())
def test_streamed_text_is_what_decode_adds_to_the_prompt(kind: str, data: st.DataObject, skip: bool):
    tokenizer = tokenizer_of(kind)
    prompt, blocks = data.draw(streams(kind))
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces = [detokenizer.push(block) for block in blocks]
    pieces.append(detokenizer.flush())
    output = [i for block in blocks for i in block]
    assert "".join(pieces) == added_text(tokenizer, prompt, output, skip)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
@holds(60, data=st.data())
def test_long_outputs_stay_exact_past_the_window(kind: str, data: st.DataObject):
    tokenizer = tokenizer_of(kind)
    prompt, blocks = data.draw(streams(kind))
    output = [i for block in blocks for i in block] * 20
    detokenizer = Detokenizer(tokenizer, prompt)
    text = "".join(detokenizer.push((i,)) for i in output) + detokenizer.flush()
    assert text == added_text(tokenizer, prompt, output, True)


@pytest.mark.parametrize("kind", KINDS)
@holds(60, text=st.text(max_size=20))
def test_valid_text_streams_without_half_characters_and_with_no_delay(kind: str, text: str):
    text = text.replace("\ufffd", "").replace("▁", "")
    detokenizer = Detokenizer(tokenizer_of(kind), byte_ids(kind, b"x"))
    seen = b""
    streamed = ""
    for byte in text.encode():
        seen += bytes([byte])
        streamed += detokenizer.push(byte_ids(kind, bytes([byte])))
        assert streamed == seen.decode(errors="ignore")


@pytest.mark.parametrize("kind", KINDS)
def test_endless_invalid_bytes_do_not_stall_or_pile_up(kind: str):
    detokenizer = Detokenizer(tokenizer_of(kind), [])
    (bad,) = byte_ids(kind, b"\xff")
    lengths = [len(detokenizer.push((bad,))) for _ in range(500)]
    assert sum(lengths) == 497
    assert len(detokenizer._window) <= 40
    assert detokenizer.flush() == "\ufffd" * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_genuine_replacement_character_is_released_by_the_next_token(kind: str):
    detokenizer = Detokenizer(tokenizer_of(kind), byte_ids(kind, b"x"))
    assert detokenizer.push(byte_ids(kind, "\ufffd".encode())) == ""
    assert detokenizer.push(byte_ids(kind, b"a")) == "\ufffda"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_leading_space_is_dropped_only_at_the_very_beginning(kind: str):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("a")
    assert tokenizer._tokenizer.id_to_token(ids[0]) == "▁a"
    assert Detokenizer(tokenizer, []).push(ids) == "a"
    assert Detokenizer(tokenizer, tokenizer.encode("the dog")).push(ids) == " a"


def test_a_character_begun_in_the_prompt_belongs_to_the_output():
    e2, x82, xac = byte_ids("byte_level", "€".encode())
    detokenizer = Detokenizer(tokenizer_of("byte_level"), [e2, x82])
    assert detokenizer.push((xac,)) == "€"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_broken_byte_does_not_take_the_characters_before_it_along(kind: str):
    tokenizer = tokenizer_of(kind)
    assert tokenizer.decode(byte_ids(kind, b"\xe2\x82\xac\xff\xf0\x9fA")) == "€\ufffd\ufffd\ufffdA"


@pytest.mark.parametrize("kind", KINDS)
@holds(200, data=st.data())
def test_decode_is_tokenizers_decode_unless_bytes_are_broken(kind: str, data: st.DataObject):
    tokenizer = tokenizer_of(kind)
    text = data.draw(st.text(max_size=20))
    for ids in (tokenizer.encode(text), byte_ids(kind, text.encode()), data.draw(id_lists(kind))):
        expected = tokenizer._tokenizer.decode(ids, skip_special_tokens=True)
        if kind == "byte_level" or "\ufffd" not in expected:
            assert tokenizer.decode(ids) == expected


# Few letters and short strings, so that stop strings overlap, nest and repeat.
LETTERS = st.text("abc", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4).map(tuple)


def first_stop(text: str, stops: tuple[str, ...], after: int = 0) -> tuple[int, int, str] | None:
    """(end, start, stop) of the match that ends first past `after`, the longest of these."""
    found = [
        (end, end - len(stop), stop)
        for stop in stops
        for end in range(max(after, len(stop) - 1) + 1, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    return min(found, default=None)


def pieces_of(draw: st.DrawFn, text: str) -> Iterator[str]:
    while text:
        size = draw(st.integers(1, 5))
        yield text[:size]
        text = text[size:]


@holds(400, data=st.data(), text=LETTERS, stops=STOPS, include=st.booleans())
def test_stop_strings_cut_where_a_search_in_the_whole_text_does(
    data: st.DataObject, text: str, stops: tuple[str, ...], include: bool
):
    stream = StopStrings(stops, include=include)
    out = ""
    for piece in pieces_of(data.draw, text):
        out += stream.push(piece)
        if stream.stop_reason is not None:
            break
    else:
        out += stream.flush()
    match = first_stop(text, stops)
    if match is None:
        assert (out, stream.stop_reason) == (text, None)
    else:
        end, start, stop = match
        assert (out, stream.stop_reason) == (text[: end if include else start], stop)


@holds(200, text=LETTERS, stops=STOPS)
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(text: str, stops: tuple[str, ...]):
    stream = StopStrings(stops, include=False)
    out, seen = "", ""
    for letter in text:
        out += stream.push(letter)
        seen += letter
        if stream.stop_reason is not None:
            return
        held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert out == seen[: len(seen) - held]


def test_a_stop_string_that_is_included_holds_nothing_back():
    assert StopStrings(("abc",), include=True).push("xab") == "xab"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="empty"):
        StopStrings(("a", ""), include=False)


def test_a_long_repetitive_stop_string_costs_linear_time():
    stream = StopStrings(("a" * 50_000 + "b",), include=False)
    assert stream.push("a" * 200_000) == "a" * 150_000


@holds(200, text=LETTERS, stops=STOPS, num_protected=st.integers(0, 12))
def test_stop_strings_that_end_under_protection_are_plain_text(
    text: str, stops: tuple[str, ...], num_protected: int
):
    stream = StopStrings(stops, include=False)
    out = ""
    for at, letter in enumerate(text):
        out += stream.push(letter, can_stop=at >= num_protected)
        if stream.stop_reason is not None:
            break
    out += stream.flush()
    match = first_stop(text, stops, after=num_protected)
    assert out == (text if match is None else text[: match[1]])


def test_a_stop_string_let_through_may_still_begin_the_one_that_stops():
    stream = StopStrings(("aba",), include=False)
    assert stream.push("xaba", can_stop=False) == "xab"
    assert (stream.push("ba"), stream.stop_reason) == ("", "aba")


def feed(stream: TextStream, ids: list[int], num_protected: int = 0) -> int:
    """How many tokens it took."""
    num_tokens = stream.push(ids, num_protected)
    stream.finish()
    return num_tokens


@pytest.mark.parametrize("kind", KINDS)
@holds(150, data=st.data(), include=st.booleans())
def test_a_text_stream_cuts_after_the_first_token_that_completes_a_stop(
    kind: str, data: st.DataObject, include: bool
):
    tokenizer = tokenizer_of(kind)
    prompt, ids = data.draw(id_lists(kind)), data.draw(id_lists(kind))
    text = added_text(tokenizer, prompt, ids, True)
    at = data.draw(st.integers(0, max(0, len(text) - 1)))
    stops = tuple({text[at : at + data.draw(st.integers(1, 4))], "ab", "€"} - {""})
    stream = TextStream(tokenizer, prompt, stops, include_stop_str_in_output=include)
    num_tokens = feed(stream, ids)
    match = first_stop(text, stops)
    if match is None:
        assert (stream.take(), stream.stop_reason, num_tokens) == (text, None, len(ids))
    else:
        end, start, stop = match
        assert (stream.take(), stream.stop_reason) == (text[: end if include else start], stop)
        # The first prefix of the ids whose certain text holds the stop string, if any does.
        detokenizer = Detokenizer(tokenizer, prompt)
        certain, expected = "", 0
        while len(certain) < end and expected < len(ids):
            certain += detokenizer.push((ids[expected],))
            expected += 1
        assert num_tokens == expected


def test_take_returns_each_text_once():
    tokenizer = tokenizer_of("byte_level")
    stream = TextStream(tokenizer, [], ("</end>",))
    taken = []
    for token_id in byte_ids("byte_level", "né </enough<".encode()):
        assert stream.push((token_id,)) == 1
        assert stream.stop_reason is None
        taken.append(stream.take())
    # "</en" begins the stop string, "</eno" does not.
    assert taken == ["n", "", "é", " ", "", "", "", "", "</eno", "u", "g", "h", ""]
    stream.finish()
    stream.finish()
    assert stream.take() == "<"
    assert stream.take() == ""


def test_min_tokens_lets_a_stop_pass_and_still_cuts_one_that_ends_later():
    tokenizer = tokenizer_of("byte_level")
    ids = byte_ids("byte_level", b"a##b##c")
    stream = TextStream(tokenizer, [], ("##",))
    assert feed(stream, ids, num_protected=3) == 6
    assert stream.take() == "a##b"
    straddling = TextStream(tokenizer, [], ("##",))
    assert feed(straddling, ids, num_protected=2) == 3
    assert straddling.take() == "a"


def test_special_tokens_can_be_shown():
    tokenizer = tokenizer_of("byte_level")
    (eos,) = [i for i in tokenizer.special_ids if tokenizer._tokenizer.id_to_token(i) == "</s>"]
    stream = TextStream(tokenizer, [], ("</s>",), skip_special_tokens=False)
    assert (stream.push((eos,)), stream.stop_reason) == (1, "</s>")
    hidden = TextStream(tokenizer, [], ("</s>",))
    assert (hidden.push((eos,)), hidden.stop_reason) == (1, None)


# ---- texts of single tokens, for every id and in random sequences

ALL_KINDS = (*KINDS, "tokens per byte", "tests' pair", "default model")


@functools.cache
def any_tokenizer(kind: str) -> Tokenizer:
    if kind in KINDS:
        return tokenizer_of(kind)
    if kind == "tokens per byte":
        return Tokenizer(byte_tokenizer(300))
    source = TARGET if kind == "tests' pair" else "default"
    return Tokenizer(open_checkpoint(source).tokenizer_parts())


@functools.cache
def without_table(kind: str) -> Tokenizer:
    """The same tokenizer, read through its decode alone."""
    tokenizer = any_tokenizer(kind)
    other = Tokenizer(TokenizerParts(tokenizer._tokenizer, None, None, None, ()))
    other.plain_text = lambda token_id: None
    return other


def with_decoder(decoder: object, kind: str = "bpe") -> Tokenizer:
    rust = RustTokenizer.from_str(any_tokenizer(kind)._tokenizer.to_str())
    rust.decoder = decoder
    return Tokenizer(TokenizerParts(rust, None, None, None, ()))


def texts_of(tokenizer: Tokenizer) -> dict[int, str]:
    """The table, filled for every id and a few past the end."""
    found = {i: tokenizer.plain_text(i) for i in range(tokenizer.vocab_size + 4)}
    return {token_id: text for token_id, text in found.items() if text is not None}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_plain_token_adds_its_text_after_any_whole_character(kind: str):
    tokenizer = any_tokenizer(kind)
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
    tokenizer, bare = any_tokenizer(kind), without_table(kind)
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
        assert streamed + last == added_text(tokenizer, ids[:cut], ids[cut:], skip), (ids, cut, skip)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_random_tokens_stream_the_text_that_decode_adds(kind: str):
    check_streams(kind, 400)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_hundred_thousand_random_streams_are_what_decode_adds(kind: str):
    check_streams(kind, 100_000)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_plain_tokens_are_streamed_without_decoding_again(kind: str, monkeypatch: pytest.MonkeyPatch):
    tokenizer = any_tokenizer(kind)
    ids = list(texts_of(tokenizer))[:50]
    stream = Detokenizer(tokenizer, ids[:1])
    expected = added_text(tokenizer, ids[:1], ids[1:], skip=True)
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
