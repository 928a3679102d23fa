"""PTX that widens eight 4-bit codes of each of two words, two codes at a time, exactly as `dequantise` does.

Operands $0 to $7 are the values of the eight places of a word: of the word $8 in the low half, and of $9 in
the high half. Then come words of scales, each first for $8, then for $9. `kernels.packed` describes both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from blockdraft.kernels.packed import SIGNS
from blockdraft.kernels.packed_speeds import Code

_BEFORE = """
.reg .b32 low, high, part, other, none;
mov.b32 none, 0x80008000;
prmt.b32 low, $8, $9, 0x5410;
prmt.b32 high, $8, $9, 0x7632;"""


@functools.cache
def widening(code: Code, num_scales: int, *, is_half: bool) -> tuple[str, str]:
    """Return assembly for a code with so many words of scales for 64 columns, and its constraints."""
    if code == "int4":
        lines, num_inputs = [*_int4(num_scales, is_half=is_half)], 2 + 2 * num_scales
    else:
        lines, num_inputs = [*(_nvfp4() if code == "nvfp4" else _mxfp4())], 6 if code == "nvfp4" else 4
    text = "\n".join(["{", *_BEFORE.strip().splitlines(), *lines, "}"])
    return text, ",".join(["=r"] * 8 + ["r"] * num_inputs)


def _int4(num_scales: int, *, is_half: bool) -> Iterator[str]:
    """A code is put into the mantissa of 128; a scale in float16 is the exact sum of two in bfloat16."""
    yield ".reg .b32 bits, base, one;"
    yield "mov.b32 bits, 0x000f000f;"
    yield "mov.b32 base, 0x43004300;"
    yield "mov.b32 one, 0x3f803f80;"
    for i in range(num_scales):
        given = f"${10 + 2 * i}, ${11 + 2 * i}"
        yield f".reg .b32 scale{i}, zero{i};"
        yield f"prmt.b32 zero{i}, {given}, 0x7632;"
        yield f"prmt.b32 scale{i}, {given}, 0x5410;"
        if is_half:
            yield from _two_pieces(i)
    for place in range(8):
        source, shift, i = ("low", "high")[place // 4], place % 4 * 4, place // 2 * num_scales // 4
        if shift:
            yield f"shr.b32 part, {source}, {shift};"
        yield f"lop3.b32 part, {'part' if shift else source}, bits, base, 0xea;"
        yield f"fma.rn.bf16x2 part, part, one, zero{i};"
        if is_half:
            yield f"fma.rn.bf16x2 other, part, rest{i}, none;"
        yield f"fma.rn.bf16x2 ${place}, part, scale{i}, {'other' if is_half else 'none'};"


def _two_pieces(i: int) -> Iterator[str]:
    """Split two scales in float16 into the upper halves of float32 numbers, and what is left."""
    yield f".reg .b16 half{i}0, half{i}1;"
    yield f".reg .f32 exact{i}0, exact{i}1, top{i};"
    yield f".reg .b32 rest{i}, whole{i}0, whole{i}1;"
    yield f"mov.b32 {{half{i}0, half{i}1}}, scale{i};"
    for side in range(2):
        exact, whole = f"exact{i}{side}", f"whole{i}{side}"
        yield f"cvt.f32.f16 {exact}, half{i}{side};"
        yield f"mov.b32 {whole}, {exact};"
        yield f"and.b32 {whole}, {whole}, 0xffff0000;"
        yield f"mov.b32 top{i}, {whole};"
        yield f"sub.f32 {exact}, {exact}, top{i};"
    yield f"prmt.b32 scale{i}, whole{i}0, whole{i}1, 0x7632;"
    yield f"mov.b32 whole{i}0, exact{i}0;"
    yield f"mov.b32 whole{i}1, exact{i}1;"
    yield f"prmt.b32 rest{i}, whole{i}0, whole{i}1, 0x7632;"


def _e2m1() -> Iterator[tuple[int, list[str]]]:
    """Yield each place, and how `part` becomes its codes, times 2 ** -126, in bfloat16."""
    for place in range(8):
        source, at = ("low", "high")[place // 4], place % 4
        up, sign_up = 6 - 3 * at, 15 - SIGNS[at]
        if up == sign_up:  # magnitude and sign move together
            moved = [f"shl.b32 part, {source}, {up};"] if up else []
            yield place, [*moved, f"and.b32 part, {'part' if up else source}, 0x81c081c0;"]
            continue
        yield (
            place,
            [
                f"{'shl' if up > 0 else 'shr'}.b32 part, {source}, {abs(up)};",
                "and.b32 part, part, 0x01c001c0;",
                f"shl.b32 other, {source}, {sign_up};",
                "lop3.b32 part, other, none, part, 0xea;",
            ],
        )


def _nvfp4() -> Iterator[str]:
    """The scales are widened as in `triton.linear.widen`, times 2 ** 118; the codes are times 2 ** -126."""
    yield ".reg .b32 sign, power;"
    yield "mov.b32 sign, 0;"
    for side in range(2):
        for pair, bytes_ in (("low", "0x5040"), ("high", "0x7060")):
            name = f"{pair}{side}"
            yield f".reg .b32 {name};"
            yield f"prmt.b32 {name}, sign, ${10 + side}, {bytes_};"
            yield f"shr.b32 part, {name}, 4;"
            yield "and.b32 part, part, 0x07f007f0;"
            yield f"lop3.b32 {name}, {name}, none, part, 0xea;"
            for power in ("0x7f007f00", "0x77007700"):  # 2 ** 127, 2 ** 111
                yield f"mov.b32 power, {power};"
                yield f"fma.rn.bf16x2 {name}, {name}, power, none;"
    for j in range(4):
        name = ("low", "high")[j // 2]
        yield f".reg .b32 scale{j};"
        yield f"prmt.b32 scale{j}, {name}0, {name}1, {'0x5410' if j % 2 == 0 else '0x7632'};"
    yield ".reg .b32 whole, rest;"
    yield "prmt.b32 whole, $12, $13, 0x5410;"
    yield "prmt.b32 rest, $12, $13, 0x7632;"
    for place, lines in _e2m1():
        yield from lines
        yield f"fma.rn.bf16x2 part, part, scale{place // 2}, none;"
        yield "fma.rn.bf16x2 other, part, rest, none;"
        yield f"fma.rn.bf16x2 ${place}, part, whole, other;"


def _mxfp4() -> Iterator[str]:
    yield ".reg .b32 scale0, scale1, power;"
    yield "prmt.b32 scale0, $10, $11, 0x5410;"
    yield "prmt.b32 scale1, $10, $11, 0x7632;"
    yield "mov.b32 power, 0x7e807e80;"  # 2 ** 126
    for place, lines in _e2m1():
        yield from lines
        yield "fma.rn.bf16x2 part, part, power, none;"
        yield f"fma.rn.bf16x2 ${place}, part, scale{place // 4}, none;"
