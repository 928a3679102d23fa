"""Compressed formats of keys and values, as plain PyTorch references.

A vector is one token's key or value of one head. It is encoded as packed bytes and one float16 scale. Only
elementwise float32 operations are used, so the bytes depend on nothing but the vector.

    int8        the vector divided by its largest magnitude, rounded
    tq4, tq4v3  TurboQuant (arXiv 2504.19874) without its second stage, the scalar case of DRIVE, EDEN and
                HIGGS: signs and a Hadamard rotation make coordinates look normal, and each is rounded to the
                nearest level of the best (Lloyd-Max) codebook for a normal distribution

Attention is computed with rotated vectors. Rotation does not change products of queries and keys; it is
undone in the outputs. So layers with tq4 rotate exact keys and values, too, and codecs see only rotated
vectors. Subtracting one constant, the centre, from all keys of a head changes no weight.

A scale too large for float16 becomes its largest number, one too small becomes zero. A vector decodes to NaN
if and only if it has a value that is not finite.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.kernels.int8 import hadamard
from blockdraft.kernels.kv_formats import LARGEST_HEAD, SCALE_BYTES, blocks, check_format

# The first 512 binary digits of pi, as signs. Without signs, a key along a row of the Hadamard matrix, such
# as a constant one, would become one large number and zeros.
_SIGNS = int(
    "243F6A8885A308D313198A2E03707344A4093822299F31D0082EFA98EC4E6C89"
    "452821E638D01377BE5466CF34E90C6CC0AC29B7C97C50DD3F84D5B5B5470917",
    16,
)
# Levels above zero, by bits; those below mirror them. They are the Lloyd-Max levels of N(0, 1), rounded at a
# cost of 0.3 % of the loss: all are bfloat16 numbers that odd polynomials of u = i + 1/2 give if each
# operation is rounded to bfloat16. 2 bits: u (0.93359375 + 0.030029296875 u²); 3 bits: u (0.47265625 +
# 0.01153564453125 u²); 4 bits: u (0.259765625 + u² (0.000301361083984375 + 2.658367156982422e-05 u²)). A
# kernel may compute them, two at a time, or look them up.
LEVELS = {
    2: (0.470703125, 1.5),
    3: (0.2373046875, 0.74609375, 1.359375, 2.140625),
    4: (0.1298828125, 0.390625, 0.65625, 0.9375, 1.25, 1.609375, 2.078125, 2.703125),
}


class Encoded(NamedTuple):
    """Encoded vectors [..., D]."""

    codes: Tensor  # uint8 [..., bytes]
    scale: Tensor  # float16 [...]


class Codec(Protocol):
    """A storage format of vectors [..., D]; `num_bytes` returns the bytes of one vector with its scale."""

    def num_bytes(self, head_dim: int) -> int: ...
    def encode(self, x: Tensor) -> Encoded: ...
    def decode(self, encoded: Encoded) -> Tensor: ...  # float32


@dataclass(frozen=True, slots=True)
class EightBits:
    """Values as multiples of a scale, up to 127."""

    def num_bytes(self, head_dim: int) -> int:
        return head_dim + SCALE_BYTES

    def encode(self, x: Tensor) -> Encoded:
        x = x.float()
        scale = _stored(x.abs().amax(dim=-1) / 127.0)
        codes = _divided(x, scale.float()).clamp(-127.0, 127.0).round().to(torch.int8)
        return Encoded(codes.view(torch.uint8), scale)

    def decode(self, encoded: Encoded) -> Tensor:
        return encoded.codes.view(torch.int8).float() * encoded.scale.float()[..., None]


@dataclass(frozen=True, slots=True)
class RotatedLevels:
    """Coordinates of a rotated vector, each rounded to one of 2**bits levels.

    With "unbiased", for keys, the dot product of the stored vector and the original is the original's squared
    length, so scores are right on average. With "matched", for values, the two vectors have the same length.
    """

    bits: int
    scaling: Literal["unbiased", "matched"]

    def num_bytes(self, head_dim: int) -> int:
        return head_dim * self.bits // 8 + SCALE_BYTES

    def encode(self, x: Tensor) -> Encoded:
        x = x.float()
        peak = x.abs().amax(dim=-1)
        y = _divided(x, peak)  # so that squares fit into float32
        square = _sum(y * y)
        u = y * _divided(torch.full_like(square, x.shape[-1]), square).sqrt()[..., None]
        codes = _nearest(u, self.bits)
        levels = _levels(codes, self.bits)
        if self.scaling == "unbiased":
            factor = _divided(square, _sum(y * levels))
        else:
            factor = (square / _sum(levels * levels)).sqrt()
        return Encoded(pack(codes, self.bits), _stored(peak * factor))

    def decode(self, encoded: Encoded) -> Tensor:
        levels = _levels(unpack(encoded.codes, self.bits), self.bits)
        return levels * encoded.scale.float()[..., None]


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The storage format of a layer's keys and values."""

    name: str
    keys: Codec
    values: Codec

    @property
    def is_rotated(self) -> bool:
        """Return whether keys and values are rotated before they are stored."""
        return isinstance(self.keys, RotatedLevels)

    def bytes_per_token(self, head_dim: int) -> int:
        """Return the bytes of a key and a value of one head, with their scales."""
        return self.keys.num_bytes(head_dim) + self.values.num_bytes(head_dim)

    def keys_back(self, k: Tensor, centre: Tensor | None = None) -> Tensor:
        """Return keys [..., G, D], encoded and decoded; `centre` [G, D] is subtracted in between."""
        return self._back(self.keys, k) if centre is None else self._back(self.keys, k - centre) + centre

    def values_back(self, v: Tensor) -> Tensor:
        return self._back(self.values, v)

    def _back(self, codec: Codec, x: Tensor) -> Tensor:
        if not self.is_rotated:
            return codec.decode(codec.encode(x))
        return rotate_back(codec.decode(codec.encode(rotate(x.float()))))


