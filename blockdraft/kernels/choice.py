"""Which implementation an operation has: Triton's kernel, the CPU's, or its PyTorch reference.

This is decided once, when the Kernels of a model are made (`kernels.kernels_for`): by the model's dtype, its
device, and the operations whose kernels do not compile on this card. The start finds those (`start/fallback`)
and makes the engine's Kernels again without them, for all shapes.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from blockdraft.kernels.cpu import why_no_llvm

Operation = Literal[
    "attention",
    "places",
    "products",
    "packed products",
    "gated products",
    "gated tiles",
    "norms",
    "activations",
    "heads",
    "heads' gates",
    "gated delta",
    "gated norms",
    "routing",
    "experts",
    "sampling",
    "acceptance",
    "block convolutions",
    "candidates",
    "recall",
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
# Their references ask the device for numbers, or branch on what the host knows of the rows of one step: a
# CUDA graph would keep the answer of its capture. Those of experts do too: `pick.mixtures.why_no_kernel`.
HOST_BOUND = frozenset[Operation]({"attention", "places", "sampling", "acceptance", "candidates"})
_ON_CPU = frozenset[Operation](
    {
        "attention", "places", "products", "norms", "activations", "heads", "gated delta",
        "sampling", "block convolutions", "candidates",
    }
)  # fmt: skip
# Exact, whatever the model computes in.
_WHOLE_NUMBERS = frozenset[Operation]({"places", "acceptance", "recall"})
_CPU = torch.device("cpu")
_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Available:
    """Which kernels can serve a model of `dtype` on `device`."""

    path: Literal["reference", "llvm", "triton"]  # "triton" on a CPU is its interpreter, for tests
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU
    off: frozenset[Operation] = frozenset()  # their kernels do not compile on this card
    is_fast: bool = False  # a token's bits may follow from how many tokens come with it

    def has_triton(self, operation: Operation) -> bool:
        """Whether `operation` has Triton's kernel."""
        return self.path == "triton" and self.why_reference(operation) is None

    def has_llvm(self, dtype: torch.dtype | None = None) -> bool:
        """Whether the CPU's kernels serve, in the model's dtype or in another."""
        return self.path == "llvm" and why_no_llvm(dtype or self.dtype, self.device) is None

    def why_reference(self, operation: Operation) -> str | None:
        """Why `operation` has its reference; None: it has a kernel."""
        if self.path == "reference":
            return "the references were asked for"
        if self.path == "llvm":
            if operation in _ON_CPU:
                return why_no_llvm(self.dtype, self.device)
            return f"the kernels for {operation} are not for '{self.device.type}'"
        if not has_triton():
            return "triton is not installed (pip install triton)"
        if operation in self.off:
            return f"the kernels for {operation} do not compile on this card"
        if self.dtype not in _TRITON_DTYPES and operation not in _WHOLE_NUMBERS:
            return f"the kernels for {operation} compute in half precision or float32, not {self.dtype}"
        return None


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
