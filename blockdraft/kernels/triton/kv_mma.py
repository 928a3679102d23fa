"""Attention over exact and 4-bit keys and values in Gluon: codes become operands without leaving registers.

It replaces `kv_attention`, with the same contract, where `serves` returns True. The operands of tensor cores
are made in `kv_mma_operands`.

The keys that a query sees are divided by position: into chunks of TILE, at most MAX_SEGMENTS segments of
equal length (`segment_length`), and runs of RUN segments, which are folded in order. The bits do not depend
on which kernel folds: with LEVEL 0 each segment is stored for the merge, with 1 each run, and with 2 (a
prefill) the first kernel folds everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from blockdraft.kernels.attention import Blocks, Mask
from blockdraft.kernels.kv_compressed import CompressedPages
from blockdraft.kernels.kv_formats import CARD, TILE
from blockdraft.kernels.triton.attention import (
    LOG2_E,
    MAX_SPLIT_COUNT,
    ROW_BLOCK,
    divide_rows,
    divided,
    empty_parts,
    fold,
    row_of,
    segment_length,
    visible_keys,
)
from blockdraft.kernels.triton.hadamard import hadamard_blocks, signs
from blockdraft.kernels.triton.kv_codes import kind_of
from blockdraft.kernels.triton.kv_mma_operands import (
    arranged_keys,
    arranged_values,
    chunk_slots,
    column_dims,
    dim_rows,
    first_slots,
    key_layout,
    key_levels,
    keys_left,
    load_chunk,
    load_group_keys,
    load_group_values,
    load_scales,
    loaded,
    operand,
    places,
    scale_layout,
    value_layout,
    value_levels,
    weights_operand,
)
from blockdraft.kernels.triton.kv_segments import (
    MAX_SEGMENTS,
    RUN,
    SEGMENT,
    row_of_tile,
    segment_chunks,
)
from blockdraft.kernels.triton.kv_wide import WIDE_ROWS, attend_wide_kernel
from blockdraft.kernels.triton.launch import (
    has_pdl,
    has_wgmma,
    let_next_start,
    overlap,
    wait_for_previous,
)

HEAD_DIMS = (64, 128)  # the operands of wider heads need too many registers
ENOUGH_WARPS = 1024  # enough to keep a large GPU busy
_N = gl.constexpr(TILE)
_RUN = gl.constexpr(RUN)
_MAX_SEGMENTS = gl.constexpr(MAX_SEGMENTS)
_SHORT = gl.constexpr(2)  # chunks of a segment, up to which small code is faster
MERGED = 8  # stored units that are loaded together


@dataclass(frozen=True, slots=True)
class Config:
    """The division of the work, which is chosen by shapes that the host knows and changes no bits."""

    tokens: int  # queries of one row in a tile
    columns: int  # `tokens` times the query heads per key/value head, padded
    warps: int  # each has all keys of some columns; if there are several, they share the decoding
    level: int  # what a program stores for the merge: segments, runs or the whole
    parts: int  # programs that share the segments of a tile
    is_wide: bool = False  # by `kv_wide`


# ---- sums: of DIM by COLUMNS, with tops and totals of each column


@gluon.jit
def _nothing(DIM: gl.constexpr, COLUMNS: gl.constexpr, mma: gl.constexpr):
    column: gl.constexpr = gl.SliceLayout(0, mma)
    top = gl.full([COLUMNS], float("-inf"), gl.float32, column)
    return gl.zeros([DIM, COLUMNS], gl.float32, mma), top, gl.zeros([COLUMNS], gl.float32, column)


@gluon.jit
def _folded(whole, acc, scale):
    """Return earlier segments (`whole`) and a segment (`acc`) together, like `attention.fold`."""
    top = gl.maximum(whole[1], acc[1])
    base = gl.where(top == float("-inf"), 0.0, top)
    before = gl.exp2((whole[1] - base) * scale)
    after = gl.exp2((acc[1] - base) * scale)
    total = gl.fma(acc[2], after, whole[2] * before)
    sums = whole[0] * gl.expand_dims(before, 0)
    return gl.fma(acc[0], gl.expand_dims(after, 0) + gl.zeros_like(sums), sums), top, total


@gluon.jit
def _weighed(acc, scores, is_seen, scale):
    """Return weights of scores [64, COLUMNS] in powers of 2, the factor of sums, new tops and totals."""
    _, top, total = acc
    scores = gl.where(is_seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 0))
    # Sums of a query that has seen no key stay zero.
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    offset = gl.expand_dims(-(base * scale), 0) + gl.zeros_like(scores)
    weights = gl.exp2(gl.fma(scores, gl.zeros_like(scores) + scale, offset))
    shrink = gl.exp2((top - base) * scale)
    return weights, gl.expand_dims(shrink, 0), new_top, gl.fma(total, shrink, gl.sum(weights, 0))


@gluon.jit
def _with_chunk(acc, scores, is_seen, value_scale, v, scale, COLUMNS: gl.constexpr, SPLITS: gl.constexpr,
                mma: gl.constexpr):  # fmt: skip
    """Return sums, tops and totals with a chunk of scores [64, COLUMNS] and values v added."""
    weights, shrink, top, total = _weighed(acc, scores, is_seen, scale)
    weights = weights_operand(weights * value_scale, COLUMNS, gl.DotOperandLayout(1, mma, 2))
    v = loaded(v, SPLITS, gl.DotOperandLayout(0, mma, 2))
    return mma_v2(v, weights, acc[0] * shrink), top, total


# ---- chunks


@gluon.jit
def _folds_now(whole, run, acc, chunk, length, scale, LEVEL: gl.constexpr, DIM: gl.constexpr,
               COLUMNS: gl.constexpr, mma: gl.constexpr):  # fmt: skip
    """Fold the previous segment if one of `length` chunks begins here, and the previous run if a run does."""
    if LEVEL > 0:  # noqa: SIM102  # the one is known to the compiler
        if chunk % length == 0:
            run = _folded(run, acc, scale)
            acc = _nothing(DIM, COLUMNS, mma)
            if LEVEL > 1:  # noqa: SIM102
                if chunk % (length * _RUN) == 0:
                    whole = _run_added(whole, run, scale, mma)
                    run = _nothing(DIM, COLUMNS, mma)
    return whole, run, acc


@gluon.jit
def _run_added(whole, run, scale, mma: gl.constexpr):
    """Fold `run` into `whole`, whose sums are in shared memory, as they are needed rarely."""
    kept, top, total = whole
    sums, top, total = _folded((kept.load(mma), top, total), run, scale)
    kept.store(sums)
    return kept, top, total


@gluon.jit
def _attend_compressed(
    whole, run, acc, q, keys, key_scale, values, value_scale, table, first_chunk, last_chunk,
    compressed_end_at, length, scale,
    DIM: gl.constexpr, COLUMNS: gl.constexpr, PAGE_SIZE: gl.constexpr, LEVEL: gl.constexpr,
    WARPS: gl.constexpr, SPLITS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Attend to compressed chunks; a query sees all keys of the chunks below its c(t)."""
    WORDS: gl.constexpr = DIM // 8
    A: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, mma)
    end = last_chunk * _N
    slots = chunk_slots(table, first_chunk, end, PAGE_SIZE, WORDS, WARPS, SPLITS)
    for chunk in range(first_chunk, last_chunk):
        k, even, odd, k_scale, v_scale = load_chunk(
            keys, key_scale, values, value_scale, slots, WORDS, WARPS, SPLITS
        )
        slots = chunk_slots(table, chunk + 1, end, PAGE_SIZE, WORDS, WARPS, SPLITS)  # one iteration ahead
        whole, run, acc = _folds_now(whole, run, acc, chunk, length, scale, LEVEL, DIM, COLUMNS, mma)
        k = operand(key_levels(k, _N, DIM), SPLITS, A)
        if SPLITS:  # before the other warps wait for the keys
            v = operand(value_levels(even, odd, _N, DIM), SPLITS, A)
        scores = mma_v2(loaded(k, SPLITS, A), q, gl.zeros([_N, COLUMNS], gl.float32, mma))
        if not SPLITS:
            v = operand(value_levels(even, odd, _N, DIM), SPLITS, A)
        by_key = gl.convert_layout(gl.reshape(k_scale, [_N]), ROWS, assert_trivial=True)
        by_value = gl.convert_layout(gl.reshape(v_scale, [_N]), ROWS, assert_trivial=True)
        scores = scores * gl.expand_dims(by_key.to(gl.float32), 1)
        is_colder = gl.expand_dims(chunk * _N < compressed_end_at, 0)
        value_scale_now = gl.expand_dims(by_value.to(gl.float32), 1)
        acc = _with_chunk(acc, scores, is_colder, value_scale_now, v, scale, COLUMNS, SPLITS, mma)
    return whole, run, acc


