"""Decodes the bytes of `kv_codec` to levels inside kernels, for each half of a head and each format.

Bytes are loaded as two tiles, whose elements have the codes of coordinates j and j + D / 2, so no value moves
between lanes. Levels are bfloat16 numbers, stored in any dtype, without the scales.

For bfloat16 on a GPU, four bytes are loaded as one word and levels are computed two at a time. Words also
hide from the compiler that an operand is made from bytes: otherwise it would sum the products of low and high
tiles in different orders.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockdraft.kernels.kv_codec import Codec, EightBits, RotatedLevels


def _curve4(first: int, shifts: tuple[str, ...]) -> str:
    """Return code for u (a + u² (b + c u²)) of the nibbles n in register r, with u = n - 7.5.

    Bits 3 to 6 under the exponent of 16 hold n, which gives 16 + n. Each of `shifts` puts two nibbles of r
    there; the results are operands from number `first` on.
    """
    return "\n".join(
        f"""
        {shift}
        lop3.b32 s, s, 0x00780078, base, 0xEA;
        sub.rn.bf16x2 u, s, half;
        mul.rn.bf16x2 w, u, u;
        fma.rn.bf16x2 t, w, c, b;
        fma.rn.bf16x2 t, w, t, a;
        mul.rn.bf16x2 ${number}, u, t;
        """
        for number, shift in enumerate(shifts, first)
    )


_LOW = ("shl.b32 s, r, 3;", "shr.u32 s, r, 5;")  # nibbles of a word's bytes 0 and 1, and of 2 and 3
_HIGH = ("shr.u32 s, r, 1;", "shr.u32 s, r, 9;")
# The numbers a, b and c of `kv_codec.LEVELS`, each twice in a word.
_CURVE4 = """
    .reg .b32 r, s, t, u, w, base, half, a, b, c;
    mov.b32 base, 0x41804180;
    mov.b32 half, 0x41BC41BC;
    mov.b32 a, 0x3E853E85;
    mov.b32 b, 0x399E399E;
    mov.b32 c, 0x37DF37DF;
    """

# The middle bytes of a word b0 b1 b2 b3 are swapped, so that values 16 bits apart belong to adjacent bytes.
# There are four results: b0 b1 and b2 b3 of both halves.
_BITS4 = tl.constexpr(f"{{ {_CURVE4} prmt.b32 r, $4, 0, 0x3120; {_curve4(0, _LOW)} {_curve4(2, _HIGH)} }}")

# The words of two adjacent tokens become pairs of numbers: bytes 0 to 3 of both words, for one half, then the
# other.
PAIR_BY_CURVE = tl.constexpr(
    f"""{{ {_CURVE4}
    prmt.b32 r, $8, $9, 0x5410; {_curve4(0, _LOW)} {_curve4(4, _HIGH)}
    prmt.b32 r, $8, $9, 0x7632; {_curve4(2, _LOW)} {_curve4(6, _HIGH)} }}"""
)


def _by_table(outputs: tuple[str, ...], halves: tuple[str, str], signs: str) -> str:
    """Return code that makes two pairs of four nibbles in i: look up low and high bytes, then set signs."""
    return f"""
    prmt.b32 l, low_1, low_2, i;
    prmt.b32 h, high_1, high_2, i;
    prmt.b32 m, y, $4, {signs};
    lop3.b32 h, h, m, 0x80808080, 0xF2;
    prmt.b32 {outputs[0]}, l, h, {halves[0]};
    prmt.b32 {outputs[1]}, l, h, {halves[1]};
    """


# Computes the results of _BITS4 by instructions of another pipe: magnitudes of levels are looked up in tables
# of 8 bytes. Codes below 8 are negative levels, the lowest first: their index in the table is 7 - code.
WORD_BY_TABLE = tl.constexpr(
    f"""{{
    .reg .b32 n, d, i, y, l, h, m, low_1, low_2, high_1, high_2;
    mov.b32 low_1, 0x7028C805;
    mov.b32 low_2, 0x2D05CEA0;
    mov.b32 high_1, 0x3F3F3E3E;
    mov.b32 high_2, 0x40403F3F;
    lop3.b32 n, $4, 0x88888888, 0, 0x0C;
    shr.u32 d, n, 3;
    sub.u32 d, n, d;
    lop3.b32 i, $4, d, 0x77777777, 0x28;
    shl.b32 y, $4, 4;
    {_by_table(("$0", "$2"), ("0x6240", "0x7351"), "0xD9C8")}
    shr.u32 i, i, 16;
    {_by_table(("$1", "$3"), ("0x6240", "0x7351"), "0xFBEA")}
    }}"""
)


def _curve3(shifts: tuple[str, ...]) -> str:
    """Return code for u (a + b u²) of 3 bits n, u = n - 3.5; n in bits 4 to 6 under 8's exponent: 8 + n."""
    return "\n".join(
        f"""
        {shift}
        lop3.b32 s, s, 0x00700070, base, 0xEA;
        sub.rn.bf16x2 u, s, half;
        mul.rn.bf16x2 w, u, u;
        fma.rn.bf16x2 t, w, b, a;
        mul.rn.bf16x2 ${number}, u, t;
        """
        for number, shift in enumerate(shifts)
    )


