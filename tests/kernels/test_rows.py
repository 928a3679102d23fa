"""RMS norm, gated activation, rotary positions: the CPU kernels against float64, and their bits."""

import pytest
import torch

from blockdraft.kernels import rows

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64]
SIZES = [2, 8, 19, 576, 4096]


def angles(num_tokens, dim, dtype):
    angle = torch.arange(num_tokens)[:, None, None] * torch.linspace(1, 0.01, dim // 2, dtype=dtype)
    return angle.cos(), angle.sin()


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    if rows._chosen(request.param, CPU) is None:
        pytest.skip("the kernels are not chosen")
    return request.param


@pytest.mark.parametrize("size", SIZES)
def test_kernels_agree_with_float64(dtype, size):
    x, weight = torch.randn(7, size, dtype=dtype), torch.randn(size, dtype=dtype)
    near = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 1e-37}
    expected = rows.reference_rms_norm(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(rows.rms_norm(x, weight, 1e-5).double(), expected, **near)
    gate_up = torch.randn(7, 2 * size, dtype=dtype) * 20
    expected = rows.reference_silu_mul(gate_up.double())
    torch.testing.assert_close(rows.silu_mul(gate_up).double(), expected, **(near | {"atol": 1e-34}))


def test_silu_has_no_bad_ends(dtype):
    gate = torch.tensor([-1e30, -1000, -90, -0.0, 0.0, 90, 1000, 1e30], dtype=dtype)
    out = rows.silu_mul(torch.cat([gate, torch.ones_like(gate)])[None])
    torch.testing.assert_close(out[0], torch.nn.functional.silu(gate), atol=1e-36, rtol=1e-6)
    assert rows.silu_mul(torch.full((1, 2), torch.nan, dtype=dtype)).isnan().all()


@pytest.mark.parametrize("dim", [2, 8, 20, 64, 128])
def test_rotation_has_the_reference_s_bits(dtype, dim):
    heads = torch.randn(5, 6, dim, dtype=dtype)
    for x in (heads, heads[:, 1:4]):
        assert torch.equal(
            rows.rotate(x, angles(5, dim, dtype)), rows.reference_rotate(x, angles(5, dim, dtype))
        )


@pytest.mark.parametrize("size", SIZES)
def test_bits_of_a_token_depend_neither_on_the_batch_nor_on_threads(dtype, size):
    x, weight = torch.randn(300, size, dtype=dtype), torch.randn(size, dtype=dtype)
    ops = [
        lambda part: rows.rms_norm(part, weight, 1e-6),
        lambda part: rows.silu_mul(torch.cat([part, part], dim=-1)),
    ]
    threads = torch.get_num_threads()
    try:
        for op in ops:
            torch.set_num_threads(1)
            alone = torch.cat([op(token[None]) for token in x])
            for count in (2, 3, 8, 17, 300):
                torch.set_num_threads(1 + count % 3)
                assert torch.equal(op(x[:count]), alone[:count])
    finally:
        torch.set_num_threads(threads)


def test_training_takes_the_references_and_has_gradients():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, w: rows.rms_norm(a, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(rows.silu_mul, (x,))
    assert torch.autograd.gradcheck(lambda a: rows.rotate(a[:, None], angles(3, 8, torch.float64)), (x,))
