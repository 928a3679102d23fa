"""N-gram lookup on a CPU; see `kernels/ngram_lookup.py` for the contracts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blockdraft.kernels.llvm.compiler import kernel, taken
from blockdraft.kernels.llvm.jit import Jit
from blockdraft.kernels.llvm.language import Int, Longs, Words, i32, i64, largest
from blockdraft.kernels.ngram_lookup import MOST

_SERIAL_TOKENS = 1 << 15  # tokens of all rows; below, waking a thread costs more than it saves


def lookup(block: Tensor, history: Tensor, rows: Tensor, starts: Tensor, least: int) -> None:
    assert block.is_contiguous()
    assert history.is_contiguous()
    is_small = len(block) * history.shape[1] < _SERIAL_TOKENS
    _LOOKUP(*block.shape, history.shape[1], least, block, history, rows, starts, is_small=is_small)


def remember(history: Tensor, sampled: Tensor, rows: Tensor, length: Tensor) -> None:
    assert history.is_contiguous()
    sampled = sampled.contiguous()
    _REMEMBER(*sampled.shape, history.shape[1], history, sampled, rows, length, is_small=True)


@kernel
def look_back(
    num_rows: Int, width: Int, size: Int, least: Int, block: Longs, history: Words, rows: Longs,
    starts: Longs, *, most: int,
) -> None:  # fmt: skip
    """Search backwards from the anchor, so that of equally long matches the latest is used."""
    for item in taken(num_rows):
        last = starts[item]
        text = history + rows[item] * size
        anchor = text[last]
        count, end = starts.zeros(i64), starts.zeros(i64)
        at = last - 1
        while (at >= 0) & (count < most):
            if text[at] == anchor:
                matched = starts.zeros(i64) + 1
                while agrees(text, at, last, matched) & (matched < most):
                    matched = matched + 1
                if matched > count:
                    count = matched
                    end = at
            at = at - 1
        if (count >= least) & (count > 0):
            for column in range(1, width):
                source = end + 1 + (column - 1) % (last - end)
                block[item * width + column] = text[source].to(i64)


def agrees(text: Words, at: Int, last: Int, back: Int) -> Any:
    """Return True if the tokens `back` places before `at` and `last` are equal; never read before the row."""
    return (at >= back) & (text[largest(at - back, 0)] == text[largest(last - back, 0)])


@kernel
def write_samples(
    num_rows: Int, width: Int, size: Int, history: Words, sampled: Longs, rows: Longs, length: Longs
) -> None:
    """Write the samples after each row's anchor."""
    for item in taken(num_rows):
        row = rows[item]
        text = history + row * size + length[row] + 1
        for i in range(width):
            text[i] = sampled[item * width + i].to(i32)


_LOOKUP, _REMEMBER = Jit(look_back, most=MOST), Jit(write_samples)
