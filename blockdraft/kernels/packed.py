"""Packed weights in the order in which a GPU's lanes read them, made once when a weight is loaded.

Words hold a tile of 16 rows and a chunk of 64 columns together. Each of 32 lanes has four words in a row: for
row g and for row g + 8, with g = lane // 4, one word of the even and one of the odd columns that the tensor
cores expect of the lane. With t = lane % 4, those columns are 16 j + 8 q + 2 t + {0, 1}; place 2 j + q of a
word holds the code. Integers are in order of places. Of the four E2M1 codes in half a word, magnitudes come
first, and signs fill the bits that are left, so that some codes are extracted by fewer operations.

Scales are a word for each row and group of columns: of integers the scale in 16 bits, below the bits of
-(128 + zero) in bfloat16; of NVFP4, the four scales of a chunk; of MXFP4, the two of a chunk in bfloat16.

GGUF's Q4_0 is integers in groups of 32 with the zero point 8. Q4_1 has a minimum in float16 above a scale.
Q8_0 has a chunk's words of the low halves of its codes, plus 128, then those of the high halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from blockdraft.kernels.packed_speeds import MEASURED, NOT_MEASURED, Code, KernelSpeed
from blockdraft.kernels.pointwise import Gate

TILE = 16  # rows that are stored together
CHUNK = 64  # columns that are stored together
NO_ZERO = 8  # the zero point of symmetric integers
SIGNS = (14, 12, 15, 13)  # bits of the signs of four E2M1 codes in half a word
_SLICE = 64 * TILE  # rows that are converted at a time
_MINUS_128 = 0xC300  # in bfloat16; its low bits are the zero point


class PackedWords(NamedTuple):
    """A weight [rows, columns] in words; see the module."""

    code: Code
    words: Tensor  # int32 [rows / 16, columns / 64, 32, 4]; of Q8_0 [rows / 16, columns / 64, 2, 32, 4]
    scales: Tensor  # int32 [tiles, groups, 16], the rows of a tile in the order 0, 8, 1, 9 …
    group: int  # columns of a word of scales
    is_half: bool = False  # scales of integers are float16, else bfloat16
    second: Tensor | None = (
        None  # float32 [rows], in the order of `scales`: multiplies or divides the scales of NVFP4
    )
    is_divisor: bool = False
    factors: Tensor | None = None  # float32 [columns]: multiply the columns
    pieces: Tensor | None = None  # int32 [rows]: the second factor in two pieces, for fast widening of NVFP4
    values: Tensor | None = None  # [rows, columns]: the unpacked weight, if memory holds both forms

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0] * TILE, self.words.shape[1] * CHUNK

    @property
    def arithmetic(self) -> Code:
        """Return the code whose operations widen this one."""
        return "int4" if self.code == "q4_0" else self.code

    @property
    def is_float(self) -> bool:
        return self.code in ("nvfp4", "mxfp4")

    @property
    def is_fast(self) -> bool:
        """Return whether bfloat16 arithmetic gives the bits of `dequantise`."""
        has_pieces = self.code != "nvfp4" or self.pieces is not None
        return self.factors is None and has_pieces and self.code not in ("q4_1", "q8_0")

    def rows(self, begin: int, end: int) -> PackedWords:
        """Return the rows from `begin` to `end`, which are multiples of TILE."""
        assert begin % TILE == 0, "whole tiles"
        assert end % TILE == 0, "whole tiles"
        return self._replace(
            words=self.words[begin // TILE : end // TILE],
            scales=self.scales[begin // TILE : end // TILE],
            second=None if self.second is None else self.second[begin:end],
            pieces=None if self.pieces is None else self.pieces[begin:end],
            values=None if self.values is None else self.values[begin:end],
        )


# x, weight, bias, onto, gate; None without a kernel for them
PackedMultiply: TypeAlias = Callable[
    [Tensor, PackedWords, Tensor | None, Tensor | None, Gate | None], Tensor | None
]


def speed_of(code: Code, device: torch.device) -> KernelSpeed:
    """Return what was measured of the kernel and this code on such a device."""
    has_card = device.type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device) if has_card else (0, 0)
    return MEASURED.get((capability, code), NOT_MEASURED)


def why_not_packed(rows: int, columns: int, group: int) -> str | None:
    """Return why a weight with a scale for `group` columns of a row has no words; None if it has."""
    if rows % TILE or columns % CHUNK:
        return f"{rows} x {columns} values are not tiles of {TILE} x {CHUNK}"
    if columns % group or (group % CHUNK and group not in (16, 32)):
        return f"groups of {group} columns are not 16, 32 or a multiple of {CHUNK}"
    return None


def pack_words(codes: Tensor, *, is_float: bool) -> Tensor:
    """Return codes uint8 [rows, columns] as words. Only slices of them are held in wider numbers."""
    slices = range(0, len(codes), _SLICE)
    return torch.cat([_packed(codes[begin : begin + _SLICE], is_float=is_float) for begin in slices])


def _packed(codes: Tensor, *, is_float: bool) -> Tensor:
    rows, columns = codes.shape
    parts = codes.view(rows // TILE, 2, 8, columns // CHUNK, 8, 4, 2)  # tile, half, g, chunk, place, t, odd
    parts = parts.permute(0, 3, 2, 5, 1, 6, 4).to(torch.int64)
    words = sum(_spread(parts[..., place], place, is_float=is_float) for place in range(8))
    assert isinstance(words, Tensor)
    return _as_int32(words).reshape(rows // TILE, columns // CHUNK, 32, 4)


def unpack_words(words: Tensor, *, is_float: bool) -> Tensor:
    """Return the codes uint8 [rows, columns]; the inverse of `pack_words`."""
    tiles, chunks = words.shape[:2]
    wide = words.to(torch.int64) & 0xFFFFFFFF
    parts = torch.stack([_gathered(wide, place, is_float=is_float) for place in range(8)], dim=-1)
    parts = parts.to(torch.uint8).view(tiles, chunks, 8, 4, 2, 2, 8)  # tile, chunk, g, t, half, odd, place
    return parts.permute(0, 4, 2, 1, 6, 3, 5).reshape(tiles * TILE, chunks * CHUNK)


def _spread(code: Tensor, place: int, *, is_float: bool) -> Tensor:
    if not is_float:
        return code << (4 * place)
    at = place % 4
    return ((code & 7) << (3 * at) | (code >> 3) << SIGNS[at]) << (16 * (place // 4))


def _gathered(words: Tensor, place: int, *, is_float: bool) -> Tensor:
    if not is_float:
        return words >> (4 * place) & 15
    at, half = place % 4, words >> (16 * (place // 4))
    return half >> (3 * at) & 7 | (half >> SIGNS[at] & 1) << 3


def _as_int32(words: Tensor) -> Tensor:
    """Return words below 2 ** 32 with the same bits."""
    return (words - ((words >> 31) << 32)).to(torch.int32)


def by_lane(scales: Tensor) -> Tensor:
    """Return words [rows, groups] as [tiles, groups, 16], in the order of the lanes."""
    rows, groups = scales.shape
    return scales.view(rows // TILE, 2, 8, groups).permute(0, 3, 2, 1).reshape(-1, groups, TILE)


def by_row(scales: Tensor) -> Tensor:
    """Return words [rows, groups]; the inverse of `by_lane`."""
    tiles, groups, _ = scales.shape
    return scales.view(tiles, groups, 8, 2).permute(0, 3, 2, 1).reshape(-1, groups)


def int4_scales(scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return words [tiles, groups, 16] of scales [rows, groups] in 16 bits and zero points below 16."""
    bits = scale.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    number = NO_ZERO if zero is None else zero.to(torch.int64)
    return by_lane(_as_int32(bits | (_MINUS_128 | number) << 16))


