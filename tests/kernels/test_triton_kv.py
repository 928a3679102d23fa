"""Triton's kernels for compressed keys and values against the references, and their promise on bits."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytest.importorskip("triton")

from blockdraft.kernels import kv_codec  # noqa: E402
from blockdraft.kernels.heads import HeadNorms, Slots, Turn, turned  # noqa: E402
from blockdraft.kernels.triton.rows import norm_rope_write  # noqa: E402

# The interpreter computes with NumPy, which warns where hidden scores are subtracted.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


# ---- heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 96])
def test_heads_are_turned_last_of_all(dim, dtype):
    num_tokens, heads, groups = 3, 6, 2
    q, k, v = (normal(num_tokens, n, dim, dtype=dtype, seed=n) for n in (heads, groups, groups + 1))
    v = v[:, :groups]
    norms = HeadNorms(normal(dim, seed=7), normal(dim, seed=8), 1e-5)
    angle = normal(num_tokens, 1, dim // 2, seed=9)
    angles = (angle.cos(), angle.sin())
    turn = Turn(kv_codec.signs(dim, DEVICE), normal(groups, dim, seed=10))
    place = torch.tensor([4, 0, 2], device=DEVICE)

    def write(kind, turn):
        parts = [x.to(kind) for x in (q, k, v)]
        store = [torch.zeros(groups, 6, dim, dtype=kind, device=DEVICE) for _ in range(2)]
        out = norm_rope_write(*parts, norms, angles, Slots(*store, place, turn))
        return out, *(x[:, place].transpose(0, 1) for x in store)

    plain = write(torch.float32, None)
    expected = [turned(x, turn, turn.centre if n == 1 else None) for n, x in enumerate(plain)]
    for got, wanted in zip(write(dtype, turn), expected, strict=True):
        torch.testing.assert_close(got, wanted.to(dtype), atol=1e-5, rtol=0.008 if dtype.itemsize == 2 else 1e-5)
