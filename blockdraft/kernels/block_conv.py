"""Convolutions over the columns of a drafted block: the contract, its PyTorch reference, the choice.

Every token has a kernel of its own for each channel: what was learnt for the channel, and what the token adds
for all channels of a group. A column sees itself and the columns before it in its block, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.choice import Available
from blockdraft.kernels.failure import named
from blockdraft.kernels.rows import RmsNorm, reference_rms_norm

BlockConvolve = Callable[[Tensor, Tensor, Tensor, int, Tensor | None], Tensor]
ConvolveAndNorm = Callable[[Tensor, Tensor, Tensor, int, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def pick_block_conv(at: Available) -> BlockConvolve:
    if at.has_llvm():
        from blockdraft.kernels.llvm.block_conv import BlockConvKernel

        return BlockConvKernel(at.dtype)
    if not at.has_triton("block convolutions"):
        return reference_block_conv
    from blockdraft.kernels.triton.block_conv import block_conv

    return named("block convolutions", block_conv)


def pick_block_conv_norm(at: Available, convolve: BlockConvolve, rms_norm: RmsNorm) -> ConvolveAndNorm:
    """What a convolution adds to the stream `onto`, and that stream normalised."""
    if not at.has_triton("block convolutions"):
        return in_turn(convolve, rms_norm)
    from blockdraft.kernels.triton.block_conv import block_conv_norm

    return named("block convolutions", block_conv_norm)


def in_turn(convolve: BlockConvolve, rms_norm: RmsNorm) -> ConvolveAndNorm:
    """First one, then the other."""

    def both(
        x: Tensor, base: Tensor, deltas: Tensor, num_columns: int, onto: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        stream = convolve(x, base, deltas, num_columns, onto)
        return stream, rms_norm(stream, weight, eps)

    return both


def reference_block_conv(
    x: Tensor, base: Tensor, deltas: Tensor, num_columns: int, onto: Tensor | None = None
) -> Tensor:
    """y_t = sum over taps i of (base_i + deltas_ti) * x_(t - i), added to `onto` [N, E] where that is given.

    x [N, E] holds blocks of `num_columns` one after another; base [T, E], deltas [N, T, G] for G groups of
    neighbouring channels. x is zero before its block. Half precision is computed in float32, tap 0 first.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    blocks = x.to(wide).view(-1, num_columns, x.shape[1])
    group = x.shape[1] // deltas.shape[2]
    y: Tensor | None = None
    for tap in range(min(len(base), num_columns)):
        kernel = base[tap].to(wide) + deltas[:, tap].to(wide).repeat_interleave(group, dim=1)
        shifted = functional.pad(blocks[:, : num_columns - tap], (0, 0, tap, 0))
        part = kernel * shifted.reshape(x.shape)
        y = part if y is None else y + part
    assert y is not None
    return y.to(x.dtype) if onto is None else onto + y.to(x.dtype)


reference_block_conv_norm = in_turn(reference_block_conv, reference_rms_norm)
