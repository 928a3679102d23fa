"""The small steps of a layer that work on one token at a time: RMS norm, gated activations, rotary positions.

Each has its contract and plain PyTorch reference here. The CPU kernels, `llvm.pointwise`, do each in one
pass and promise that a token's bits do not depend on the tokens next to it. PyTorch promises nothing of the
kind, and its sigmoid, silu, softplus and gelu do vary: elements past the last whole vector are done by other
code than those before (measured on aarch64, PyTorch 2.13). `sigmoid` and `softplus` here have one chain of
operations for every element, of which `exp` and `log1p` do not vary. Training takes the references.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    pass

Angles = tuple[Tensor, Tensor]  # cosines and sines, [N, 1, R / 2] each, contiguous, R <= D values rotated
Gate = Literal["silu", "gelu"]  # gelu by its tanh approximation
RmsNorm = Callable[[Tensor, Tensor | None, float], Tensor]
GateMul = Callable[[Tensor, Gate], Tensor]
Rotate = Callable[[Tensor, Angles], Tensor]


def reference_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, accumulated in float32 or wider.

    Half precision is rounded before it meets a weight of its own dtype; a float32 weight is multiplied in
    float32 and the product is rounded, once. No weight: x / rms(x).
    """
    if x.dtype in (torch.float32, torch.float64):
        weight = None if weight is None else weight.to(x.dtype)
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    normed = functional.rms_norm(x.float(), x.shape[-1:], None, eps)
    if weight is None:
        return normed.to(x.dtype)
    if weight.dtype == torch.float32:
        return (normed * weight).to(x.dtype)
    return normed.to(x.dtype) * weight


def reference_gate_mul(gate_up: Tensor, gate: Gate) -> Tensor:
    """gate(a) * b, where gate_up [..., 2 K] holds a and b one after the other; returns [..., K]."""
    a, b = gate_up.chunk(2, dim=-1)
    return (functional.silu(a) if gate == "silu" else functional.gelu(a, approximate="tanh")) * b


def reference_rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotary position on x [N, H, D]: the halves of its first R values are the coordinates (neox style).

    R is twice the number of angles; the values past it stay as they are.
    """
    cos, sin = angles
    size = cos.shape[-1]
    first, second, rest = x[..., :size], x[..., size : 2 * size], x[..., 2 * size :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), the same bits wherever an element stands."""
    small = torch.exp(-x.abs())
    return torch.where(x >= 0, 1, small) / (1 + small)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), the same bits wherever an element stands."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
