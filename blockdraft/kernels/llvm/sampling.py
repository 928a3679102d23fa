"""Greedy choice on a CPU: the first of the largest logits, in two passes over each column's."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.kernels.llvm.compiler import kernel, taken
from blockdraft.kernels.llvm.jit import Jit
from blockdraft.kernels.llvm.language import Floats, Int, Longs, f32, halved, i64, largest, load, zeros

_WIDE = 16


class ArgMax:
    """torch.argmax over the last dimension of float32 [R, C, V]: NaN counts as the largest there too."""

    def __init__(self) -> None:
        self._run = Jit(argmax)

    def takes(self, logits: Tensor) -> bool:
        return logits.dtype == torch.float32 and logits.is_contiguous()

    def __call__(self, logits: Tensor, chosen: Tensor) -> None:
        size = logits.shape[-1]
        num_rows = logits.numel() // size
        self._run(num_rows, size, logits, chosen, is_small=num_rows == 1)


@kernel
def argmax(num_rows: Int, size: Int, x: Floats, chosen: Longs) -> None:
    for item in taken(num_rows):
        row = x + item * size
        whole = size - size % _WIDE
        best = load(row, 1)[0] + zeros(x, f32.wide(_WIDE))
        is_odd = best != best
        for i in range(0, whole, _WIDE):
            values = load(row + i, _WIDE)
            best = largest(best, values)
            is_odd = is_odd | (values != values)
        top, odd = halved(best, largest), halved(is_odd, or_)
        for i in range(whole, size):
            top = largest(top, row[i])
            odd = odd | (row[i] != row[i])
        place = zeros(x, i64)
        if odd:
            while row[place] == row[place]:
                place += 1
        else:
            while row[place] != top:
                place += 1
        chosen[item] = place


def or_(one: Int, two: Int) -> Int:
    return one | two
