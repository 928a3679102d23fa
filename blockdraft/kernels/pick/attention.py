"""Picks attention over exact and compressed pages, compression, and the lookup of tokens' slots."""

from __future__ import annotations

import functools

from torch import Tensor

from blockdraft.kernels.attention import Attend, Blocks, Locate, Mask, reference_attend_paged
from blockdraft.kernels.choice import Available
from blockdraft.kernels.failure import named
from blockdraft.kernels.kv_compressed import (
    AttendCompressed,
    Compress,
    CompressedPages,
    Tiles,
    reference_attend_compressed_paged,
    reference_compress,
)
from blockdraft.kernels.kv_formats import EXACT, ROTATED
from blockdraft.kernels.llvm.attention import PagedAttention
from blockdraft.kernels.llvm.heads import locate as llvm_locate
from blockdraft.kernels.llvm.kv_attention import CompressedAttention
from blockdraft.kernels.llvm.kv_codec import CompressTiles

_llvm_kernel = functools.cache(PagedAttention)
_llvm_compressed = functools.cache(CompressedAttention)
_llvm_tiles = functools.cache(CompressTiles)


def pick_locate(at: Available) -> Locate | None:
    """Return the kernel that finds tokens' slots; None if Blocks computes them by indexing."""
    if at.has_triton("slots"):
        from blockdraft.kernels.triton.pointwise import locate

        return named("slots", locate)
    return llvm_locate if at.has_llvm() else None


def pick_attend(at: Available) -> Attend:
    """Pick attention of q [N, H, D] over keys and values [G, S, D], including the blocks' own; sinks [H]."""
    if at.has_triton("attention"):
        from blockdraft.kernels.triton.attention import attend

        return named("attention", attend)
    return _llvm_attend if at.has_llvm() else reference_attend_paged


def why_no_heads(at: Available, head_dim: int, kv_dtype: str) -> str | None:
    """Return why no kernel takes such heads, or None. A GPU's kernel takes every size that fits."""
    lanes = _llvm_lanes(is_rotated=kv_dtype in ROTATED)
    if not at.has_llvm() or head_dim % lanes == 0:
        return None
    stored = f" in {kv_dtype}" if kv_dtype != EXACT else ""
    return f"the kernel takes heads{stored} of a multiple of {lanes} values, not of {head_dim}"


def _llvm_attend(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
) -> Tensor:
    if q.shape[-1] % _llvm_lanes(is_rotated=False) != 0:
        return reference_attend_paged(q, keys, values, blocks, mask, sinks)
    return _llvm_kernel(q.dtype, q.shape[-1])(q, keys, values, blocks, mask, sinks)


def pick_attend_compressed(at: Available) -> AttendCompressed:
    """Pick attention [N, H, D] of q [N, H, D] over one layer's CompressedPages (L = 1); sinks [H]."""
    if at.has_triton("attention"):
        return named("attention", _triton_attend_compressed)
    return _llvm_attend_compressed if at.has_llvm() else reference_attend_compressed_paged


def _triton_attend_compressed(
    q: Tensor, pages: CompressedPages, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
) -> Tensor:
    from blockdraft.kernels.triton.kv_attention import attend_compressed  # importing Gluon is slow

    return attend_compressed(q, pages, blocks, mask, sinks)


def pick_compress(at: Available) -> Compress:
    if at.has_triton("attention"):
        from blockdraft.kernels.triton.kv_compress import compress

        return named("attention", compress)
    return _llvm_compress if at.has_llvm() else reference_compress


def _llvm_lanes(*, is_rotated: bool) -> int:
    """Return the number that the head size must be a multiple of for the CPU kernels."""
    return 16 if is_rotated else 4


def _llvm_attend_compressed(
    q: Tensor, pages: CompressedPages, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
) -> Tensor:
    if q.shape[-1] % _llvm_lanes(is_rotated=pages.format.is_rotated) != 0:
        return reference_attend_compressed_paged(q, pages, blocks, mask, sinks)
    return _llvm_compressed(q.dtype, q.shape[-1], pages.format)(q, pages, blocks, mask, sinks)


def _llvm_compress(pages: CompressedPages, tiles: Tiles) -> None:
    stored = pages.exact_keys
    if stored.shape[-1] % _llvm_lanes(is_rotated=pages.format.is_rotated) != 0:
        reference_compress(pages, tiles)
    else:
        _llvm_tiles(stored.dtype, stored.shape[-1], pages.format)(pages, tiles)
