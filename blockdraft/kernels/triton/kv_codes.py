"""From the bytes of `kv_codec` to levels, inside of kernels: each format's two halves of a head.

Bytes come as tiles [N, HALF]: an element has what coordinates j and j + D / 2 need, so that no value moves
between lanes. Levels are numbers of bfloat16, whichever dtype they are wanted in; scales are not in them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockdraft.kernels.kv_codec import Codec, EightBits, Turned

# Four bytes, b0 b1 b2 b3, in one register. The byte in the middle change places: then what lies 16 bits apart
# are neighbours. A nibble n in bits 3 to 6 under the exponent of 16 is 16 + n; u = n - 7.5 is exact, and so is
# u². The constants are 23.5 and the curve's, twice each.
_ASM4 = tl.constexpr(
    """
    {
    .reg .b32 r, s, t, k16, half, a, b, c, u, w;
    mov.b32 k16, 0x41804180;
    mov.b32 half, 0x41BC41BC;
    mov.b32 a, 0x3E853E85;
    mov.b32 b, 0x399E399E;
    mov.b32 c, 0x37DF37DF;
    prmt.b32 r, $4, 0, 0x3120;

    shl.b32 s, r, 3;
    lop3.b32 s, s, 0x00780078, k16, 0xEA;
    sub.rn.bf16x2 u, s, half;
    mul.rn.bf16x2 w, u, u;
    fma.rn.bf16x2 t, w, c, b;
    fma.rn.bf16x2 t, w, t, a;
    mul.rn.bf16x2 $0, u, t;

    shr.u32 s, r, 5;
    lop3.b32 s, s, 0x00780078, k16, 0xEA;
    sub.rn.bf16x2 u, s, half;
    mul.rn.bf16x2 w, u, u;
    fma.rn.bf16x2 t, w, c, b;
    fma.rn.bf16x2 t, w, t, a;
    mul.rn.bf16x2 $1, u, t;

    shr.u32 s, r, 1;
    lop3.b32 s, s, 0x00780078, k16, 0xEA;
    sub.rn.bf16x2 u, s, half;
    mul.rn.bf16x2 w, u, u;
    fma.rn.bf16x2 t, w, c, b;
    fma.rn.bf16x2 t, w, t, a;
    mul.rn.bf16x2 $2, u, t;

    shr.u32 s, r, 9;
    lop3.b32 s, s, 0x00780078, k16, 0xEA;
    sub.rn.bf16x2 u, s, half;
    mul.rn.bf16x2 w, u, u;
    fma.rn.bf16x2 t, w, c, b;
    fma.rn.bf16x2 t, w, t, a;
    mul.rn.bf16x2 $3, u, t;
    }
    """
)


def kind_of(codec: Codec) -> str:
    """How kernels call it."""
    if isinstance(codec, EightBits):
        return "fp8" if codec.is_float else "int8"
    assert isinstance(codec, Turned)
    return f"bits{codec.bits}"


@triton.jit
def load_codes(codes, where, is_read, column, DIM: tl.constexpr, KIND: tl.constexpr):
    """Two tiles [N, HALF] of bytes of the vectors that begin at `where` [N, 1]; `column` [1, HALF]."""
    if KIND == "bits4":
        first = tl.load(codes + where + column, mask=is_read, other=0)
        return first, first
    if KIND == "bits3":
        low = tl.load(codes + where + column % (DIM // 4), mask=is_read, other=0)
        high = tl.load(codes + where + DIM // 4 + column % (DIM // 8), mask=is_read, other=0)
        return low, high
    first = tl.load(codes + where + column, mask=is_read, other=0)
    second = tl.load(codes + where + DIM // 2 + column, mask=is_read, other=0)
    return first, second


@triton.jit
def levels_of(first, second, column, DIM: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr,
              HAS_ASM: tl.constexpr):  # fmt: skip
    """The two halves [N, HALF] of what `load_codes` returned."""
    if KIND == "bits4":
        if HAS_ASM and tl.bfloat16 == DTYPE:
            return tl.inline_asm_elementwise(
                _ASM4, "=r,=r,=r,=r,r", [first], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        return level4((first & 15).to(tl.int32)).to(DTYPE), level4((first >> 4).to(tl.int32)).to(DTYPE)
    if KIND == "bits3":
        quarter = 2 * (column // (DIM // 4))
        eighth = column // (DIM // 8)
        low, high = first.to(tl.int32), second.to(tl.int32)
        one = ((low >> quarter) & 3) | ((high >> eighth) & 1) << 2
        other = ((low >> (quarter + 4)) & 3) | ((high >> (eighth + 4)) & 1) << 2
        return level3(one).to(DTYPE), level3(other).to(DTYPE)
    if KIND == "int8":
        return first.to(tl.int8, bitcast=True).to(DTYPE), second.to(tl.int8, bitcast=True).to(DTYPE)
    return first.to(tl.float8e4nv, bitcast=True).to(DTYPE), second.to(tl.float8e4nv, bitcast=True).to(DTYPE)


@triton.jit
def level4(code):
    """Of codes below 16, float32: LEVELS[4], picked."""
    size = tl.where(code >= 8, code - 8, 7 - code)
    low = tl.where(size < 2, tl.where(size < 1, 0.1298828125, 0.390625), tl.where(size < 3, 0.65625, 0.9375))
    high = tl.where(size < 6, tl.where(size < 5, 1.25, 1.609375), tl.where(size < 7, 2.078125, 2.703125))
    level = tl.where(size < 4, low, high)
    return tl.where(code >= 8, level, -level)


@triton.jit
def level3(code):
    """Of codes below 8: LEVELS[3]."""
    size = tl.where(code >= 4, code - 4, 3 - code)
    low = tl.where(size < 1, 0.2373046875, 0.74609375)
    level = tl.where(size < 2, low, tl.where(size < 3, 1.359375, 2.140625))
    return tl.where(code >= 4, level, -level)
