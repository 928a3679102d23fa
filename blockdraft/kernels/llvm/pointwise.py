"""Operations on single tokens on a CPU: RMS norm, gated activations, rotary positions, each in one pass.

One thread processes a row in a fixed order of operations, so its bits depend only on the row. Elements after
the last whole vector go through the same operations one at a time.
"""

from __future__ import annotations

import functools
import math
from typing import get_args

import torch
from torch import Tensor

from blockdraft.kernels.llvm.compiler import inlined, kernel, taken
from blockdraft.kernels.llvm.jit import REALS, Jit
from blockdraft.kernels.llvm.language import Int, Real, Reals, Type, fma, load, pieces, sigmoid, sqrt, store
from blockdraft.kernels.pointwise import Angles, Gate

WIDE = 16  # elements at a time; sums' bits depend on it
SERIAL_ELEMENTS = 1 << 14  # below, waking a thread costs more than it saves


class RowKernels:
    """The kernels for one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        real = REALS[dtype]
        self._norm = Jit(rms_norm, real=real)
        self._gate = {gate: Jit(gate_mul, real=real, gate=gate) for gate in get_args(Gate)}
        self._rotate = Jit(rotate, real=real)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        size = x.shape[-1]
        if weight is None:
            weight = x.new_ones(size)
        assert x.dtype == weight.dtype
        x = x.contiguous()
        y = torch.empty_like(x)
        self._norm(x.numel() // size, size, x, y, weight, eps, is_small=x.numel() < SERIAL_ELEMENTS)
        return y

    def gate_mul(self, gate_up: Tensor, gate: Gate) -> Tensor:
        assert gate_up.shape[-1] % 2 == 0
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        y = gate_up.new_empty(*gate_up.shape[:-1], size)
        self._gate[gate](y.numel() // size, size, gate_up, y, is_small=y.numel() < SERIAL_ELEMENTS)
        return y

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        num_rows, heads, dim = x.shape
        cos, sin = angles
        size = cos.shape[-1]
        assert 2 * size <= dim
        assert cos.shape == sin.shape == (num_rows, 1, size)
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        if x.stride()[1:] != (dim, 1):
            x = x.contiguous()
        # The kernel writes only rotated values: the others are copied.
        y = x.new_empty(x.shape) if 2 * size == dim else x.clone(memory_format=torch.contiguous_format)
        is_small = x.numel() < SERIAL_ELEMENTS
        self._rotate(num_rows, heads, dim, size, x.stride(0), x, y, cos, sin, is_small=is_small)
        return y


@kernel
def rms_norm(num_rows: Int, size: Int, x: Reals, y: Reals, weight: Reals, eps: Real, *, real: Type) -> None:
    """Compute y = x * (1 / sqrt(mean(x**2) + eps)) * weight."""
    for row in taken(num_rows):
        normalise(x + row * size, y + row * size, weight, size, eps, real)


@inlined
def normalise(x: Reals, y: Reals, weight: Reals, size: Int, eps: Real, real: Type) -> None:
    """Compute a row of `rms_norm`: sum squares in lanes, join the lanes, then add the other squares."""
    whole, lanes = size - size % WIDE, x.zeros(real.wide(WIDE))
    for i in range(0, whole, WIDE):
        values = load(x + i, WIDE)
        lanes = fma(values, values, lanes)
    total = lanes.halved()
    for i in range(whole, size):
        total = fma(x[i], x[i], total)
    scale = 1.0 / sqrt(total / size.to(real) + eps)
    for begin, end, step in pieces(size, WIDE):
        for i in range(begin, end, step):
            store(y + i, load(x + i, step) * scale * load(weight + i, step))


@kernel
def gate_mul(num_rows: Int, size: Int, x: Reals, y: Reals, *, real: Type, gate: str) -> None:
    """Compute y = gate(a) * b; a row of x is a followed by b."""
    for row in taken(num_rows):
        a, row_y = x + row * size * 2, y + row * size
        b = a + size
        for begin, end, lanes in pieces(size, WIDE):
            for i in range(begin, end, lanes):
                store(row_y + i, gated(load(a + i, lanes), gate) * load(b + i, lanes))


def gated(x: Real, gate: str) -> Real:
    """Return silu(x) = x sigmoid(x), or gelu(x) by its tanh approximation, which is x sigmoid(z)."""
    z = x
    if gate == "gelu":
        z = x * fma(x * x, 0.044715, 1.0) * (2 * math.sqrt(2 / math.pi))
    return x * sigmoid(z)


@kernel
def rotate(
    num_rows: Int, heads: Int, dim: Int, size: Int, stride: Int, x: Reals, y: Reals, cos: Reals, sin: Reals,
    *, real: Type,
) -> None:  # fmt: skip
    """Replace halves (u, v) of each head's first 2 * size values by (u cos - v sin, v cos + u sin)."""
    for row in taken(num_rows):
        for head in range(heads):
            u, u_y = x + row * stride + head * dim, y + (row * heads + head) * dim
            rotate_head(u, u_y, cos + row * size, sin + row * size, size)


@inlined
def rotate_head(u: Reals, u_y: Reals, cos: Reals, sin: Reals, size: Int) -> None:
    v, v_y = u + size, u_y + size
    for begin, end, lanes in pieces(size, WIDE):
        for i in range(begin, end, lanes):
            first, second = load(u + i, lanes), load(v + i, lanes)
            c, s = load(cos + i, lanes), load(sin + i, lanes)
            store(u_y + i, first * c - second * s)
            store(v_y + i, second * c + first * s)


llvm_rows = functools.cache(RowKernels)
