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
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.kernels.cpu import why_no_llvm

LinearOp = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The specification."""
    return F.linear(x, weight, bias)


@dataclass(frozen=True)
class LinearChoice:
    """The linear to use for a whole run; `is_row_stable` is the promise on bits above."""

    op: LinearOp
    is_row_stable: bool
    reason: str


def choose_linear(*, dtype: torch.dtype, device: torch.device) -> LinearChoice:
    """The fast path where it is known to win, else the reference, with the reason either way."""
    problem = why_no_llvm(dtype, device)
    if problem is not None:
        return LinearChoice(op=reference_linear, is_row_stable=False, reason=problem)
    from blockdraft.kernels.llvm.linear import TileLinear

    return LinearChoice(op=TileLinear(dtype), is_row_stable=True, reason="tiled CPU kernel")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The contract, on the path chosen for this dtype and device. Training takes the reference."""
    if weight.requires_grad and torch.is_grad_enabled():
        return reference_linear(x, weight, bias)
    return _chosen(x.dtype, x.device).op(x, weight, bias)


@functools.cache
def _chosen(dtype: torch.dtype, device: torch.device) -> LinearChoice:
    return choose_linear(dtype=dtype, device=device)