def read_int4_scales(scales: Tensor, *, is_half: bool) -> tuple[Tensor, Tensor]:
    """Return scales and zero points [rows, groups]; the inverse of `int4_scales`."""
    dtype = torch.float16 if is_half else torch.bfloat16
    words = by_row(scales)
    halves = words.view(torch.int16).view(*words.shape, 2)
    return halves[..., 0].contiguous().view(dtype), (halves[..., 1] & 0x7F).to(torch.uint8)


def pack_bytes(codes: Tensor) -> Tensor:
    """Return codes uint8 [rows, columns] as words of their low halves and words of their high halves."""
    halves = (codes & 15, codes >> 4)
    return torch.stack([pack_words(half, is_float=False) for half in halves], dim=2)


def unpack_bytes(words: Tensor) -> Tensor:
    """Return the codes uint8 [rows, columns]; the inverse of `pack_bytes`."""
    low, high = (unpack_words(half, is_float=False) for half in words.unbind(2))
    return low | high << 4


def pair_words(numbers: Tensor) -> Tensor:
    """Return words [tiles, groups, 16] of one or two float16 numbers [rows, groups, 1 or 2]."""
    low, high = numbers[..., 0], numbers[..., -1] if numbers.shape[-1] == 2 else numbers[..., 0] * 0
    return by_lane(torch.stack((low, high), dim=-1).view(torch.int32)[..., 0])