# $4 has the low two bits of codes in bits 0 and 1 of each byte, and the other half's in bits 4 and 5. $5 has
# the high bits in bits 0 and 4. Together they make nibbles as above.
_BITS3 = tl.constexpr(
    """{
    .reg .b32 r, s, t, u, w, base, half, a, b;
    mov.b32 base, 0x41004100;
    mov.b32 half, 0x41384138;
    mov.b32 a, 0x3EF23EF2;
    mov.b32 b, 0x3C3D3C3D;
    shl.b32 s, $5, 2;
    and.b32 s, s, 0x44444444;
    lop3.b32 r, $4, 0x33333333, s, 0xEA;
    prmt.b32 r, r, 0, 0x3120;
    """
    + _curve3(("shl.b32 s, r, 4;", "shr.u32 s, r, 4;", "mov.b32 s, r;", "shr.u32 s, r, 8;"))
    + "}"
)

# An int8's low seven bits under the exponent of 128, minus 128, or minus 256 if it is negative.
_INT8 = tl.constexpr(
    """{
    .reg .b32 s, t, w, base;
    mov.b32 base, 0x43004300;
    prmt.b32 s, $2, 0, 0x4140;
    lop3.b32 t, s, 0x007F007F, base, 0xEA;
    lop3.b32 w, s, 0x00800080, base, 0xEA;
    sub.rn.bf16x2 $0, t, w;
    prmt.b32 s, $2, 0, 0x4342;
    lop3.b32 t, s, 0x007F007F, base, 0xEA;
    lop3.b32 w, s, 0x00800080, base, 0xEA;
    sub.rn.bf16x2 $1, t, w;
    }"""
)


def kind_of(codec: Codec) -> str:
    """Return the name that kernels use for the codec."""
    if isinstance(codec, EightBits):
        return "whole8"
    assert isinstance(codec, RotatedLevels)
    return f"bits{codec.bits}"


def has_words(codec: Codec, head_dim: int) -> bool:
    """Return whether four adjacent codes of a half can be loaded and shifted as one word."""
    return head_dim % (32 if kind_of(codec) == "bits3" else 8) == 0


