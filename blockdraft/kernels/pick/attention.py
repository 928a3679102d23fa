"""Picks attention over exact and compressed pages, and the lookup of tokens' slots."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import Tensor

from blockdraft.kernels.attention import Attend, Blocks, Locate, Mask, reference_attend_paged
from blockdraft.kernels.choice import Available
from blockdraft.kernels.failure import named
from blockdraft.kernels.kv_codec import KvFormat
from blockdraft.kernels.kv_compressed import (
    AttendCompressed,
    Compress,
    CompressedPages,
    Tiles,
    reference_attend_compressed_paged,
    reference_compress,
)

if TYPE_CHECKING:
    import torch

    from blockdraft.kernels.llvm.attention import PagedAttention
    from blockdraft.kernels.llvm.kv_attention import CompressedAttention
    from blockdraft.kernels.llvm.kv_compress import CompressTiles


def pick_locate(at: Available) -> Locate | None:
    """Return the kernel; None if Blocks uses indexing."""
    if at.has_triton("slots"):
        from blockdraft.kernels.triton.pointwise import locate

        return named("slots", locate)
    return _llvm_locate() if at.has_llvm() else None


@functools.cache
def _llvm_locate() -> Locate:
    from blockdraft.kernels.llvm.heads import LocateKernel

    return LocateKernel()


def pick_attend(at: Available) -> Attend:
    """Attend with q [N, H, D] over keys and values [G, S, D], including the blocks' own; sinks [H]."""
    if at.has_triton("attention"):
        from blockdraft.kernels.triton.attention import attend

        return named("attention", attend)
    return _llvm_attend(at.dtype) if at.has_llvm() else reference_attend_paged


def _llvm_attend(dtype: torch.dtype) -> Attend:
    def attend(
        q: Tensor, keys: Tensor, values: Tensor, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
    ) -> Tensor:
        if q.shape[-1] % 4 != 0:
            return reference_attend_paged(q, keys, values, blocks, mask, sinks)
        return _llvm_kernel(dtype, q.shape[-1])(
            q,
            keys,
            values,
            page_table=blocks.table,
            rows=blocks.rows,
            starts=blocks.starts,
            offsets=blocks.offsets,
            units=blocks.units(q.shape[1], keys.shape[0]),
            page_size=blocks.page_size,
            mask=mask,
            sinks=sinks,
        )

    return attend


@functools.cache
def _llvm_kernel(dtype: torch.dtype, head_dim: int) -> PagedAttention:
    from blockdraft.kernels.llvm.attention import PagedAttention

    return PagedAttention(dtype, head_dim)


def pick_attend_compressed(at: Available) -> AttendCompressed:
    """Attend with q [N, H, D] over one layer's CompressedPages (L = 1); sinks [H]. Returns [N, H, D]."""
    if at.has_triton("attention"):
        return named("attention", _triton_attend_compressed)
    return _llvm_attend_compressed(at.dtype) if at.has_llvm() else reference_attend_compressed_paged


def _triton_attend_compressed(
    q: Tensor, pages: CompressedPages, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
) -> Tensor:
    from blockdraft.kernels.triton.kv_attention import attend_compressed  # importing Gluon is slow

    return attend_compressed(q, pages, blocks, mask, sinks)


def pick_compress(at: Available) -> Compress:
    if at.has_triton("attention"):
        from blockdraft.kernels.triton.kv_compress import compress

        return named("attention", compress)
    return _llvm_compress(at.dtype) if at.has_llvm() else reference_compress


def _llvm_lanes(form: KvFormat) -> int:
    """The head dimension must be a multiple of this."""
    return 16 if form.is_rotated else 4


def _llvm_attend_compressed(dtype: torch.dtype) -> AttendCompressed:
    def attend_compressed(
        q: Tensor, pages: CompressedPages, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
    ) -> Tensor:
        if q.shape[-1] % _llvm_lanes(pages.format) != 0:
            return reference_attend_compressed_paged(q, pages, blocks, mask, sinks)
        return _llvm_attention(dtype, q.shape[-1], pages.format)(q, pages, blocks, mask, sinks)

    return attend_compressed


@functools.cache
def _llvm_attention(dtype: torch.dtype, head_dim: int, form: KvFormat) -> CompressedAttention:
    from blockdraft.kernels.llvm.kv_attention import CompressedAttention

    return CompressedAttention(dtype, head_dim, form)


def _llvm_compress(dtype: torch.dtype) -> Compress:
    def compress(pages: CompressedPages, tiles: Tiles) -> None:
        head_dim = pages.exact_keys.shape[-1]
        if head_dim % _llvm_lanes(pages.format) != 0:
            reference_compress(pages, tiles)
        else:
            _llvm_tiles(dtype, head_dim, pages.format)(pages, tiles)

    return compress


@functools.cache
def _llvm_tiles(dtype: torch.dtype, head_dim: int, form: KvFormat) -> CompressTiles:
    from blockdraft.kernels.llvm.kv_compress import CompressTiles

    return CompressTiles(dtype, head_dim, form)
