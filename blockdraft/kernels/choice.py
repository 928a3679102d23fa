"""Decides which implementation an operation uses: the Triton kernel, the CPU kernel, or the reference.

The decision is made when the Kernels of a model are built (`kernels.kernels_for`), by the model's dtype and
device. Operations whose kernels do not compile on this GPU use references (`start/fallback` finds them).
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from blockdraft.kernels.cpu import why_no_llvm

Operation = Literal[
    "attention", "slots", "products", "packed products", "gated products", "gated tiles", "norms",
    "activations", "heads", "heads' gates", "gated delta", "gated norms", "routing", "experts",
    "sampling", "acceptance", "block convolutions", "candidates", "trees", "lookup",
]  # fmt: skip
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
# Operations that a CUDA graph cannot capture: their references read numbers from the device, or branch on the
# host's state of one step. So do the references of experts: `pick.mixtures.why_no_kernel`.
HOST_BOUND = frozenset[Operation]({"attention", "slots", "sampling", "acceptance", "candidates"})
_ON_CPU = frozenset[Operation](
    {
        "attention", "slots", "products", "norms", "activations", "heads", "gated delta",
        "sampling", "block convolutions", "candidates",
    }
)  # fmt: skip
# Integers only, so the model's dtype does not matter.
_EXACT_IN_ANY_DTYPE = frozenset[Operation]({"slots", "acceptance", "lookup"})
_CPU = torch.device("cpu")
_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Available:
    """The kernels that are available for a model of `dtype` on `device`."""

    path: Literal["reference", "llvm", "triton"]  # "triton" on a CPU is its interpreter, for tests
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU
    off: frozenset[Operation] = frozenset()  # their kernels do not compile on this GPU
    is_fast: bool = False  # a token's bits may depend on the number of tokens in the batch

    def has_triton(self, operation: Operation) -> bool:
        return self.path == "triton" and self.why_reference(operation) is None

    def has_llvm(self, dtype: torch.dtype | None = None) -> bool:
        """Return whether the CPU kernels are used for `dtype` (default: the model's dtype)."""
        return self.path == "llvm" and why_no_llvm(dtype or self.dtype, self.device) is None

    def why_reference(self, operation: Operation) -> str | None:
        """Return why `operation` uses its reference; None if it uses a kernel."""
        if self.path == "reference":
            return "the references were requested"
        if self.path == "llvm":
            if operation in _ON_CPU:
                return why_no_llvm(self.dtype, self.device)
            return f"the kernels for {operation} do not run on '{self.device.type}'"
        if not has_triton():
            return "triton is not installed (pip install triton)"
        if operation in self.off:
            return f"the kernels for {operation} do not compile on this card"
        if self.dtype not in _TRITON_DTYPES and operation not in _EXACT_IN_ANY_DTYPE:
            return f"the kernels for {operation} compute in half precision or float32, not {self.dtype}"
        return None


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
