"""Texts that are encoded piece by piece have the ids that the tokenizer gives the whole text."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from blockdraft.text import piece_cache
from blockdraft.text.piece_cache import PieceCache, can_cut

NUMBERS = {"qwen2": r"\p{N}", "llama3": r"\p{N}{1,3}"}
WORDS = "|".join(
    [
        *(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", "%s"),
        *(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern):
    steps = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps)


KINDS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
    **{name: split(WORDS % numbers) for name, numbers in NUMBERS.items()},
    "o200k": split(O200K),
}
TEXT = (
    "the cat's 12 cats said: \"don't\" (see the 3 pages), then it's over.\n\n    return x + 1\n"
    "Über naïve 東京 x = 3.14 // the end <b> and they'll go "
) * 3


@functools.cache
def tokenizer(kind):
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC() if kind == "qwen2" else None
    made.pre_tokenizer = KINDS[kind]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    made.post_processor = processors.ByteLevel(trim_offsets=kind != "gpt2")
    made.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    made.add_tokens([AddedToken("   "), AddedToken(" <tag>")])
    return made


PARTS = ("the", "cats", "'s", "'T", "x", "12", "3.14", "(", "),", "é", "e\u0301", "東京", "😀", "/", "\u00a0")
SPACES = (" ", " ", " ", "  ", "   ", "\n", "\r\n", "\t", "\u2003", "")
TEXTS = st.lists(st.sampled_from([*PARTS, *SPACES, "<|end|>", "<tag>", "\x1c"])).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(texts=st.lists(st.one_of(TEXTS, st.text()), max_size=4))
def test_a_text_has_the_same_ids_piece_by_piece(kind, texts):
    rust = tokenizer(kind)
    assert can_cut(rust)
    cache = PieceCache(rust)
    for text in [*texts, *texts]:  # unknown pieces, and then known ones
        assert cache.encode(text) == rust.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": split(r" ?\p{L}+ \p{L}+|\s+")},
        {"pre_tokenizer": pre_tokenizers.Digits(True)},
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace(" ", "_")},
    ],
    ids=str,
)
def test_a_tokenizer_of_another_kind_is_not_cut(change):
    rust = Tokenizer.from_str(tokenizer("gpt2").to_str())
    for name, value in change.items():
        setattr(rust, name, value)
    assert not can_cut(rust)


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("ab cd"),
        AddedToken("<x>", rstrip=True),
        AddedToken("<x>", lstrip=True),
        AddedToken("<x>", single_word=True),
    ],
    ids=str,
)
def test_a_token_that_reaches_over_a_cut_forbids_it(token):
    rust = Tokenizer.from_str(tokenizer("gpt2").to_str())
    rust.add_tokens([token])
    assert not can_cut(rust)


def test_a_long_text_has_the_same_ids_piece_by_piece():
    rust, text = tokenizer("qwen2"), TEXT * 100
    assert len(text) > piece_cache.LONG_TEXT_CHARS
    cache = PieceCache(rust)
    for known in ("", text):
        text = f"{known}{text} {'other words ' * 2000}é"
        assert cache.encode(text) == rust.encode(text, add_special_tokens=False).ids


def test_the_cache_stays_small(monkeypatch):
    monkeypatch.setattr(piece_cache, "MAX_PIECES", 8)
    rust = tokenizer("gpt2")
    cache = PieceCache(rust)
    for number in range(20):
        text = f"the {number} cats and {'x' * 80}"
        assert cache.encode(text) == rust.encode(text, add_special_tokens=False).ids
        assert len(cache._known) <= 8
        assert max(map(len, cache._known)) <= piece_cache.MAX_PIECE_CHARS


def test_texts_of_new_pieces_are_no_longer_remembered_when_enough_are(monkeypatch):
    monkeypatch.setattr(piece_cache, "ENOUGH_PIECES", 4)
    rust = tokenizer("gpt2")
    cache = PieceCache(rust)
    for text in ("a b c d e f g h", "a b c d e f x h", "s t u v w x y z"):
        assert cache.encode(text) == rust.encode(text, add_special_tokens=False).ids
    assert set(cache._known) == set("bcdefgx")
