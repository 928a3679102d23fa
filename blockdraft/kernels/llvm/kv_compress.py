"""Compression of keys and values on a CPU: `kv_compressed.compress`.

A vector's operations are those of the encoders in `kv_codec`, in float32, so the bytes are equal, and depend
only on the vector. The kernel reads at run time which rows have tiles to compress.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from blockdraft.kernels.cpu import has_permute
from blockdraft.kernels.kv_codec import LEVELS, Codec, EightBits, KvFormat, RotatedLevels
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.llvm.compiler import inlined, kernel, taken
from blockdraft.kernels.llvm.jit import Jit, real_type
from blockdraft.kernels.llvm.kv_codes import LANES, lanes_in, levels_of, num_bytes
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
    halved,
    i8,
    i32,
    largest,
    load,
    magnitude,
    rounded,
    scratch,
    select,
    smallest,
    sqrt,
    store,
)

if TYPE_CHECKING:
    from blockdraft.kernels.kv_compressed import CompressedPages, Tiles

_LARGEST_SCALE = torch.finfo(torch.float16).max
_SMALLEST_FLOAT8 = 2.0**-6  # the smallest normal number; smaller ones are multiples of 2**-9


class CompressTiles:
    """The kernel for one dtype, head size (a multiple of 4) and format."""

    def __init__(self, dtype: torch.dtype, head_dim: int, form: KvFormat) -> None:
        assert head_dim % 4 == 0
        self._form = form
        self._jit = Jit(compress_tiles, real=real_type(dtype), dim=head_dim, form=form, permute=has_permute())

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
    """Compress the tiles of all rows, most of which have none; a thread takes a key head of a layer."""
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
    """Encode one vector [dim]."""
    y = scratch(x, f32, dim)
    peak = peak_of(x, y, dim)
    if isinstance(codec, EightBits):
        most = 448.0 if codec.is_float else 127.0
        scale[0] = stored(peak / most)
        by = scale[0].to(f32)
        round_eight(y, codes, by, dim, most, codec.is_float)
    elif isinstance(codec, RotatedLevels):
        divide(y, y, peak, dim)
        rest, unpacked = scratch(x, f32, dim), scratch(x, i8, dim)
        square = sum_of_products(rest, y, y, dim)
        unit = sqrt(over(square.constant(float(dim)), square))
        levels = scratch(x, f32, dim)
        nearest(y, unpacked, levels, unit, dim, codec.bits, permute)
        pack(unpacked, codes, dim, codec.bits)
        if codec.scaling == "unbiased":
            scale[0] = stored(peak * over(square, sum_of_products(rest, y, levels, dim)))
        else:
            scale[0] = stored(peak * sqrt(square / sum_of_products(rest, levels, levels, dim)))


def peak_of(x: Pointer, y: Pointer, dim: int) -> Value:
    """Copy x to y in float32; return its largest magnitude, found by its bits, where NaN is the largest."""
    lanes, best = lanes_in(dim), None
    for d in range(0, dim, lanes):
        some = load(x + d, lanes).to(f32)
        store(y + d, some)
        bits = magnitude(some).bits_as(i32.wide(lanes))
        best = bits if best is None else largest(best, bits)
    assert best is not None
    return halved(best, largest).bits_as(f32)


def is_finite(x: Value) -> Value:
    return magnitude(x) < math.inf


def over(x: Value, by: Value) -> Value:
    """Return x / by; zero if `by` is zero or not finite."""
    return select((by > 0.0) & is_finite(by), x / by, x.constant(0.0))


def divide(x: Pointer, y: Pointer, by: Value, dim: int) -> None:
    lanes = lanes_in(dim)
    is_number = (by > 0.0) & is_finite(by)
    for d in range(0, dim, lanes):
        some = load(x + d, lanes)
        store(y + d, select(is_number, some / by, some.constant(0.0)))


def stored(scale: Value) -> Value:
    cut = smallest(scale, _LARGEST_SCALE)
    return select(is_finite(scale), cut, scale.constant(math.nan)).to(f16)


def sum_of_products(rest: Pointer, x: Pointer, y: Pointer, dim: int) -> Value:
    """Sum x * y as kv_codec does: the first half plus the second until one is left. `rest` is scratch."""
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
    return halved(load(rest, dim))


def nearest(
    y: Pointer, unpacked: Pointer, levels: Pointer, unit: Value, dim: int, bits: int, permute: bool
) -> None:
    """Round y * unit to codes, one per byte, and their levels."""
    first = 1 << bits - 1
    for d in range(0, dim, LANES):
        u = load(y + d, LANES) * unit
        size = u.constant(0, i32.wide(LANES))
        for below, above in itertools.pairwise(LEVELS[bits]):
            size = size + (magnitude(u) >= (below + above) / 2).to(i32)
        code = select(u < 0.0, first - 1 - size, first + size).to(i8)
        store(unpacked + d, code)
        store(levels + d, levels_of(code, bits, permute))


def pack(unpacked: Pointer, codes: Pointer, dim: int, bits: int) -> None:
    """kv_codec.pack"""
    if bits == 4:
        _plane(unpacked, codes, dim, 4, 0)
    else:
        _plane(unpacked, codes, dim, bits - 1, 0)
        _plane(unpacked, codes + dim * (bits - 1) // 8, dim, 1, bits - 1)


def _plane(unpacked: Pointer, codes: Pointer, dim: int, width: int, bit: int) -> None:
    """Pack `width` bits of each code, from `bit` on, 8 / width codes per byte."""
    size = dim * width // 8
    lanes = lanes_in(size)
    for d in range(0, size, lanes):
        packed = unpacked.constant(0, i8.wide(lanes))
        for part in range(8 // width):
            some = load(unpacked + part * size + d, lanes) >> bit & (1 << width) - 1
            packed = packed | some << width * part
        store(codes + d, packed)


def round_eight(y: Pointer, codes: Pointer, by: Value, dim: int, most: float, is_float: bool) -> None:
    lanes = lanes_in(dim)
    is_number = (by > 0.0) & is_finite(by)
    for d in range(0, dim, lanes):
        some = load(y + d, lanes)
        ratio = smallest(largest(select(is_number, some / by, some.constant(0.0)), -most), most)
        store(codes + d, _float8(ratio) if is_float else rounded(ratio).to(i32).to(i8))


def _float8(x: Value) -> Value:
    """Return the bits of numbers up to 448 as e4m3, rounded to nearest, ties to even."""
    bits = x.bits_as(i32.wide(x.type.lanes))
    size = bits & 0x7FFFFFFF
    normal = (size + (0x7FFFF + (size >> 20 & 1)) >> 20) - (127 - 7 << 3)
    small = rounded(magnitude(x) * 512.0)
    is_small = magnitude(x) < _SMALLEST_FLOAT8
    return (select(is_small, small.to(i32), normal) | bits >> 24 & 128).to(i8)
