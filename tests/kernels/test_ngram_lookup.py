"""Drafts from n-grams of the text so far: every implementation against a search in plain Python."""

import random

import pytest
import torch

from blockdraft.kernels.ngram_lookup import MOST
from tests.kernels.implementations import quiet
from tests.matrix import slow_but

pytestmark = quiet
KEPT = -7  # what a block holds where its drafts stay
PIECE = 1024  # tokens of a history that Triton's kernel reads at a time


def found(text, least, width):
    """The drafts behind `text`, one token at a time; None: its end has not occurred before."""
    best, count = None, 0
    for end in range(len(text) - 1):
        matched = 0
        while matched < min(MOST, end + 1) and text[end - matched] == text[-1 - matched]:
            matched += 1
        if matched and matched >= count:
            best, count = end, matched
    if best is None or count < least:
        return None
    whole = list(text)
    for _ in range(width - 1):
        best += 1
        whole.append(whole[best])  # which may be a draft itself
    return whole[len(text) :]


def check(implementation, texts, *, least=1, width=8, size=None):
    """`texts` by their rows, asked in another order; past each text stands what would mislead."""
    device = implementation.device
    size = size or max(map(len, texts)) + width
    history = torch.zeros(len(texts) + 1, size, dtype=torch.int32)
    for row, text in enumerate(texts):
        history[row] = text[-1]
        history[row, : len(text)] = torch.tensor(text)
    order = list(range(len(texts)))[::-1]
    starts = torch.tensor([len(texts[row]) - 1 for row in order], device=device)
    block = torch.full((len(texts), width), KEPT, device=device)
    implementation.kernels.lookup(
        block, history.to(device), torch.tensor(order, device=device), starts, least
    )
    expected = [[KEPT, *(found(texts[row], least, width) or [KEPT] * (width - 1))] for row in order]
    assert block.tolist() == expected


TEXTS = {
    "one token": [5],
    "nothing occurs again": [1, 2, 3, 4],
    "the anchor alone": [1, 2, 3, 1],
    "the longer one wins over the later": [7, 1, 2, 3, 9, 2, 4, 7, 1, 2],
    "of two alike the later wins": [1, 2, 3, 1, 2, 4, 1, 2],
    "a loop of one": [9, 9],
    "a loop of two, the match overlaps the end": [1, 2, 1, 2, 1, 2],
    "what followed runs into the anchor": [3, 1, 2, 3],
    "the whole text again": [4, 5, 6, 4, 5, 6],
    "from its very first token on": [8, 1, 8],
    "longer than is compared": [*range(100, 150), 1, *range(100, 150), 2, *range(110, 150)],
    "more than is compared is no more": [*range(99, 150), 1, *range(150 - MOST, 150), 2, *range(99, 150)],
}


@pytest.mark.parametrize("name", TEXTS)
def test_drafts_are_what_followed_before(implementation, name):
    for least in (3,) if implementation.is_interpreted else (1, 3, MOST):
        check(implementation, [TEXTS[name]], least=least)


def test_what_follows_is_what_one_would_say():
    assert found([1, 2, 3, 1], 1, 6) == [2, 3, 1, 2, 3]
    assert found([1, 2, 3, 1], 2, 6) is None
    assert found(TEXTS["the longer one wins over the later"], 1, 4) == [3, 9, 2]
    assert found(TEXTS["of two alike the later wins"], 1, 3) == [4, 1]
    assert found(TEXTS["one token"], 1, 4) is None
    assert found([9, 9], 1, 4) == [9, 9, 9]


def test_rows_are_searched_by_themselves(implementation):
    if not implementation.is_interpreted:
        check(implementation, [*TEXTS.values(), [1, 2], [3]], least=2)
    check(implementation, [[1, 2, 3], [3, 4, 5], [9, 3]], least=1)


@pytest.mark.parametrize("width", [2, 3, 8, 16, 17])
def test_drawn_texts_are_recalled_as_by_plain_python(implementation, width):
    rng = random.Random(width)
    for _ in range(1 if implementation.is_interpreted else 60):
        texts = [draw(rng) for _ in range(rng.randint(1, 4))]
        check(implementation, texts, least=rng.choice([1, 1, 2, 3, 5, MOST]), width=width)


@pytest.mark.parametrize("last", slow_but([PIECE - 1, PIECE, PIECE + 1, 3 * PIECE - 5], PIECE + 1))
def test_a_history_of_several_pieces(implementation, last):
    """Matches end in one piece and begin in another, with shorter ones behind; the table is longer."""
    rng = random.Random(last)
    phrase = [rng.randrange(1000) for _ in range(40)]
    texts = []
    for place in (0, PIECE // 2, PIECE - 20, last - 100):
        text = [rng.randrange(1000) for _ in range(last + 1)]
        text[place : place + 40] = phrase
        text[last - 55 : last - 40] = phrase[15:30]
        text[-30:] = phrase[:30]
        texts.append(text)
    check(implementation, texts, least=3, size=4 * PIECE)


def draw(rng):
    """Few words, many repeats, sometimes a loop at the end."""
    text = [rng.randrange(rng.choice([1, 2, 4, 50])) for _ in range(rng.randint(1, 60))]
    for _ in range(rng.randint(0, 3)):
        begin = rng.randrange(len(text))
        text += text[begin : begin + rng.randint(1, 40)]
        text += [rng.randrange(50)] * rng.randint(0, 2)
    return text


@pytest.mark.parametrize("width", [1, 3, 16])
def test_samples_stand_behind_the_anchor(implementation, width):
    generator, device = torch.Generator().manual_seed(1), implementation.device
    sampled = torch.randint(0, 50_000, (2, width), generator=generator).to(device)
    rows, length = (torch.tensor(one, device=device) for one in ([2, 0], [7, 99, 0, 99]))
    expected = torch.zeros(4, 40, dtype=torch.int32, device=device)
    expected[2, 1 : 1 + width], expected[0, 8 : 8 + width] = sampled.int()
    history = torch.zeros_like(expected)
    implementation.kernels.remember(history, sampled, rows, length)
    assert torch.equal(history, expected)
    implementation.kernels.remember(history, torch.cat((sampled, sampled), 1)[:, :width], rows, length)
    assert torch.equal(history, expected)
