"""`TileLinear`: dot products of a few tokens with every weight row; it reads each weight once.

The operations for one output are the same in every tile. Over whole cache lines, lane j sums k = j,
j + lanes, … in order by fused multiply-add. Then lanes are summed by adding the upper half to the lower. The
remaining elements are added one by one. So an output's bits depend only on its token and weight row.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from blockdraft.kernels.llvm.compiler import inlined, kernel, taken, unrolled
from blockdraft.kernels.llvm.jit import REALS, Jit
from blockdraft.kernels.llvm.language import Int, Reals, Registers, Type, fma, load, prefetch, smallest

_VECTOR_BYTES = 16  # a register size that every CPU has; results' bits depend on it
_LINE_BYTES = 64
_MAX_TOKENS = 8  # tokens of one tile; more tokens need several passes over cached weight rows
_MAX_SUMS = 16  # vector registers that may hold sums
_ROWS = 12  # a multiple of the rows of any tile, so only the last rows of a weight are left over
_CHUNK_BYTES = 256 * 1024  # of weights that a thread takes at a time; 32 KB is 29 % slower at M = 1
_PREFETCH_LEVEL = 3  # into the L1; into the L2 is 15 % slower at M = 2
_SERIAL_OPS = 1 << 16  # below this many multiply-adds, waking a thread costs more than it saves


class TileLinear:
    """The kernel for kernels/linear.py in float32 or float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @functools.cached_property
    def _jits(self) -> dict[int, Jit]:
        """The kernels by number of tokens; the first use compiles all of them, before requests need them."""
        real = REALS[self._dtype]
        jits = {count: Jit(linear, real=real, tokens=count) for count in range(1, _MAX_TOKENS + 1)}
        for jit in jits.values():
            jit.compile()
        return jits

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None
    ) -> Tensor:
        n, k = weight.shape
        assert x.shape[-1] == k
        assert x.dtype == weight.dtype == self._dtype
        assert weight.is_contiguous()
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], n)
        num_tokens = math.prod(x.shape[:-1])
        if num_tokens == 0:
            return y
        num_passes = -(-num_tokens // _MAX_TOKENS)
        chunk = max(1, _CHUNK_BYTES // (k * x.itemsize + 1) // _ROWS) * _ROWS
        is_small = num_tokens * n * k < _SERIAL_OPS
        jit = self._jits[-(-num_tokens // num_passes)]
        jit(-(-n // chunk), chunk, num_passes, num_tokens, n, k, weight, x, y, is_small=is_small)
        y = y if bias is None else y.add_(bias)
        return y if onto is None else onto + y


@kernel
def linear(
    num_chunks: Int, chunk: Int, num_passes: Int, num_tokens: Int, n: Int, k: Int,
    weight: Reals, x: Reals, y: Reals, *, real: Type, tokens: int,
) -> None:  # fmt: skip
    """Compute y[token, row] = dot(weight[row], x[token]); a thread takes a chunk of rows, with all tokens.

    Each pass over a chunk computes `tokens` tokens. The last pass may repeat tokens, with equal bits.
    """
    for item in taken(num_chunks):
        first = item * chunk
        num_rows = smallest(chunk, n - first)
        w = weight + first * k
        for number in range(num_passes):
            token = smallest(number * tokens, num_tokens - tokens)
            pass_over(w, x + token * k, y + (token * n + first), num_rows, n, k, real, tokens)
        if k % cache_line(real) > 0:
            add_rest(w, x, y + first, num_rows, num_tokens, n, k, real)


@inlined
def pass_over(w: Reals, x: Reals, y: Reals, num_rows: Int, n: Int, k: Int, real: Type, tokens: int) -> None:
    """Multiply `tokens` tokens by a chunk's rows: whole tiles, then the other rows one output at a time."""
    rows = tile_rows(tokens)
    whole = num_rows - num_rows % rows
    for row in range(0, whole, rows):
        tile(w + row * k, x, y + row, n, k, real, rows, tokens)
    if rows > 1:
        for row in range(whole, num_rows):
            for token in range(tokens):
                tile(w + row * k, x + token * k, y + (token * n + row), n, k, real, 1, 1)


def tile_rows(tokens: int) -> int:
    """Return the weight rows per tile: one if memory is the limit, otherwise as many as fit registers."""
    return 1 if tokens <= 2 else min(4, _MAX_SUMS // tokens)


@inlined
def tile(w: Reals, x: Reals, y: Reals, n: Int, k: Int, real: Type, rows: int, tokens: int) -> None:
    """Compute `rows` x `tokens` outputs over the whole cache lines of k.

    Meanwhile, prefetch the next tile's weights, front to back: the hardware's prefetcher cannot follow as
    many streams as there are rows. In a prototype of this kernel, this reduced the time of the linears of a
    SmolLM2-135M forward of 8 tokens from 56 to 40 ms (2 Neoverse-N1 cores, 2026-11).
    """
    line, lanes = cache_line(real), _VECTOR_BYTES * 8 // real.bits
    w_rows, x_rows = [w + k * row for row in range(rows)], [x + k * token for token in range(tokens)]
    following = w + k * rows
    sums = Registers((rows, tokens), w.zeros(real.wide(lanes)))
    for i in range(0, k - k % line, line):
        for row in unrolled(rows):
            prefetch(following + (i * rows + row * line), level=_PREFETCH_LEVEL)
        for j in unrolled(0, line, lanes):
            weights = [load(at + (i + j), lanes) for at in w_rows]
            values = [load(at + (i + j), lanes) for at in x_rows]
            for token in unrolled(tokens):
                for row in unrolled(rows):
                    sums[row, token] = fma(weights[row], values[token], sums[row, token])
    for token in unrolled(tokens):
        for row in unrolled(rows):
            y[n * token + row] = sums[row, token].halved()


def cache_line(real: Type) -> int:
    """Return the number of elements in a cache line."""
    return _LINE_BYTES * 8 // real.bits


@inlined
def add_rest(
    w: Reals, x: Reals, y: Reals, num_rows: Int, num_tokens: Int, n: Int, k: Int, real: Type
) -> None:  # fmt: skip
    """Add the products of the elements after the last whole cache line, one by one."""
    for row in range(num_rows):
        for token in range(num_tokens):
            total = y[token * n + row]
            for i in range(k - k % cache_line(real), k):
                total = fma(w[row * k + i], x[token * k + i], total)
            y[token * n + row] = total
