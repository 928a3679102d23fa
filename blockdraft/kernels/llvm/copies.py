"""Kernels that copy and gather tensors, so that a tape can replay a step's copies without Python.

If a PyTorch operation only moves memory, `lowered` runs it by these kernels where possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blockdraft.kernels.llvm.compiler import inlined, kernel, taken
from blockdraft.kernels.llvm.jit import Jit
from blockdraft.kernels.llvm.language import Bytes, Int, Longs, load, pieces, store

_SERIAL_BYTES = 1 << 16
_WIDE = 16  # bytes, or other numbers, at a time
Empty = Callable[[Sequence[int], torch.dtype], Tensor]


def lowered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], empty: Empty) -> Tensor | None:
    """Run an operation by kernels, with new memory from `empty`; return None if PyTorch has to run it."""
    aten = torch.ops.aten
    if func is aten.clone.default and _becomes_contiguous(args[0], kwargs.get("memory_format")):
        out = empty(args[0].shape, args[0].dtype)
        return out if _put(args[0], out) else None
    if func is aten.copy_.default and args[0].shape == args[1].shape and args[0].dtype == args[1].dtype:
        return args[0] if _put(args[1], args[0]) else None
    if func is aten.cat.default:
        return _joined(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0), empty)
    if func is aten.index.Tensor and len(args[1]) == 1:
        return _gathered(args[0], args[1][0], empty)
    return None


def _becomes_contiguous(x: Tensor, memory_format: torch.memory_format | None) -> bool:
    """Return True if PyTorch's copy of x would be contiguous."""
    if memory_format in (None, torch.preserve_format):
        return x.is_contiguous() or torch.empty_like(x, device="meta").is_contiguous()
    return memory_format is torch.contiguous_format


def _joined(parts: Sequence[Tensor], dim: int, empty: Empty) -> Tensor | None:
    parts = [one for one in parts if one.numel()]
    if not parts or len({one.dtype for one in parts}) > 1:
        return None
    dim %= parts[0].dim()
    shape = list(parts[0].shape)
    shape[dim] = sum(one.shape[dim] for one in parts)
    out = empty(shape, parts[0].dtype)
    begin = 0
    for one in parts:
        if not _put(one, out.narrow(dim, begin, one.shape[dim])):
            return None
        begin += one.shape[dim]
    return out


def _put(source: Tensor, into: Tensor) -> bool:
    """Copy and return True if both tensors have at most two strided dimensions over contiguous values."""
    layout = _layout(source, into)
    if layout is None:
        return False
    counts, source_strides, into_strides, size = layout
    each = source.itemsize
    _COPY(
        *counts, *(each * one for one in source_strides), *(each * one for one in into_strides), each * size,
        source, into, is_small=source.nbytes < _SERIAL_BYTES,
    )  # fmt: skip
    return True


def _layout(source: Tensor, into: Tensor) -> tuple[list[int], list[int], list[int], int] | None:
    """Return two counts, their strides in source and target, and the number of contiguous values.

    Return None if more than two strided dimensions are left.
    """
    outer: list[tuple[int, int, int]] = []
    size = 1
    axes = zip(source.shape, source.stride(), into.stride(), strict=True)
    for count, stride, into_stride in reversed([axis for axis in axes if axis[0] != 1]):
        if not outer and stride == into_stride == size:
            size *= count
        elif outer and stride == outer[-1][0] * outer[-1][1] and into_stride == outer[-1][0] * outer[-1][2]:
            outer[-1] = (outer[-1][0] * count, outer[-1][1], outer[-1][2])
        else:
            outer.append((count, stride, into_stride))
    if len(outer) > 2:
        return None
    outer = [*([(1, 0, 0)] * (2 - len(outer))), *reversed(outer)]
    counts, strides, into_strides = (list(one) for one in zip(*outer, strict=True))
    return counts, strides, into_strides, size


def _gathered(table: Tensor, index: Tensor | None, empty: Empty) -> Tensor | None:
    if index is None or index.dtype != torch.int64 or not table.is_contiguous() or not index.is_contiguous():
        return None
    out = empty((*index.shape, *table.shape[1:]), table.dtype)
    size = math.prod(table.shape[1:]) * table.itemsize
    _GATHER(index.numel(), table.shape[0], size, index, table, out, is_small=out.nbytes < _SERIAL_BYTES)
    return out


@kernel
def copy_rows(
    count: Int, rows: Int, far: Int, near: Int, into_far: Int, into_near: Int, size: Int, source: Bytes,
    into: Bytes,
) -> None:  # fmt: skip
    """Copy `count` groups of `rows` rows of `size` bytes; strides are in bytes."""
    for item in taken(count * rows):
        i, j = item // rows, item % rows
        copy(source + i * far + j * near, into + i * into_far + j * into_near, size)


@kernel
def gather_rows(count: Int, num_rows: Int, size: Int, index: Longs, table: Bytes, into: Bytes) -> None:
    """Gather rows of `size` bytes; a negative index counts from the table's end, as in PyTorch."""
    for item in taken(count):
        row = index[item]
        if row < 0:
            row = row + num_rows
        copy(table + row * size, into + item * size, size)


@inlined
def copy(source: Any, into: Any, size: Int) -> None:
    """Copy `size` numbers of one type."""
    for begin, end, lanes in pieces(size, _WIDE):
        for i in range(begin, end, lanes):
            store(into + i, load(source + i, lanes))


_COPY, _GATHER = Jit(copy_rows), Jit(gather_rows)
