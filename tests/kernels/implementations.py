"""The implementations of every operation: the reference, the CPU's kernels (llvm) and a GPU's (Triton).

An operation's test file gives the same cases to each of them, by the fixture `implementation` in conftest.py.
Without a card Triton's kernels are interpreted, slowly: they get the smallest shapes that reach all code.
"""

from typing import NamedTuple

import pytest
import torch

from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.kernels import REFERENCE, Kernels, kernels_for
from tests.matrix import slow_but

NAMES = ("reference", "llvm", "triton")
HAS_CARD = torch.cuda.is_available()
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if HAS_CARD else "cpu")  # Triton's
HALF = torch.bfloat16 if HAS_CARD else torch.float16  # the interpreter cannot multiply bfloat16
on_card = pytest.mark.skipif(not HAS_CARD, reason="needs a CUDA device")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
only_kernels = pytest.mark.parametrize("implementation", NAMES[1:], indirect=True)
slow_triton = pytest.mark.parametrize(  # all kernels, the interpreted ones in `make test-all`
    "implementation", slow_but(NAMES[1:], "llvm"), indirect=True
)
slow_interpreted = (lambda test: test) if HAS_CARD else pytest.mark.slow
only_llvm = pytest.mark.parametrize("implementation", ["llvm"], indirect=True)
only_triton = pytest.mark.parametrize("implementation", ["triton"], indirect=True)
# The interpreter computes with NumPy, which warns where unsigned words wrap as they should, and of NaN.
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


class Implementation(NamedTuple):
    """The kernels of one name, and the device that they run on."""

    name: str
    kernels: Kernels
    device: torch.device

    @property
    def is_interpreted(self):
        return self.name == "triton" and not HAS_CARD


def implementation_of(name, dtype=torch.float32):
    """Skips the test where this machine cannot run it."""
    if name == "reference":
        return Implementation(name, REFERENCE, CPU)
    if name == "triton":
        pytest.importorskip("triton")
        return Implementation(name, kernels_for(dtype, DEVICE, is_interpreted=True), DEVICE)
    if (why := why_no_llvm(dtype, CPU)) is not None:
        pytest.skip(f"the CPU kernels are not chosen: {why}")
    return Implementation(name, kernels_for(dtype, CPU), CPU)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(got, expected, tolerance=None):
    """Within the dtype's (or another) tolerance of the number itself and of the results' root mean square."""
    assert expected.dtype in (torch.float64, got.dtype)
    wide = expected.double()
    error = (got.double() - wide).abs() / (wide.abs() + wide.square().mean().sqrt())
    assert got.shape == expected.shape
    if got.numel() > 0:
        assert error.max() <= (tolerance or TOLERANCE[got.dtype]), f"off by {error.max():.2g}"
