"""Thoughts apart from the answer, however the text is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockdraft.tool_calls.thoughts import Splitter, Tags, ThoughtCounter, begins_inside, find_tags
from tests.server.families import family_tokenizer
from tests.server.pair import THINKING, models, spelled_tokenizer, thinking_tokenizer

THINK = Tags("<think>", "</think>", (3,), (6,))
CASES = [
    # text, is_inside, reasoning, content
    ("hello", False, "", "hello"),
    ("<think>a</think>b", False, "a", "b"),
    ("\n <think>\n\na\nb\n\n</think>\n\nc\n", False, "a\nb", "c\n"),
    ("a</think>b", True, "a", "b"),
    ("a", True, "a", ""),
    ("a\n", True, "a\n", ""),
    ("\na </thin", True, "a </thin", ""),
    ("<thinking> no", False, "", "<thinking> no"),
    ("<thin", False, "", "<thin"),
    ("x <think>a</think>", False, "", "x <think>a</think>"),
    ("<think></think>", False, "", ""),
    ("<think>a</think>b</think><think>c", False, "a", "b</think><think>c"),
    ("  \n", False, "", "  \n"),
    ("a<</think></think>", True, "a<", "</think>"),
    ("<think>a\r\n</think>\r\nb", False, "a", "b"),
    ("", True, "", ""),
]


def divide(pieces, is_inside):
    splitter = Splitter(THINK, is_inside=is_inside)
    parts = [splitter.push(piece, is_last=False) for piece in pieces[:-1]]
    parts.append(splitter.push(pieces[-1], is_last=True))
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)


@pytest.mark.parametrize(("text", "is_inside", "reasoning", "content"), CASES)
def test_the_division_is_the_same_however_the_text_is_cut(text, is_inside, reasoning, content):
    assert divide([text], is_inside) == (reasoning, content)
    assert divide([*text, ""], is_inside) == (reasoning, content)
    for at in range(len(text)):
        assert divide([text[:at], text[at:]], is_inside) == (reasoning, content)


_WORDS = st.sampled_from(["<think>", "</think>", "<", "\n", " ", "</", "think>", "a", "é"])


@given(st.lists(_WORDS), st.booleans(), st.data())
def test_any_cut_of_any_text_gives_the_same(words, is_inside, data):
    text = "".join(words)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert divide(pieces, is_inside) == divide([text], is_inside)


def test_text_is_let_go_as_soon_as_it_is_certain():
    splitter = Splitter(THINK, is_inside=True)
    assert splitter.push("some thoughts <", is_last=False).reasoning == "some thoughts "
    assert splitter.push("b", is_last=False).reasoning == "<b"
    assert splitter.push("</think>answer", is_last=False).content == "answer"


def test_only_models_with_both_tokens_think():
    assert find_tags(models().tokenizer) is None
    tags = find_tags(thinking_tokenizer())
    assert (tags.open_ids, tags.close_ids, tags.special) == ((3,), (6,), ())


def test_tags_that_are_special_tokens_are_known_as_such():
    tokenizer = spelled_tokenizer(THINKING, special=("<think>", "</think>"))
    assert find_tags(tokenizer).special == ("<think>", "</think>")
    gemma = find_tags(family_tokenizer("gemma4"))
    assert (gemma.open, gemma.close) == ("<|channel>thought", "<channel|>")


def test_a_prompt_that_ends_with_the_tag_begins_inside():
    tokenizer = thinking_tokenizer()
    assert begins_inside(THINK, tokenizer, [1, 2, 3])
    assert not begins_inside(THINK, tokenizer, [1, 2, 3, 6])
    assert not begins_inside(THINK, tokenizer, [1, 3, 2])


@pytest.mark.parametrize(
    ("token_ids", "is_inside", "count"),
    [
        ([3, 4, 5, 6, 7], False, 2),
        ([4, 5, 6, 7], True, 2),
        ([4, 3, 5, 6], False, 0),
        ([3, 4, 3, 5, 6, 3, 4], False, 3),
        ([3, 4], False, 1),
        ([6, 4], True, 0),
    ],
)
def test_tokens_between_the_tags_are_counted(token_ids, is_inside, count):
    tokenizer = thinking_tokenizer()
    for size in (1, 2, len(token_ids)):
        counter = ThoughtCounter(find_tags(tokenizer), tokenizer, is_inside=is_inside)
        for start in range(0, len(token_ids), size):
            counter.push(token_ids[start : start + size])
        assert counter.num_tokens == count
