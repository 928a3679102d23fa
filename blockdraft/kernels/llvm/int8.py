"""Products in whole numbers: 8-bit weights with a scale per row, tokens rounded to 8 bits with a scale each.

The sum of a row's products is exact in 32 bits, in any order, on any processor, so the order is free: each
path below gives the same bits. Then, in float32 and in this order, times the row's scale, times the token's,
plus bias, onto the residual. A token's result is therefore the same in any company and with any threads.

Weights lie in blocks of 16 rows, of which 4 columns after 4 columns: [N / 16, K / 4, 16, 4], so that a vector
has 4 columns of 4, 8 or 16 rows, which one instruction multiplies with 4 values of a token and adds up.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.kernels.llvm.compiler import inlined, kernel, taken, unrolled
from blockdraft.kernels.llvm.jit import Jit
from blockdraft.kernels.llvm.language import (
    Bytes,
    Floats,
    Int,
    Registers,
    Type,
    Value,
    Words,
    f32,
    halved,
    i8,
    i32,
    i64,
    largest,
    load,
    magnitude,
    rounded,
    smallest,
    store,
    zeros,
)

ROWS = 16  # of a block of weights
COLUMNS = 16  # values that both sides are filled up to with zeros
_TOKENS = 4  # of one tile
_CHUNK_BYTES = 64 * 1024  # of weights that a thread takes at a time
_SERIAL_OPS = 1 << 17  # multiply-adds below which waking a thread costs more than it saves


def interleave(values: Tensor) -> Tensor:
    """int8 [N, K] as the kernel reads it, [N / 16, K / 4, 16, 4], filled up with zeros."""
    n, k = values.shape
    full = functional.pad(values, (0, -k % COLUMNS, 0, -n % ROWS))
    return full.view(-1, ROWS, full.shape[1] // 4, 4).transpose(1, 2).contiguous()


class Int8Products:
    """Rounding and products, by one path."""

    def __init__(self, path: str) -> None:
        self._round = Jit(round_tokens, real=f32, path=path)
        self._product = Jit(product, real=f32, path=path)

    def round(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n, k = x.shape
        assert x.stride(1) == 1
        values = torch.empty(n, k + -k % COLUMNS, dtype=torch.int8)
        scale = torch.empty(n, dtype=torch.float32)
        self._round(n, k, values.shape[1], x.stride(0), x, values, scale, is_small=x.numel() < 1 << 14)
        return values, scale

    def __call__(self, tokens: tuple[Tensor, Tensor], weight: Tensor, scale: Tensor, n: int,
                 bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        values, token_scale = tokens
        m, k = values.shape
        y = torch.empty(m, n, dtype=torch.float32)
        chunk = max(1, _CHUNK_BYTES // (k * ROWS))
        self._product(m, n, k, values, token_scale, weight, scale, bias, onto, y, chunk, is_small=m*n*k < _SERIAL_OPS)
        return y


@kernel
def round_tokens(
    num_tokens: Int, size: Int, full: Int, stride: Int, x: Floats, values: Bytes, scale: Floats,
    *, real: Type, path: str,
) -> None:  # fmt: skip
    """Each token to whole numbers from -127 to 127 times a scale; zeros from `size` to `full`.

    The largest magnitude is found by its bits, which order as numbers do, with infinity and NaN above all:
    a token that has one gets it as its scale, and so do its products.
    """
    for token in taken(num_tokens):
        row, out = x + token * stride, values + token * full
        whole = size - size % 16
        peaks = zeros(x, i32.wide(16))
        for i in range(0, whole, 16):
            peaks = largest(peaks, magnitude(load(row + i, 16)).bits_as(i32.wide(16)))
        bits = halved(peaks, largest)
        for i in range(whole, size):
            bits = largest(bits, magnitude(row[i]).bits_as(i32))
        peak = bits.bits_as(f32)
        scale[token] = peak / 127.0
        factor = 127.0 / peak if peak > 0.0 else peak
        for i in range(0, whole, 16):
            store(out + i, whole_numbers(load(row + i, 16), factor))
        for i in range(whole, size):
            out[i] = whole_numbers(load(row + i, 1), factor)[0]
        for i in range(size, full):
            out[i] = 0


def whole_numbers(x: Value, factor: Value) -> Value:
    """x * factor rounded to a byte; the limits are for NaN alone, which no whole number is."""
    return smallest(largest(rounded(x * factor), -127.0), 127.0).to(i32).to(i8)


@kernel
def product(
    num_tokens: Int, n: Int, k: Int, x: Bytes, x_scale: Floats, w: Bytes, w_scale: Floats, bias: Floats,
    onto: Floats, y: Floats, chunk: Int, *, real: Type, path: str,
) -> None:  # fmt: skip
    blocks = (n + (ROWS - 1)) // ROWS
    for item in taken((blocks + chunk - 1) // chunk):
        last = smallest((item + 1) * chunk, blocks)
        for block in range(item * chunk, last):
            weights = w + block * k * ROWS
            token = 0
            while token + _TOKENS <= num_tokens:
                tile(weights, block, token, n, k, x, x_scale, w_scale, bias, onto, y, _TOKENS)
                token += _TOKENS
            left = num_tokens - token
            for count in unrolled(1, _TOKENS):
                if left == count:
                    tile(weights, block, token, n, k, x, x_scale, w_scale, bias, onto, y, count)


@inlined
def tile(weights: Bytes, block: Int, token: Int, n: Int, k: Int, x: Bytes, x_scale: Floats, w_scale: Floats,
         bias: Floats, onto: Floats, y: Floats, tokens: int) -> None:
    sums = Registers((tokens, 4), zeros(x, i32.wide(4)))
    row = x + token * k
    for i in range(0, k, COLUMNS):
        four = [load((row + i) + t * k, 16).bits_as(i32.wide(4)) for t in unrolled(tokens)]
        for j in unrolled(4):
            for v in unrolled(4):
                part = load(weights + i * ROWS + (j * 64 + v * 16), 16)
                for t in unrolled(tokens):
                    sums[t, v] = dot(sums[t, v], part, four[t], j)
    first = block * ROWS
    if first + ROWS <= n:
        for t in unrolled(tokens):
            at = (token + t) * n + first
            for v in unrolled(4):
                out = sums[t, v].to(f32) * load(w_scale + first + 4 * v, 4) * x_scale[token + t]
                if bias.is_given:
                    out = out + load(bias + first + 4 * v, 4)
                if onto.is_given:
                    out = load(onto + at + 4 * v, 4) + out
                store(y + at + 4 * v, out)


def dot(total: Value, weights: Value, four: Value, j: int) -> Value:
    x = four.lanes([j] * 4).bits_as(i8.wide(16))
    return total.text.call("llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, total, weights, x)