def read_pair_words(words: Tensor) -> Tensor:
    """Return float16 numbers [rows, groups, 2]; the inverse of `pair_words`."""
    rows = by_row(words)
    return rows.view(torch.float16).view(*rows.shape, 2)


def fp4_scales(scale: Tensor) -> Tensor:
    """Return words [tiles, columns / 64, 16] of scales [rows, groups] in float8: a word for each chunk."""
    if scale.dtype != torch.float8_e4m3fn:
        scale = scale.float().to(torch.bfloat16)  # exact: powers of two
    return by_lane(scale.contiguous().view(torch.int32))


def read_fp4_scales(scales: Tensor, code: Code) -> Tensor:
    """Return scales [rows, groups]; the inverse of `fp4_scales`."""
    words = by_row(scales)
    if code == "nvfp4":
        return words.view(torch.float8_e4m3fn)
    return (words.view(torch.int16) >> 7).to(torch.uint8).view(torch.float8_e8m0fnu)


# ---- NVFP4's second factor in two pieces

_TRIES = 64  # second pieces on either side of the nearest
_SMALLEST = 2.0**-100  # of values that are not zero; smaller ones could become subnormal


def split_factors(second: Tensor, *, is_divisor: bool) -> Tensor | None:
    """Return factors [rows] in two pieces of bfloat16, or None if no pieces give the bits of `dequantise`.

    A code times a scale in fp8 is exact in bfloat16. Its products with the first piece, and, rounded, with
    the second piece are added and rounded once. A float32 has 24 bits, two pieces have 16, so the second
    piece is chosen among neighbours such that all codes and scales get the right bits.
    """
    found, index = torch.unique(second.cpu(), return_inverse=True)
    pieces = [_pieces(number, is_divisor=is_divisor) for number in found]
    if any(one is None for one in pieces):
        return None
    return torch.stack([one for one in pieces if one is not None])[index].to(second.device)


def _pieces(second: Tensor, *, is_divisor: bool) -> Tensor | None:
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = torch.tensor([[0.5], [1.0], [1.5], [6.0]])
    wanted = (codes * (scales / second if is_divisor else scales * second)).to(torch.bfloat16).double()
    if not bool(torch.isfinite(wanted).all()) or float(wanted.min()) < _SMALLEST:
        return None
    exact = (codes * scales).double()
    factor = 1 / second.double() if is_divisor else second.double()
    first = _to_bfloat16(factor)
    step = torch.exp2(torch.floor(torch.log2(factor)) - 17)
    tries = sorted(range(-_TRIES, _TRIES + 1), key=abs)
    rest = _to_bfloat16(factor - first + step * torch.tensor(tries, dtype=torch.float64))
    sums = _to_bfloat16(exact[..., None] * first + _to_bfloat16(exact[..., None] * rest))
    is_right = (sums == wanted[..., None]).flatten(0, 1).all(0)
    if not bool(is_right.any()):
        return None
    both = torch.stack((first, rest[int(is_right.float().argmax())])) * 256  # see triton.packed
    return both.to(torch.bfloat16).view(torch.int32)[0]


def _to_bfloat16(values: Tensor) -> Tensor:
    """Round float64 numbers to the nearest bfloat16, as float64; PyTorch would round to float32 first."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.round(mantissa * 256), exponent - 8)
