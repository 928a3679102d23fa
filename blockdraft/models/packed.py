"""Weight matrices that stay in their stored format and are dequantised on use.

Every format has a logical shape, can be dequantised to a dtype, multiplied by activations, and indexed by
expert or by row. Dequantisation computes in float32 and rounds once to the requested dtype, so models in
float64, float32 and bfloat16 have the same weights. Activations are never quantised.
"""

from __future__ import annotations

import copy
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from blockdraft.errors import ModelError
from blockdraft.kernels.kernels import REFERENCE, Kernels
from blockdraft.kernels.pointwise import Gate

_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_INT8_MAX = 127.0  # symmetric, without -128


class Packed(nn.Module):
    """A weight [..., rows, columns] kept in its stored format, in buffers."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    @abstractmethod
    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return a contiguous [..., rows, columns], computed in float32 and rounded once to `dtype`."""

    @abstractmethod
    def __getitem__(self, index: int | Tensor) -> Packed:
        """Index the leading dimension: experts, or rows of a single matrix.

        An int selects one matrix of [E, rows, columns]. A tensor of any shape gathers experts, or rows of
        [rows, columns] (an embedding). Raise TypeError if the format cannot be indexed so.
        """

    @abstractmethod
    def stack_with(self, others: Sequence[Packed]) -> Packed:
        """Stack this matrix and others of the same format into [E, rows, columns]; see `stack`."""

    def matmul(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        onto: Tensor | None = None,
        kernels: Kernels = REFERENCE,
    ) -> Tensor:
        """Return onto + W x + bias [..., rows] for x [..., columns], as for a plain weight."""
        assert len(self.shape) == 2, "a product needs one matrix; take an expert first"
        return kernels.linear(x, self.dequantise(x.dtype), bias, onto)

    def gated(self, x: Tensor, bias: Tensor | None, gate: Gate, *, kernels: Kernels = REFERENCE) -> Tensor:
        """Return gate(a) * b, where a and b are the halves of the product with x."""
        return kernels.gate_mul(self.matmul(x, bias, kernels=kernels), gate)

    def rows_from(self, begin: int) -> Packed:
        """Return the matrix without its first `begin` rows."""
        return self[torch.arange(begin, self.shape[0], device=next(self.buffers()).device)]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Allow only moves to a device: `model.to(dtype)` must not change packed values or scales."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)  # type: ignore[no-any-return, no-untyped-call]


def stack(items: Sequence[Packed]) -> Packed:
    """Stack matrices of one format into [E, rows, columns]."""
    return items[0].stack_with(items[1:])


def stack_each(
    items: Iterator[Packed], count: int, empty: Callable[[Sequence[int], torch.dtype], Tensor]
) -> Packed:
    """Stack `count` items of an iterator without holding them twice; `empty` allocates memory."""
    first = next(items)
    if not isinstance(first, Buffered):
        return stack([first, *items])
    whole = {
        name: None if buffer is None else empty((count, *buffer.shape), buffer.dtype)
        for name, buffer in first.tensors().items()
    }

    def taken(index: int) -> Packed:
        cut = {name: None if buffer is None else buffer[index] for name, buffer in whole.items()}
        return first.rebuild(first.shape, cut)

    for index, item in enumerate(itertools.chain([first], items)):
        if not isinstance(item, Buffered) or _signature(item) != _signature(first):
            return stack([*map(taken, range(index)), item, *items])  # `stack` may unify the formats
        for name, buffer in item.tensors().items():
            target = whole[name]
            if target is not None and buffer is not None:
                target[index].copy_(buffer)
    return first.rebuild((count, *first.shape), whole)


class Buffered(Packed):
    """A format made of named buffers [..., rows, anything], or [..., 1, anything] if in `per_matrix`.

    Buffers in `per_matrix` belong to the whole matrix: they are indexed by expert, but not by row.
    """

    per_matrix: tuple[str, ...] = ()

    def __init__(self, shape: Sequence[int], buffers: Mapping[str, Tensor | None]) -> None:
        super().__init__(shape)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def rebuild(self, shape: Sequence[int], buffers: Mapping[str, Tensor | None]) -> Self:
        """Return a weight of the same format with other buffers."""
        rebuilt = copy.copy(self)
        rebuilt.shape = tuple(shape)
        rebuilt._buffers = dict(buffers)
        return rebuilt

    def with_default(self, name: str, buffer: Tensor) -> Self:
        """Return this weight with `buffer` as its buffer `name`, unless it already has one."""
        tensors = self.tensors()
        return self if tensors[name] is not None else self.rebuild(self.shape, {**tensors, name: buffer})

    def format(self) -> tuple[object, ...]:
        """Return the properties that must be equal, in addition to shapes and dtypes, to stack matrices."""
        return (type(self),)

    def tensors(self) -> dict[str, Tensor | None]:
        return dict(self._buffers)

    def stack_with(self, others: Sequence[Packed]) -> Packed:
        items: list[Buffered] = [self]
        for other in others:
            if not isinstance(other, Buffered) or _signature(other) != _signature(self):
                raise _different(self, other)
            items.append(other)
        tables = [item.tensors() for item in items]
        stacked = {name: _stack_buffers([table[name] for table in tables]) for name in tables[0]}
        return self.rebuild((len(items), *self.shape), stacked)

    def __getitem__(self, index: int | Tensor) -> Packed:
        tensors = self.tensors()
        if len(self.shape) == 2:
            rows = _row_index(index)
            cut = {
                name: buffer if buffer is None or name in self.per_matrix else buffer[rows]
                for name, buffer in tensors.items()
            }
            return self.rebuild((*rows.shape, self.shape[-1]), cut)
        cut = {name: None if buffer is None else buffer[index] for name, buffer in tensors.items()}
        leading = tuple(index.shape) if isinstance(index, Tensor) else ()
        return self.rebuild((*leading, *self.shape[1:]), cut)


