"""Compression, decoding and rotation of keys and values on a CPU; see `kernels/kv_codec.py` for the formats.

The codec is a compile-time constant. A vector's operations are those of the reference, in float32, so the
bits are equal and depend only on the vector. At run time, `compress_tiles` finds the rows that have tiles.
"""

from __future__ import annotations

import itertools
import math
import platform
import struct

import torch

from blockdraft.kernels.cpu import has_permute
from blockdraft.kernels.kv_codec import LEVELS, Codec, EightBits, KvFormat, RotatedLevels
from blockdraft.kernels.kv_compressed import CompressedPages, Tiles
from blockdraft.kernels.kv_formats import TILE, blocks
from blockdraft.kernels.llvm.compiler import inlined, kernel, taken, unrolled
from blockdraft.kernels.llvm.int8 import hadamard
from blockdraft.kernels.llvm.jit import REALS, Jit
from blockdraft.kernels.llvm.language import (
    Bytes,
    Halves,
    Int,
    Longs,
    Pointer,
    Reals,
    Type,
    Value,
    f16,
    f32,
    i8,
    i16,
    i32,
    largest,
    load,
    select,
    smallest,
    sqrt,
    store,
)

LANES = 16
_LARGEST_SCALE = torch.finfo(torch.float16).max


class CompressTiles:
    """The kernel for one dtype, head size (a multiple of 4) and KV format."""

    def __init__(self, dtype: torch.dtype, head_dim: int, form: KvFormat) -> None:
        assert head_dim % 4 == 0
        self._form = form
        self._jit = Jit(compress_tiles, real=REALS[dtype], dim=head_dim, form=form, permute=has_permute())

    def __call__(self, pages: CompressedPages, tiles: Tiles) -> None:
        stores = (pages.exact_keys, pages.exact_values, *pages.keys, *pages.values)
        where = (tiles.exact_table, tiles.table, tiles.rows, tiles.begins, tiles.ends)
        assert pages.format == self._form
        assert all(one.is_contiguous() for one in stores)
        assert all(one.dtype == torch.int64 and one.stride(-1) == 1 for one in where)
        num_layers, num_groups, num_exact = pages.exact_keys.shape[:3]
        self._jit(
            num_layers * num_groups, num_exact, pages.keys.scale.shape[2], len(tiles.rows),
            tiles.most * TILE, tiles.page_size, tiles.exact_table.stride(0), tiles.table.stride(0), *where,
            *stores, is_small=num_layers * num_groups == 1,
        )  # fmt: skip


@kernel
def compress_tiles(
    num_heads: Int, num_exact: Int, num_slots: Int, num_rows: Int, most: Int, page_size: Int,
    num_exact_pages: Int, num_pages: Int, exact_table: Longs, table: Longs, rows: Longs, begins: Longs,
    ends: Longs, keys: Reals, values: Reals, key_codes: Bytes, key_scale: Halves, value_codes: Bytes,
    value_scale: Halves, *, real: Type, dim: int, form: KvFormat, permute: bool,
) -> None:  # fmt: skip
    """Compress the tiles of all rows; most rows have none. A thread takes a key head of a layer."""
    for head in taken(num_heads):
        for row in range(num_rows):
            begin = begins[row]
            exact_pages, pages = exact_table + rows[row] * num_exact_pages, table + rows[row] * num_pages
            for position in range(begin, smallest(ends[row], begin + most)):
                page, inside = position // page_size, position % page_size
                source = (head * num_exact + exact_pages[page] * page_size + inside) * dim
                slot = head * num_slots + pages[page] * page_size + inside
                encode(
                    keys + source, key_codes + slot * num_bytes(form.keys, dim), key_scale + slot, dim,
                    form.keys, permute,
                )  # fmt: skip
                encode(
                    values + source, value_codes + slot * num_bytes(form.values, dim), value_scale + slot,
                    dim, form.values, permute,
                )  # fmt: skip


@inlined
def encode(x: Reals, codes: Bytes, scale: Halves, dim: int, codec: Codec, permute: bool) -> None:
    """Encode a vector x [dim] to its codes and its scale."""
    y = x.scratch(f32, dim)
    peak = peak_of(x, y, dim)
    if isinstance(codec, EightBits):
        scale[0] = stored(peak / 127.0)
        by = scale[0].to(f32)
        round_eight(y, codes, by, dim)
    elif isinstance(codec, RotatedLevels):
        for d in unrolled(0, dim, lanes_in(dim)):
            store(y + d, over(load(y + d, lanes_in(dim)), peak))
        rest, unpacked = x.scratch(f32, dim), x.scratch(i8, dim)
        square = sum_of_products(rest, y, y, dim)
        unit = sqrt(over(square.constant(float(dim)), square))
        levels = x.scratch(f32, dim)
        nearest(y, unpacked, levels, unit, dim, codec.bits, permute)
        pack(unpacked, codes, dim, codec.bits)
        if codec.scaling == "unbiased":
            scale[0] = stored(peak * over(square, sum_of_products(rest, y, levels, dim)))
        else:
            scale[0] = stored(peak * sqrt(square / sum_of_products(rest, levels, levels, dim)))


