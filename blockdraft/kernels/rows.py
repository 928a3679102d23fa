"""The small steps of a layer that work on one token at a time: RMS norm, gated activation, rotary positions.

Each has its contract and plain PyTorch reference here. The CPU kernels, `llvm.pointwise`, do each in one
pass and promise that a token's bits do not depend on the tokens next to it. PyTorch promises nothing of the
kind (whether its results vary was not measured). Training takes the references.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.cpu import is_training, why_no_llvm

if TYPE_CHECKING:
    from blockdraft.kernels.llvm.pointwise import RowKernels

Angles = tuple[Tensor, Tensor]  # cosines and sines, [N, 1, D / 2] each, contiguous


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, accumulated in float32 or wider."""
    kernels = _chosen(x.dtype, x.device)
    if kernels is None or is_training(x, weight):
        return reference_rms_norm(x, weight, eps)
    return kernels.rms_norm(x, weight, eps)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype in (torch.float32, torch.float64):
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate_up [..., 2 K] holds one after the other; returns [..., K]."""
    kernels = _chosen(gate_up.dtype, gate_up.device)
    if kernels is None or is_training(gate_up):
        return reference_silu_mul(gate_up)
    return kernels.silu_mul(gate_up)


def reference_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotary position on x [N, H, D]: its halves are the coordinates (neox style)."""
    kernels = _chosen(x.dtype, x.device)
    if kernels is None or is_training(x):
        return reference_rotate(x, angles)
    return kernels.rotate(x, *angles)


def reference_rotate(x: Tensor, angles: Angles) -> Tensor:
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@functools.cache
def _chosen(dtype: torch.dtype, device: torch.device) -> RowKernels | None:
    if why_no_llvm(dtype, device) is not None:
        return None
    from blockdraft.kernels.llvm.pointwise import RowKernels

    return RowKernels(dtype)
