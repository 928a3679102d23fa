"""Recalling a text, in Triton: the reference's integers, over several pieces of a history."""

import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytest.importorskip("triton")

from blockdraft.kernels import ngram_lookup as contract  # noqa: E402
from blockdraft.kernels.kernels import kernels_for  # noqa: E402
from blockdraft.kernels.triton.ngram_lookup import PIECE, recall, remember  # noqa: E402
from tests.kernels.test_recall import TEXTS, check, draw  # noqa: E402

KERNELS = kernels_for(torch.float64, DEVICE, is_interpreted=True)  # whole numbers are exact in any dtype


def test_known_texts():
    for least in (1, 2, contract.MOST):
        check(recall, list(TEXTS.values()), least=least, device=DEVICE)


@pytest.mark.parametrize("width", [2, 5, 16, 17])
def test_drawn_texts_are_recalled_as_by_plain_python(width):
    rng = random.Random(width)
    for _ in range(8):
        texts = [draw(rng) for _ in range(rng.randint(1, 4))]
        check(recall, texts, least=rng.choice([1, 2, 5]), width=width, device=DEVICE)


@pytest.mark.parametrize("last", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE - 5])
def test_a_history_of_several_pieces(last):
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
    check(recall, texts, least=3, size=4 * PIECE, device=DEVICE)
    check(KERNELS.recall, texts, least=3, size=4 * PIECE, device=DEVICE)


def test_samples_stand_behind_the_anchor():
    generator = torch.Generator().manual_seed(1)
    for width in (1, 3, 16):
        sampled = torch.randint(0, 50_000, (3, width), generator=generator).to(DEVICE)
        rows, length = (torch.tensor(one, device=DEVICE) for one in ([3, 0, 2], [5, 1, 0, 9, 4]))
        tables = [torch.zeros(5, 40, dtype=torch.int32, device=DEVICE) for _ in range(3)]
        calls = (contract.reference_remember, remember, KERNELS.remember)
        for table, call in zip(tables, calls, strict=True):
            call(table, sampled, rows, length)
        assert torch.equal(tables[0], tables[1])
        assert torch.equal(tables[0], tables[2])
