"""Picks the gated delta rule: its scans and folds, the convolution before it and the norm after it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from blockdraft.kernels.choice import Available
from blockdraft.kernels.failure import named
from blockdraft.kernels.gated_delta import (
    Convolve,
    DeltaFold,
    DeltaScan,
    GatedNorm,
    InPlace,
    reference_convolve,
    reference_fold,
    reference_scan,
)
from blockdraft.kernels.llvm.gated_delta import GatedDeltaKernels
from blockdraft.kernels.pointwise import RmsNorm, sigmoid

_llvm_delta = functools.cache(GatedDeltaKernels)


def pick_scan(at: Available) -> tuple[DeltaScan, DeltaFold]:
    dtype = torch.promote_types(at.dtype, torch.float32)  # the dtype of states
    if not at.has_llvm(dtype):
        return reference_scan, reference_fold
    kernels = _llvm_delta(dtype)
    return kernels.scan, kernels.fold


def pick_convolve(at: Available) -> Convolve:
    return _llvm_delta(at.dtype).convolve if at.has_llvm() else reference_convolve


def pick_gated_norm(at: Available, rms_norm: RmsNorm) -> GatedNorm:
    """Pick rms_norm(read [N, H, V]) * silu(z [N, H * V]) in read's dtype, computed in float32 or wider."""
    if at.has_triton("gated norms"):
        from blockdraft.kernels.triton import gated_delta as kernels

        return named("gated norms", kernels.gated_norm)

    def gated_norm(read: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        z = z.reshape(read.shape).to(torch.promote_types(z.dtype, torch.float32))
        return (rms_norm(read, weight, eps) * (z * sigmoid(z))).to(read.dtype)

    return gated_norm


def pick_in_place(at: Available) -> InPlace | None:
    """Return the kernels on states in place; None if `convolve`, `scan` and `fold` get gathered states."""
    if not at.has_triton("gated delta"):
        return None
    from blockdraft.kernels.triton import gated_delta as kernels

    return InPlace(named("gated delta", kernels.scan), named("gated delta", kernels.fold))
