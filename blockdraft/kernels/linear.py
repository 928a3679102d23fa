"""`y = x @ weight.T + bias` for a few tokens at a time, the bulk of a forward on a CPU.

Contract: x [..., K], weight [N, K] contiguous, bias [N] or None, one dtype; returns a new [..., N].
The weight keeps PyTorch's own layout, so nothing is packed or copied: an embedding table tied to
the head, `weight[rows]` and `F.linear` all work on the same storage.

`reference_linear` is `F.linear`. It promises nothing on bits: BLAS picks a kernel by the number of
tokens M, so a token's result changes with its neighbours, and M = 2 costs three times M = 1.

`llvm.linear.TileLinear` is the fast path on a CPU. It promises that output (token, n) has the same bits
for every M, at every index in the batch and with every number of threads: it is one fixed chain of
operations on x[token] and weight[n].
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.choice import takes_reference
from blockdraft.kernels.cpu import why_no_llvm

if TYPE_CHECKING:
    from blockdraft.kernels.llvm.linear import TileLinear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The contract, on the path chosen for this dtype and device. Training takes the reference."""
    if takes_reference(x, weight) or (kernel := _chosen(x.dtype, x.device)) is None:
        return reference_linear(x, weight, bias)
    return kernel(x, weight, bias)


def reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


@functools.cache
def _chosen(dtype: torch.dtype, device: torch.device) -> TileLinear | None:
    if why_no_llvm(dtype, device) is not None:
        return None
    from blockdraft.kernels.llvm.linear import TileLinear

    return TileLinear(dtype)