def peak_of(x: Pointer, y: Pointer, dim: int) -> Value:
    """Copy x to y in float32; return its largest magnitude by bits, so that NaN is larger than numbers."""
    lanes, best = lanes_in(dim), None
    for d in range(0, dim, lanes):
        some = load(x + d, lanes).to(f32)
        store(y + d, some)
        bits = abs(some).bits_as(i32.wide(lanes))
        best = bits if best is None else largest(best, bits)
    assert best is not None
    return best.halved(largest).bits_as(f32)


def is_finite(x: Value) -> Value:
    return abs(x) < math.inf


def over(x: Value, by: Value) -> Value:
    """Return x / by; 0 if `by` is 0, negative or not finite."""
    return select((by > 0.0) & is_finite(by), x / by, x.constant(0.0))


def stored(scale: Value) -> Value:
    cut = smallest(scale, _LARGEST_SCALE)
    return select(is_finite(scale), cut, scale.constant(math.nan)).to(f16)


def sum_of_products(rest: Pointer, x: Pointer, y: Pointer, dim: int) -> Value:
    """Return the sum of x * y: add halves until one number is left, as kv_codec does. `rest` is scratch."""
    lanes = lanes_in(dim)
    for d in range(0, dim, lanes):
        store(rest + d, load(x + d, lanes) * load(y + d, lanes))
    while dim > LANES or dim & dim - 1:
        half = dim // 2
        lanes = lanes_in(half)
        for d in range(0, half, lanes):
            store(rest + d, load(rest + d, lanes) + load(rest + half + d, lanes))
        if dim % 2:
            rest[half] = rest[2 * half]
        dim = half + dim % 2
    return load(rest, dim).halved()


def nearest(
    y: Pointer, unpacked: Pointer, levels: Pointer, unit: Value, dim: int, bits: int, permute: bool
) -> None:
    """Round y * unit to the nearest levels; store their codes, one per byte, and the levels."""
    first = 1 << bits - 1
    for d in range(0, dim, LANES):
        u = load(y + d, LANES) * unit
        size = u.constant(0, i32.wide(LANES))
        for below, above in itertools.pairwise(LEVELS[bits]):
            size = size + (abs(u) >= (below + above) / 2).to(i32)
        code = select(u < 0.0, first - 1 - size, first + size).to(i8)
        store(unpacked + d, code)
        store(levels + d, levels_of(code, bits, permute))


