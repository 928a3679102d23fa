"""RMS norm, gated activations, rotary positions: the CPU kernels against float64, and their bits."""

import pytest
import torch

from blockdraft.kernels import pointwise as rows
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.kernels import REFERENCE, kernels_for

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64]
SIZES = [2, 8, 19, 576, 4096]


def angles(num_tokens, dim, dtype):
    angle = torch.arange(num_tokens)[:, None, None] * torch.linspace(1, 0.01, dim // 2, dtype=dtype)
    return angle.cos(), angle.sin()


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    if why_no_llvm(request.param, CPU) is not None:
        pytest.skip("the kernels are not chosen")
    return request.param


@pytest.mark.parametrize("size", SIZES)
def test_kernels_agree_with_float64(dtype, size):
    kernels = kernels_for(dtype, CPU)
    x, weight = torch.randn(7, size, dtype=dtype), torch.randn(size, dtype=dtype)
    near = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 1e-37}
    for given in (weight, None):
        expected = rows.reference_rms_norm(x.double(), None if given is None else given.double(), 1e-5)
        torch.testing.assert_close(kernels.rms_norm(x, given, 1e-5).double(), expected, **near)
    gate_up = torch.randn(7, 2 * size, dtype=dtype) * 20
    expected = rows.reference_gate_mul(gate_up.double(), "silu")
    torch.testing.assert_close(
        kernels.gate_mul(gate_up, "silu").double(), expected, **(near | {"atol": 1e-34})
    )
    # looser: the error of exp's argument grows with the gate, and torch's own 1 + tanh cancels
    gate_up = gate_up / 4
    expected = rows.reference_gate_mul(gate_up.double(), "gelu")
    loose = {"rtol": 64 * torch.finfo(dtype).eps, "atol": 1e-6 if dtype == torch.float32 else 1e-14}
    torch.testing.assert_close(kernels.gate_mul(gate_up, "gelu").double(), expected, **loose)


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gates_have_no_bad_ends(dtype, name):
    kernels = kernels_for(dtype, CPU)
    gate = torch.tensor([-1e30, -1000, -90, -0.0, 0.0, 90, 1000, 1e30], dtype=dtype)
    out = kernels.gate_mul(torch.cat([gate, torch.ones_like(gate)])[None], name)
    functions = torch.nn.functional
    expected = functions.silu(gate) if name == "silu" else functions.gelu(gate, approximate="tanh")
    torch.testing.assert_close(out[0], expected, atol=1e-36 if name == "silu" else 0, rtol=1e-6)
    assert kernels.gate_mul(torch.full((1, 2), torch.nan, dtype=dtype), name).isnan().all()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_meets_a_float32_weight_before_it_is_rounded(half):
    x, weight = torch.randn(50, 64).to(half), torch.randn(64)
    scale = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    for given in (None, weight, weight.to(half)):
        exact = x.double() * scale * (1.0 if given is None else given.double())
        rounded_twice = given is not None and given.dtype == half
        out = rows.reference_rms_norm(x, given, 1e-5)
        assert out.dtype == half
        # A float32 result within a hair of a tie may round the other way, hence not the nearest always.
        is_nearest = out == exact.to(half)
        assert is_nearest.float().mean() < 0.9 if rounded_twice else is_nearest.float().mean() > 0.99
        torch.testing.assert_close(out.double(), exact, rtol=4 * torch.finfo(half).eps, atol=1e-6)


PARTS = [(8, 2), (20, 8), (64, 16), (64, 62), (7, 4), (256, 64), *((dim, dim) for dim in (2, 20, 128))]


@pytest.mark.parametrize(("dim", "rotated"), PARTS)
def test_rotation_has_the_reference_s_bits_and_leaves_the_rest_of_each_head(dtype, dim, rotated):
    kernels = kernels_for(dtype, CPU)
    heads = torch.randn(5, 6, dim, dtype=dtype)
    turned = angles(5, rotated, dtype)
    for x in (heads, heads[:, 1:4], heads.transpose(0, 1).contiguous().transpose(0, 1)):
        before = x.clone()
        out = kernels.rotate(x, turned)
        assert torch.equal(out[..., rotated:], x[..., rotated:])
        assert torch.equal(out[..., :rotated], kernels.rotate(x[..., :rotated].contiguous(), turned))
        assert torch.equal(out, rows.reference_rotate(x, turned))
        assert torch.equal(x, before)


def test_rotation_turns_each_pair_by_its_angle(dtype):
    """Compare with complex numbers: the first half has the real parts, the second the imaginary ones."""
    kernels = kernels_for(dtype, CPU)
    x, (cos, sin) = torch.randn(5, 3, 10, dtype=dtype), angles(5, 6, dtype)
    for op in (kernels.rotate, rows.reference_rotate):
        out = op(x, (cos, sin))
        expected = torch.complex(x[..., :3], x[..., 3:6]) * torch.complex(cos, sin)
        torch.testing.assert_close(torch.complex(out[..., :3], out[..., 3:6]), expected)


@pytest.mark.parametrize("size", SIZES)
def test_bits_of_a_token_depend_neither_on_the_batch_nor_on_threads(dtype, size, threads):
    kernels = kernels_for(dtype, CPU)
    x, weight = torch.randn(300, size, dtype=dtype), torch.randn(size, dtype=dtype)
    ops = [
        lambda part: kernels.rms_norm(part, weight, 1e-6),
        lambda part: kernels.rms_norm(part, None, 1e-6),
        lambda part: kernels.gate_mul(torch.cat([part, part], dim=-1), "silu"),
        lambda part: kernels.gate_mul(torch.cat([part, part], dim=-1), "gelu"),
    ]
    for op in ops:
        threads(1)
        alone = torch.cat([op(token[None]) for token in x])
        for count in (2, 3, 8, 17, 300):
            threads(1 + count % 3)
            assert torch.equal(op(x[:count]), alone[:count])


@pytest.mark.parametrize("op", [rows.sigmoid, rows.softplus], ids=["sigmoid", "softplus"])
@pytest.mark.parametrize("precision", DTYPES, ids=str)
def test_sigmoid_and_softplus_have_the_same_bits_wherever_an_element_stands(op, precision):
    x = torch.randn(1003, generator=torch.Generator().manual_seed(1)).to(precision) * 10
    x[:6] = torch.tensor([-1e30, -800, -0.0, 0.0, 800, 1e30])
    whole = op(x)
    expected = {rows.sigmoid: torch.sigmoid, rows.softplus: torch.nn.functional.softplus}[op](x.double())
    near = {"rtol": 8 * torch.finfo(precision).eps, "atol": 1e-8 if op is rows.softplus else 1e-300}
    torch.testing.assert_close(whole[6:].double(), expected[6:], **near)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-6, atol=1e-8)
    assert torch.equal(torch.cat([op(one) for one in x.split(1)]), whole)
    assert torch.equal(op(x[::3]), whole[::3])
    for count in range(1, 40):
        assert torch.equal(op(x[1 : 1 + count]), whole[1 : 1 + count])


def test_the_references_have_gradients():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    for op in (
        lambda a, w: REFERENCE.rms_norm(a, w, 1e-5) + REFERENCE.rms_norm(a, None, 1e-5),
        lambda a, w: REFERENCE.gate_mul(a, "silu") + REFERENCE.gate_mul(a * w, "gelu"),
        lambda a, w: REFERENCE.rotate(a[:, None] * w, angles(3, 8, torch.float64)),
    ):
        assert torch.autograd.gradcheck(op, (x, weight), fast_mode=True)
