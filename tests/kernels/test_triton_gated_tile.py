"""Gate and up of a tile of tokens in one product, against float64, and its promise on bits.

Without a card the kernel is interpreted, at some milliseconds for each program: few strips.
"""

import pytest
import torch

from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.pointwise import reference_gate_mul
from blockdraft.kernels.triton import gated_tile, narrow
from blockdraft.kernels.triton.gated_tile import MAX_TOKENS, Config, choose, fits, gated_linear
from tests.kernels.implementations import DEVICE, HALF, assert_close, normal, quiet

pytestmark = quiet
ON_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE)[0] == 9
if DEVICE.type == "cuda" and not ON_HOPPER:
    pytest.skip("the kernel is for Hopper", allow_module_level=True)
on_card = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper card")
DTYPES = [HALF] if ON_HOPPER else [torch.float32, HALF]  # a card is never asked for float32
TOKENS = 70  # a tile of 128 that is not full
CONFIGS = {
    "plain": Config(32, 0, 4, 2),
    "tail": Config(32, 16, 4, 2),
    "two warp groups": Config(64, 32, 8, 3),
    "chosen": None,
}
REAL = {"Qwen3-8B": (24576, 4096), "SmolLM2-135M": (3072, 576), "Llama-3.1-8B": (28672, 4096)}


def make(num_rows, num_inputs, dtype=HALF, num_tokens=TOKENS):
    return normal(num_tokens, num_inputs, dtype=dtype), normal(num_rows, num_inputs, dtype=dtype, seed=1)


def join(product, gate):
    return reference_gate_mul(product, gate)


