"""`y = x @ weight.T` in int8: weights and tokens are int8 values, with a scale per row and per token.

Contract: x float32 [..., K] is multiplied by `factors`, powers of two by which the weight's columns were
divided, to make the magnitudes of columns more equal. Then x is rotated: a Walsh-Hadamard transform of each
`rotated` values spreads outliers over all of them (the weight's rows were rotated alike, so products do not
change). Then each token is rounded to 127ths of its largest magnitude. The sum of integer products is exact
in any order. The sum is then, in float32 and in this order, multiplied by the row's scale and the token's
scale, and bias and `onto` are added. So a token's result depends only on the token and the weight, not on
other tokens, the number of threads, or the processor.

`llvm.int8` is the fast path on CPUs, with the same bits as this reference. docs/quality.md measures the gain
of rotation and factors for the default model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

MAX_ROTATED = 512  # values that are rotated together
TINY = 2.0**-119  # a token with a smaller largest magnitude counts as zero: 127 / it overflows float32
ROWS, COLUMNS = 16, 16  # rows of a block of weights; K is padded to a multiple of COLUMNS


class Int8Weight(NamedTuple):
    """A matrix [rows, columns] in the layout of int8 products."""

    packed: Tensor  # int8 [rows / 16, columns / 4, 16, 4], both padded with zeros to multiples of 16
    sums: Tensor  # int32, -128 times the sum of each row, for processors that multiply unsigned bytes
    scale: Tensor  # float32, of each row
    factors: Tensor  # float32 [columns], powers of two that multiply tokens before they are rotated
    rows: int
    columns: int
    rotated: int


Int8Multiply = Callable[[Tensor, Int8Weight, Tensor | None, Tensor | None], Tensor]  # x, weight, bias, onto
Int8LookUp = Callable[[Tensor, Int8Weight], Tensor]  # row numbers, weight


def rotated_columns(columns: int) -> int:
    """Return how many values to rotate together: the largest power of two in `columns`, up to MAX_ROTATED."""
    return min(MAX_ROTATED, columns & -columns)


def reference_int8_linear(
    x: Tensor, weight: Int8Weight, bias: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    values, scale = round_tokens(x.float(), weight.rotated, weight.factors)
    rows = unpack(weight.packed)[: weight.rows]
    sums = values.double() @ rows.double().T  # integers below 2**53: exact
    out = sums.float() * weight.scale[: weight.rows] * scale[..., None]
    out = out if bias is None else out + bias
    out = out if onto is None else onto + out
    return out.to(x.dtype)


def reference_look_up(rows: Tensor, weight: Int8Weight) -> Tensor:
    """Return rows [..., columns] in float32; two rotations multiply by `rotated`, which `scale` undoes."""
    values = unpack(weight.packed)[rows].float() * weight.scale[rows][..., None]
    return hadamard(values[..., : weight.columns].contiguous(), weight.rotated) * weight.factors


def unpack(packed: Tensor) -> Tensor:
    """Return the int8 matrix [rows, columns], with both dimensions padded."""
    blocks, fours = packed.shape[:2]
    return packed.transpose(1, 2).reshape(blocks * ROWS, fours * 4)


def round_tokens(x: Tensor, rotated: int, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded tokens, int8 [..., padded K], and their float32 scales [...]."""
    x = hadamard(x * factors, rotated)
    peak = x.abs().amax(dim=-1)
    # Not `127.0 / peak`, which PyTorch computes as 127 times a rounded reciprocal.
    factor = torch.where(peak > TINY, torch.full_like(peak, 127.0) / peak, peak)
    values = (x * factor[..., None]).round().nan_to_num(127.0).clamp(-127, 127).to(torch.int8)
    return functional.pad(values, (0, -x.shape[-1] % COLUMNS)), peak / 127.0


def hadamard(x: Tensor, rotated: int) -> Tensor:
    """Return the transform of each `rotated` values: sums and differences of values 1, 2, 4, … apart."""
    distance = 1
    while distance < rotated:
        pairs = x.reshape(*x.shape[:-1], -1, 2, distance)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((first + second, first - second), dim=-2).reshape(x.shape)
        distance *= 2
    return x
