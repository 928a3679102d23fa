"""Convolutions over the columns of a block on a CPU; see `kernels/block_conv.py` for the contract."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.kernels.llvm.compiler import inlined, kernel, taken
from blockdraft.kernels.llvm.jit import REALS, Jit
from blockdraft.kernels.llvm.language import Int, Reals, Type, load, pieces, smallest, store
from blockdraft.kernels.llvm.pointwise import SERIAL_ELEMENTS

_WIDE = 16  # channels at a time


class BlockConvKernel:
    """The kernel for one dtype. Its operations and their order are the reference's, so the bits are equal."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._jit = Jit(convolve_block, real=REALS[dtype])

    def __call__(
        self, x: Tensor, base: Tensor, deltas: Tensor, num_columns: int, onto: Tensor | None = None
    ) -> Tensor:
        (num_tokens, size), (_, taps, groups) = x.shape, deltas.shape
        if deltas.stride()[1:] != (groups, 1):
            deltas = deltas.contiguous()
        x, y = x.contiguous(), x.new_empty(x.shape)
        onto = None if onto is None else onto.contiguous()
        self._jit(
            num_tokens, size, taps, groups, num_columns, deltas.stride(0), x, base.contiguous(), deltas, onto,
            y, is_small=y.numel() < SERIAL_ELEMENTS,
        )  # fmt: skip
        return y


@kernel
def convolve_block(
    num_tokens: Int, size: Int, taps: Int, groups: Int, num_columns: Int, stride: Int, x: Reals, base: Reals,
    deltas: Reals, onto: Reals, y: Reals, *, real: Type,
) -> None:  # fmt: skip
    """Convolve x into y; leave out taps that would read before the block."""
    for token in taken(num_tokens):
        group, count = size // groups, smallest(taps, token % num_columns + 1)
        row, own = token * size, deltas + token * stride
        for i in range(groups):
            for begin, end, lanes in pieces(group, _WIDE):
                for at in range(i * group + begin, i * group + end, lanes):
                    mix(x + row + at, base + at, own + i, onto, y, row + at, count, size, groups, lanes)


@inlined
def mix(
    x: Reals, base: Reals, deltas: Reals, onto: Reals, y: Reals, place: Int, count: Int, size: Int,
    groups: Int, lanes: int,
) -> None:  # fmt: skip
    """Compute `lanes` channels of a token from the same channels of it and of the tokens before it."""
    total = (load(base, lanes) + deltas[0]) * load(x, lanes)
    for tap in range(1, count):
        part = (load(base + tap * size, lanes) + deltas[tap * groups]) * load(x + (0 - tap * size), lanes)
        total = total + part
    if onto.is_given:
        total = load(onto + place, lanes) + total
    store(y + place, total)
