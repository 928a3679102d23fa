"""The Triton `walk` and convolutions against their references: on the card, or in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from blockdraft.kernels.block_conv import (  # noqa: E402
    reference_block_conv,
    reference_conv_after,
    reference_conv_before,
)
from blockdraft.kernels.candidates import PairScores, reference_walk  # noqa: E402
from blockdraft.kernels.triton.block_conv import conv_after, conv_before  # noqa: E402
from blockdraft.kernels.triton.candidates import walk  # noqa: E402
from blockdraft.kernels.triton.sampling import choose  # noqa: E402
from tests.kernels.test_triton_sampling import DEVICE, HALF, RULES, make_logits, place_rows  # noqa: E402
from tests.matrix import slow_but  # noqa: E402

# The interpreter computes with NumPy, which warns where unsigned words wrap as they should, and of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def make_pairs(shape, *, top_k, rank, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_columns, vocab_size = shape
    books = (torch.randn(vocab_size, rank, generator=generator).to(DEVICE, dtype) for _ in range(2))
    mixture = torch.randn(num_rows, num_columns, rank, generator=generator) * rank**-0.5
    return PairScores(*books, mixture.to(DEVICE, dtype), top_k)


def drafts_of(logits, rows, pairs, only=None):
    starts, anchor = rows.length[rows.active], rows.anchor[rows.active][:, None]
    ways = (walk, reference_walk) if only is None else (only,)
    return [one(logits, pairs, starts, anchor, rows.sampling()) for one in ways]


@pytest.mark.parametrize(
    ("vocab_size", "num_columns"), slow_but([(40, 1), (40, 3), (2048, 3), (5000, 3)], (40, 1))
)
def test_drafts_are_those_of_the_reference_under_every_rule(vocab_size, num_columns):
    rules = list(RULES.values())
    rows = place_rows(rules, vocab_size)
    shape = (len(rules), num_columns, vocab_size)
    got, expected = drafts_of(make_logits(shape, 3.0), rows, make_pairs(shape, top_k=16, rank=6))
    assert got.dtype == torch.int64
    assert got.tolist() == expected.tolist()
    assert len(set(got.flatten().tolist())) > 8


@pytest.mark.parametrize("vocab_size", slow_but([40, 4100], 40))
def test_where_pairs_say_nothing_rows_without_filters_draft_what_choose_draws(vocab_size):
    """By the very same numbers; a row with filters is among them."""
    rules = [RULES[name] for name in ("random", "filters", "greedy", "banned", "counts")]
    rows, logits = place_rows(rules, vocab_size), make_logits((len(rules), 2, vocab_size), 2.0)
    pairs = make_pairs(logits.shape, top_k=2, rank=2)
    flat = pairs._replace(mixture=torch.zeros_like(pairs.mixture))
    drafts = drafts_of(logits, rows, flat, only=walk)[0]
    anchor = rows.anchor[rows.active][:, None]
    chosen = choose(logits, rows.length[rows.active], anchor, rows.sampling())
    same = [0, 2, 3, 4]
    assert drafts[same].tolist() == chosen[same].tolist()


@pytest.mark.parametrize(
    ("top_k", "rank", "num_columns"),
    slow_but(
        [(1, 4, 3), (3, 4, 1), (16, 70, 2), (16, 70, 7), (20, 5, 2)], (3, 4, 1), (16, 70, 2), (20, 5, 2)
    ),
)
def test_any_number_of_candidates_ranks_and_columns(top_k, rank, num_columns):
    rows = place_rows([RULES["greedy"], RULES["random"], RULES["filters"]], 64)
    shape = (3, num_columns, 64)
    got, expected = drafts_of(make_logits(shape, 2.0), rows, make_pairs(shape, top_k=top_k, rank=rank))
    assert got.tolist() == expected.tolist()


def test_pairs_without_a_mixture_and_rows_of_a_reduced_head():
    rows, shape = place_rows([RULES["greedy"], RULES["filters"]], 64), (2, 3, 64)
    logits, whole = make_logits(shape, 2.0), make_pairs(shape, top_k=17, rank=6)._replace(mixture=None)
    places = torch.arange(64, device=DEVICE).flip(0) % 40
    reduced = whole._replace(successors=whole.successors[:40].contiguous(), places=places)
    spelled = whole._replace(successors=whole.successors[places])
    ones = whole._replace(mixture=torch.ones(2, 3, 6, device=DEVICE))
    for pairs, other in ((whole, ones), (reduced, spelled)):
        got, expected = drafts_of(logits, rows, pairs)
        assert got.tolist() == expected.tolist()
        assert got.tolist() == drafts_of(logits, rows, other, only=reference_walk)[0].tolist()


def test_where_pairs_skip_the_first_draft_its_mixture_does_not_count():
    rows, shape = place_rows([RULES["greedy"], RULES["filters"]], 64), (2, 3, 64)
    logits, pairs = make_logits(shape, 2.0), make_pairs(shape, top_k=4, rank=6)
    without = pairs._replace(mixture=pairs.mixture.clone())
    without.mixture[:, 0] = 0
    drafts = drafts_of(logits, rows, pairs._replace(skips_first=True))
    assert drafts[0].tolist() == drafts[1].tolist() == drafts_of(logits, rows, without, only=walk)[0].tolist()
    assert drafts[0].tolist() != drafts_of(logits, rows, pairs, only=walk)[0].tolist()


@pytest.mark.parametrize("dtype", slow_but([HALF, torch.float32], HALF))
def test_of_equal_candidates_the_lowest_id_is_taken_and_kept(dtype):
    """Half precision has many ties: more tokens reach the last place than there is room for."""
    vocab_size = 2100  # two chunks
    rows = place_rows([RULES["greedy"]] * 2, vocab_size)
    logits = torch.zeros(2, 4, vocab_size, dtype=dtype, device=DEVICE)
    logits[:, 1, 9::300] = 2.0
    logits[:, 2, -3:] = 1.0
    pairs = make_pairs(logits.shape, top_k=4, rank=2, dtype=dtype)
    flat = pairs._replace(mixture=torch.zeros_like(pairs.mixture))
    for one in drafts_of(logits, rows, flat):
        assert one.tolist() == [[0, 9, vocab_size - 3, 0]] * 2
    got, expected = drafts_of(logits, rows, pairs)
    assert got.tolist() == expected.tolist()
    assert max(got[:, 0].tolist()) < 4


def test_a_column_of_bans_still_gives_tokens():
    rows = place_rows([RULES["greedy"], RULES["filters"], RULES["random"]], 32)
    logits = torch.full((3, 2, 32), float("-inf"), device=DEVICE)
    for one in drafts_of(logits, rows, make_pairs(logits.shape, top_k=4, rank=2)):
        assert ((one >= 0) & (one < 32)).all()


@pytest.mark.parametrize("dtype", slow_but([HALF, torch.float32], HALF))
@pytest.mark.parametrize(
    ("num_blocks", "num_columns", "size", "group", "taps"),
    [
        (1, 1, 32, 16, 2),
        (3, 3, 48, 16, 2),
        (9, 8, 20, 4, 3),
        (3, 2, 32, 1, 4),
        (3, 4, 1040, 16, 2),
        (2, 16, 120, 20, 2),
    ],
)
def test_blocks_are_convolved_as_by_the_reference(num_blocks, num_columns, size, group, taps, dtype):
    generator = torch.Generator().manual_seed(2)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    x, onto = noise(num_blocks * num_columns, size), noise(num_blocks * num_columns, size)
    base, projection = noise(2, taps, size), noise(2 * taps * size // group, size) / size**0.5
    bound = {HALF: 2e-2, torch.float32: 1e-5}[dtype]

    def wide(*values):
        return (one.double() if isinstance(one, torch.Tensor) else one for one in values)

    mixed, deltas = conv_before(x, base[0], projection, num_columns)
    _, expected = reference_conv_before(*wide(x, base[0], projection, num_columns))
    torch.testing.assert_close(deltas.double(), expected, rtol=bound, atol=bound)
    assert torch.equal(mixed, reference_block_conv(x, base[0], deltas[:, 0], num_columns))
    rest, weight = (base[1], deltas[:, 1], num_columns, onto), noise(size)
    stream, normed = conv_after(x, *rest, weight, 1e-6)
    _, expected = reference_conv_after(*wide(x, *rest, weight), 1e-6)
    assert torch.equal(stream, reference_block_conv(x, *rest))
    torch.testing.assert_close(normed.double(), expected, rtol=bound, atol=bound)