def pack(unpacked: Pointer, codes: Pointer, dim: int, bits: int) -> None:
    """Pack codes of one byte to `bits` bits, as `kv_codec.pack` does."""
    if bits == 4:
        _plane(unpacked, codes, dim, 4, 0)
    else:
        _plane(unpacked, codes, dim, bits - 1, 0)
        _plane(unpacked, codes + dim * (bits - 1) // 8, dim, 1, bits - 1)


def _plane(unpacked: Pointer, codes: Pointer, dim: int, width: int, bit: int) -> None:
    """Pack `width` bits of each code, beginning at bit `bit`; a byte gets 8 / width codes."""
    size = dim * width // 8
    lanes = lanes_in(size)
    for d in range(0, size, lanes):
        packed = unpacked.constant(0, i8.wide(lanes))
        for part in range(8 // width):
            some = load(unpacked + part * size + d, lanes) >> bit & (1 << width) - 1
            packed = packed | some << width * part
        store(codes + d, packed)


def round_eight(y: Pointer, codes: Pointer, by: Value, dim: int) -> None:
    lanes = lanes_in(dim)
    for d in range(0, dim, lanes):
        ratio = smallest(largest(over(load(y + d, lanes), by), -127.0), 127.0)
        store(codes + d, round(ratio).to(i32).to(i8))


def num_bytes(codec: Codec, dim: int) -> int:
    """Return the size of a vector's codes."""
    return dim if isinstance(codec, EightBits) else dim * _rotated(codec).bits // 8


def lanes_in(size: int) -> int:
    """Return how many of `size` numbers are processed at a time: a power of two that divides `size`."""
    return min(LANES, size & -size)


def decode(codes: Pointer, scale: Value, out: Pointer, dim: int, codec: Codec, has_permute: bool) -> None:
    """Decode one vector [dim] from its codes and its float16 scale into `out`."""
    factor = scale.to(f32)
    if isinstance(codec, EightBits):
        lanes = lanes_in(dim)
        factor = factor.spread(lanes)
        for d in range(0, dim, lanes):
            _put(out + d, load(codes + d, lanes).to(f32) * factor)
        return
    bits, factor = _rotated(codec).bits, factor.spread(LANES)
    for d in range(0, dim, LANES):
        indices = _four_bits(codes, d, dim, has_permute) if bits == 4 else _three_bits(codes, d, dim)
        _put(out + d, levels_of(indices, bits, has_permute) * factor)


def _rotated(codec: Codec) -> RotatedLevels:
    assert isinstance(codec, RotatedLevels)
    return codec


def _put(at: Pointer, values: Value) -> None:
    store(at, values.to(at.element))


def _four_bits(codes: Pointer, first: int, dim: int, is_wide: bool) -> Value:
    """Return 4-bit codes of 16 coordinates from `first` on, in the low bits of bytes or 32-bit words."""
    plane, half = dim // 2, [d // (dim // 2) for d in range(first, first + LANES)]
    some = _bytes(codes, first, plane)
    some = some.widened(i32) if is_wide else some
    if len(set(half)) == 1:
        return some >> 4 * half[0]
    return select(some.constants(Type("i1"), half), some >> 4, some)


def _three_bits(codes: Pointer, first: int, dim: int) -> Value:
    """Return 3-bit codes as `_four_bits` does: two bits are in the first plane, one is in the second."""
    low, high = _bytes(codes, first, dim // 4), _bytes(codes + dim // 4, first, dim // 8)
    found = low.constant(0)
    for some, plane, width, bit in ((low, 4, 2, 0), (low, 4, 2, 1), (high, 8, 1, 0)):
        bits = [d // (dim // plane) * width + bit for d in range(first, first + LANES)]
        is_set = (some & some.constants(i8, [(1 << one ^ 128) - 128 for one in bits])) != 0
        found = found | select(is_set, some.constant(1 << bit if some is low else 4), found.constant(0))
    return found


def _bytes(codes: Pointer, first: int, plane: int) -> Value:
    """Load the bytes of a plane with the 16 coordinates from `first` on."""
    size = lanes_in(plane)
    parts = [load(codes + (first + i) % plane, size) for i in range(0, LANES, size)]
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [one.lanes(range(2 * one.type.lanes), two) for one, two in pairs]
    return parts[0]


def levels_of(codes: Value, bits: int, has_permute: bool) -> Value:
    """Return the level of each code by the code's lowest 4 bits; a table of fewer levels is repeated."""
    above = LEVELS[bits]
    table = [*(-level for level in reversed(above)), *above]
    table = table * (LANES // len(table))
    call = codes.text.call
    if has_permute:
        levels = codes.constants(f32, table)
        wide = codes if codes.type.wide(0) == i32 else codes.widened(i32)
        return call("llvm.x86.avx512.permvar.sf.512", levels.type, levels, wide)
    indices = codes & 15
    pair = []
    for byte in (0, 1):  # a level is a bfloat16 number: two bytes
        tables = codes.constants(i8, [struct.pack("<f", level)[2 + byte] for level in table])
        name = "x86.ssse3.pshuf.b.128" if platform.machine() == "x86_64" else "aarch64.neon.tbl1.v16i8"
        pair.append(call(f"llvm.{name}", codes.type, tables, indices))
    zipped = pair[0].lanes([i // 2 + i % 2 * LANES for i in range(2 * LANES)], pair[1])
    return (zipped.bits_as(i16.wide(LANES)).widened(i32) << 16).bits_as(f32.wide(LANES))


@inlined
def hadamard_head(row: Reals, dim: int) -> None:
    """Multiply a head by the normalised Hadamard matrices of its blocks, in place."""
    for first, size in zip(itertools.accumulate(blocks(dim), initial=0), blocks(dim), strict=False):
        hadamard(row + first, size, size)
        for i in range(first, first + size, LANES):
            store(row + i, load(row + i, LANES) * size**-0.5)


@inlined
def sign_head(row: Reals, signs: Reals, dim: int) -> None:
    for i in range(0, dim, LANES):
        store(row + i, load(row + i, LANES) * load(signs + i, LANES))