# ---- meaning


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("gate", "has_bias"), [("silu", False), ("gelu", True)])
@pytest.mark.parametrize("shape", [(10, 16), (202, 176)], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_halves_are_joined(name, shape, gate, has_bias, dtype):
    """Fewer outputs than a block and more than a strip; neither half ends with a block, nor the columns."""
    x, weight = make(*shape, dtype)
    bias = normal(shape[0], dtype=dtype, seed=2) if has_bias else None
    got = gated_linear(x, weight, bias, gate, CONFIGS[name])
    assert got.dtype == dtype
    assert got.shape == (TOKENS, shape[0] // 2)
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_close(got, join(product, gate))


@pytest.mark.parametrize("num_tokens", [1, 17, 64, 65, 128])
def test_any_number_of_tokens(num_tokens):
    x, weight = make(70, 80, num_tokens=num_tokens)
    assert_close(gated_linear(x, weight, None, "silu"), join(x.double() @ weight.double().T, "silu"))


def test_a_token_may_be_part_of_a_wider_row():
    wide, weight = normal(40, 208, dtype=HALF), normal(70, 80, dtype=HALF, seed=1)
    for x in (wide[:, 64:144], wide[::2, :80], wide[3:4, 8:88], wide[:1, :80].as_strided((1, 80), (1, 1))):
        expected = gated_linear(x.contiguous(), weight, None, "silu")
        assert torch.equal(gated_linear(x, weight, None, "silu"), expected)


# ---- bits


@pytest.mark.parametrize("name", CONFIGS)
def test_a_token_s_bits_depend_neither_on_its_place_nor_on_its_neighbours(name):
    x, weight = make(110, 112)
    whole = gated_linear(x, weight, None, "silu", CONFIGS[name])
    for some in (range(TOKENS - 1, -1, -1), [9, 3] * 9 + [4] * (TOKENS - 20)):
        index = torch.tensor(list(some), device=DEVICE)
        assert torch.equal(gated_linear(x[index], weight, None, "silu", CONFIGS[name]), whole[index])
    x[2] = float("nan")
    got = gated_linear(x, weight, None, "silu", CONFIGS[name])
    assert got[2].isnan().all()
    keep = [0, 1, *range(3, TOKENS)]
    assert torch.equal(got[keep], whole[keep])


@pytest.mark.parametrize("name", CONFIGS)
def test_what_lies_behind_the_operands_is_not_multiplied(name):
    """Tokens, rows and columns past the end may hold anything."""
    x, weight = make(22, 80)
    tokens, rows = (torch.full((9000,), float("nan"), dtype=HALF, device=DEVICE) for _ in range(2))
    tokens = tokens[: (TOKENS + 5) * 112].view(TOKENS + 5, 112)[:TOKENS, :80]
    rows = rows[: 22 * 80].view(22, 80)
    tokens.copy_(x)
    rows.copy_(weight)
    got = gated_linear(tokens, rows, None, "silu", CONFIGS[name])
    assert torch.equal(got, gated_linear(x, weight, None, "silu", CONFIGS[name]))


# ---- how a product is cut, and which ones are


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("num_outputs", [1, 33, 1536, 12288, 14336, 5_000_000])
def test_every_shape_has_a_cut_that_fits_the_card(num_outputs, block_m):
    config = choose(block_m, num_outputs, 132)
    rows = 2 * (config.block_n + config.tail)
    assert config.stages >= 3
    assert config.stages * (rows + block_m) * gated_tile.BLOCK_K * 2 <= 227 * 1024


def test_what_does_not_fit_is_refused():
    x, weight = make(64, 80)
    assert fits(x, weight) == ON_HOPPER
    assert not fits(x.float(), weight.float())
    assert not fits(x[:0], weight)
    assert not fits(normal(MAX_TOKENS + 1, 80, dtype=HALF), weight)
    assert not fits(*make(64, 70))
    assert not fits(x[None], weight)
    assert not fits(x[:, 1:73], weight[:, :72].contiguous())  # rows of 160 bytes that begin 2 bytes later
    assert not fits(x.new_zeros(1, 80).expand(20, 80), weight)
    assert not fits(x, weight.T.contiguous().T)
    for bad in (x[:0], normal(MAX_TOKENS + 1, 80, dtype=HALF), x.new_zeros(1, 80).expand(20, 80)):
        with pytest.raises(AssertionError):
            gated_linear(bad, weight, None, "silu")
    for odd in (make(64, 70), (x[:, 1:73], weight[:, :72].contiguous())):
        with pytest.raises(AssertionError, match="begin at 16 bytes"):
            gated_linear(*odd, None, "silu")


def test_products_too_wide_for_the_small_kernel_take_this_one(monkeypatch):
    monkeypatch.setattr(narrow, "MAX_ROWS", 0)
    monkeypatch.setattr(gated_tile, "fits", lambda x, weight: len(x) <= MAX_TOKENS)
    taken = []
    monkeypatch.setattr(gated_tile, "gated_linear", lambda x, *rest: taken.append(len(x)) or x)
    _, weight = make(8, 16)
    kernels = kernels_for(HALF, DEVICE, is_interpreted=True)
    for count in (16, 17, 128, 129):
        kernels.gated_linear(normal(count, 16, dtype=HALF), weight, None, "silu")
    assert taken == [17, 128]


# ---- on the card


@on_card
@pytest.mark.parametrize("num_tokens", [20, 64, 128])
@pytest.mark.parametrize("name", REAL)
def test_real_products(name, num_tokens):
    x, weight = make(*REAL[name], num_tokens=num_tokens)
    assert fits(x, weight)
    got = gated_linear(x, weight, None, "silu")
    half = REAL[name][0] // 2
    chosen = torch.arange(0, half, 37, device=DEVICE)
    rows = weight[torch.cat((chosen, chosen + half))]
    assert_close(got[:, chosen], join(x.double() @ rows.double().T, "silu"))
    assert torch.equal(gated_linear(x.flip(0), weight, None, "silu"), got.flip(0))
    assert torch.equal(gated_linear(x[1:], weight, None, "silu"), got[1:])


@on_card
def test_products_one_after_another_wait_for_each_other():
    """A chain in a graph, each reading what the one before wrote: the same bits every time."""
    x, weight = make(4096, 2048, num_tokens=64)
    weight = weight * 2048**-0.5
    expected = x
    for _ in range(10):
        expected = x + gated_linear(expected, weight, None, "silu")
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x
        for _ in range(10):
            out = x + gated_linear(out, weight, None, "silu")
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
