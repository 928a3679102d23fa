"""Products in int8 on a CPU; see `kernels/int8.py` for the contract.

The sum of a row's products is exact in 32 bits in any order, so all kinds of instructions give the same bits:

  sdot      ARM with dot products: 4 columns of 4 rows at a time
  vnni      x86 with AVX-512 VNNI: 4 columns of 16 rows. It multiplies unsigned by signed bytes, so 128 is
            added to tokens, and the sums start at -128 times the row's sum
  avx2      x86 with AVX2: 4 columns of 8 rows, by magnitudes and signs; two products of 127 * 127 fit 16 bits
  generic   any processor

Weights are packed as [N / 16, K / 4, 16, 4]: blocks of 16 rows, each in groups of 4 columns. A vector has 4
columns of some rows, which are multiplied by 4 values of a token and summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.kernels.int8 import COLUMNS, ROWS, TINY, Int8Weight
from blockdraft.kernels.llvm.compiler import inlined, kernel, taken, unrolled
from blockdraft.kernels.llvm.jit import Jit
from blockdraft.kernels.llvm.language import (
    Bytes,
    Floats,
    Int,
    Longs,
    Real,
    Registers,
    Value,
    Words,
    f32,
    i8,
    i16,
    i32,
    largest,
    load,
    pieces,
    smallest,
    store,
)

_LANES = {"sdot": 4, "vnni": 16, "avx2": 8, "generic": 4}  # rows in one vector of weights
_TOKENS = {"sdot": 4, "vnni": 8, "avx2": 4, "generic": 2}  # tokens of a tile, as many as fit registers
_VECTOR = 16  # floats that are rounded at a time
_CHUNK_BYTES = 64 * 1024  # bytes of weights that a thread takes at a time
_SERIAL_OPS = 1 << 17  # multiply-adds; below, waking a thread costs more than it saves
_SERIAL_VALUES = 1 << 14  # values to round; below, waking a thread costs more than it saves


class Int8Kernels:
    """The kernels for one kind of instructions."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._round = Jit(round_tokens)
        self._product = Jit(product, path=path)
        self._interleave = Jit(interleave)
        self._look_up = Jit(look_up)

    def round(
        self, x: Tensor, rotated: int, factors: Tensor, *, is_weight: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Multiply x [M, K] by `factors`, rotate, and round it to int8 [M, padded K] with a scale per row."""
        m, k = x.shape
        assert x.dtype == torch.float32
        assert k % rotated == 0
        if x.stride(1) != 1:
            x = x.contiguous()
        full = k + -k % COLUMNS
        values = torch.empty(m, full, dtype=torch.int8)
        scale = torch.empty(m, dtype=torch.float32)
        buffer = torch.empty(m, full, dtype=torch.float32)
        flip = -128 if self.path == "vnni" and not is_weight else 0
        self._round(
            m, k, full, x.stride(0), rotated, flip, x, factors, buffer, values, scale,
            is_small=x.numel() < _SERIAL_VALUES,
        )  # fmt: skip
        return values, scale

    def interleaved(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return int8 [N, padded K] packed for products, and -128 times the sum of each row."""
        n, k = values.shape
        assert k % COLUMNS == 0
        blocks = -(-n // ROWS)
        packed = torch.empty(blocks, k // 4, ROWS, 4, dtype=torch.int8)
        sums = torch.empty(blocks * ROWS, dtype=torch.int32)
        self._interleave(blocks, n, k, values, packed, sums)
        return packed, sums

    def linear(
        self, x: Tensor, weight: Int8Weight, bias: Tensor | None = None, onto: Tensor | None = None
    ) -> Tensor:
        values, token_scale = self.round(x.reshape(-1, weight.columns), weight.rotated, weight.factors)
        (m, k), n = values.shape, weight.rows
        assert weight.packed.shape[1] * 4 == k
        bias = bias if bias is None else bias.contiguous()
        onto = onto if onto is None else onto.reshape(-1, n).contiguous()
        y = torch.empty(m, n, dtype=torch.float32)
        chunk = max(1, _CHUNK_BYTES // (k * ROWS))
        self._product(
            m, n, k, chunk, values, token_scale, weight.packed, weight.sums, weight.scale, bias, onto, y,
            is_small=m * n * k < _SERIAL_OPS,
        )  # fmt: skip
        return y.view(*x.shape[:-1], n)

    def look_up(self, rows: Tensor, weight: Int8Weight) -> Tensor:
        """Return the given rows of the matrix in float32."""
        full = weight.packed.shape[1] * 4
        out = torch.empty(*rows.shape, weight.columns, dtype=torch.float32)
        buffer = torch.empty(*rows.shape, full, dtype=torch.float32)
        self._look_up(
            rows.numel(), weight.columns, full, weight.rotated, rows.contiguous(), weight.packed,
            weight.scale, weight.factors, buffer, out, is_small=out.numel() < _SERIAL_VALUES,
        )  # fmt: skip
        return out


@kernel
def round_tokens(
    num_tokens: Int, size: Int, full: Int, stride: Int, rotated: Int, flip: Int, x: Floats, factors: Floats,
    buffer: Floats, values: Bytes, scale: Floats,
) -> None:  # fmt: skip
    """Rotate each token and round it to integers from -127 to 127 times a scale; pad with zeros to `full`.

    The bits of magnitudes order like the numbers, with infinity and NaN above all others. So a token with
    infinity or NaN gets that as its scale, and its products are not finite. `flip` is XORed to each byte.
    """
    for token in taken(num_tokens):
        row, out = buffer + token * full, values + token * full
        for begin, end, lanes in pieces(size, _VECTOR):
            for i in range(begin, end, lanes):
                store(row + i, load(x + token * stride + i, lanes) * load(factors + i, lanes))
        hadamard(row, size, rotated)
        whole, peaks = size - size % _VECTOR, x.zeros(i32.wide(_VECTOR))
        for i in range(0, whole, _VECTOR):
            peaks = largest(peaks, abs(load(row + i, _VECTOR)).bits_as(i32.wide(_VECTOR)))
        bits = peaks.halved(largest)
        for i in range(whole, size):
            bits = largest(bits, abs(row[i]).bits_as(i32))
        peak = bits.bits_as(f32)
        scale[token] = peak / 127.0
        factor = 127.0 / peak if peak > TINY else peak
        for begin, end, lanes in pieces(size, _VECTOR):
            for i in range(begin, end, lanes):
                store(out + i, to_int8(load(row + i, lanes), factor) ^ flip.to(i8))
        for i in range(size, full):
            out[i] = flip.to(i8)


def to_int8(x: Value, factor: Value) -> Value:
    """Return x * factor rounded to int8; the limits are needed only for NaN."""
    return smallest(largest(round(x * factor), -127.0), 127.0).to(i32).to(i8)


@inlined
def hadamard(row: Floats, size: Int, rotated: Int) -> None:
    """Transform each run of `rotated` values (a power of two) by Walsh-Hadamard, which spreads outliers."""
    for lanes in (1, 2, 4, 8):
        if rotated > lanes:
            if rotated >= 16:
                hadamard_lanes(row, size, lanes)
            else:
                hadamard_pairs(row, size, lanes)
    distance = rotated * 0 + 16
    while distance < rotated:
        for first in range(0, size, distance * 2):
            for i in range(first, first + distance, _VECTOR):
                one, two = load(row + i, _VECTOR), load(row + i + distance, _VECTOR)
                store(row + i, one + two)
                store(row + i + distance, one - two)
        distance = distance * 2


@inlined
def hadamard_lanes(row: Floats, size: Int, distance: int) -> None:
    """Do a step of the transform within vectors: combine lanes that are `distance` apart."""
    for i in range(0, size, _VECTOR):
        x = load(row + i, _VECTOR)
        partner = x.lanes([lane ^ distance for lane in unrolled(_VECTOR)])
        chosen = [lane + _VECTOR if lane & distance else lane for lane in unrolled(_VECTOR)]
        store(row + i, (x + partner).lanes(chosen, partner - x))


@inlined
def hadamard_pairs(row: Floats, size: Int, distance: int) -> None:
    for first in range(0, size, 2 * distance):
        for i in unrolled(distance):
            one, two = row[first + i], row[first + i + distance]
            row[first + i] = one + two
            row[first + i + distance] = one - two


@kernel
def interleave(num_blocks: Int, n: Int, k: Int, values: Bytes, packed: Bytes, sums: Words) -> None:
    """Pack rows in blocks, with zero rows after the last, and compute `sums`."""
    for block in taken(num_blocks):
        for r in range(ROWS):
            row = block * ROWS + r
            total = values.zeros(i32)
            if row < n:
                for i in range(0, k, 4):
                    four = load(values + row * k + i, 4)
                    total = total + four.to(i32).halved()
                    store(packed + block * k * ROWS + i * ROWS + r * 4, four)
            else:
                for i in range(0, k, 4):
                    store(packed + block * k * ROWS + i * ROWS + r * 4, values.zeros(i8.wide(4)))
            sums[row] = total * -128


@kernel
def look_up(
    num_rows: Int, size: Int, full: Int, rotated: Int, rows: Longs, packed: Bytes, scale: Floats,
    factors: Floats, buffer: Floats, out: Floats,
) -> None:  # fmt: skip
    """Dequantise rows. Rotating twice multiplies by `rotated`, by which the scale was divided."""
    for item in taken(num_rows):
        row = rows[item]
        block, r = row // ROWS, row % ROWS
        values, wide = packed + block * full * ROWS + r * 4, buffer + item * full
        for i in range(0, full, 4):
            store(wide + i, load(values + i * ROWS, 4).to(f32) * scale[row])
        hadamard(wide, full - full % rotated, rotated)
        for i in range(size):
            out[item * size + i] = wide[i] * factors[i]


@kernel
def product(
    num_tokens: Int, n: Int, k: Int, chunk: Int, x: Bytes, x_scale: Floats, w: Bytes, sums: Words,
    w_scale: Floats, bias: Floats, onto: Floats, y: Floats, *, path: str,
) -> None:  # fmt: skip
    """Multiply all tokens by a chunk of blocks of weights at a time; a block stays in the L1 cache."""
    tokens = _TOKENS[path]
    blocks = (n + (ROWS - 1)) // ROWS
    for item in taken((blocks + chunk - 1) // chunk):
        last = smallest((item + 1) * chunk, blocks)
        for block in range(item * chunk, last):
            first = block * ROWS
            at = w + first * k
            token = 0
            while token + tokens <= num_tokens:
                tile(at, first, token, n, k, x, x_scale, sums, w_scale, bias, onto, y, tokens, path)
                token += tokens
            left = num_tokens - token
            for count in unrolled(1, tokens):
                if left == count:
                    tile(at, first, token, n, k, x, x_scale, sums, w_scale, bias, onto, y, count, path)


@inlined
def tile(
    w: Bytes, first: Int, token: Int, n: Int, k: Int, x: Bytes, x_scale: Floats, sums: Words,
    w_scale: Floats, bias: Floats, onto: Floats, y: Floats, tokens: int, path: str,
) -> None:  # fmt: skip
    """Multiply one block of rows by `tokens` tokens; load each weight once."""
    lanes = _LANES[path]
    vectors = ROWS // lanes
    totals = Registers((tokens, vectors), x.zeros(i32.wide(lanes)))
    if path == "vnni":
        for v in unrolled(vectors):
            for t in unrolled(tokens):
                totals[t, v] = load(sums + first + v * lanes, lanes)
    at = x + token * k
    for i in range(0, k, COLUMNS):
        values = [load(at + t * k + i, COLUMNS) for t in unrolled(tokens)]
        for j in unrolled(COLUMNS // 4):
            for v in unrolled(vectors):
                weights = load(w + i * ROWS + (j * ROWS * 4 + v * lanes * 4), lanes * 4)
                for t in unrolled(tokens):
                    totals[t, v] = dot(totals[t, v], weights, values[t], j, path)
    sums = x.scratch(i32, tokens * ROWS)
    for t in unrolled(tokens):
        for v in unrolled(vectors):
            store(sums + (t * ROWS + v * lanes), totals[t, v])
    for i in range(tokens):
        put(sums + i * ROWS, w_scale, x_scale[token + i], bias, onto, y, n, first, (token + i) * n + first)


@inlined
def put(
    sums: Words, w_scale: Floats, scale: Real, bias: Floats, onto: Floats, y: Floats, n: Int, first: Int,
    output: Int,
) -> None:  # fmt: skip
    """Write a token's outputs of one block of rows; the last block of a matrix may have fewer rows."""
    values = load(sums, ROWS).to(f32) * load(w_scale + first, ROWS) * scale
    if n - first >= ROWS:
        if bias.is_given:
            values = values + load(bias + first, ROWS)
        if onto.is_given:
            values = load(onto + output, ROWS) + values
        store(y + output, values)
    else:
        rest = sums.scratch(f32, ROWS)
        store(rest, values)
        for i in range(n - first):
            value = rest[i]
            if bias.is_given:
                value = value + bias[first + i]
            if onto.is_given:
                value = onto[output + i] + value
            y[output + i] = value


def dot(total: Value, weights: Value, values: Value, j: int, path: str) -> Value:
    """Return total[row] + dot(weights[row], a token's values 4 j to 4 j + 3), for each row."""
    lanes = total.type.lanes
    four = values.bits_as(i32.wide(4)).lanes([j] * lanes).bits_as(i8.wide(4 * lanes))
    call = total.text.call
    if path == "sdot":
        return call("llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, total, weights, four)
    if path == "vnni":
        return call("llvm.x86.avx512.vpdpbusd.512", total.type, total, four, weights)
    if path == "avx2":
        signed = call("llvm.x86.avx2.psign.b", weights.type, weights, four)
        pairs = call("llvm.x86.avx2.pmadd.ub.sw", i16.wide(2 * lanes), largest(four, 0 - four), signed)
        return total + call("llvm.x86.avx2.pmadd.wd", total.type, pairs, pairs.constant(1))
    products = weights.to(i16) * four.to(i16)
    for column in range(4):
        total = total + products.lanes(range(column, 4 * lanes, 4)).to(i32)
    return total
