"""The Hadamard rotation of `kv_codec.rotate` for tiles of heads.

It computes sums and differences of values 1, 2, 4, … apart: for every value, the reference's float32
additions in the reference's order, in any tile layout.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels import kv_codec, kv_formats

assert kv_formats.LARGEST_HEAD == 1 << 9  # the largest block below


@triton.jit
def hadamard_blocks(x, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Multiply each power-of-two block of the first DIM values of x [M, DIM_PAD] by its Hadamard matrix."""
    d = tl.arange(0, DIM_PAD)
    size = d * 0  # the size of each value's block; 0 past the end of the head
    norm = d * 0.0
    for bit in tl.static_range(9, -1, -1):
        if DIM & (1 << bit):  # the largest block is first
            begin = (DIM >> (bit + 1)) << (bit + 1)
            is_mine = (d >= begin) & (d < begin + (1 << bit))
            size = tl.where(is_mine, 1 << bit, size)
            norm = tl.where(is_mine, 2.0 ** (-0.5 * bit), norm)
    for bit in tl.static_range(10):
        if (1 << bit) < DIM_PAD:
            is_paired = size > (1 << bit)
            index = tl.where(is_paired, d ^ (1 << bit), d)
            other = tl.gather(x, tl.broadcast_to(index[None, :], x.shape), 1)
            sign = tl.where((d & (1 << bit)) == 0, 1.0, -1.0)
            x = tl.where(is_paired[None, :], tl.fma(x, tl.broadcast_to(sign[None, :], x.shape), other), x)
    return x * norm[None, :]


@functools.cache
def signs(head_dim: int, device: torch.device) -> Tensor:
    """Return `kv_codec.signs`, cached, as a CUDA graph cannot repeat the copy from the host."""
    return kv_codec.signs(head_dim, device)
