"""Heads on their way into attention: norm, rotation and a copy into slots, one after another."""

import pytest
import torch

from blockdraft.kernels.heads import HeadNorms, Rotation, Slots
from blockdraft.kernels.kernels import REFERENCE, kernels_for
from blockdraft.kernels.pointwise import sigmoid

CPU = torch.device("cpu")
NAN = float("nan")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Inputs:
    """Queries, keys and values as parts of one projection, and a cache that holds NaN."""

    def __init__(self, dtype, *, num_tokens=5, num_heads=6, num_kv_heads=3, dim=12, turned=8):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        sizes = (num_heads, num_kv_heads, num_kv_heads)
        self.q, self.k, self.v = normal(num_tokens, sum(sizes), dim).split(sizes, dim=1)
        angle = torch.rand(num_tokens, 1, turned // 2, generator=generator) * 6
        self.angles = angle.cos().to(dtype), angle.sin().to(dtype)
        self.norms = HeadNorms(normal(dim), normal(dim), 1e-5)
        self.place = torch.randperm(2 * num_tokens, generator=generator)[:num_tokens]
        self.slots = self.empty()

    def empty(self):
        shape = (self.k.shape[1], 2 * len(self.k), self.k.shape[2])
        return Slots(*(torch.full(shape, NAN, dtype=self.k.dtype) for _ in range(2)), self.place)


def is_same(mine, theirs):
    """Compare all bits, also those of NaN."""
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("path", ["chosen", "reference"])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writing_is_the_chain_of_its_steps(dtype, has_norms, path):
    inputs = Inputs(dtype)
    norms = inputs.norms if has_norms else None
    kernels = kernels_for(dtype, CPU) if path == "chosen" else REFERENCE
    normalise, turn = kernels.rms_norm, kernels.rotate
    q, k = inputs.q, inputs.k
    if has_norms:
        q, k = normalise(q, inputs.norms.q, 1e-5), normalise(k, inputs.norms.k, 1e-5)
    expected = inputs.empty()
    expected.keys.index_copy_(1, inputs.place, turn(k, inputs.angles).transpose(0, 1))
    expected.values.index_copy_(1, inputs.place, inputs.v.transpose(0, 1))
    before = [x.clone() for x in (inputs.q, inputs.k, inputs.v)]
    got = kernels.norm_rope_write(inputs.q, inputs.k, inputs.v, norms, inputs.angles, inputs.slots)
    assert torch.equal(got, turn(q, inputs.angles))
    assert is_same(inputs.slots[:2], expected[:2])
    assert all(torch.equal(x, y) for x, y in zip((inputs.q, inputs.k, inputs.v), before, strict=True))


@pytest.mark.parametrize("has_norms", [False, True])
def test_a_context_leaves_what_its_tokens_would(has_norms):
    inputs = Inputs(torch.float32)
    norms, expected = inputs.norms if has_norms else None, inputs.empty()
    kernels = kernels_for(torch.float32, CPU)
    kernels.norm_rope_write(inputs.q, inputs.k, inputs.v, norms, inputs.angles, expected)
    kernels.norm_rope_write(None, inputs.k, inputs.v, norms, inputs.angles, inputs.slots)
    assert is_same(inputs.slots[:2], expected[:2])


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "llvm", "triton"], indirect=True)
def test_a_token_with_several_slots_is_written_to_each(implementation, is_rotated):
    inputs, kernels, device = Inputs(torch.float32, dim=16), implementation.kernels, implementation.device
    q, k, v = (one.to(device) for one in (inputs.q, inputs.k, inputs.v))
    given = (
        HeadNorms(*(one.to(device) for one in inputs.norms[:2]), 1e-5),
        [a.to(device) for a in inputs.angles],
    )
    generator = torch.Generator().manual_seed(1)
    rotation = Rotation(torch.randint(0, 2, (16,), generator=generator) * 2.0 - 1, torch.randn(3, 16))
    rotation = Rotation(*(one.to(device) for one in rotation)) if is_rotated else None
    wide = [torch.full((3, 20, 16), NAN, device=device) for _ in range(4)]
    once = torch.arange(5, device=device) * 4
    several = once[:, None] + torch.tensor([0, 0, 3, 0, 1], device=device)
    outs = [
        kernels.norm_rope_write(q, k, v, *given, Slots(*wide[:2], once, rotation)),
        kernels.norm_rope_write(q, k, v, *given, Slots(*wide[2:], several, rotation)),
    ]
    assert torch.equal(*outs)
    for usual in wide[:2]:
        for offset in (1, 3):
            usual[:, once + offset] = usual[:, once]
    assert is_same([one.cpu() for one in wide[:2]], [one.cpu() for one in wide[2:]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_are_let_through_by_their_gates(dtype):
    inputs = Inputs(dtype)
    got = kernels_for(dtype, CPU).gate_heads(inputs.k, inputs.v)
    assert torch.equal(got, inputs.k * sigmoid(inputs.v))
    expected = inputs.k.double() * torch.sigmoid(inputs.v.double())
    near = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=near, atol=near)


def test_training_has_gradients():
    inputs = Inputs(torch.float64)
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))

    def attended(q, k, v):
        slots = Slots(*(torch.zeros(3, 10, 12, dtype=torch.float64) for _ in range(2)), inputs.place)
        turned = REFERENCE.norm_rope_write(q, k, v, inputs.norms, inputs.angles, slots)
        return turned, slots.keys, slots.values

    assert torch.autograd.gradcheck(attended, (q, k, v), fast_mode=True)
    assert torch.autograd.gradcheck(REFERENCE.gate_heads, (k, v), fast_mode=True)


def test_float64_never_meets_the_gpu_kernel(monkeypatch):
    """It would be computed in float32."""
    pytest.importorskip("triton")

    def refuse(*_, **__):
        raise AssertionError("the kernel was asked")

    monkeypatch.setattr("blockdraft.kernels.triton.pointwise.norm_rope_write", refuse)
    kernels, inputs = kernels_for(torch.float64, CPU, is_interpreted=True), Inputs(torch.float64)
    for q in (inputs.q, None):
        kernels.norm_rope_write(q, inputs.k, inputs.v, inputs.norms, inputs.angles, inputs.slots)
