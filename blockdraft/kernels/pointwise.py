"""Operations on single tokens (RMS norm, gated activations, rotary positions): contracts and references.

In the CPU kernels, `llvm.pointwise`, a token's bits do not depend on other tokens. In PyTorch they may: its
sigmoid, silu, softplus and gelu compute the elements after the last full SIMD vector by other code (measured
on aarch64, PyTorch 2.13). `sigmoid` and `softplus` here use one chain of operations for every element.
Training uses the references.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Angles = tuple[Tensor, Tensor]  # cosines and sines, [N, 1, R / 2] each, contiguous, R <= D values rotated
Gate = Literal["silu", "gelu"]  # gelu by its tanh approximation
RmsNorm = Callable[[Tensor, Tensor | None, float], Tensor]
GateMul = Callable[[Tensor, Gate], Tensor]
Rotate = Callable[[Tensor, Angles], Tensor]


def reference_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, accumulated in float32 or wider.

    Half precision is rounded before it is multiplied by a half-precision weight. The product with a float32
    weight is computed in float32 and rounded once. Without a weight, the result is x / rms(x).
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
    """Return gate(a) * b [..., K] for gate_up [..., 2 K], which holds a, then b."""
    a, b = gate_up.chunk(2, dim=-1)
    return (functional.silu(a) if gate == "silu" else functional.gelu(a, approximate="tanh")) * b


def reference_rotate(x: Tensor, angles: Angles) -> Tensor:
    """Return x [N, H, D] with rotary positions applied to its first R values, paired by halves (neox).

    R is twice the number of angles; the other values do not change.
    """
    cos, sin = angles
    size = cos.shape[-1]
    first, second, rest = x[..., :size], x[..., size : 2 * size], x[..., 2 * size :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), with bits that do not depend on an element's index."""
    small = torch.exp(-x.abs())
    return torch.where(x >= 0, 1, small) / (1 + small)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), with bits that do not depend on an element's index."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
