"""Words: a weight of 4-bit codes in the order in which a GPU's kernel reads it (see kernels/packed.py).

It may hold the unpacked values, too: both forms give the same bits, so each product takes the faster one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from blockdraft.kernels.kernels import REFERENCE, Kernels
from blockdraft.kernels.packed import (
    PackedWords,
    by_lane,
    by_row,
    fp4_scales,
    int4_scales,
    pack_bytes,
    pack_words,
    pair_words,
    read_fp4_scales,
    read_int4_scales,
    read_pair_words,
    speed_of,
    split_factors,
    unpack_bytes,
    unpack_words,
    why_not_packed,
)
from blockdraft.kernels.packed_speeds import CODES, Code
from blockdraft.kernels.pointwise import Gate
from blockdraft.models.packed import Packed, Stacked
from blockdraft.models.packed_gguf import Q4_0, Q4_1, Q8_0, GgufPacked, gguf_blocks, gguf_parts
from blockdraft.models.packed_groups import Fp4Groups, IntGroups, pack_nibbles, unpack_nibbles

GGUF: Mapping[Code, int] = {"q4_0": Q4_0, "q4_1": Q4_1, "q8_0": Q8_0}


class Words(Packed):
    """A weight [rows, columns], rows of one or several projections, that was packed by `pack_for_kernel`."""

    def __init__(self, weight: PackedWords) -> None:
        super().__init__(weight.shape)
        self._layout = {}
        for name, value in weight._asdict().items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                self._layout[name] = value

    @property
    def weight(self) -> PackedWords:
        return PackedWords(**self._layout, **self._buffers)  # type: ignore[arg-type]

    def stored(self) -> IntGroups | Fp4Groups | GgufPacked:
        """Return the weight in groups or blocks, as it was before it was packed."""
        one = self.weight
        if one.code in GGUF:
            return _blocks(one)
        codes = pack_nibbles(unpack_words(one.words, is_float=one.is_float))
        if one.code == "int4":
            scale, zero = read_int4_scales(one.scales, is_half=one.is_half)
            buffers = {"codes": codes, "scale": scale, "zero": zero, "group_index": None}
            return IntGroups(self.shape, buffers, bits=4, group_size=one.group)
        second = None if one.second is None else by_row(one.second.view(-1, 1, 16))
        return Fp4Groups(
            codes,
            read_fp4_scales(one.scales, one.code),
            multiplier=None if one.is_divisor else second,
            divisor=second if one.is_divisor else None,
            column_factors=None if one.factors is None else one.factors[None],
        )

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        values = self.weight.values
        return values if values is not None and values.dtype == dtype else self.stored().dequantise(dtype)

    def with_values(self, dtype: torch.dtype) -> Words:
        """Return the weight with its unpacked values."""
        if not self.weight.words.is_cuda:
            return Words(self.weight._replace(values=self.dequantise(dtype)))
        from blockdraft.kernels.triton.packed import unpack

        return Words(self.weight._replace(values=unpack(self.weight, dtype)))

    def matmul(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        onto: Tensor | None = None,
        kernels: Kernels = REFERENCE,
    ) -> Tensor:
        product = kernels.packed_linear(x, self.weight, bias, onto, None)
        return super().matmul(x, bias, onto=onto, kernels=kernels) if product is None else product

    def gated(self, x: Tensor, bias: Tensor | None, gate: Gate, *, kernels: Kernels = REFERENCE) -> Tensor:
        product = kernels.packed_linear(x, self.weight, bias, None, gate)
        return super().gated(x, bias, gate, kernels=kernels) if product is None else product

    def rows_from(self, begin: int) -> Packed:
        if begin % 16:
            return super().rows_from(begin)
        return Words(self.weight.rows(begin, self.shape[0]))

    def __getitem__(self, index: int | Tensor) -> Packed:
        stored = self.stored()
        if not isinstance(stored, Fp4Groups) or stored.has_group_scales_only:
            return stored[index]
        rows = index if isinstance(index, Tensor) else torch.tensor(index)
        second = {name: one if one is None else one[rows] for name, one in _seconds(stored).items()}
        found = stored[rows]
        assert isinstance(found, Fp4Groups)
        return found.rebuild(found.shape, {**found.tensors(), **second})

    def stack_with(self, others: Sequence[Packed]) -> Packed:
        raise TypeError("words cannot be stacked: they are made of single matrices")


def for_kernel(weight: Packed, dtype: torch.dtype, device: torch.device) -> Packed:
    """Return a weight on `device` in words, if the kernel reads it and was measured; else as it is."""
    words = _measured_words(weight, dtype, device)
    if not isinstance(words, Words):
        return weight
    tries = (words, Words(words.weight._replace(pieces=None)))  # the second in float32
    return next((one for one in tries if device.type != "cuda" or _is_exact(one, dtype)), weight)


def why_no_words(weight: Packed, dtype: torch.dtype, device: torch.device) -> str:
    """Return why a weight is in no words, although the kernel was measured on `device`; else nothing."""
    words = _measured_words(weight, dtype, device)
    return "" if isinstance(words, Words) else words


def _measured_words(weight: Packed, dtype: torch.dtype, device: torch.device) -> Words | str:
    parts = weight.members() if isinstance(weight, Stacked) else [weight]
    if dtype not in (torch.bfloat16, torch.float16) or not all(
        isinstance(part, IntGroups | Fp4Groups | GgufPacked) for part in parts
    ):
        return ""
    if not any(speed_of(code, device).unpacking for code in CODES):
        return ""
    words = pack_for_kernel(weight)
    is_measured = isinstance(words, str) or speed_of(words.weight.code, device).unpacking > 0
    return words if is_measured else ""


def _is_exact(words: Words, dtype: torch.dtype) -> bool:
    """Return whether the kernel unpacks every value to the bits of `dequantise`, on this card."""
    from blockdraft.kernels.triton.packed import unpack

    end = words.shape[0]
    slices = (words.weight.rows(begin, min(begin + 1024, end)) for begin in range(0, end, 1024))
    return all(torch.equal(unpack(part, dtype), Words(part).dequantise(dtype)) for part in slices)


def pack_for_kernel(weight: Packed) -> Words | str:
    """Return the weight in words; or why none are made: a format or a size that the kernel does not read."""
    parts = weight.members() if isinstance(weight, Stacked) else [weight]
    if any(len(part.shape) != 2 for part in parts):
        return "several matrices in one weight"
    if all(isinstance(part, IntGroups) for part in parts):
        return _pack_int4([part for part in parts if isinstance(part, IntGroups)])
    if all(isinstance(part, Fp4Groups) for part in parts):
        return _pack_fp4([part for part in parts if isinstance(part, Fp4Groups)])
    if all(isinstance(part, GgufPacked) for part in parts):
        return _pack_gguf([part for part in parts if isinstance(part, GgufPacked)])
    return "no kernel reads the format, or parts of several formats"


def _pack_int4(parts: list[IntGroups]) -> Words | str:
    first = parts[0]
    if any(part.bits != 4 for part in parts):
        return "codes of 8 bits in groups"
    if any(part.group_index is not None for part in parts):
        return "columns in the order of their activations"
    if len({(part.group_size, part.scale.dtype) for part in parts}) > 1:
        return "parts with groups of several sizes, or scales of several types"
    if first.scale.dtype not in (torch.float16, torch.bfloat16):
        return f"scales in {str(first.scale.dtype).removeprefix('torch.')}"
    rows, columns = sum(part.shape[0] for part in parts), first.shape[1]
    why = why_not_packed(rows, columns, first.group_size)
    if why is not None:
        return why
    zeros = [
        torch.full_like(one.scale, 8, dtype=torch.uint8) if one.zero is None else one.zero for one in parts
    ]
    codes = torch.cat([unpack_nibbles(part.codes) for part in parts])
    return Words(
        PackedWords(
            "int4",
            pack_words(codes, is_float=False),
            int4_scales(torch.cat([part.scale for part in parts]), torch.cat(zeros)),
            first.group_size,
            is_half=first.scale.dtype == torch.float16,
        )
    )


def _pack_gguf(parts: list[GgufPacked]) -> Words | str:
    kinds = {part.quantization for part in parts}
    code = next((code for code, kind in GGUF.items() if kinds == {kind}), None)
    if code is None:
        return f"blocks of {' and '.join(sorted({part.type_name for part in parts}))}"
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    why = why_not_packed(rows, columns, 32)
    if why is not None:
        return why
    codes, numbers = gguf_parts(torch.cat([part.raw for part in parts]), GGUF[code])
    scales = int4_scales(numbers[..., 0], None) if code == "q4_0" else pair_words(numbers)
    words = pack_bytes(codes) if code == "q8_0" else pack_words(codes, is_float=False)
    return Words(PackedWords(code, words, scales, 32, is_half=True))


def _blocks(one: PackedWords) -> GgufPacked:
    """Return the blocks of a GGUF file that were packed."""
    codes = unpack_bytes(one.words) if one.code == "q8_0" else unpack_words(one.words, is_float=False)
    if one.code == "q4_0":
        numbers = read_int4_scales(one.scales, is_half=True)[0][..., None]
    else:
        numbers = read_pair_words(one.scales)[..., : 2 if one.code == "q4_1" else 1]
    return gguf_blocks(codes, numbers, GGUF[one.code])


def _pack_fp4(parts: list[Fp4Groups]) -> Words | str:
    first = parts[0]
    if len({(part.group_size, part.scale.dtype) for part in parts}) > 1:
        return "parts with groups of several sizes, or scales of several types"
    is_nvfp4 = (first.group_size, first.scale.dtype) == (16, torch.float8_e4m3fn)
    if not is_nvfp4 and (first.group_size, first.scale.dtype) != (32, torch.float8_e8m0fnu):
        return f"groups of {first.group_size} with scales in {first.scale.dtype}"
    if not is_nvfp4 and not all(part.has_group_scales_only for part in parts):
        return "MXFP4 with further factors"
    rows, columns = sum(part.shape[0] for part in parts), first.shape[1]
    why = why_not_packed(rows, columns, first.group_size)
    if why is not None:
        return why
    if any(part.multiplier is not None and part.divisor is not None for part in parts):
        return "a multiplier and a divisor"
    factors = [part.column_factors for part in parts]
    if not _is_alike(factors):
        return "parts with column factors of their own"
    divisors = [part.divisor is not None for part in parts]
    if len(set(divisors)) > 1:
        return "parts with multipliers and divisors"
    second = (
        by_lane(torch.cat([_second_of_rows(part) for part in parts])[:, None]).flatten() if is_nvfp4 else None
    )
    return Words(
        PackedWords(
            "nvfp4" if is_nvfp4 else "mxfp4",
            pack_words(torch.cat([unpack_nibbles(part.codes) for part in parts]), is_float=True),
            fp4_scales(_cat_scales(parts)),
            first.group_size,
            second=second,
            is_divisor=divisors[0],
            factors=None if factors[0] is None else factors[0].float().flatten(),
            pieces=None if second is None else split_factors(second, is_divisor=divisors[0]),
        )
    )


def _cat_scales(parts: list[Fp4Groups]) -> Tensor:
    return torch.cat([part.scale.view(torch.uint8) for part in parts]).view(parts[0].scale.dtype)


def _seconds(weight: Fp4Groups) -> dict[str, Tensor | None]:
    return {"multiplier": weight.multiplier, "divisor": weight.divisor}


def _second_of_rows(part: Fp4Groups) -> Tensor:
    """Return the factor of the scales for each row; 1 without one."""
    given = next((one for one in _seconds(part).values() if one is not None), None)
    rows = part.shape[0]
    if given is None:
        return torch.ones(rows, device=part.codes.device)
    return given.float().reshape(-1).expand(rows).contiguous()


def _is_alike(factors: list[Tensor | None]) -> bool:
    first = factors[0]
    if first is None:
        return all(one is None for one in factors)
    return all(one is not None and torch.equal(one, first) for one in factors)
