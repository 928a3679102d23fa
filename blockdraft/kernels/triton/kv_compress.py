"""Compression of keys and values on a CUDA device; see `kernels.kv_compressed` for the contract.

A program encodes the keys and the values of one head in one tile. All vectors go through the same operations
in float32, so a vector's bytes depend only on the vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blockdraft.kernels.kv_codec import EightBits, RotatedLevels
from blockdraft.kernels.kv_compressed import CompressedPages, Tiles
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.triton.kv_codes import kind_of, level3, level4
from blockdraft.kernels.triton.launch import overlap, start_and_wait

_N = tl.constexpr(TILE)
_ROUNDING = tl.constexpr(1.5 * 2**23)  # adding it to a number rounds the number to an integer


@triton.jit
def _nearest4(u):
    """Return the codes of the nearest levels; ties round away from zero."""
    size = tl.abs(u)
    above = (size >= 0.26025390625).to(tl.int32) + (size >= 0.5234375).to(tl.int32)
    above += (size >= 0.796875).to(tl.int32) + (size >= 1.09375).to(tl.int32)
    above += (size >= 1.4296875).to(tl.int32) + (size >= 1.84375).to(tl.int32)
    above += (size >= 2.390625).to(tl.int32)
    return tl.where(u < 0, 7 - above, 8 + above)


@triton.jit
def _nearest3(u):
    size = tl.abs(u)
    above = (size >= 0.49169921875).to(tl.int32) + (size >= 1.052734375).to(tl.int32)
    above += (size >= 1.75).to(tl.int32)
    return tl.where(u < 0, 3 - above, 4 + above)


@triton.jit
def _quotient(x, by):
    """Return x / by, rounded once, or zero where `by` is zero or not finite."""
    is_sound = (by > 0) & (by < float("inf"))
    return tl.where(is_sound, tl.div_rn(x, tl.where(is_sound, by, 1.0)), 0.0)


@triton.jit
def _stored(scale):
    is_finite = tl.abs(scale) < float("inf")
    return tl.where(is_finite, tl.minimum(scale, 65504.0), float("nan")).to(tl.float16)


@triton.jit
def _rounded(x, scale):
    """Return values, rounded to multiples of scale [N, 1], as bytes."""
    ratio = tl.minimum(tl.maximum(_quotient(x, tl.broadcast_to(scale, x.shape)), -127.0), 127.0)
    whole = (ratio + _ROUNDING) - _ROUNDING  # ties to even
    return whole.to(tl.int32).to(tl.uint8)


@triton.jit
def _encode(
    exact, codes, scales, source, target, DIM: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr,
    BYTES: tl.constexpr, IS_UNBIASED: tl.constexpr,
):  # fmt: skip
    """Encode the vectors in slots `source` [N] of `exact` into slots `target` [N]."""
    column = tl.arange(0, HALF)[None, :]
    is_in = (column < DIM // 2) & (source >= 0)[:, None]
    lo = tl.load(exact + source[:, None] * DIM + column, mask=is_in, other=0.0).to(tl.float32)
    hi = tl.load(exact + source[:, None] * DIM + DIM // 2 + column, mask=is_in, other=0.0).to(tl.float32)
    is_finite = (tl.abs(lo) < float("inf")) & (tl.abs(hi) < float("inf"))
    is_sound = tl.min(is_finite.to(tl.int32), 1) > 0
    peak = tl.where(is_sound, tl.max(tl.maximum(tl.abs(lo), tl.abs(hi)), 1), float("nan"))
    place = codes + target[:, None] * BYTES
    if KIND == "whole8":
        scale = _stored(tl.div_rn(peak, peak * 0.0 + 127.0))
        wide = scale.to(tl.float32)[:, None]
        tl.store(place + column, _rounded(lo, wide), mask=is_in)
        tl.store(place + DIM // 2 + column, _rounded(hi, wide), mask=is_in)
    else:
        y_lo = _quotient(lo, tl.broadcast_to(peak[:, None], lo.shape))
        y_hi = _quotient(hi, tl.broadcast_to(peak[:, None], hi.shape))
        square = tl.sum(y_lo * y_lo + y_hi * y_hi, 1)
        stretch = tl.sqrt_rn(_quotient(square * 0.0 + DIM, square))[:, None]
        if KIND == "bits4":
            code_lo = _nearest4(y_lo * stretch)
            code_hi = _nearest4(y_hi * stretch)
            level_lo = tl.where(is_in, level4(code_lo), 0.0)
            level_hi = tl.where(is_in, level4(code_hi), 0.0)
            tl.store(place + column, (code_lo | code_hi << 4).to(tl.uint8), mask=is_in)
        else:
            level_lo = tl.where(is_in, level3(_nearest3(y_lo * stretch)), 0.0)
            level_hi = tl.where(is_in, level3(_nearest3(y_hi * stretch)), 0.0)
            _store_planes(exact, place, source, peak[:, None], stretch, DIM, HALF)
        if IS_UNBIASED:
            factor = _quotient(square, tl.sum(y_lo * level_lo + y_hi * level_hi, 1))
        else:
            factor = tl.sqrt_rn(tl.div_rn(square, tl.sum(level_lo * level_lo + level_hi * level_hi, 1)))
        scale = _stored(peak * factor)
    tl.store(scales + target, scale)


@triton.jit
def _store_planes(exact, place, source, peak, stretch, DIM: tl.constexpr, HALF: tl.constexpr):
    """Store codes of 3 bits: first the low two bits of all codes, then the high bits."""
    column = tl.arange(0, HALF // 4)[None, :]
    is_in = (column < DIM // 8) & (source >= 0)[:, None]
    even = tl.zeros([_N, HALF // 4], tl.int32)
    odd = tl.zeros([_N, HALF // 4], tl.int32)
    high = tl.zeros([_N, HALF // 4], tl.int32)
    for part in tl.static_range(8):
        where = source[:, None] * DIM + part * (DIM // 8) + column
        x = tl.load(exact + where, mask=is_in, other=0.0).to(tl.float32)
        code = _nearest3(_quotient(x, tl.broadcast_to(peak, x.shape)) * stretch)
        high |= (code >> 2) << part
        if part % 2 == 0:
            even |= (code & 3) << part
        else:
            odd |= (code & 3) << (part - 1)
    tl.store(place + column, even.to(tl.uint8), mask=is_in)
    tl.store(place + DIM // 8 + column, odd.to(tl.uint8), mask=is_in)
    tl.store(place + DIM // 4 + column, high.to(tl.uint8), mask=is_in)


@triton.jit
def _compressed_end(length, window, block):
    """Return `PositionRule.compressed_end` of a row of `length` tokens."""
    return tl.maximum(length + block - 1 - window, 0) // _N * _N


@triton.jit(do_not_specialize=["most", "window", "block", "num_groups", "table_stride", "exact_table_stride"])
def _compress_kernel(
    exact_keys, exact_values, keys, key_scale, values, value_scale, page_table, exact_page_table, rows,
    starts, counts, window, block, most, num_groups, table_stride, exact_table_stride, exact_layer,
    exact_group, key_layer, key_group, value_layer, value_group, scale_layer, scale_group,
    DIM: tl.constexpr, HALF: tl.constexpr, PAGE_SIZE: tl.constexpr, KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr, KEY_BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Encode one tile of one head; grid (rows times tiles per row, layers times key/value heads)."""
    start_and_wait(PDL)
    row = tl.program_id(0) // most
    start = tl.load(starts + row)
    begin = _compressed_end(start, window, block) + tl.program_id(0) % most * _N
    if begin >= _compressed_end(start + tl.load(counts + row), window, block):
        return
    layer = (tl.program_id(1) // num_groups).to(tl.int64)
    group = (tl.program_id(1) % num_groups).to(tl.int64)
    home = tl.load(rows + row)
    position = begin + tl.arange(0, _N)
    source = tl.load(exact_page_table + home * exact_table_stride + position // PAGE_SIZE).to(tl.int64)
    target = tl.load(page_table + home * table_stride + position // PAGE_SIZE).to(tl.int64)
    source = source * PAGE_SIZE + position % PAGE_SIZE
    target = target * PAGE_SIZE + position % PAGE_SIZE
    exact = layer * exact_layer + group * exact_group
    scale = layer * scale_layer + group * scale_group
    _encode(
        exact_keys + exact, keys + layer * key_layer + group * key_group, key_scale + scale, source, target,
        DIM, HALF, KEY_KIND, KEY_BYTES, True,
    )  # fmt: skip
    _encode(
        exact_values + exact, values + layer * value_layer + group * value_group, value_scale + scale, source,
        target, DIM, HALF, VALUE_KIND, VALUE_BYTES, False,
    )  # fmt: skip


def compress(pages: CompressedPages, tiles: Tiles) -> None:
    """Encode `tiles` of all layers from exact slots to compressed slots."""
    num_layers, num_groups, _, head_dim = pages.exact_keys.shape
    _check(pages, tiles)
    _compress_kernel[(tiles.rows.shape[0] * tiles.most, num_layers * num_groups)](
        pages.exact_keys, pages.exact_values, *pages.keys, *pages.values, tiles.table, tiles.exact_table,
        tiles.rows, tiles.starts, tiles.counts, tiles.rule.window, tiles.rule.block, tiles.most, num_groups,
        tiles.table.stride(0), tiles.exact_table.stride(0), *pages.exact_keys.stride()[:2],
        *pages.keys.codes.stride()[:2], *pages.values.codes.stride()[:2], *pages.keys.scale.stride()[:2],
        DIM=head_dim, HALF=max(16, triton.next_power_of_2(head_dim // 2)), PAGE_SIZE=tiles.page_size,
        KEY_KIND=kind_of(pages.format.keys), VALUE_KIND=kind_of(pages.format.values),
        KEY_BYTES=pages.keys.codes.shape[-1], VALUE_BYTES=pages.values.codes.shape[-1], num_warps=4,
        **overlap(pages.exact_keys.device),
    )  # fmt: skip


def _check(pages: CompressedPages, tiles: Tiles) -> None:
    keys, values = pages.format.keys, pages.format.values
    assert isinstance(keys, EightBits) or (isinstance(keys, RotatedLevels) and keys.scaling == "unbiased")
    assert isinstance(values, EightBits) or (
        isinstance(values, RotatedLevels) and values.scaling == "matched"
    )
    assert pages.exact_keys.stride() == pages.exact_values.stride()
    assert pages.keys.scale.stride() == pages.values.scale.stride()
    stores = (pages.exact_keys, *pages.keys, *pages.values)
    assert all(x.stride(-1) == 1 for x in stores)
    assert all(x.stride(2) == x.shape[3] for x in stores if x.dim() == 4)
    assert tiles.table.stride(1) == tiles.exact_table.stride(1) == 1
    assert torch.float16 == pages.keys.scale.dtype == pages.values.scale.dtype
