"""Paged attention over exact and compressed keys on a CUDA device; contract: `kernels.kv_compressed`.

Tiles, segments, parts and their merge are as in the exact kernel (`triton.attention`). Keys are read in
chunks of TILE by position: chunk 0 exact, the chunks below a query's c(t) compressed, later chunks exact. The
queries of a tile have at most two different c(t). So at most one chunk is read both ways, compressed for some
queries and exact for others, and each query sees it once. Keys that a query does not see change none of its
bits.

A head is processed in two halves, since a byte of codes has one coordinate of each half. Levels are exact in
the model's dtype: a key's scale is multiplied into its scores, a value's into its weights, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.attention import Blocks, Mask
from blockdraft.kernels.failure import DoesNotFit
from blockdraft.kernels.kv_compressed import CompressedPages
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.triton import kv_mma
from blockdraft.kernels.triton.attention import (
    LOG2_E,
    MAX_SPLIT_COUNT,
    SUMS,
    divide_rows,
    divided,
    empty_parts,
    fold,
    row_of,
    segment_length,
    shared_constants,
    visible_keys,
)
from blockdraft.kernels.triton.hadamard import hadamard_blocks, signs
from blockdraft.kernels.triton.kv_codes import has_words, kind_of, levels_of, load_codes
from blockdraft.kernels.triton.launch import has_pdl, let_next_start, num_multiprocessors, wait_for_previous

# Per query, four times as many as in the exact kernel: decoding is so slow that a row needs more programs.
MAX_SEGMENTS = 64
SEGMENT = 64  # keys of the shortest segments; the result's bits depend on both numbers

_MERGED = tl.constexpr(8)  # segments whose sums are loaded together


@dataclass(frozen=True, slots=True)
class Config:
    """The division of the work, which is chosen by shapes that the host knows and changes no bits."""

    tokens: int  # queries of one row in a tile, at most TILE
    block_m: int  # `tokens` times the query heads per key/value head, padded to a power of two
    warps: int
    stages: int  # exact chunks in flight
    parts: int  # programs that share the segments of a tile
    is_ahead: bool = True  # the next compressed chunk is in flight, in registers
    registers: int | None = None  # the most per thread


@triton.jit
def _both_folded(whole, acc, scale):
    """Return `attention.fold` of sums in two halves, tops and totals."""
    lo, top, total = fold((whole[0], whole[2], whole[3]), (acc[0], acc[2], acc[3]), scale)
    hi, _, _ = fold((whole[1], whole[2], whole[3]), (acc[1], acc[2], acc[3]), scale)
    return lo, hi, top, total


@triton.jit
def _nothing_yet(M: tl.constexpr, HALF: tl.constexpr):
    lo = tl.zeros([M, HALF], tl.float32)
    hi = tl.zeros([M, HALF], tl.float32)
    return lo, hi, tl.full([M], float("-inf"), tl.float32), tl.zeros([M, SUMS], tl.float32)


@triton.jit
def _picked(condition, one, other):
    """Select from `one` where condition [M] holds, else from `other`."""
    both = condition[:, None]
    return (
        tl.where(both, one[0], other[0]),
        tl.where(both, one[1], other[1]),
        tl.where(condition, one[2], other[2]),
        tl.where(both, one[3], other[3]),
    )


@triton.jit
def _segments_begun(whole, acc, is_new, scale, HALF: tl.constexpr):
    """Fold the previous segment of the queries whose next segment begins here."""
    whole = _picked(is_new, _both_folded(whole, acc, scale), whole)
    acc = _picked(is_new, _nothing_yet(acc[0].shape[0], HALF), acc)
    return whole, acc


@triton.jit
def _weighed(acc, scores, scale):
    """Return new tops, weights of scores [M, N] in powers of 2, and the factor of sums and totals [M, 1]."""
    new_top = tl.maximum(acc[2], tl.max(scores, 1))
    # Sums of a query that has seen no key stay zero.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(tl.fma(scores, scale, -(base * scale)[:, None]))
    return new_top, weights, tl.exp2((acc[2] - base) * scale)[:, None]


@triton.jit
def _attend_exact(
    whole, acc, q_lo, q_hi, keys, values, table, first_chunk, last_chunk, tile_lo, tile_hi, lo, hi,
    compressed_end_at, length, shortest, longest, scale,
    N: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, FOLDS: tl.constexpr,
    HAS_LO: tl.constexpr, IS_FIRST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute an online softmax over exact chunks; with IS_FIRST over chunk 0, exact for all queries.

    Segments are folded as in the exact kernel's `_attend_chunks`.
    """
    column = tl.arange(0, HALF)
    ones = tl.full([N, SUMS], 1.0, q_lo.dtype)
    key = first_chunk * N + tl.arange(0, N)
    page = tl.load(table + key // PAGE_SIZE, mask=(key >= tile_lo) & (key < tile_hi), other=0).to(tl.int32)
    for chunk in tl.range(first_chunk, last_chunk, num_stages=STAGES):
        key = chunk * N + tl.arange(0, N)
        where = (page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE)[:, None] * DIM + column[None, :]
        next_key = key + N
        is_next = (next_key >= tile_lo) & (next_key < tile_hi)
        page = tl.load(table + next_key // PAGE_SIZE, mask=is_next, other=0).to(tl.int32)
        is_read = ((key >= tile_lo) & (key < tile_hi))[:, None] & (column < DIM // 2)[None, :]
        k_lo = tl.load(keys + where, mask=is_read, other=0.0)
        k_hi = tl.load(keys + DIM // 2 + where, mask=is_read, other=0.0)
        v_lo = tl.load(values + where, mask=is_read, other=0.0)
        v_hi = tl.load(values + DIM // 2 + where, mask=is_read, other=0.0)
        if FOLDS:
            is_short_new = chunk * N % shortest == 0
            is_long_new = chunk * N % longest == 0
            if is_short_new | is_long_new:
                is_new = tl.where(length == shortest, is_short_new, is_long_new)
                if not IS_FIRST:
                    is_new = is_new & (
                        chunk * N >= compressed_end_at
                    )  # otherwise it began when the chunk was read compressed
                whole, acc = _segments_begun(whole, acc, is_new, scale, HALF)
        scores = tl.dot(q_lo, tl.trans(k_lo), input_precision=PRECISION)
        scores = tl.dot(q_hi, tl.trans(k_hi), scores, input_precision=PRECISION)
        is_seen = key[None, :] < hi[:, None]
        if not IS_FIRST:
            is_seen = is_seen & (chunk * N >= compressed_end_at)[:, None]
        if HAS_LO:
            is_seen = is_seen & (key[None, :] >= lo[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_top, weights, shrink = _weighed(acc, scores, scale)
        weights = weights.to(v_lo.dtype)
        # In the opposite order, the compiler gives every warp all of a low tile.
        total = tl.dot(weights, ones, acc[3] * shrink, input_precision=PRECISION)
        sums_lo = tl.dot(weights, v_lo, acc[0] * shrink, input_precision=PRECISION)
        sums_hi = tl.dot(weights, v_hi, acc[1] * shrink, input_precision=PRECISION)
        acc = sums_lo, sums_hi, new_top, total
    return whole, acc


@triton.jit
def _compressed_page(table, chunk, last_chunk, tile_lo, N: tl.constexpr, PAGE_SIZE: tl.constexpr,
               HAS_LO: tl.constexpr):  # fmt: skip
    """Return the page ids [N] of a chunk's keys, and a mask of the keys to read."""
    key = chunk * N + tl.arange(0, N)
    is_read = key < last_chunk * N
    if HAS_LO:
        is_read = is_read & (key >= tile_lo)
    return tl.load(table + key // PAGE_SIZE, mask=is_read, other=0).to(tl.int32), is_read


@triton.jit
def _stored(
    codes, scales, page, chunk, is_read, N: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, HAS_LO: tl.constexpr, KIND: tl.constexpr, BYTES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Return the codes and scales of a chunk's keys, or values; scales are 0 where not `is_read`."""
    slot = page.to(tl.int64) * PAGE_SIZE + (chunk * N + tl.arange(0, N)) % PAGE_SIZE
    scale = tl.load(scales + slot, mask=is_read, other=0.0)
    in_reach = is_read if HAS_LO else None
    first, second = load_codes(codes, slot, in_reach, DIM, HALF, KIND, BYTES, WORDS)
    return first, second, scale


@triton.jit
def _both_stored(
    keys, key_scale, values, value_scale, page, chunk, is_read, N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, HAS_LO: tl.constexpr, KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr, KEY_BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Return `_stored` of a chunk's keys and of its values."""
    k = _stored(
        keys, key_scale, page, chunk, is_read, N, PAGE_SIZE, DIM, HALF, HAS_LO, KEY_KIND, KEY_BYTES, WORDS
    )
    v = _stored(
        values, value_scale, page, chunk, is_read,
        N, PAGE_SIZE, DIM, HALF, HAS_LO, VALUE_KIND, VALUE_BYTES, WORDS,
    )  # fmt: skip
    return k, v


@triton.jit
def _levels(
    is_true, first, second, N: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr,
    DTYPE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Return `levels_of` under the condition `is_true`, which always holds.

    If the compiler sees that an operand is made from bytes, it sums the products of low and high tiles in
    different orders. The condition hides this, and the compiled code does not contain it.
    """
    lo = tl.zeros([N, HALF], DTYPE)
    hi = tl.zeros([N, HALF], DTYPE)
    if is_true:
        lo, hi = levels_of(first, second, DIM, HALF, KIND, DTYPE, WORDS)
    return lo, hi


@triton.jit
def _attend_compressed(
    whole, acc, q_lo, q_hi, keys, key_scale, values, value_scale, table, first_chunk, last_chunk, tile_lo, lo,
    compressed_end_at, length, shortest, longest, scale,
    N: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, FOLDS: tl.constexpr,
    HAS_LO: tl.constexpr, KEY_KIND: tl.constexpr, VALUE_KIND: tl.constexpr, KEY_BYTES: tl.constexpr,
    VALUE_BYTES: tl.constexpr, WORDS: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute an online softmax over compressed chunks; a query sees keys below its c(t), from `lo` on."""
    ones = tl.full([N, SUMS], 1.0, q_lo.dtype)
    # Page ids are loaded one iteration before codes and scales; with AHEAD, these are loaded one ahead, too,
    # into registers.
    page, is_read = _compressed_page(table, first_chunk, last_chunk, tile_lo, N, PAGE_SIZE, HAS_LO)
    if AHEAD:
        k, v = _both_stored(
            keys, key_scale, values, value_scale, page, first_chunk, is_read,
            N, PAGE_SIZE, DIM, HALF, HAS_LO, KEY_KIND, VALUE_KIND, KEY_BYTES, VALUE_BYTES, WORDS,
        )  # fmt: skip
        page, is_read = _compressed_page(table, first_chunk + 1, last_chunk, tile_lo, N, PAGE_SIZE, HAS_LO)
    for chunk in tl.range(first_chunk, last_chunk, num_stages=1):
        key = chunk * N + tl.arange(0, N)
        loaded_k, loaded_v = _both_stored(
            keys, key_scale, values, value_scale, page, chunk + AHEAD, is_read,
            N, PAGE_SIZE, DIM, HALF, HAS_LO, KEY_KIND, VALUE_KIND, KEY_BYTES, VALUE_BYTES, WORDS,
        )  # fmt: skip
        if not AHEAD:
            k, v = loaded_k, loaded_v
        page, is_read = _compressed_page(
            table, chunk + AHEAD + 1, last_chunk, tile_lo, N, PAGE_SIZE, HAS_LO
        )  # fmt: skip
        is_compressed = chunk * N < compressed_end_at  # [M]
        if FOLDS:
            is_short_new = chunk * N % shortest == 0
            is_long_new = chunk * N % longest == 0
            if is_short_new | is_long_new:
                is_new = tl.where(length == shortest, is_short_new, is_long_new) & is_compressed
                whole, acc = _segments_begun(whole, acc, is_new, scale, HALF)
        k_lo, k_hi = _levels(chunk < last_chunk, k[0], k[1], N, DIM, HALF, KEY_KIND, q_lo.dtype, WORDS)
        scores = tl.dot(q_lo, tl.trans(k_lo), input_precision=PRECISION)
        scores = tl.dot(q_hi, tl.trans(k_hi), scores, input_precision=PRECISION)
        scores = scores * k[2].to(tl.float32)[None, :]
        is_seen = is_compressed[:, None]
        if HAS_LO:
            is_seen = is_seen & (key[None, :] >= lo[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_top, weights, shrink = _weighed(acc, scores, scale)
        scaled = (weights * v[2].to(tl.float32)[None, :]).to(q_lo.dtype)
        v_lo, v_hi = _levels(chunk < last_chunk, v[0], v[1], N, DIM, HALF, VALUE_KIND, q_lo.dtype, WORDS)
        total = tl.dot(weights.to(q_lo.dtype), ones, acc[3] * shrink, input_precision=PRECISION)
        sums_lo = tl.dot(scaled, v_lo, acc[0] * shrink, input_precision=PRECISION)
        sums_hi = tl.dot(scaled, v_hi, acc[1] * shrink, input_precision=PRECISION)
        acc = sums_lo, sums_hi, new_top, total
        if AHEAD:
            k, v = loaded_k, loaded_v
    return whole, acc


@triton.jit
def _joined(lo, hi, DIM: tl.constexpr, HALF: tl.constexpr):
    """Return two halves, joined to [M, 2 * HALF]; the head's values come first, then padding."""
    M: tl.constexpr = lo.shape[0]
    x = tl.reshape(tl.permute(tl.join(lo, hi), (0, 2, 1)), (M, 2 * HALF))
    if DIM < 2 * HALF:
        d = tl.arange(0, 2 * HALF)
        index = tl.where(d < DIM // 2, d, tl.minimum(d + HALF - DIM // 2, 2 * HALF - 1))
        x = tl.gather(x, tl.broadcast_to(index[None, :], x.shape), 1)
    return x


@triton.jit
def _rotated_back(x, signs, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    d = tl.arange(0, DIM_PAD)
    return hadamard_blocks(x, DIM, DIM_PAD) * tl.load(signs + d, mask=d < DIM, other=0.0)[None, :]


@triton.jit(
    do_not_specialize=[
        "num_rows", "tiles_per_row", "window", "exact_window", "table_stride", "exact_table_stride",
        "num_segments",
    ]
)  # fmt: skip
def _attend_kernel(
    q, exact_keys, exact_values, keys, key_scale, values, value_scale, out, part, part_top, part_total,
    page_table, exact_page_table, rows, starts, offsets, sinks, sign, scale, window, exact_window, num_rows,
    tiles_per_row, table_stride, exact_table_stride, num_segments, q_stride, q_head_stride, exact_stride,
    key_stride, value_stride, scale_stride,
    TOKENS: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    N: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, FOLDS: tl.constexpr,
    IS_EVEN: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_ANCHORED: tl.constexpr,
    HAS_SINKS: tl.constexpr, IS_ROTATED: tl.constexpr, KEY_KIND: tl.constexpr, VALUE_KIND: tl.constexpr,
    KEY_BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr, WORDS: tl.constexpr,
    PRECISION: tl.constexpr, ROW_BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr, MAX_SEGMENTS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with one tile; grid (tiles, key/value heads, parts), as in the exact kernel."""
    let_next_start(PDL)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    wait_for_previous(PDL)

    if IS_EVEN:
        row = tile // tiles_per_row
        tile = tile % tiles_per_row
    else:
        row = row_of(offsets, num_rows, tile, TOKENS, ROW_BLOCK)
        tile -= (tl.load(offsets + row) // TOKENS + row).to(tl.int32)
    stream = tl.load(offsets + row)
    count = (tl.load(offsets + row + 1) - stream).to(tl.int32)
    start = tl.load(starts + row).to(tl.int32)
    home = tl.load(rows + row)
    table = page_table + home * table_stride
    exact_table = exact_page_table + home * exact_table_stride
    first = tile * TOKENS
    if first >= count:  # after the loads, so that they run concurrently
        return
    exact_keys += group.to(tl.int64) * exact_stride
    exact_values += group.to(tl.int64) * exact_stride
    keys += group.to(tl.int64) * key_stride
    values += group.to(tl.int64) * value_stride
    key_scale += group.to(tl.int64) * scale_stride
    value_scale += group.to(tl.int64) * scale_stride

    # Each query sees keys [lo, hi), the tile [tile_lo, tile_hi).
    lane = tl.arange(0, BLOCK_M)
    token = first + lane // SHARED
    head = group * SHARED + lane % SHARED
    is_live = (lane < TOKENS * SHARED) & (token < count)
    last = tl.minimum(first + TOKENS, count) - 1
    lo, hi = visible_keys(start, tl.minimum(token, last), count, window, IS_CAUSAL, HAS_WINDOW, IS_ANCHORED)
    tile_lo, first_hi = visible_keys(start, first, count, window, IS_CAUSAL, HAS_WINDOW, IS_ANCHORED)
    _, tile_hi = visible_keys(start, last, count, window, IS_CAUSAL, HAS_WINDOW, IS_ANCHORED)
    length = segment_length(hi, SEGMENT, MAX_SEGMENTS)
    # The queries of a tile have segments of at most two lengths: the first query's and the last one's.
    shortest = segment_length(first_hi, SEGMENT, MAX_SEGMENTS)
    longest = segment_length(tile_hi, SEGMENT, MAX_SEGMENTS)
    compressed_end_at = tl.maximum(start + tl.minimum(token, last) - exact_window, 0) // N * N
    compressed_chunk = tl.maximum(start + last - exact_window, 0) // N  # the first exact for all queries
    exact_chunk = tl.maximum(tl.maximum(start + first - exact_window, 0) // N, 1)  # the first exact for some

    column = tl.arange(0, HALF)
    in_tile = is_live[:, None] & (column < DIM // 2)[None, :]
    where = (stream + token)[:, None] * q_stride + head[:, None] * q_head_stride + column[None, :]
    q_lo = tl.load(q + where, mask=in_tile, other=0.0)
    q_hi = tl.load(q + DIM // 2 + where, mask=in_tile, other=0.0)

    result = (stream + token) * HEADS + head  # [BLOCK_M] int64, a row of the output
    first_chunk = tile_lo // N
    last_chunk = (tile_hi + N - 1) // N
    num_passes = 1
    if not FOLDS:
        num_passes = tl.where(shortest == longest, 1, 2)  # a pass for each length
    for number in range(num_passes):
        pass_length = tl.where(number == 0, shortest, longest)
        if FOLDS:
            begin_segment = 0
            end_segment = 1
        else:
            pass_hi = tl.minimum(tile_hi, pass_length * MAX_SEGMENTS)  # queries of the other pass see more
            each = tl.cdiv(tl.cdiv(pass_hi, pass_length), tl.num_programs(2))
            begin_segment = tl.maximum(tile_lo // pass_length, tl.program_id(2) * each)
            end_segment = tl.minimum(tl.cdiv(pass_hi, pass_length), (tl.program_id(2) + 1) * each)
        for segment in range(begin_segment, end_segment):
            begin = first_chunk
            end = last_chunk
            if not FOLDS:
                begin = tl.maximum(first_chunk, segment * pass_length // N)
                end = tl.minimum(last_chunk, (segment + 1) * pass_length // N)
            whole = _nothing_yet(BLOCK_M, HALF)
            acc = _nothing_yet(BLOCK_M, HALF)
            whole, acc = _attend_exact(
                whole, acc, q_lo, q_hi, exact_keys, exact_values, exact_table, begin, tl.minimum(end, 1),
                tile_lo, tile_hi, lo, hi, compressed_end_at, length, shortest, longest, scale,
                N, PAGE_SIZE, DIM, HALF, FOLDS, HAS_WINDOW, True, PRECISION, 1,
            )  # fmt: skip
            whole, acc = _attend_compressed(
                whole, acc, q_lo, q_hi, keys, key_scale, values, value_scale, table, tl.maximum(begin, 1),
                tl.minimum(end, compressed_chunk), tile_lo, lo, compressed_end_at, length, shortest, longest,
                scale, N, PAGE_SIZE, DIM, HALF, FOLDS, HAS_WINDOW, KEY_KIND, VALUE_KIND, KEY_BYTES,
                VALUE_BYTES, WORDS, PRECISION, AHEAD,
            )  # fmt: skip
            whole, acc = _attend_exact(
                whole, acc, q_lo, q_hi, exact_keys, exact_values, exact_table,
                tl.maximum(begin, exact_chunk), end,
                tile_lo, tile_hi, lo, hi, compressed_end_at, length, shortest, longest, scale,
                N, PAGE_SIZE, DIM, HALF, FOLDS, HAS_WINDOW, False, PRECISION, STAGES,
            )  # fmt: skip
            if FOLDS:
                sink = lane * 0.0
                if HAS_SINKS:
                    sink = tl.load(sinks + head, mask=is_live, other=0.0).to(tl.float32) * 1.4426950408889634
                whole = _both_folded(whole, acc, scale)
                out_lo = divided((whole[0], whole[2], whole[3]), sink, scale, HAS_SINKS)
                out_hi = divided((whole[1], whole[2], whole[3]), sink, scale, HAS_SINKS)
                if IS_ROTATED:
                    outputs = _rotated_back(_joined(out_lo, out_hi, DIM, HALF), sign, DIM, 2 * HALF)
                    dim = tl.arange(0, 2 * HALF)[None, :]
                    is_kept = is_live[:, None] & (dim < DIM)
                    at = out + result[:, None] * DIM + dim
                    tl.store(at, outputs.to(out.dtype.element_ty), mask=is_kept)
                else:
                    at = out + result[:, None] * DIM + column[None, :]
                    tl.store(at, out_lo.to(out.dtype.element_ty), mask=in_tile)
                    tl.store(at + DIM // 2, out_hi.to(out.dtype.element_ty), mask=in_tile)
            else:
                is_mine = is_live & (length == pass_length)
                at = result * num_segments + segment
                tl.store(part_top + at, acc[2], mask=is_mine)
                tl.store(part_total + at, tl.max(acc[3], 1), mask=is_mine)
                is_kept = is_mine[:, None] & (column < DIM // 2)[None, :]
                place = part + at[:, None] * DIM + column[None, :]
                tl.store(place, acc[0], mask=is_kept)
                tl.store(place + DIM // 2, acc[1], mask=is_kept)


@triton.jit(do_not_specialize=["num_rows", "tokens_per_row", "window", "num_segments"])
def _merge_kernel(
    part, part_top, part_total, out, starts, offsets, sinks, sign, scale, window, num_rows, tokens_per_row,
    num_segments,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_ANCHORED: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_ROTATED: tl.constexpr, ROW_BLOCK: tl.constexpr, SEGMENT: tl.constexpr, MAX_SEGMENTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Fold the segments of a token that have keys, in order; grid (tokens, query heads)."""
    let_next_start(PDL)
    head = tl.program_id(1)
    number = tl.program_id(0)
    wait_for_previous(PDL)
    row = number // tokens_per_row if IS_EVEN else row_of(offsets, num_rows, number, 0, ROW_BLOCK)
    stream = tl.load(offsets + row)
    count = (tl.load(offsets + row + 1) - stream).to(tl.int32)
    start = tl.load(starts + row).to(tl.int32)
    if number >= tl.load(offsets + num_rows):  # after the loads, so that they run concurrently
        return
    token = number - stream.to(tl.int32)
    lo, hi = visible_keys(start, token, count, window, IS_CAUSAL, HAS_WINDOW, IS_ANCHORED)
    length = segment_length(hi, SEGMENT, MAX_SEGMENTS)
    result = number.to(tl.int64) * HEADS + head
    lane = tl.arange(0, 1)
    dim = tl.arange(0, DIM_PAD)[None, :]
    sums = tl.zeros([1, DIM_PAD], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1, 1], tl.float32)
    for begin in range(lo // length, tl.cdiv(hi, length), _MERGED):
        for step in tl.static_range(_MERGED):
            segment = begin + step
            is_there = segment * length < hi
            at = result * num_segments + segment + lane
            new_top = tl.load(part_top + at, mask=is_there, other=float("-inf"))
            new_total = tl.load(part_total + at, mask=is_there, other=0.0)[:, None]
            new_sums = tl.load(part + at[:, None] * DIM + dim, mask=is_there & (dim < DIM), other=0.0)
            sums, top, total = fold((sums, top, total), (new_sums, new_top, new_total), scale)
    sink = lane * 0.0
    if HAS_SINKS:
        sink += tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
    outputs = divided((sums, top, total), sink, scale, HAS_SINKS)
    if IS_ROTATED:
        outputs = _rotated_back(outputs, sign, DIM, DIM_PAD)
    tl.store(out + result * DIM + dim, outputs.to(out.dtype.element_ty), mask=dim < DIM)


def attend_compressed(
    q: Tensor,
    pages: CompressedPages,
    blocks: Blocks,
    mask: Mask,
    sinks: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Return attention [N, H, D] of q [N, H, D] over one layer's CompressedPages; sinks [H].

    Outputs past the last of blocks.offsets are undefined.
    """
    _check(q, pages, blocks, sinks)
    if config is None and kv_mma.serves(q, pages, blocks, mask):
        return kv_mma.attend(q, pages, blocks, mask, sinks)
    num_tokens, num_heads, head_dim = q.shape
    num_groups, num_rows, max_count = pages.exact_keys.shape[1], blocks.rows.shape[0], max(blocks.counts)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    if config is None:
        config = choose(
            num_rows=num_rows,
            num_groups=num_groups,
            shared=num_heads // num_groups,
            head_dim=head_dim,
            element_size=q.element_size(),
            max_count=max_count,
            multiprocessors=num_multiprocessors(q.device),
        )
    is_split, is_rotated = config.parts > 1, pages.format.is_rotated
    segments = min(MAX_SEGMENTS, -(-blocks.table.shape[1] * blocks.page_size // SEGMENT))
    parts = empty_parts((num_tokens, num_heads, segments), head_dim, q.device) if is_split else (out,) * 3
    num_tiles, tiles_per_row, is_even = divide_rows(blocks, num_tokens, config.tokens)
    read_sinks, sign = out if sinks is None else sinks, signs(head_dim, q.device) if is_rotated else out
    scale = mask.scale * LOG2_E  # exp2 is used instead of exp
    window = 0 if mask.window is None else mask.window
    constants = {
        "IS_ROTATED": is_rotated,
        "SEGMENT": SEGMENT,
        "MAX_SEGMENTS": MAX_SEGMENTS,
        **shared_constants(q, mask, sinks),
    }
    assert blocks.exact_table is not None
    _attend_kernel[(num_tiles, num_groups, min(config.parts, segments))](
        q, pages.exact_keys, pages.exact_values, *pages.keys, *pages.values, out, *parts,
        blocks.table, blocks.exact_table, blocks.rows, blocks.starts, blocks.offsets, read_sinks, sign,
        scale, window, pages.rule.window, num_rows, tiles_per_row, blocks.table.stride(0),
        blocks.exact_table.stride(0), segments, *q.stride()[:2], pages.exact_keys.stride(1),
        pages.keys.codes.stride(1), pages.values.codes.stride(1), pages.keys.scale.stride(1),
        TOKENS=config.tokens, SHARED=num_heads // num_groups, HALF=_half(head_dim), N=TILE,
        PAGE_SIZE=blocks.page_size, BLOCK_M=config.block_m, FOLDS=not is_split, IS_EVEN=is_even,
        KEY_KIND=kind_of(pages.format.keys), VALUE_KIND=kind_of(pages.format.values),
        KEY_BYTES=pages.keys.codes.shape[-1], VALUE_BYTES=pages.values.codes.shape[-1],
        WORDS=_has_words(q, pages), PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        STAGES=config.stages, AHEAD=config.is_ahead,
        num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers, **constants,
    )  # fmt: skip
    if is_split:
        _merge_kernel[(num_tokens, num_heads)](
            *parts, out, blocks.starts, blocks.offsets, read_sinks, sign, scale, window, num_rows, max_count,
            segments, DIM_PAD=2 * _half(head_dim), IS_EVEN=num_tokens == num_rows * max_count, num_warps=1,
            **constants,
        )  # fmt: skip
    return out


def _has_words(q: Tensor, pages: CompressedPages) -> bool:
    """Return whether to decode four codes at a time to bfloat16, by instructions of Hopper and later GPUs."""
    if q.device.type != "cuda" or q.dtype != torch.bfloat16 or not has_pdl(q.device):
        return False
    return all(has_words(codec, q.shape[2]) for codec in (pages.format.keys, pages.format.values))


def _half(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim // 2)))


def _check(q: Tensor, pages: CompressedPages, blocks: Blocks, sinks: Tensor | None) -> None:
    exact = (pages.exact_keys, pages.exact_values)
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or any(
        x.dtype != q.dtype for x in exact
    ):
        raise ValueError(
            f"attention over compressed pages in {q.dtype}, with exact keys in {exact[0].dtype} and values "
            f"in {exact[1].dtype}: it wants one of bfloat16, float16 and float32 for all three"
        )
    assert q.shape[2] % 2 == 0
    assert len(pages.exact_keys) == 1, "one layer"
    assert all(x[0].is_contiguous() for x in (*exact, *pages.keys, *pages.values))
    assert pages.keys.scale.stride(1) == pages.values.scale.stride(1)
    assert q.stride(2) == 1
    assert blocks.table.stride(1) == 1
    assert blocks.exact_table is not None
    assert blocks.exact_table.stride(1) == 1
    assert q.shape[1] % pages.exact_keys.shape[1] == 0
    assert sinks is None or (sinks.shape == q.shape[1:2] and sinks.is_contiguous())


def choose(
    *,
    num_rows: int,
    num_groups: int,
    shared: int,
    head_dim: int,
    element_size: int,
    max_count: int,
    multiprocessors: int,
) -> Config:
    """Choose one tile for the whole block if it fits, and several programs per tile if tiles are few."""
    if shared > 128:
        raise DoesNotFit(f"{shared} query heads share a key/value head: paged attention takes at most 128")
    row_bytes = 2 * _half(head_dim) * element_size
    # At most 32 rows, for mma.sync: 64 rows use Hopper's wgmma, with which a ragged batch caused an illegal
    # memory access. If `shared` needs 64, there are 8 warps, with which this did not happen.
    is_ahead = row_bytes <= 512  # the registers of wider heads hold sums and one chunk of codes, no more
    widest = max(32 if is_ahead and element_size == 2 else 16, triton.next_power_of_2(shared))
    block_m = min(max(16, triton.next_power_of_2(max_count * shared)), widest)
    tokens = min(block_m // shared, TILE)
    num_tiles = num_rows * -(-max_count // tokens) * num_groups
    warps = 8 if block_m >= 64 or row_bytes >= 512 or element_size == 4 else 4  # otherwise sums spill
    is_large = row_bytes > 256 or element_size == 4
    is_small = block_m == 16 and not is_large
    registers = 128 if is_small else None  # so that four programs fit a multiprocessor
    parts, programs = 1, (8 if is_small else 4) * multiprocessors
    if max_count <= MAX_SPLIT_COUNT:
        while parts < MAX_SEGMENTS and 2 * parts * num_tiles <= programs:
            parts *= 2
    return Config(tokens, block_m, warps, 1 if is_large else 2, parts, is_ahead, registers)
