"""Choosing on a CPU: the first of the largest logits, and the keyed noise of `kernels/noise.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.kernels.llvm.compiler import kernel, taken, unrolled
from blockdraft.kernels.llvm.jit import Jit
from blockdraft.kernels.llvm.language import (
    Floats,
    Int,
    Longs,
    Value,
    f32,
    halved,
    i32,
    i64,
    largest,
    load,
    log,
    store,
    zeros,
)
from blockdraft.kernels.noise import MULTIPLIERS, WEYL

_WIDE = 16
_COUNTERS = 4  # of Philox at a time
_PART = 4096  # token ids that a thread takes at a time


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


class Gumbel:
    """float32 noise [R, C, V] for seeds [R] and positions [R, C]: each number follows from its own key."""

    def __init__(self) -> None:
        self._run = Jit(gumbel)

    def __call__(self, seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        num_rows, num_columns = positions.shape
        full = vocab_size + -vocab_size % (4 * _COUNTERS)
        noise = torch.empty(num_rows, num_columns, full, dtype=torch.float32)
        seeds, positions = seeds.contiguous(), positions.contiguous()
        parts = -(-full // _PART)
        self._run(num_rows * num_columns, num_columns, full, parts, seeds, positions, noise)
        return noise[..., :vocab_size]


@kernel
def gumbel(
    num_columns_of_all: Int, num_columns: Int, full: Int, parts: Int, seeds: Longs, positions: Longs,
    noise: Floats,
) -> None:  # fmt: skip
    """Token ids in steps of 4 counters, each of which gives words for 4 ids."""
    for item in taken(num_columns_of_all * parts):
        column, part = item // parts, item % parts
        seed, position = seeds[column // num_columns], positions[column]
        first = part * _PART
        end = first + _PART
        if end > full:
            end = full
        for token in range(first, end, 4 * _COUNTERS):
            words = philox(counters(token // 4), position, seed)
            for i in unrolled(_COUNTERS):
                four = (
                    words[0]
                    .lanes([i, i + _COUNTERS], words[1])
                    .lanes([0, 1, 2, 3], words[2].lanes([i, i + _COUNTERS], words[3]))
                )
                store(noise + column * full + token + 4 * i, gumbel_of(four))


def gumbel_of(words: Value) -> Value:
    return -log(-log(((words >> 9).to(f32) + 0.5) * 2.0**-23))


def counters(first: Int) -> Int:
    """The 32-bit words first, first + 1, …"""
    one = first.to(i32)
    words = one.spread(_COUNTERS)
    for i in range(1, _COUNTERS):
        words = words.lanes([*range(i), i + _COUNTERS, *range(i + 1, _COUNTERS)], (one + i).spread(_COUNTERS))
    return words


def philox(counter: Value, position: Value, seed: Value) -> list[Value]:
    """Philox-4x32-10 of (counter, position's halves, 0) under the seed's halves; see kernels/noise.py."""
    c0, c1, c2 = counter, position.to(i32).spread(_COUNTERS), (position >> 32).to(i32).spread(_COUNTERS)
    c3 = zeros(counter, i32.wide(_COUNTERS))
    k0, k1 = seed.to(i32), (seed >> 32).to(i32)
    for _ in range(10):
        high0, low0 = _halves(c0, MULTIPLIERS[0])
        high1, low1 = _halves(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _signed(WEYL[0]), k1 + _signed(WEYL[1])
    return [c0, c1, c2, c3]


def _halves(word: Value, constant: int) -> tuple[Value, Value]:
    """High and low half of a 32 x 32 bit product."""
    product = word.widened(i64) * constant
    return (product >> 32).to(i32), product.to(i32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


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
