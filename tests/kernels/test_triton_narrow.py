"""Products with narrow weights in Triton, against float64, and their promise on bits."""

import pytest
import torch

from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.pointwise import reference_gate_mul
from blockdraft.kernels.triton import narrow
from blockdraft.kernels.triton.linear import counters
from tests.kernels.implementations import DEVICE, HALF, HAS_CARD, assert_close, normal, on_card, quiet
from tests.matrix import slow_but

pytestmark = quiet
SHAPES = [(3, 5), (33, 512), (17, 700), (8, 1024), (20, 1536)]  # [N, K]: empty parts, broken and whole ones
COUNTS = [0, 1, 16, 17, 33, 257]  # tokens: one tile, several, several programs to a tile


def make(shape, num_tokens):
    x, weight = normal(num_tokens, shape[1], dtype=HALF), normal(*shape, dtype=HALF, seed=1)
    if not HAS_CARD:  # NumPy adds in different orders: its sums have to be exact
        x, weight = (4 * x).round(), (4 * weight).round() / 64
    bias, onto = normal(shape[0], dtype=HALF, seed=2), 30 * normal(num_tokens, shape[0], dtype=HALF, seed=3)
    return x, weight, bias, onto


@pytest.mark.parametrize("num_tokens", slow_but(COUNTS, 1, 17, 257))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_agree_with_float64(shape, num_tokens):
    x, weight, bias, onto = make(shape, num_tokens)
    expected = x.double() @ weight.double().T
    assert_close(narrow.linear(x, weight), expected)
    got = narrow.linear(x, weight, bias)
    assert_close(got, expected + bias.double())
    assert torch.equal(narrow.linear(x, weight, bias, onto=onto), onto + got), "rounded before it is added"


@pytest.mark.parametrize("shape", [(33, 512), (17, 700)], ids=str)
def test_a_token_s_bits_depend_neither_on_its_place_nor_on_the_number_of_tokens(shape):
    x, weight, bias, onto = make(shape, 300)
    whole = narrow.linear(x, weight, bias, onto=onto)
    for some in ([299], [9, 3], range(15), range(40, 70), range(256)):
        index = torch.tensor(list(some), device=DEVICE)
        assert torch.equal(narrow.linear(x[index], weight, bias, onto=onto[index]), whole[index])
    assert not counters(DEVICE).any()


@pytest.mark.parametrize("num_tokens", [1, 20, 300])
def test_sums_are_added_in_the_order_of_their_parts(num_tokens):
    """Numbers of which float32 loses the small ones if they are added in any other order."""
    weight = torch.ones(16, 512, dtype=HALF, device=DEVICE)
    weight[:, :128] = weight[:, 256:384] = 2.0**12
    x = torch.zeros(num_tokens, 512, dtype=HALF, device=DEVICE)
    x[:, 0], x[:, 128], x[:, 256], x[:, 384] = -(2.0**12), 5.0, 2.0**12, 1.0
    assert (narrow.linear(x, weight) == 6.0).all(), "2 ** 24 + 1 loses the 1"


def test_tokens_may_be_part_of_a_wider_row():
    wide, weight = normal(6, 900, dtype=HALF), normal(34, 700, dtype=HALF, seed=1)
    for x in (wide[:, 64:764], wide[::2, :700], wide.new_zeros(1, 700).expand(4, 700)):
        assert torch.equal(narrow.linear(x, weight), narrow.linear(x.contiguous(), weight))


def test_not_a_number_stays_in_its_row():
    x, weight, *_ = make((20, 700), 20)
    before = narrow.linear(x, weight)
    x[3] = float("nan")
    after = narrow.linear(x, weight)
    assert after[3].isnan().all()
    assert torch.equal(after[4:], before[4:])


# ---- who is multiplied by this kernel


def test_only_narrow_weights_in_half_precision():
    x = normal(3, 64, dtype=HALF)
    assert narrow.takes(x, normal(narrow.MAX_ROWS, 64, dtype=HALF))
    assert not narrow.takes(x, normal(narrow.MAX_ROWS + 1, 64, dtype=HALF))
    assert not narrow.takes(x[None], normal(8, 64, dtype=HALF))
    assert not narrow.takes(x, torch.ones(8, 64, dtype=torch.int8, device=DEVICE))
    assert not narrow.takes(x.float(), normal(8, 64))


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_router_has_the_same_bits_for_any_number_of_tokens(is_fast):
    kernels = kernels_for(HALF, DEVICE, is_fast=is_fast, is_interpreted=True)
    x, weight, bias, onto = make((33, 512), 260)
    whole = kernels.linear(x, weight, bias, onto)
    assert_close(whole, onto + (x.double() @ weight.double().T + bias.double()))
    for count in (1, 17, 65):
        assert torch.equal(kernels.linear(x[:count], weight, bias, onto[:count]), whole[:count])


@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_a_narrow_gated_product_has_the_same_bits_for_any_number_of_tokens(gate):
    kernels = kernels_for(HALF, DEVICE, is_interpreted=True)
    x, weight, *_ = make((34, 512), 130)
    whole = kernels.gated_linear(x, weight, None, gate)
    assert_close(whole, reference_gate_mul(x.double() @ weight.double().T, gate))
    for count in (1, 17, 65):
        assert torch.equal(kernels.gated_linear(x[:count], weight, None, gate), whole[:count])


def test_steps_that_do_not_fit_are_shortened():
    for config in (narrow._FEW, narrow._SOME):
        small = narrow._fitted(config, 64 * 1024)
        assert small.block_k < config.block_k
        assert narrow.STEP % small.block_k == 0
        assert narrow._fitted(config, 228 * 1024) == config


@on_card
@pytest.mark.parametrize(("rows", "columns"), [(257, 2048), (32, 2880), (128, 2816), (513, 2048)])
def test_real_routers_on_the_card(rows, columns):
    x, weight = (
        normal(700, columns, dtype=torch.bfloat16),
        normal(rows, columns, dtype=torch.bfloat16, seed=1),
    )
    whole = narrow.linear(x, weight)
    assert_close(whole, x.double() @ weight.double().T)
    for count in (1, 5, 16, 17, 64, 128, 256, 257):
        assert torch.equal(narrow.linear(x[:count], weight), whole[:count])
