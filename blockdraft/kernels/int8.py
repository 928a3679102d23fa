"""`y = x @ weight.T` in whole numbers: weights and tokens as int8, each row and each token with a scale.

Contract: each column of x float32 [..., K] is divided by its factor, a power of two, by which that of the
weight was multiplied: columns that are always large or small come nearer to the others. Then x is turned
(Walsh-Hadamard over each `rotated` values, which spreads what single
values have too much of; the weight's rows were turned alike, so products stay what they are), then rounded to
127ths of its largest magnitude. The sum of whole numbers is exact in any order. Then, in float32 and in this
order: times the row's scale, times the token's, plus bias, and `onto` plus that. So a token's result follows
from the token and the weight alone: not from its neighbours, the number of threads, or the processor.

`llvm.int8` is the fast path of CPUs; the reference here has the same bits. What turning and factors are worth
to the default model: docs/quality.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    pass

MAX_ROTATED = 512  # values that are turned together
TINY = 2.0**-119  # a token whose largest magnitude is below is zero: 127 / it has no room in float32
ROWS, COLUMNS = 16, 16  # of a block of weights, and what K is filled up to


class Int8Weight(NamedTuple):
    """A matrix [rows, columns] as products read it."""

    packed: Tensor  # int8 [rows / 16, columns / 4, 16, 4], both filled up with zeros to multiples of 16
    sums: Tensor  # int32, -128 times the sum of each row, for processors that multiply unsigned bytes
    scale: Tensor  # float32, of each row
    factors: Tensor  # float32 [columns], what tokens are multiplied by before they are turned: powers of two
    rows: int
    columns: int
    rotated: int


Int8Multiply = Callable[[Tensor, Int8Weight, Tensor | None, Tensor | None], Tensor]  # x, weight, bias, onto
Int8LookUp = Callable[[Tensor, Int8Weight], Tensor]  # row numbers, weight


def rotated_columns(columns: int) -> int:
    """How many values of rows of that length are turned together: the largest power of two that fits."""
    return min(MAX_ROTATED, columns & -columns)


def reference_int8_linear(
    x: Tensor, weight: Int8Weight, bias: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    values, scale = round_tokens(x.float(), weight.rotated, weight.factors)
    rows = unpack(weight.packed)[: weight.rows]
    sums = values.double() @ rows.double().T  # whole numbers below 2**53: exact
    out = sums.float() * weight.scale[: weight.rows] * scale[..., None]
    out = out if bias is None else out + bias
    out = out if onto is None else onto + out
    return out.to(x.dtype)


def reference_look_up(rows: Tensor, weight: Int8Weight) -> Tensor:
    """[..., columns] float32: turning twice gives back what was, `rotated` times as large."""
    values = unpack(weight.packed)[rows].float() * weight.scale[rows][..., None]
    return turn(values[..., : weight.columns].contiguous(), weight.rotated) * weight.factors


def unpack(packed: Tensor) -> Tensor:
    """int8 [rows, columns], both filled up."""
    blocks, fours = packed.shape[:2]
    return packed.transpose(1, 2).reshape(blocks * ROWS, fours * 4)


def round_tokens(x: Tensor, rotated: int, factors: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., K filled up] and float32 scales [...]."""
    turned = turn(x * factors, rotated)
    peak = turned.abs().amax(dim=-1)
    # Not `127.0 / peak`, which PyTorch computes as 127 times a rounded reciprocal.
    factor = torch.where(peak > TINY, torch.full_like(peak, 127.0) / peak, peak)
    values = (turned * factor[..., None]).round().nan_to_num(127.0).clamp(-127, 127).to(torch.int8)
    return functional.pad(values, (0, -x.shape[-1] % COLUMNS)), peak / 127.0


def turn(x: Tensor, rotated: int) -> Tensor:
    """Sums and differences of values 1, 2, 4, … apart, within each `rotated` of them."""
    distance = 1
    while distance < rotated:
        pairs = x.reshape(*x.shape[:-1], -1, 2, distance)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((first + second, first - second), dim=-2).reshape(x.shape)
        distance *= 2
    return x