class Dense(Buffered):
    """An unquantised tensor with the interface of Packed."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape, {"weight": weight})

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)


class Stacked(Packed):
    """Several weights of one input (q, k, v; gate, up) stacked along the rows, each in its own format."""

    def __init__(self, parts: Sequence[Packed]) -> None:
        leading, columns = parts[0].shape[:-2], parts[0].shape[-1]
        for part in parts:
            if part.shape[:-2] != leading or part.shape[-1] != columns:
                raise ModelError(
                    f"parts of one projection have shapes {list(parts[0].shape)} and {list(part.shape)}, but "
                    "they must differ in rows only."
                )
        super().__init__((*leading, sum(part.shape[-2] for part in parts), columns))
        self.parts = nn.ModuleList(parts)

    def members(self) -> list[Packed]:
        return [part for part in self.parts if isinstance(part, Packed)]

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([part.dequantise(dtype) for part in self.members()], dim=-2)

    def stack_with(self, others: Sequence[Packed]) -> Stacked:
        rows = [self.members()]
        for other in others:
            if not isinstance(other, Stacked) or len(other.parts) != len(self.parts):
                raise _different(self, other)
            rows.append(other.members())
        return Stacked([stack(list(column)) for column in zip(*rows, strict=True)])

    def rows_from(self, begin: int) -> Packed:
        parts = []
        for part in self.members():
            if begin < part.shape[0]:
                parts.append(part if begin == 0 else part.rows_from(begin))
            begin = max(0, begin - part.shape[0])
        return parts[0] if len(parts) == 1 else Stacked(parts)

    def __getitem__(self, index: int | Tensor) -> Stacked:
        if len(self.shape) == 2:
            raise TypeError("rows of a fused projection cannot be gathered; index its parts")
        return Stacked([part[index] for part in self.members()])


class Scaled(Buffered):
    """A weight of fp8 or int8 values times one scale per block of `block` = (rows, columns).

    scale [..., row blocks, column blocks]; the last block of a side may be smaller. With a single scale, the
    block is the whole matrix; with one per output row, (1, columns). `zero`, of the scale's shape, is
    subtracted from the values first.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(
        self, values: Tensor, scale: Tensor, *, block: tuple[int, int], zero: Tensor | None = None
    ) -> None:
        rows, columns = values.shape[-2:]
        grid = (*values.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
        assert tuple(scale.shape) == grid, f"scale is {tuple(scale.shape)}, blocks are {grid}"
        assert zero is None or zero.shape == scale.shape, "one zero point per scale"
        super().__init__(values.shape, {"values": values, "scale": scale, "zero": zero})
        self.block = block

    def format(self) -> tuple[object, ...]:
        return (type(self), self.block)

    def __getitem__(self, index: int | Tensor) -> Packed:
        if len(self.shape) != 2:
            return super().__getitem__(index)
        rows = _row_index(index)
        blocks = rows // self.block[0]
        zero = None if self.zero is None else self.zero[blocks]
        return Scaled(self.values[rows], self.scale[blocks], block=(1, self.block[1]), zero=zero)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        zero = None if self.zero is None else self._per_row(self.zero)
        values = self.values.float().contiguous()
        return affine_(values, zero, self._per_row(self.scale), group_size=self.block[1]).to(dtype)

    def rows_from(self, begin: int) -> Packed:
        if not self.has_row_scales or len(self.shape) != 2:
            return super().rows_from(begin)
        return Scaled(self.values[begin:], self.scale[begin:], block=self.block)

    @property
    def has_row_scales(self) -> bool:
        """True if there is one scale per row and no zero point, as GPU kernels require."""
        return self.zero is None and self.block == (1, self.shape[-1])

    def matmul(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        onto: Tensor | None = None,
        kernels: Kernels = REFERENCE,
    ) -> Tensor:
        product = self._product(x, bias, onto, None, kernels)
        return super().matmul(x, bias, onto=onto, kernels=kernels) if product is None else product

    def gated(self, x: Tensor, bias: Tensor | None, gate: Gate, *, kernels: Kernels = REFERENCE) -> Tensor:
        product = self._product(x, bias, None, gate, kernels)
        return super().gated(x, bias, gate, kernels=kernels) if product is None else product

    def _product(
        self, x: Tensor, bias: Tensor | None, onto: Tensor | None, gate: Gate | None, kernels: Kernels
    ) -> Tensor | None:
        """Return the product from a kernel for scaled weights; None without a suitable kernel."""
        if len(self.shape) != 2 or not self.has_row_scales:
            return None
        return kernels.scaled_linear(x, self.values, self.scale.flatten().float(), bias, onto, gate)

    def _per_row(self, grid: Tensor) -> Tensor:
        """Expand [..., row blocks, column blocks] to [..., rows or 1, column blocks]."""
        if grid.shape[-2] == 1:
            return grid
        return grid.float().repeat_interleave(self.block[0], dim=-2)[..., : self.shape[-2], :]


def join_rows(parts: Sequence[Packed]) -> Packed:
    """Stack matrices of one input along the rows: to a Scaled if each row has a scale, else to Stacked.

    Experts always become Stacked: they are too large to be held twice, even briefly.
    """
    if len(parts) == 1:
        return parts[0]
    same = [part for part in parts if isinstance(part, Scaled) and part.has_row_scales]
    is_alike = len(same) == len(parts) and len({part.values.dtype for part in same}) == 1
    if len(parts[0].shape) != 2 or not is_alike:
        return Stacked(parts)
    values = torch.cat([part.values for part in same], dim=-2)
    scale = torch.cat([part.scale.float() for part in same], dim=-2)
    return Scaled(values, scale, block=(1, values.shape[-1]))


def affine_(values: Tensor, zero: Tensor | None, scale: Tensor, *, group_size: int) -> Tensor:
    """Compute (values - zero) * scale in place, with one zero and one scale per group of columns.

    values float32 [..., rows, columns]; zero, scale [..., rows or 1, groups]; the last group may be shorter.
    """
    columns = values.shape[-1]
    is_even = columns % group_size == 0
    groups = values.view(*values.shape[:-1], -1, group_size) if is_even else values

    def spread(factor: Tensor) -> Tensor:
        if is_even:
            return factor.float().unsqueeze(-1)
        return factor.float().repeat_interleave(group_size, dim=-1)[..., :columns]

    if zero is not None:
        groups -= spread(zero)
    groups *= spread(scale)
    return values


def quantise_fp8(weight: Tensor) -> Packed:
    """Quantise [..., rows, columns] to e4m3fn with one float32 scale per output row."""
    scaled, scale = _scale_rows(weight, _FP8_MAX)
    return Scaled(scaled.clamp_(-_FP8_MAX, _FP8_MAX).to(_FP8), scale, block=(1, weight.shape[-1]))


def quantise_int8(weight: Tensor) -> Packed:
    """Quantise [..., rows, columns] to symmetric int8 with one float32 scale per output row."""
    scaled, scale = _scale_rows(weight, _INT8_MAX)
    values = scaled.round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return Scaled(values, scale, block=(1, weight.shape[-1]))


def _scale_rows(weight: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return rows divided by scales so that they fill [-largest, largest], and the scales (zero rows: 1)."""
    values = weight.float()
    peak = values.abs().amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(peak).all()):
        raise ModelError("a weight holds infinite or undefined values and cannot be quantised.")
    smallest = torch.finfo(torch.float32).tiny
    scale = torch.where(peak > 0, (peak / largest).clamp(min=smallest), torch.ones_like(peak))
    return values / scale, scale


def _row_index(index: int | Tensor) -> Tensor:
    if not isinstance(index, Tensor) or index.dim() == 0:
        raise TypeError("one matrix is indexed by a tensor of rows, not by a single number")
    return index


def _stack_buffers(buffers: Sequence[Tensor | None]) -> Tensor | None:
    present = [buffer for buffer in buffers if buffer is not None]
    return torch.stack(present) if present else None


def _signature(item: Buffered) -> tuple[object, ...]:
    layout = tuple(
        (name, None if buffer is None else (tuple(buffer.shape), buffer.dtype))
        for name, buffer in item.tensors().items()
    )
    return (item.format(), item.shape, layout)


def _different(one: Packed, other: Packed) -> ModelError:
    kinds = [f"{type(item).__name__} {list(item.shape)}" for item in (one, other)]
    return ModelError(
        f"experts of different formats cannot be stacked: {kinds[0]} and {kinds[1]}. "
        "Quantise every expert of a layer in the same way."
    )