@gluon.jit
def _attend_compressed_alone(
    run, acc, q, keys, key_scale, values, value_scale, table, first_chunk, last_chunk,
    compressed_end_at, length, scale,
    DIM: gl.constexpr, COLUMNS: gl.constexpr, PAGE_SIZE: gl.constexpr, LEVEL: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Do `_attend_compressed` with one warp, for short segments, by a loop over groups of 16 keys.

    The bits are equal. Between two layers, a model's weights evict code from all caches, so code is read from
    memory. For short segments this function is faster, as it has a third of the code; for long segments
    `_attend_compressed` is faster.
    """
    WORDS: gl.constexpr = DIM // 8
    A: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    SCALES: gl.constexpr = scale_layout(1)
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    pairs: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])  # in the order of an operand
    all_scores = gl.allocate_shared_memory(gl.float32, [4, 16, COLUMNS], rows)
    all_weights = gl.allocate_shared_memory(gl.bfloat16, [4, 16, COLUMNS], pairs)
    end = last_chunk * _N
    first = first_chunk * 4
    k, k_scale = load_group_keys(keys, key_scale, table, first, end, WORDS, PAGE_SIZE, mma)
    even, odd = load_group_values(values, table, first, end, WORDS, PAGE_SIZE)
    next_k, next_scale = load_group_keys(keys, key_scale, table, first + 1, end, WORDS, PAGE_SIZE, mma)
    next_even, next_odd = load_group_values(values, table, first + 1, end, WORDS, PAGE_SIZE)
    for chunk in range(first_chunk, last_chunk):
        slot = first_slots(table, chunk, end, PAGE_SIZE, gl.SliceLayout(1, SCALES))
        by_value = gl.reshape(load_scales(value_scale, slot, SCALES), [_N])
        if LEVEL > 0:  # noqa: SIM102  # the one is known to the compiler
            if chunk % length == 0:
                run = _folded(run, acc, scale)
                acc = _nothing(DIM, COLUMNS, mma)
        for group in range(4):
            far_k, far_scale = load_group_keys(
                keys, key_scale, table, chunk * 4 + group + 2, end, WORDS, PAGE_SIZE, mma
            )
            levels = gl.convert_layout(key_levels(k, 16, DIM), A, assert_trivial=True)
            scores = mma_v2(levels, q, gl.zeros([16, COLUMNS], gl.float32, mma))
            all_scores.index(group).store(scores * gl.expand_dims(k_scale.to(gl.float32), 1))
            k, k_scale, next_k, next_scale = next_k, next_scale, far_k, far_scale
        scores = all_scores._reinterpret(gl.float32, [_N, COLUMNS], rows).load(mma)
        is_colder = gl.expand_dims(chunk * _N < compressed_end_at, 0)
        weights, shrink, top, total = _weighed(acc, scores, is_colder, scale)
        by_value = gl.convert_layout(by_value, gl.SliceLayout(1, mma), assert_trivial=True).to(gl.float32)
        weights = (weights * gl.expand_dims(by_value, 1)).to(gl.bfloat16)
        weights = gl.permute(gl.reshape(weights, [2, 2, 16, COLUMNS]), [2, 3, 0, 1])
        lower, upper = gl.split(weights)
        first_group, third_group = gl.split(lower)
        second_group, fourth_group = gl.split(upper)
        all_weights.index(0).store(first_group)
        all_weights.index(1).store(second_group)
        all_weights.index(2).store(third_group)
        all_weights.index(3).store(fourth_group)
        sums = acc[0] * shrink
        for group in range(4):
            far_even, far_odd = load_group_values(values, table, chunk * 4 + group + 2, end, WORDS, PAGE_SIZE)
            levels = gl.convert_layout(value_levels(even, odd, 16, DIM), A, assert_trivial=True)
            sums = mma_v2(levels, all_weights.index(group).load(B), sums)
            even, odd, next_even, next_odd = next_even, next_odd, far_even, far_odd
        acc = sums, top, total
    return run, acc


@gluon.jit
def _attend_exact(
    whole, run, acc, q, keys, values, table, first_chunk, last_chunk, folds_from, tile_hi, hi,
    compressed_end_at, length, scale,
    DIM: gl.constexpr, COLUMNS: gl.constexpr, PAGE_SIZE: gl.constexpr, LEVEL: gl.constexpr,
    WARPS: gl.constexpr, SPLITS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Attend to exact chunks; a query sees keys before its `hi` in chunk 0 and in the chunks from c(t) on.

    Segments are folded only from chunk `folds_from` on: before it, this was done when the chunk was read
    compressed.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    K: gl.constexpr = key_layout(DIM, 2, WARPS, SPLITS)
    V: gl.constexpr = value_layout(DIM, 2, WARPS, SPLITS)
    row = gl.arange(0, _N, gl.SliceLayout(1, mma))
    for chunk in range(first_chunk, last_chunk):
        left = tile_hi - chunk * _N  # later keys are not written yet
        k_slot = first_slots(table, chunk, tile_hi, PAGE_SIZE, gl.SliceLayout(1, gl.SliceLayout(2, K)))
        v_slot = gl.convert_layout(k_slot, gl.SliceLayout(1, gl.SliceLayout(2, V)), assert_trivial=True)
        k = gl.load(keys + places(k_slot, 0, 1, DIM, K), mask=keys_left(left, 16, K), other=0.0)
        even = gl.load(values + places(v_slot, 0, 2, DIM, V), mask=keys_left(left, 8, V), other=0.0)
        odd = gl.load(values + places(v_slot, 1, 2, DIM, V), mask=keys_left(left - 1, 8, V), other=0.0)
        if LEVEL > 0:  # noqa: SIM102
            if chunk >= folds_from:
                whole, run, acc = _folds_now(whole, run, acc, chunk, length, scale, LEVEL, DIM, COLUMNS, mma)
        k = operand(arranged_keys(k, DIM), SPLITS, A)
        v = operand(arranged_values(even, odd, DIM), SPLITS, A)
        scores = mma_v2(loaded(k, SPLITS, A), q, gl.zeros([_N, COLUMNS], gl.float32, mma))
        is_warmer = (chunk * _N >= compressed_end_at) | (chunk == 0)
        is_seen = gl.expand_dims(row + chunk * _N, 1) < gl.expand_dims(hi, 0)
        is_seen = is_seen & gl.expand_dims(is_warmer, 0)
        acc = _with_chunk(acc, scores, is_seen, 1.0, v, scale, COLUMNS, SPLITS, mma)
    return whole, run, acc


# ---- the kernels


@gluon.jit(
    do_not_specialize=["num_rows", "tiles_per_row", "cold_window", "table_stride", "exact_table_stride",
                       "num_units"]
)  # fmt: skip
def _attend_kernel(
    q, exact_keys, exact_values, keys, key_scale, values, value_scale, part, part_top, part_total,
    page_table, exact_page_table, rows, starts, offsets, scale, cold_window, num_rows, tiles_per_row,
    table_stride, exact_table_stride, num_units, q_stride, q_head_stride, exact_stride, key_stride,
    value_stride, scale_stride,
    TOKENS: gl.constexpr, SHARED: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr,
    COLUMNS: gl.constexpr, PAGE_SIZE: gl.constexpr, LEVEL: gl.constexpr, IS_EVEN: gl.constexpr,
    IS_CAUSAL: gl.constexpr, ROW_BLOCK: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Attend with one tile; grid (tiles, key/value heads, parts), as in `kv_attention`."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32,
                                  is_pure=False, pack=1)  # fmt: skip
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False,
                                  pack=1)  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8]
    )
    B: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    group = gl.program_id(1)
    if IS_EVEN:
        row = tile // tiles_per_row
        tile = tile % tiles_per_row
    else:
        row = row_of_tile(offsets, num_rows, tile, TOKENS, ROW_BLOCK, WARPS)
        tile -= (gl.load(offsets + row) // TOKENS + row).to(gl.int32)
    stream = gl.load(offsets + row)
    count = (gl.load(offsets + row + 1) - stream).to(gl.int32)
    start = gl.load(starts + row).to(gl.int32)
    home = gl.load(rows + row)
    first = tile * TOKENS
    if first >= count:  # after the loads, so that they run concurrently
        return
    table = page_table + home * table_stride
    exact_table = exact_page_table + home * exact_table_stride
    wide = group.to(gl.int64)
    exact_keys += wide * exact_stride
    exact_values += wide * exact_stride
    keys = (keys + wide * key_stride).to(gl.pointer_type(gl.int32))
    values = (values + wide * value_stride).to(gl.pointer_type(gl.int32))
    key_scale += wide * scale_stride
    value_scale += wide * scale_stride

    # A query sees keys before `hi`, of which it reads keys before `compressed_end_at` compressed.
    last = gl.minimum(first + TOKENS, count) - 1
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, mma))
    token = gl.minimum(first + column // SHARED, last)
    hi = start + (token + 1 if IS_CAUSAL else token * 0 + count)
    tile_hi = start + (last + 1 if IS_CAUSAL else count)
    compressed_end_at = gl.maximum(start + token - cold_window, 0) // _N * _N
    cold_chunk = gl.maximum(start + last - cold_window, 0) // _N  # the first that is compressed for no query
    exact_chunk = gl.maximum(gl.maximum(start + first - cold_window, 0) // _N, 1)  # the first exact for some
    last_chunk = (tile_hi + _N - 1) // _N

    q_column = gl.arange(0, COLUMNS, gl.SliceLayout(0, B))
    q_token = first + q_column // SHARED
    is_live = (q_column < TOKENS * SHARED) & (q_token < count)
    q_dim = gl.expand_dims(column_dims(gl.arange(0, DIM, gl.SliceLayout(1, B)), DIM), 1)
    q_at = (stream + q_token) * q_stride + (group * SHARED + q_column % SHARED) * q_head_stride
    in_tile = gl.expand_dims(is_live, 0) & (q_dim >= 0)
    query = gl.load(q + gl.expand_dims(q_at, 0) + q_dim, mask=in_tile, other=0.0)

    lengths = segment_chunks(hi)  # the queries of a tile have one or two lengths
    shortest = segment_chunks(start + first + 1 if IS_CAUSAL else tile_hi)
    longest = segment_chunks(tile_hi)
    out_row = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(1, mma)), 1)
    result = (stream + first + column // SHARED) * HEADS + group * SHARED + column % SHARED
    is_kept = (column < TOKENS * SHARED) & (first + column // SHARED < count)
    for turn in range(1 + (longest != shortest).to(gl.int32)):
        length = gl.where(turn == 0, shortest, longest)
        turn_last = gl.minimum(last_chunk, length * _MAX_SEGMENTS)  # queries of the other turn see more
        unit_length = turn_last
        num_mine = 1
        if LEVEL < 2:
            unit_length = length if LEVEL == 0 else length * _RUN
            num_mine = (turn_last + unit_length - 1) // unit_length
        each = (num_mine + gl.num_programs(2) - 1) // gl.num_programs(2)
        begin_unit = gl.program_id(2) * each
        for unit in range(begin_unit, gl.minimum(begin_unit + each, num_mine)):
            begin = unit * unit_length
            end = gl.minimum(turn_last, begin + unit_length)
            acc = _nothing(DIM, COLUMNS, mma)
            run = acc
            whole = acc
            if LEVEL == 2:
                flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
                whole = gl.allocate_shared_memory(gl.float32, [DIM, COLUMNS], flat, acc[0]), acc[1], acc[2]
            # Chunk 0, then compressed chunks, then exact ones; the code contains each kind once.
            for phase in range(2):
                whole, run, acc = _attend_exact(
                    whole, run, acc, query, exact_keys, exact_values, exact_table,
                    gl.where(phase == 0, begin, gl.maximum(begin, exact_chunk)),
                    gl.where(phase == 0, gl.minimum(end, 1), end),
                    gl.where(phase == 0, 1, cold_chunk), tile_hi, hi, compressed_end_at, length, scale,
                    DIM, COLUMNS, PAGE_SIZE, LEVEL, WARPS, SPLITS, mma,
                )  # fmt: skip
                first_cold = gl.maximum(begin, 1)
                last_cold = gl.where(phase == 0, gl.minimum(end, cold_chunk), 0)
                if WARPS == 1 and LEVEL < 2:  # noqa: SIM102  # the one is known to the compiler
                    if (first_cold < last_cold) & (length <= _SHORT):
                        run, acc = _attend_compressed_alone(
                            run, acc, query, keys, key_scale, values, value_scale, table, first_cold,
                            last_cold, compressed_end_at, length, scale,
                            DIM, COLUMNS, PAGE_SIZE, LEVEL, mma,
                        )  # fmt: skip
                        last_cold = 0
                if first_cold < last_cold:
                    whole, run, acc = _attend_compressed(
                        whole, run, acc, query, keys, key_scale, values, value_scale, table, first_cold,
                        last_cold, compressed_end_at, length, scale,
                        DIM, COLUMNS, PAGE_SIZE, LEVEL, WARPS, SPLITS, mma,
                    )  # fmt: skip
            if LEVEL > 0:
                acc = _folded(run, acc, scale)
            if LEVEL == 2:
                whole = _run_added(whole, acc, scale, mma)
                acc = whole[0].load(mma), whole[1], whole[2]
            is_mine = is_kept & (lengths == length)
            at = result * num_units + unit
            gl.store(part_top + at, acc[1], mask=is_mine)
            gl.store(part_total + at, acc[2], mask=is_mine)
            place = part + gl.expand_dims(at, 0) * DIM + out_row
            gl.store(place, acc[0], mask=gl.expand_dims(is_mine, 0) & (out_row >= 0))


@triton.jit
def _part(part, part_top, part_total, at, is_there, DIM: tl.constexpr):
    """Return the sums, top and total of a unit, or those of no keys where not `is_there`."""
    dim = tl.arange(0, DIM)[None, :]
    at = at + tl.arange(0, 1)
    top = tl.load(part_top + at, mask=is_there, other=float("-inf"))
    total = tl.load(part_total + at, mask=is_there, other=0.0)[:, None]
    return tl.load(part + at[:, None] * DIM + dim, mask=is_there, other=0.0), top, total


@triton.jit(do_not_specialize=["num_rows", "tokens_per_row", "num_units"])
def _merge_kernel(
    part, part_top, part_total, out, starts, offsets, sinks, sign, scale, num_rows, tokens_per_row, num_units,
    HEADS: tl.constexpr, DIM: tl.constexpr, LEVEL: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SINKS: tl.constexpr, ROW_BLOCK: tl.constexpr, SEGMENT: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fold the units of a token that have keys, in order, undo the rotation; grid (tokens, query heads)."""
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
    _, hi = visible_keys(start, number - stream.to(tl.int32), count, 0, IS_CAUSAL, False, False)
    length = segment_length(hi, SEGMENT, MAX_SEGMENTS)
    result = number.to(tl.int64) * HEADS + head
    at = result * num_units
    dim = tl.arange(0, DIM)
    sums = tl.zeros([1, DIM], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1, 1], tl.float32)
    whole = sums, top, total
    if LEVEL == 2:
        whole = _part(part, part_top, part_total, at, True, DIM)
    else:
        for first in range(0, tl.cdiv(hi, length * RUN), RUNS):
            for run in tl.static_range(RUNS):
                begin = (first + run) * RUN  # the run's first segment
                if LEVEL == 1:
                    acc = _part(part, part_top, part_total, at + first + run, begin * length < hi, DIM)
                else:
                    acc = sums, top, total
                    for segment in tl.static_range(RUN):
                        is_there = (begin + segment) * length < hi
                        one = _part(part, part_top, part_total, at + begin + segment, is_there, DIM)
                        acc = fold(acc, one, scale)
                whole = fold(whole, acc, scale)
    sink = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        sink += tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
    outputs = divided(whole, sink, scale, HAS_SINKS)
    outputs = tl.gather(outputs, dim_rows(dim, DIM)[None, :], 1)
    outputs = hadamard_blocks(outputs, DIM, DIM) * tl.load(sign + dim)[None, :]
    tl.store(out + result * DIM + dim[None, :], outputs.to(out.dtype.element_ty))


