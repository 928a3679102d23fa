"""The tiled linear against float64, and its promise on bits."""

import pytest
import torch

from blockdraft.kernels import cpu
from blockdraft.kernels.linear import reference_linear
from blockdraft.kernels.llvm.linear import TileLinear

CPU = torch.device("cpu")
# [N, K]: below a cache line, no multiple of anything, whole lines, and big enough for two threads.
SHAPES = [(1, 1), (5, 3), (7, 16), (97, 131), (33, 1537), (64, 576), (1003, 200)]
DTYPES = [torch.float32, torch.float64]


def make(n: int, k: int, dtype: torch.dtype, num_tokens: int = 20):
    generator = torch.Generator().manual_seed(n * 10_000 + k)
    weight = torch.randn(n, k, dtype=dtype, generator=generator)
    return torch.randn(num_tokens, k, dtype=dtype, generator=generator), weight


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def tile(dtype):
    pytest.importorskip("llvmlite")
    return TileLinear(dtype)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8, 9, 20])
def test_tile_is_as_close_to_float64_as_a_dot_product_can_be(tile, dtype, n, k, num_tokens):
    x, weight = make(n, k, dtype, num_tokens)
    # Each of the k roundings is at most eps of the running sum of magnitudes.
    bound = k * torch.finfo(dtype).eps * (x.double().abs() @ weight.double().abs().T)
    error = (tile(x, weight).double() - x.double() @ weight.double().T).abs()
    assert (error <= bound).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_tile_bits_of_a_token_depend_neither_on_the_batch_nor_on_its_place(tile, dtype, n, k):
    x, weight = make(n, k, dtype)
    alone = torch.cat([tile(token[None], weight) for token in x])
    for num_tokens in range(1, 18):
        for start in (0, 3):
            rows = slice(start, start + num_tokens)
            assert torch.equal(tile(x[rows], weight), alone[rows])


def test_tile_bits_of_an_output_do_not_depend_on_the_other_outputs(tile, dtype):
    x, weight = make(97, 131, dtype, num_tokens=8)
    whole = tile(x, weight)
    for start, stop in [(0, 1), (3, 8), (50, 97)]:
        assert torch.equal(tile(x, weight[start:stop]), whole[:, start:stop])


def test_tile_bits_do_not_depend_on_the_number_of_threads(tile, dtype, threads):
    x, weight = make(1003, 200, dtype)
    first, *others = [threads(n) or tile(x, weight) for n in (1, 2, 3)]
    assert all(torch.equal(one, first) for one in others)


def test_tile_takes_leading_dimensions_bias_and_strided_input(tile, dtype):
    x, weight = make(7, 16, dtype, num_tokens=6)
    bias = torch.arange(7, dtype=dtype)
    expected = reference_linear(x, weight, bias)
    wide = torch.stack([x, x], dim=1)[:, 0]
    for given in (x, x.view(2, 3, 16), wide):
        actual = tile(given, weight, bias)
        assert actual.shape == (*given.shape[:-1], 7)
        torch.testing.assert_close(actual.view(6, 7), expected)
    assert tile(x[:0], weight).shape == (0, 7)


def test_pytorch_is_the_fallback_and_the_reason_is_known(monkeypatch):
    assert "float16" in cpu.why_no_llvm(torch.float16, CPU)
    monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(cpu, "_NEEDED", {cpu.platform.machine(): set()})
    assert "llvmlite" in cpu.why_not_here.__wrapped__()  # past its cache


def test_gradients_reach_the_input_of_the_reference():
    x, weight = make(7, 16, torch.float32)
    reference_linear(x.requires_grad_(), weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x))
