"""Convolutions over the columns of a drafted block: the contract and its PyTorch reference.

Every token has its own convolution kernel for each channel: the channel's learned kernel plus a term that the
token adds for a group of channels. A column sees only itself and the earlier columns of its block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.linear import Multiply, reference_linear
from blockdraft.kernels.pointwise import RmsNorm, reference_rms_norm

BlockConvolve = Callable[[Tensor, Tensor, Tensor, int, Tensor | None], Tensor]
ConvBefore = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
ConvAfter = Callable[[Tensor, Tensor, Tensor, int, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def in_turn(convolve: BlockConvolve, linear: Multiply, rms_norm: RmsNorm) -> tuple[ConvBefore, ConvAfter]:
    """Return `before` and `after`, composed of single operations."""

    def before(x: Tensor, base: Tensor, projection: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
        """Return x convolved by `base` plus its tokens' deltas, and the deltas [N, 2, T, G].

        Index 0 of the second dimension is for this convolution, 1 for `after`; projection [2 * T * G, E].
        """
        deltas = linear(x, projection, None, None).view(len(x), 2, len(base), -1)
        return convolve(x, base, deltas[:, 0], num_columns, None), deltas

    def after(
        x: Tensor, base: Tensor, deltas: Tensor, num_columns: int, onto: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the stream, onto + convolve(x), and its norm."""
        stream = convolve(x, base, deltas, num_columns, onto)
        return stream, rms_norm(stream, weight, eps)

    return before, after


def reference_block_conv(
    x: Tensor, base: Tensor, deltas: Tensor, num_columns: int, onto: Tensor | None = None
) -> Tensor:
    """Return y_t = sum over taps i of (base_i + deltas_ti) * x_(t - i), added to `onto` [N, E] if given.

    x [N, E] holds consecutive blocks of `num_columns`; inputs before a token's block count as zero. base
    [T, E], deltas [N, T, G] for G groups of adjacent channels. Half precision is computed in float32. Taps
    are added in order, tap 0 first.
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


reference_conv_before, reference_conv_after = in_turn(
    reference_block_conv, reference_linear, reference_rms_norm
)