# ---- the host's side


def serves(q: Tensor, pages: CompressedPages, blocks: Blocks, mask: Mask) -> bool:
    """Return whether this kernel serves the layer; it depends on the model and the GPU, not on the batch."""
    is_kind = {kind_of(pages.format.keys), kind_of(pages.format.values)} == {"bits4"}
    is_half = q.dtype == torch.bfloat16 and q.shape[2] in HEAD_DIMS and blocks.page_size % CARD.page == 0
    has_shape = is_half and q.shape[1] // pages.exact_keys.shape[1] <= 64 and mask.window is None
    return is_kind and has_shape and has_pdl(q.device)


def choose(*, num_rows: int, num_groups: int, shared: int, max_count: int, has_wgmma: bool) -> Config:
    """Choose one warp for few columns, four for many; the more tiles, the larger the stored units."""
    wanted = max_count * shared
    is_wide = has_wgmma and wanted > 16
    columns = 8 if wanted <= 8 else 16 if wanted <= 16 else 32 if wanted <= 32 and not is_wide else WIDE_ROWS
    tokens = min(columns // shared, TILE)
    warps = max(1, columns // 16)
    num_tiles = num_rows * -(-max_count // tokens) * num_groups
    level = 0 if num_tiles < (8 if is_wide else 64 if warps == 1 else 0) else 1
    if max_count > MAX_SPLIT_COUNT or num_tiles * warps >= ENOUGH_WARPS:
        level = 2  # there are enough tiles, and storing units would cost much
    parts = (MAX_SEGMENTS, MAX_SEGMENTS // RUN, 1)[level]
    return Config(tokens, columns, warps, level, parts, is_wide)


def attend(
    q: Tensor,
    pages: CompressedPages,
    blocks: Blocks,
    mask: Mask,
    sinks: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Return attention of q [N, H, D] over one layer's CompressedPages, like `attend_compressed`."""
    num_tokens, num_heads, head_dim = q.shape
    num_groups, num_rows, max_count = pages.exact_keys.shape[1], blocks.rows.shape[0], max(blocks.counts)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    if config is None:
        shared = num_heads // num_groups
        config = choose(
            num_rows=num_rows,
            num_groups=num_groups,
            shared=shared,
            max_count=max_count,
            has_wgmma=CARD.has_wide_blocks and has_wgmma(q.device),
        )
    segments = min(MAX_SEGMENTS, -(-blocks.table.shape[1] * blocks.page_size // SEGMENT))
    units = (segments, -(-segments // RUN), 1)[config.level]
    parts = empty_parts((num_tokens, num_heads, units), head_dim, q.device)
    num_tiles, tiles_per_row, is_even = divide_rows(blocks, num_tokens, config.tokens)
    scale = mask.scale * LOG2_E  # exp2 is used instead of exp
    constants = {
        "HEADS": num_heads,
        "DIM": head_dim,
        "LEVEL": config.level,
        "IS_CAUSAL": mask.is_causal,
        "ROW_BLOCK": ROW_BLOCK,
        **overlap(q.device),
    }
    assert blocks.exact_table is not None
    kernel, only_narrow = attend_wide_kernel, {}
    if not config.is_wide:
        kernel = _attend_kernel
        only_narrow = {"COLUMNS": config.columns, "WARPS": config.warps, "SPLITS": config.warps > 1}
    kernel[(num_tiles, num_groups, min(config.parts, units))](
        q, pages.exact_keys, pages.exact_values, *pages.keys, *pages.values, *parts,
        blocks.table, blocks.exact_table, blocks.rows, blocks.starts, blocks.offsets, scale,
        pages.rule.window, num_rows, tiles_per_row, blocks.table.stride(0), blocks.exact_table.stride(0),
        units, *q.stride()[:2], pages.exact_keys.stride(1), pages.keys.codes.stride(1),
        pages.values.codes.stride(1), pages.keys.scale.stride(1),
        TOKENS=config.tokens, SHARED=num_heads // num_groups, PAGE_SIZE=blocks.page_size, IS_EVEN=is_even,
        num_warps=config.warps, **only_narrow, **constants,
    )  # fmt: skip
    _merge_kernel[(num_tokens, num_heads)](
        *parts, out, blocks.starts, blocks.offsets, out if sinks is None else sinks,
        signs(head_dim, q.device), scale, num_rows, max_count, units,
        IS_EVEN=num_tokens == num_rows * max_count, HAS_SINKS=sinks is not None, SEGMENT=SEGMENT,
        MAX_SEGMENTS=MAX_SEGMENTS, RUN=RUN, RUNS=MERGED // (1 if config.level else RUN), num_warps=1,
        **constants,
    )  # fmt: skip
    return out
