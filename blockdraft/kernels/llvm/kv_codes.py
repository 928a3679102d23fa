"""Decoding and rotation of compressed vectors on a CPU; see `kernels/kv_codec.py` for the formats.

The codec is a compile-time constant. Vectors are decoded 16 coordinates at a time by the reference's
operations, so the bits are equal.
"""

from __future__ import annotations

import platform
import struct

from blockdraft.kernels.kv_codec import LEVELS, Codec, EightBits, RotatedLevels
from blockdraft.kernels.kv_formats import blocks
from blockdraft.kernels.llvm.compiler import inlined
from blockdraft.kernels.llvm.int8 import hadamard
from blockdraft.kernels.llvm.language import (
    Pointer,
    Reals,
    Type,
    Value,
    constants,
    f16,
    f32,
    i8,
    i16,
    i32,
    load,
    select,
    store,
)

LANES = 16


def num_bytes(codec: Codec, dim: int) -> int:
    """The size of a vector's codes."""
    return dim if isinstance(codec, EightBits) else dim * _rotated(codec).bits // 8


def lanes_in(size: int) -> int:
    """Return how many of `size` numbers are processed at a time: a power of two that divides it."""
    return min(LANES, size & -size)


def decode(codes: Pointer, scale: Value, out: Pointer, dim: int, codec: Codec, has_permute: bool) -> None:
    """Decode one vector [dim] from its codes and its float16 scale into `out`."""
    factor = scale.to(f32)
    if isinstance(codec, EightBits):
        lanes = lanes_in(dim)
        factor = (factor * 256.0 if codec.is_float else factor).spread(lanes)
        for d in range(0, dim, lanes):
            _put(out + d, _eight_bits(load(codes + d, lanes), codec.is_float) * factor)
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


def _eight_bits(codes: Value, is_float: bool) -> Value:
    """Return stored numbers in float32; float8 (e4m3), converted through float16, is 256 times too small.

    NaN is never stored as float8: a vector with NaN has it as its scale.
    """
    if not is_float:
        return codes.to(f32)
    wide = codes.to(i16)
    return (wide << 7 & 0x3F80 | wide & -0x8000).bits_as(f16.wide(codes.type.lanes)).to(f32)


def _four_bits(codes: Pointer, first: int, dim: int, is_wide: bool) -> Value:
    """Return the codes of 16 coordinates from `first` on, in the lowest 4 bits of bytes or 32-bit words."""
    plane, half = dim // 2, [d // (dim // 2) for d in range(first, first + LANES)]
    some = _bytes(codes, first, plane)
    some = some.widened(i32) if is_wide else some
    if len(set(half)) == 1:
        return some >> 4 * half[0]
    return select(constants(some, Type("i1"), half), some >> 4, some)


def _three_bits(codes: Pointer, first: int, dim: int) -> Value:
    """`_four_bits` for 3 bits: two bits in the first plane, one in the second."""
    low, high = _bytes(codes, first, dim // 4), _bytes(codes + dim // 4, first, dim // 8)
    found = low.constant(0)
    for some, plane, width, bit in ((low, 4, 2, 0), (low, 4, 2, 1), (high, 8, 1, 0)):
        bits = [d // (dim // plane) * width + bit for d in range(first, first + LANES)]
        is_set = (some & constants(some, i8, [(1 << one ^ 128) - 128 for one in bits])) != 0
        found = found | select(is_set, some.constant(1 << bit if some is low else 4), found.constant(0))
    return found


def _bytes(codes: Pointer, first: int, plane: int) -> Value:
    """Load the bytes of a plane that hold the coordinates from `first` on."""
    size = lanes_in(plane)
    parts = [load(codes + (first + i) % plane, size) for i in range(0, LANES, size)]
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [one.lanes(range(2 * one.type.lanes), two) for one, two in pairs]
    return parts[0]


def levels_of(codes: Value, bits: int, has_permute: bool) -> Value:
    """Look up the level of each code by its lowest 4 bits; a smaller table is repeated."""
    above = LEVELS[bits]
    table = [*(-level for level in reversed(above)), *above]
    table = table * (LANES // len(table))
    call = codes.text.call
    if has_permute:
        levels = constants(codes, f32, table)
        wide = codes if codes.type.single == i32 else codes.widened(i32)
        return call("llvm.x86.avx512.permvar.sf.512", levels.type, levels, wide)
    indices = codes & 15
    pair = []
    for byte in (0, 1):  # a level is a bfloat16 number, two bytes
        tables = constants(codes, i8, [_bfloat16(level) >> 8 * byte & 255 for level in table])
        name = "x86.ssse3.pshuf.b.128" if platform.machine() == "x86_64" else "aarch64.neon.tbl1.v16i8"
        pair.append(call(f"llvm.{name}", codes.type, tables, indices))
    zipped = pair[0].lanes([i // 2 + i % 2 * LANES for i in range(2 * LANES)], pair[1])
    return (zipped.bits_as(i16.wide(LANES)).widened(i32) << 16).bits_as(f32.wide(LANES))


def _bfloat16(number: float) -> int:
    """Return the bits of a bfloat16 number."""
    bits: int = struct.unpack("I", struct.pack("f", number))[0]
    assert bits & 0xFFFF == 0
    return bits >> 16


@inlined
def hadamard_head(row: Reals, dim: int) -> None:
    """Multiply a head by the normalised Hadamard matrices of its blocks, in place."""
    for first, size in parts(dim):
        hadamard(row + first, size, size)
        for i in range(first, first + size, LANES):
            store(row + i, load(row + i, LANES) * size**-0.5)


@inlined
def sign_head(row: Reals, signs: Reals, dim: int) -> None:
    for i in range(0, dim, LANES):
        store(row + i, load(row + i, LANES) * load(signs + i, LANES))


def parts(dim: int) -> list[tuple[int, int]]:
    """Return the begin and the size of each block."""
    sizes = blocks(dim)
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