FORMATS = {
    "int8": KvFormat("int8", EightBits(), EightBits()),
    "tq4": KvFormat("tq4", RotatedLevels(4, "unbiased"), RotatedLevels(4, "matched")),
    "tq4v3": KvFormat("tq4v3", RotatedLevels(4, "unbiased"), RotatedLevels(3, "matched")),
}


def kv_format(name: str, head_dim: int) -> KvFormat:
    """Return the format `name`; raise an error if it is unknown or cannot store heads of that size."""
    check_format(name, head_dim)
    return FORMATS[name]


# ---- rotation


def signs(head_dim: int, device: torch.device) -> Tensor:
    """Return the signs [D] of `rotate`, each 1 or -1."""
    bits = (_SIGNS >> (LARGEST_HEAD - 1 - i) & 1 for i in range(head_dim))
    return torch.tensor([1.0 - 2.0 * bit for bit in bits], device=device)


def rotate(x: Tensor) -> Tensor:
    """Apply signs, then a Hadamard matrix to each block of the last axis; this keeps lengths and products."""
    return _hadamard_blocks(x * signs(x.shape[-1], x.device))


def rotate_back(y: Tensor) -> Tensor:
    return _hadamard_blocks(y) * signs(y.shape[-1], y.device)


def _hadamard_blocks(x: Tensor) -> Tensor:
    sizes = blocks(x.shape[-1])
    parts = zip(torch.split(x, sizes, dim=-1), sizes, strict=True)
    return torch.cat([hadamard(part.contiguous(), size) * size**-0.5 for part, size in parts], dim=-1)


# ---- levels and bytes


def _nearest(u: Tensor, bits: int) -> Tensor:
    """Return the uint8 codes of the nearest levels, 0 for the lowest; ties round away from zero."""
    size = torch.zeros(u.shape, dtype=torch.uint8, device=u.device)
    for below, above in itertools.pairwise(LEVELS[bits]):
        size += u.abs() >= (below + above) / 2
    first = 1 << bits - 1  # above zero
    return torch.where(u < 0, first - 1 - size, first + size)


def _levels(codes: Tensor, bits: int) -> Tensor:
    above = torch.tensor(LEVELS[bits], device=codes.device)
    return torch.cat((-above.flip(0), above))[codes.long()]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes [..., D], packed into bytes [..., D * bits / 8].

    Codes of 4 bits are packed two per byte: byte j has coordinates j (in its low half) and j + D / 2. Codes
    of 3 bits are split: first the low two bits of all codes, four per byte, then the high bits, eight per
    byte. Again, the coordinates in one byte are as far apart as possible.
    """
    if bits == 4:
        return _plane(codes, 4)
    levels = codes & (1 << bits - 1) - 1
    return torch.cat((_plane(levels, bits - 1), _plane(codes >> bits - 1, 1)), dim=-1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    if bits == 4:
        return _from_plane(packed, 4)
    num_levels = packed.shape[-1] * (bits - 1) // bits
    levels = _from_plane(packed[..., :num_levels], bits - 1)
    return levels | _from_plane(packed[..., num_levels:], 1) << bits - 1


def _plane(codes: Tensor, width: int) -> Tensor:
    parts = codes.chunk(8 // width, dim=-1)
    packed = torch.zeros_like(parts[0])
    for index, part in enumerate(parts):
        packed |= part << width * index
    return packed


def _from_plane(packed: Tensor, width: int) -> Tensor:
    return torch.cat([packed >> shift & (1 << width) - 1 for shift in range(0, 8, width)], dim=-1)


# ---- arithmetic whose bits do not depend on shapes


def _sum(x: Tensor) -> Tensor:
    """Return the sum over the last axis: add the second half to the first until one value is left."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = torch.cat((x[..., :half] + x[..., half : 2 * half], rest), dim=-1)
    return x[..., 0]


def _divided(x: Tensor, by: Tensor) -> Tensor:
    """Return x [..., D] or [...] divided by `by` [...], or zero where `by` is not positive and finite."""
    by = by if by.dim() == x.dim() else by[..., None]
    return torch.where((by > 0) & by.isfinite(), x / by, 0.0)


def _stored(scale: Tensor) -> Tensor:
    largest = torch.finfo(torch.float16).max
    return torch.where(scale.isfinite(), scale.clamp(max=largest), torch.nan).half()
