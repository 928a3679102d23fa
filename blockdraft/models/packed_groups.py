"""Weights of 4- or 8-bit codes in groups along a row: integers with zero points, and E2M1 floats.

A row is consecutive bytes, column 0 first, the low half of a byte before the high half, whatever the order in
the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from blockdraft.errors import ModelError
from blockdraft.models.packed import Buffered, Packed, affine_

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class IntGroups(Buffered):
    """A weight (code - zero) * scale, with one zero and one scale per group of columns of a row.

    codes uint8 [..., rows, columns * bits / 8], unsigned; scale [..., rows, groups]; zero uint8 of the
    scale's shape, or None for the middle code (symmetric). `group_index` int32 [..., 1, columns] is the group
    of each column if activation ordering has shuffled columns; None if groups are consecutive columns.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    group_index: Tensor | None
    per_matrix = ("group_index",)

    def __init__(
        self,
        shape: Sequence[int],
        buffers: Mapping[str, Tensor | None],
        *,
        bits: int,
        group_size: int,
    ) -> None:
        assert bits in (4, 8), "the reader of the configuration refuses other widths"
        super().__init__(shape, buffers)
        self.bits = bits
        self.group_size = group_size

    def format(self) -> tuple[object, ...]:
        return (type(self), self.bits, self.group_size)

    def stack_with(self, others: Sequence[Packed]) -> Packed:
        items = [self, *(other for other in others if isinstance(other, IntGroups))]
        if len(items) == len(others) + 1 and len({item.group_index is None for item in items}) == 2:
            runs = torch.arange(self.shape[-1], dtype=torch.int32, device=self.codes.device)
            index = (runs // self.group_size).expand(*self.shape[:-2], 1, -1).contiguous()
            ordered, *rest = [item.with_default("group_index", index) for item in items]
            return super(IntGroups, ordered).stack_with(rest)
        return super().stack_with(others)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        codes = unpack_nibbles(self.codes) if self.bits == 4 else self.codes
        values = codes[..., : self.shape[-1]].float().contiguous()
        if self.zero is None:
            values -= 1 << (self.bits - 1)
        if self.group_index is None:
            return affine_(values, self.zero, self.scale, group_size=self.group_size).to(dtype)
        zero = None if self.zero is None else self._per_column(self.zero)
        return affine_(values, zero, self._per_column(self.scale), group_size=1).to(dtype)

    def _per_column(self, groups: Tensor) -> Tensor:
        """Expand [..., rows, groups] to [..., rows, columns] by `group_index`."""
        assert self.group_index is not None
        index = self.group_index.long().expand(*groups.shape[:-1], self.shape[-1])
        return groups.gather(-1, index)


INT4_GROUPS = (128, 64, 32, 16)  # columns with a scale; the first that divides a row


def quantise_int4(weight: Tensor) -> IntGroups:
    """Round [..., rows, columns] to the nearest of 16 multiples of a scale in bfloat16 for each group."""
    columns = weight.shape[-1]
    group = next((size for size in INT4_GROUPS if columns % size == 0), None)
    if group is None:
        raise ModelError(f"a weight has rows of {columns} values: int4 takes groups of 16. Use int8.")
    values = weight.float().reshape(*weight.shape[:-1], -1, group)
    peak = values.abs().amax(dim=-1)
    if not bool(torch.isfinite(peak).all()):
        raise ModelError("a weight holds infinite or undefined values and cannot be quantised.")
    scale = torch.where(peak > 0, peak / 7.5, torch.ones_like(peak)).clamp(min=2.0**-100).to(torch.bfloat16)
    codes = (values / scale.float()[..., None]).round_().clamp_(-8, 7).add_(8).to(torch.uint8).flatten(-2)
    buffers = {"codes": pack_nibbles(codes), "scale": scale, "zero": None, "group_index": None}
    return IntGroups(tuple(weight.shape), buffers, bits=4, group_size=group)


class Fp4Groups(Buffered):
    """A weight of E2M1 values times one scale per group of columns: 16 in NVFP4, 32 in MXFP4.

    codes uint8 [..., rows, columns / 2]; scale float8 (e4m3fn or e8m0fnu) [..., rows, columns / group].
    NVFP4 has a second scale, float32 [..., 1, 1], that multiplies (ModelOpt) or divides (compressed-tensors)
    the first. AWQ multiplies the inputs by `column_factors` [..., 1, columns]; here they multiply the
    weight's columns, which is equivalent.
    """

    codes: Tensor
    scale: Tensor
    multiplier: Tensor | None
    divisor: Tensor | None
    column_factors: Tensor | None
    per_matrix = ("multiplier", "divisor", "column_factors")

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        *,
        multiplier: Tensor | None = None,
        divisor: Tensor | None = None,
        column_factors: Tensor | None = None,
    ) -> None:
        columns = codes.shape[-1] * 2
        assert columns % scale.shape[-1] == 0, "groups of one size"
        buffers = {"codes": codes, "scale": scale, "multiplier": multiplier, "divisor": divisor}
        super().__init__((*codes.shape[:-1], columns), {**buffers, "column_factors": column_factors})
        self.group_size = columns // scale.shape[-1]

    @property
    def has_group_scales_only(self) -> bool:
        """True if it has no other factors, as MXFP4."""
        return self.multiplier is None and self.divisor is None and self.column_factors is None

    def stack_with(self, others: Sequence[Packed]) -> Packed:
        items = [self, *(other for other in others if isinstance(other, Fp4Groups))]
        factors = next((item.column_factors for item in items if item.column_factors is not None), None)
        if factors is None or len(items) <= len(others):
            return super().stack_with(others)
        ones = torch.ones_like(factors)
        first, *rest = [item.with_default("column_factors", ones) for item in items]
        return super(Fp4Groups, first).stack_with(rest)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        scale = self.scale.float()
        if self.multiplier is not None:
            scale = scale * self.multiplier
        if self.divisor is not None:
            scale = scale / self.divisor
        table = torch.tensor(_E2M1, device=self.codes.device)
        values = table[unpack_nibbles(self.codes).int()].view(*scale.shape, self.group_size)
        values = values.mul_(scale.unsqueeze(-1)).flatten(-2)
        if self.column_factors is not None:
            values *= self.column_factors.float()
        return values.to(dtype)


def e8m0(raw: Tensor) -> Tensor:
    """View bytes as power-of-two scales (float8_e8m0fnu); raise ModelError for 255, which is NaN."""
    if bool((raw.view(torch.uint8) == 255).any()):
        raise ModelError("a block scale is 255, which is NaN in E8M0: the checkpoint is damaged.")
    return raw.view(torch.float8_e8m0fnu)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack uint8 [..., n] to uint8 [..., 2 n], the low half of a byte first."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., 2 n] below 16 to uint8 [..., n]; the inverse of `unpack_nibbles`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def word_codes(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [..., n] to uint8 codes [..., n * 32 / bits], the lowest bits of a word first."""
    packed = words.contiguous().view(torch.uint8)  # the bytes of a little-endian word are in order
    return unpack_nibbles(packed) if bits == 4 else packed