@triton.jit
def load_codes(
    codes, slot, is_read, DIM: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr, BYTES: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Return two tiles of codes of the vectors in `slot` [N], of BYTES bytes each.

    With WORDS the tiles are [N, HALF / 4], of four bytes each, otherwise [N, HALF], of one byte. Codes are
    zero where `is_read` [N], if given, is False.
    """
    SIZE: tl.constexpr = 4 if WORDS else 1
    column = tl.arange(0, HALF // SIZE)[None, :]
    if WORDS:
        codes = codes.to(tl.pointer_type(tl.int32))
    at = codes + slot[:, None] * (BYTES // SIZE)
    if KIND == "bits3":
        one = at + column % (DIM // (4 * SIZE))
        two = at + (DIM // (4 * SIZE) + column % (DIM // (8 * SIZE)))
    else:
        one = at + column
        two = at + (DIM // (2 * SIZE) + column)
    if is_read is not None:
        in_tile = (column < DIM // (2 * SIZE)) & is_read[:, None]
        first = tl.load(one, mask=in_tile, other=0)
        second = first if KIND == "bits4" else tl.load(two, mask=in_tile, other=0)
    elif DIM // 2 < HALF:
        in_tile = column < DIM // (2 * SIZE)
        first = tl.load(one, mask=in_tile, other=0)
        second = first if KIND == "bits4" else tl.load(two, mask=in_tile, other=0)
    else:
        first = tl.load(one)
        second = first if KIND == "bits4" else tl.load(two)
    return first, second


@triton.jit
def levels_of(
    first, second, DIM: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Return the two halves [N, HALF] of the levels of the codes that `load_codes` returned."""
    if WORDS:
        lo, hi = _levels_of_words(first, second, DIM, HALF, KIND)
    else:
        column = tl.arange(0, HALF)[None, :]
        if KIND == "bits4":
            lo, hi = level4((first & 15).to(tl.int32)), level4((first >> 4).to(tl.int32))
        elif KIND == "bits3":
            low = first.to(tl.int32) >> 2 * (column // (DIM // 4))
            high = second.to(tl.int32) >> column // (DIM // 8)
            lo = level3((low & 3) | (high & 1) << 2)
            hi = level3((low >> 4 & 3) | (high >> 4 & 1) << 2)
        else:
            lo, hi = first.to(tl.int8, bitcast=True), second.to(tl.int8, bitcast=True)
        lo, hi = lo.to(DTYPE), hi.to(DTYPE)
    return lo, hi


@triton.jit
def _levels_of_words(first, second, DIM: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr):
    if KIND == "bits4":
        lo_1, lo_2, hi_1, hi_2 = tl.inline_asm_elementwise(
            _BITS4, "=r,=r,=r,=r,r", [first], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True,
            pack=1,
        )  # fmt: skip
    elif KIND == "bits3":
        column = tl.arange(0, HALF // 4)[None, :]
        low = first >> 2 * (column // (DIM // 16))
        high = second >> column // (DIM // 32)
        lo_1, lo_2, hi_1, hi_2 = tl.inline_asm_elementwise(
            _BITS3, "=r,=r,=r,=r,r,r", [low, high], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        lo_1, lo_2 = tl.inline_asm_elementwise(
            _INT8, "=&r,=&r,r", [first], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        hi_1, hi_2 = tl.inline_asm_elementwise(
            _INT8, "=&r,=&r,r", [second], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    return _spread(lo_1, lo_2, HALF), _spread(hi_1, hi_2, HALF)


@triton.jit
def _spread(one, two, HALF: tl.constexpr):
    """Return the pairs of bfloat16 in words `one` and `two`, alternately, as [N, HALF]."""
    N: tl.constexpr = one.shape[0]
    pairs = tl.reshape(tl.join(one, two), (N, HALF // 2))
    even = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    odd = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(even, odd), (N, HALF))


@triton.jit
def level4(code):
    """Return LEVELS[4] of codes below 16, in float32, by selection."""
    size = tl.where(code >= 8, code - 8, 7 - code)
    low = tl.where(size < 2, tl.where(size < 1, 0.1298828125, 0.390625), tl.where(size < 3, 0.65625, 0.9375))
    high = tl.where(size < 6, tl.where(size < 5, 1.25, 1.609375), tl.where(size < 7, 2.078125, 2.703125))
    level = tl.where(size < 4, low, high)
    return tl.where(code >= 8, level, -level)


@triton.jit
def level3(code):
    """Return LEVELS[3] of codes below 8, in float32, by selection."""
    size = tl.where(code >= 4, code - 4, 3 - code)
    low = tl.where(size < 1, 0.2373046875, 0.74609375)
    level = tl.where(size < 2, low, tl.where(size < 3, 1.359375, 2.140625))
    return tl.where(code >= 4, level, -level)
