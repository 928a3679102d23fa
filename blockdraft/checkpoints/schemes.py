"""Quantisation schemes: the tensors that a file stores for a projection, and their conversion to `Packed`.

A scheme lists its tensors by suffix, with shapes and dtypes, so the loader can check a checkpoint before it
reads any data. `pack` refuses values that the layout does not allow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.errors import ModelError
from blockdraft.models.packed import Packed, Scaled
from blockdraft.models.packed_groups import Fp4Groups, IntGroups, e8m0, pack_nibbles, word_codes

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Scales of activations and of a quantised cache: we do not use these tensors.
ACTIVATION_SCALES = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".k_scale",
    ".v_scale",
)
# The last part of a router's name. AutoGPTQ, AutoAWQ and DeepSeek's fp8 never quantise routers.
_ROUTERS = ("gate", "router", "shared_expert_gate")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position of rows 0, 1, 2 … in AWQ's words of eight codes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The expected shape and dtypes of one tensor, and whether it may be missing."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    is_optional: bool = False

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Return whether the shapes are equal without sides of 1: files have [] or [1], [n] or [n, 1]."""
        return [side for side in shape if side != 1] == [side for side in self.shape if side != 1]


class Scheme(Protocol):
    """The storage format of one projection."""

    @property
    def name(self) -> str:
        """Return a name for messages, such as "fp8, 128x128 blocks"."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return suffixes of tensors that may be present but are not used."""

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        """Return the expected tensors, by suffix, for a projection of this logical shape."""

    def pack(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Packed:
        """Return the weight of this logical shape. Raise ModelError if the tensors do not fit the scheme."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation of one checkpoint."""

    name: str
    # Returns the scheme of a module, given its Hugging Face path without ".weight", or None if it is plain.
    scheme: Callable[[str], Scheme | None]


def is_router(module: str) -> bool:
    return module.rpartition(".")[2] in _ROUTERS


def is_head(module: str) -> bool:
    return module.rpartition(".")[2] == "lm_head"


@dataclass(frozen=True, slots=True)
class ScaledScheme:
    """An fp8 or int8 `.weight` with one scale per block. None in `block` is the whole side of the matrix."""

    name: str
    dtype: torch.dtype
    block: tuple[int | None, int | None]
    scale_suffix: str = ".weight_scale"
    scale_dtypes: tuple[torch.dtype, ...] = FLOATS
    has_zero: bool = False
    ignored: tuple[str, ...] = ACTIVATION_SCALES

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        grid = self._grid(shape)
        specs = {
            ".weight": TensorSpec(shape, (self.dtype,)),
            self.scale_suffix: TensorSpec(grid, self.scale_dtypes),
        }
        if self.has_zero:
            specs[".weight_zero_point"] = TensorSpec(grid, (torch.int8,))
        return specs

    def pack(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Packed:
        found = _reshaped(self, tensors, shape)
        scale = found[self.scale_suffix]
        return Scaled(
            found[".weight"],
            e8m0(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale,
            block=self._block(shape),
            zero=found.get(".weight_zero_point"),
        )

    def _block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        rows, columns = self.block
        return rows or shape[-2], columns or shape[-1]

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, columns = self._block(shape)
        return (*shape[:-2], _ceil(shape[-2], rows), _ceil(shape[-1], columns))


@dataclass(frozen=True, slots=True)
class Fp4Scheme:
    """4-bit floats, two per byte, with a scale for each group of columns.

    NVFP4 also has a scale for the whole matrix, which is a multiplier or a divisor, depending on the library.
    AWQ also has factors for the inputs, unless these were folded into the norm before the projection.
    """

    name: str
    codes: str  # suffixes of the tensors
    scales: str
    group_size: int
    scale_dtype: torch.dtype
    multiplier: str | None = None
    divisor: str | None = None
    column_factors: str | None = None
    is_fused: bool = False  # all experts in one tensor [E, rows (outputs), groups, bytes of a group]
    ignored: tuple[str, ...] = ACTIVATION_SCALES

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        *leading, columns = shape if self.is_fused else _one_matrix(self, shape)
        _divides(self, "columns", columns, self.group_size)
        groups = (*leading, columns // self.group_size)
        codes = (*groups, self.group_size // 2) if self.is_fused else (*leading, columns // 2)
        specs = {
            self.codes: TensorSpec(codes, (torch.uint8,)),
            self.scales: TensorSpec(groups, (self.scale_dtype,)),
        }
        for suffix in (self.multiplier, self.divisor):
            if suffix is not None:
                specs[suffix] = TensorSpec((1, 1), (torch.float32,))
        if self.column_factors is not None:
            specs[self.column_factors] = TensorSpec((1, columns), FLOATS, is_optional=True)
        return specs

    def pack(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Packed:
        found = _reshaped(self, tensors, shape)
        scale = found[self.scales]
        if self.divisor is not None and not bool((found[self.divisor] > 0).all()):
            value = found[self.divisor].item()
            raise ModelError(f"{self.name}: {self.divisor.lstrip('.')} is {value}, expected more than 0.")
        return Fp4Groups(
            found[self.codes].reshape(*shape[:-1], -1),
            e8m0(scale) if scale.dtype == torch.uint8 else scale,
            multiplier=None if self.multiplier is None else found[self.multiplier],
            divisor=None if self.divisor is None else found[self.divisor],
            column_factors=None if self.column_factors is None else found.get(self.column_factors),
        )


_FP8 = torch.float8_e4m3fn
MODELOPT_NVFP4 = Fp4Scheme(
    "NVFP4, ModelOpt layout", ".weight", ".weight_scale", 16, _FP8, multiplier=".weight_scale_2"
)
MODELOPT_NVFP4_AWQ = replace(
    MODELOPT_NVFP4, name="NVFP4 with AWQ, ModelOpt layout", column_factors=".pre_quant_scale"
)
COMPRESSED_NVFP4 = Fp4Scheme(
    *("NVFP4, compressed-tensors layout", ".weight_packed", ".weight_scale", 16, _FP8),
    divisor=".weight_global_scale",
)
COMPRESSED_MXFP4 = Fp4Scheme(
    "MXFP4, compressed-tensors layout", ".weight_packed", ".weight_scale", 32, torch.uint8
)
FUSED_MXFP4 = Fp4Scheme(  # the experts of gpt-oss
    "MXFP4, fused experts", "_blocks", "_scales", 32, torch.uint8, is_fused=True, ignored=()
)


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """GPTQ: codes packed along the columns, zero points along the rows.

    `zero_offset` is added to a stored zero point: 1 in the original format, 0 in gptq_v2. None (symmetric
    only) derives the offset: stored value plus offset must be the middle code.
    """

    name: str
    bits: int
    group_size: int | None  # None: one group per row
    is_symmetric: bool
    zero_offset: int | None
    is_reordered: bool = False  # groups are not consecutive columns: g_idx is required
    ignored: tuple[str, ...] = ()

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = _one_matrix(self, shape)
        per_word = 32 // self.bits
        _divides(self, "rows", rows, per_word)
        _divides(self, "columns", columns, per_word)
        groups = _ceil(columns, self.group_size or columns)
        return {
            ".qweight": TensorSpec((columns // per_word, rows), (torch.int32,)),
            ".qzeros": TensorSpec((groups, rows // per_word), (torch.int32,)),
            ".scales": TensorSpec((groups, rows), FLOATS),
            ".g_idx": TensorSpec((columns,), (torch.int32, torch.int64), is_optional=not self.is_reordered),
        }

    def pack(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Packed:
        found = _reshaped(self, tensors, shape)
        group_size = self.group_size or shape[-1]
        stored = word_codes(found[".qzeros"], self.bits)
        zero = stored + self._offset(stored)
        is_middle = self.is_symmetric and bool((zero == self._middle).all())
        return IntGroups(
            shape,
            {
                "codes": found[".qweight"].T.contiguous().view(torch.uint8),
                "scale": found[".scales"].T.contiguous(),
                "zero": None if is_middle else zero.T.contiguous(),
                "group_index": _group_index(self, found.get(".g_idx"), shape[-1], group_size),
            },
            bits=self.bits,
            group_size=group_size,
        )

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    def _offset(self, stored: Tensor) -> int:
        if self.zero_offset is None:
            offset = self._middle - int(stored.flatten()[0])
            if offset not in (0, 1) or not bool((stored == self._middle - offset).all()):
                raise ModelError(
                    f"{self.name}: the zero points of a weight are neither all {self._middle - 1} nor all "
                    f"{self._middle}, but its configuration says sym = true. Quantise the model again."
                )
            return offset
        if self.zero_offset and bool((stored == (1 << self.bits) - 1).any()):
            # The format stores zero - 1, and 0 - 1 overflows into neighbouring zero points.
            raise ModelError(
                f"{self.name}: a stored zero point is {(1 << self.bits) - 1}, which the original GPTQ format "
                "cannot express. Use a checkpoint in the gptq_v2 format."
            )
        return self.zero_offset


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """AWQ, gemm version: codes and zero points packed along the rows, eight per word, interleaved."""

    name: str
    group_size: int | None
    ignored: tuple[str, ...] = ()

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = _one_matrix(self, shape)
        _divides(self, "rows", rows, 8)
        _divides(self, "columns", columns, 2)
        groups = _ceil(columns, self.group_size or columns)
        return {
            ".qweight": TensorSpec((columns, rows // 8), (torch.int32,)),
            ".qzeros": TensorSpec((groups, rows // 8), (torch.int32,)),
            ".scales": TensorSpec((groups, rows), FLOATS),
        }

    def pack(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Packed:
        found = _reshaped(self, tensors, shape)
        return IntGroups(
            shape,
            {
                "codes": pack_nibbles(_awq_rows(found[".qweight"]).T.contiguous()),
                "scale": found[".scales"].T.contiguous(),
                "zero": _awq_rows(found[".qzeros"]).T.contiguous(),
                "group_index": None,
            },
            bits=4,
            group_size=self.group_size or shape[-1],
        )


@dataclass(frozen=True, slots=True)
class CompressedIntScheme:
    """compressed-tensors pack-quantized: codes packed along the columns, zero points along the rows."""

    name: str
    bits: int
    group_size: int | None  # None: one group per row
    is_symmetric: bool
    is_per_tensor: bool = False
    has_group_index: bool = False
    ignored: tuple[str, ...] = ACTIVATION_SCALES

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = _one_matrix(self, shape)
        groups = _ceil(columns, self.group_size or columns)
        specs = {
            ".weight_packed": TensorSpec((rows, _ceil(columns * self.bits, 32)), (torch.int32,)),
            ".weight_scale": TensorSpec((1, 1) if self.is_per_tensor else (rows, groups), FLOATS),
            ".weight_shape": TensorSpec((2,), (torch.int64, torch.int32)),
        }
        if not self.is_symmetric:
            packed_rows = _ceil(rows * self.bits, 32)
            specs[".weight_zero_point"] = TensorSpec((packed_rows, groups), (torch.int32,))
        if self.has_group_index:
            specs[".weight_g_idx"] = TensorSpec((columns,), (torch.int32, torch.int64))
        return specs

    def pack(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Packed:
        found = _reshaped(self, tensors, shape)
        rows, columns = shape
        stored = tuple(found[".weight_shape"].tolist())
        if stored != shape:
            raise ModelError(f"{self.name}: weight_shape is {list(stored)}, expected {list(shape)}.")
        group_size = self.group_size or columns
        num_bytes = _ceil(columns * self.bits, 8)
        zero = found.get(".weight_zero_point")
        return IntGroups(
            shape,
            {
                "codes": found[".weight_packed"].contiguous().view(torch.uint8)[:, :num_bytes].contiguous(),
                "scale": found[".weight_scale"].expand(rows, -1).contiguous(),
                "zero": None if zero is None else word_codes(zero.T, self.bits)[:, :rows].T.contiguous(),
                "group_index": _group_index(self, found.get(".weight_g_idx"), columns, group_size),
            },
            bits=self.bits,
            group_size=group_size,
        )


def _awq_rows(words: Tensor) -> Tensor:
    """Unpack AWQ's int32 words [n, rows / 8] to uint8 codes [n, rows] in row order."""
    return word_codes(words, 4).view(*words.shape, 8)[..., list(_AWQ_ORDER)].flatten(-2)


def _group_index(scheme: Scheme, stored: Tensor | None, columns: int, group_size: int) -> Tensor | None:
    """Return the group of each column as [1, columns], or None if groups are consecutive columns."""
    if stored is None:
        return None
    runs = torch.arange(columns, dtype=stored.dtype, device=stored.device) // group_size
    if torch.equal(stored, runs):
        return None
    if int(stored.min()) < 0 or int(stored.max()) >= _ceil(columns, group_size):
        raise ModelError(
            f"{scheme.name}: g_idx names group {int(stored.max())} (lowest {int(stored.min())}) of "
            f"{_ceil(columns, group_size)} groups. The checkpoint is damaged or its group_size is wrong."
        )
    return stored.to(torch.int32).unsqueeze(0)


def _reshaped(scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the tensors in the shapes of the scheme. Raise ModelError if a scale is not finite."""
    specs = scheme.tensors(shape)
    for suffix, tensor in tensors.items():
        is_scale = tensor.is_floating_point() and suffix != ".weight" and tensor.dtype != torch.float8_e8m0fnu
        if is_scale and not bool(torch.isfinite(tensor.float()).all()):
            raise ModelError(
                f"{scheme.name}: {suffix.lstrip('._')} holds infinite or undefined values: the checkpoint is "
                "damaged. Fetch it again."
            )
    return {suffix: tensors[suffix].reshape(specs[suffix].shape) for suffix in specs if suffix in tensors}


def _one_matrix(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2:
        raise ModelError(f"{scheme.name}: fused experts {list(shape)} are not supported in this format.")
    return shape[0], shape[1]


def _divides(scheme: Scheme, side: str, size: int, group: int) -> None:
    if size % group:
        raise ModelError(f"{scheme.name}: {size} {side} are not a multiple of {group}.")


def _ceil(size: int, group: int) -> int:
    return -(-size // group)
