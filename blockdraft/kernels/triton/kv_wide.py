"""4-bit attention of many queries on Hopper: a chunk is decoded once, to shared memory, for all of a tile.

Scores are queries by keys here, on `wgmma`, whose second operand is in shared memory: keys, then values. The
four warps share the decoding: that of values overlaps with the product of scores, that of the next keys with
the sums. Bits are those of `kv_mma`, whose scores are keys by queries: products add up 16 coordinates, or 16
keys, at a time in the same order, and `_sum_of_keys` adds up weights in the same order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.triton.kv_mma_operands import (
    arranged_keys,
    arranged_values,
    column_dims,
    column_scale_layout,
    first_slots,
    key_layout,
    key_levels,
    keys_left,
    load_scales,
    places,
    value_layout,
    value_levels,
)
from blockdraft.kernels.triton.kv_segments import MAX_SEGMENTS, RUN, row_of_tile, segment_chunks

_N = gl.constexpr(TILE)
_RUN = gl.constexpr(RUN)
_MAX_SEGMENTS = gl.constexpr(MAX_SEGMENTS)
WIDE_ROWS = 64  # queries times heads of a tile: a warpgroup's
_M = gl.constexpr(WIDE_ROWS)
_WARPS = gl.constexpr(4)


# ---- sums [64, DIM], with tops and totals [64]; earlier segments' sums are in shared memory


@gluon.jit
def _nothing(DIM: gl.constexpr, mma: gl.constexpr):
    row: gl.constexpr = gl.SliceLayout(1, mma)
    top = gl.full([_M], float("-inf"), gl.float32, row)
    return gl.zeros([_M, DIM], gl.float32, mma), top, gl.zeros([_M], gl.float32, row)


@gluon.jit
def _folded(whole, acc, scale):
    """Return earlier segments (`whole`) and a segment (`acc`) together, like `attention.fold`."""
    top = gl.maximum(whole[1], acc[1])
    base = gl.where(top == float("-inf"), 0.0, top)
    before = gl.exp2((whole[1] - base) * scale)
    after = gl.exp2((acc[1] - base) * scale)
    total = gl.fma(acc[2], after, whole[2] * before)
    sums = whole[0] * gl.expand_dims(before, 1)
    return gl.fma(acc[0], gl.expand_dims(after, 1) + gl.zeros_like(sums), sums), top, total


@gluon.jit
def _added(kept, acc, scale, mma: gl.constexpr):
    """Fold `acc` into `kept`, whose sums are in shared memory."""
    store, top, total = kept
    sums, top, total = _folded((store.load(mma), top, total), acc, scale)
    store.store(sums)
    return store, top, total


@gluon.jit
def _emptied(kept, DIM: gl.constexpr, mma: gl.constexpr):
    store, _, _ = kept
    sums, top, total = _nothing(DIM, mma)
    store.store(sums)
    return store, top, total


@gluon.jit
def _folds_now(whole, run, acc, chunk, length, scale, LEVEL: gl.constexpr, DIM: gl.constexpr,
               mma: gl.constexpr):  # fmt: skip
    """Fold the previous segment if one of `length` chunks begins here, and the previous run if a run does."""
    if LEVEL > 0:  # noqa: SIM102  # the one is known to the compiler
        if chunk % length == 0:
            run = _added(run, acc, scale, mma)
            acc = _nothing(DIM, mma)
            if LEVEL > 1:  # noqa: SIM102
                if chunk % (length * _RUN) == 0:
                    whole = _added(whole, (run[0].load(mma), run[1], run[2]), scale, mma)
                    run = _emptied(run, DIM, mma)
    return whole, run, acc


@gluon.jit
def _sum_of_keys(weights):
    """Return sums [64] over 64 keys in the order of `kv_mma`: key 8 j + 2 t + e by j, then by t and e."""
    x = gl.sum(gl.reshape(weights, [_M, 8, 4, 2]), 1)
    return gl.sum(gl.sum(x, 1), 1)


@gluon.jit
def _weighed(acc, scores, is_seen, scale, mma: gl.constexpr):
    """Return weights of scores [64, 64] in powers of 2, the factor of sums, new tops and totals."""
    _, top, total = acc
    scores = gl.where(is_seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    # Sums of a query that has seen no key stay zero.
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    offset = gl.expand_dims(-(base * scale), 1) + gl.zeros_like(scores)
    weights = gl.exp2(gl.fma(scores, gl.zeros_like(scores) + scale, offset))
    shrink = gl.exp2((top - base) * scale)
    added = gl.convert_layout(_sum_of_keys(weights), gl.SliceLayout(1, mma), assert_trivial=True)
    return weights, gl.expand_dims(shrink, 1), new_top, gl.fma(total, shrink, added)


@gluon.jit
def _scores_begun(q, keys, mma: gl.constexpr):
    """Begin the product of queries and the keys [64, DIM] in shared memory."""
    fence_async_shared()
    return warpgroup_mma(q, keys.permute((1, 0)), gl.zeros([_M, _N], gl.float32, mma), use_acc=False,
                         is_async=True)  # fmt: skip


@gluon.jit
def _sums_begun(weights, values, sums, mma: gl.constexpr):
    """Begin to add the weighted values [DIM, 64], in shared memory, to the sums."""
    A: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    weights = gl.convert_layout(weights.to(gl.bfloat16), A, assert_trivial=True)
    return warpgroup_mma(weights, values.permute((1, 0)), sums, is_async=True)


# ---- chunks


@gluon.jit
def _load_codes(keys, values, table, chunk, end, PAGE_SIZE: gl.constexpr, WORDS: gl.constexpr):
    """Return the words of a chunk's keys and values; those of slot 0 from key `end` on."""
    K: gl.constexpr = key_layout(WORDS, 1, _WARPS, True)
    V: gl.constexpr = value_layout(WORDS, 1, _WARPS, True)
    slot = first_slots(table, chunk, end, PAGE_SIZE, gl.SliceLayout(1, gl.SliceLayout(2, K)))
    v_slot = gl.convert_layout(slot, gl.SliceLayout(1, gl.SliceLayout(2, V)), assert_trivial=True)
    k = gl.load(keys + places(slot, 0, 1, WORDS, K))
    even = gl.load(values + places(v_slot, 0, 2, WORDS, V))
    odd = gl.load(values + places(v_slot, 1, 2, WORDS, V))
    return k, even, odd


@gluon.jit
def _load_scales(key_scale, value_scale, table, chunk, end, PAGE_SIZE: gl.constexpr):
    LAYOUT: gl.constexpr = column_scale_layout(_WARPS)
    slot = first_slots(table, chunk, end, PAGE_SIZE, gl.SliceLayout(1, LAYOUT))
    return load_scales(key_scale, slot, LAYOUT), load_scales(value_scale, slot, LAYOUT)


@gluon.jit
def _by_column(scales, mma: gl.constexpr):
    """Return scales [4, 16] as factors [1, 64] of scores."""
    x = gl.convert_layout(gl.reshape(scales, [_N]), gl.SliceLayout(0, mma), assert_trivial=True)
    return gl.expand_dims(x.to(gl.float32), 0)


@gluon.jit
def _attend_compressed(
    whole, run, acc, q, k_place, v_place, keys, key_scale, values, value_scale, table, first_chunk,
    last_chunk, compressed_end_at, length, scale,
    DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, LEVEL: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Attend to compressed chunks; a query sees all keys of the chunks below its c(t)."""
    WORDS: gl.constexpr = DIM // 8
    end = last_chunk * _N
    k, even, odd = _load_codes(keys, values, table, first_chunk, end, PAGE_SIZE, WORDS)
    by_key, by_value = _load_scales(key_scale, value_scale, table, first_chunk, end, PAGE_SIZE)
    k_place.store(key_levels(k, _N, DIM))
    for chunk in range(first_chunk, last_chunk):
        next_k, next_even, next_odd = _load_codes(keys, values, table, chunk + 1, end, PAGE_SIZE, WORDS)
        next_by_key, next_by_value = _load_scales(key_scale, value_scale, table, chunk + 1, end, PAGE_SIZE)
        whole, run, acc = _folds_now(whole, run, acc, chunk, length, scale, LEVEL, DIM, mma)
        scores = _scores_begun(q, k_place, mma)
        v_place.store(value_levels(even, odd, _N, DIM))
        fence_async_shared()
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = scores * _by_column(by_key, mma)
        is_colder = gl.expand_dims(chunk * _N < compressed_end_at, 1)
        weights, shrink, top, total = _weighed(acc, scores, is_colder, scale, mma)
        sums = _sums_begun(weights * _by_column(by_value, mma), v_place, acc[0] * shrink, mma)
        k_place.store(key_levels(next_k, _N, DIM))  # every warp has waited for the scores
        acc = warpgroup_mma_wait(0, deps=[sums]), top, total
        even, odd, by_key, by_value = next_even, next_odd, next_by_key, next_by_value
    return whole, run, acc


@gluon.jit
def _attend_exact(
    whole, run, acc, q, k_place, v_place, keys, values, table, first_chunk, last_chunk, folds_from, tile_hi,
    hi, compressed_end_at, length, scale,
    DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, LEVEL: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Attend to exact chunks; a query sees keys before its `hi` in chunk 0 and in the chunks from c(t) on.

    Segments are folded only from chunk `folds_from` on: before it, this was done when the chunk was read
    compressed.
    """
    K: gl.constexpr = key_layout(DIM, 2, _WARPS, True)
    V: gl.constexpr = value_layout(DIM, 2, _WARPS, True)
    key = gl.arange(0, _N, gl.SliceLayout(0, mma))
    for chunk in range(first_chunk, last_chunk):
        left = tile_hi - chunk * _N  # later keys are not written yet
        k_slot = first_slots(table, chunk, tile_hi, PAGE_SIZE, gl.SliceLayout(1, gl.SliceLayout(2, K)))
        v_slot = gl.convert_layout(k_slot, gl.SliceLayout(1, gl.SliceLayout(2, V)), assert_trivial=True)
        k = gl.load(keys + places(k_slot, 0, 1, DIM, K), mask=keys_left(left, 16, K), other=0.0)
        even = gl.load(values + places(v_slot, 0, 2, DIM, V), mask=keys_left(left, 8, V), other=0.0)
        odd = gl.load(values + places(v_slot, 1, 2, DIM, V), mask=keys_left(left - 1, 8, V), other=0.0)
        if chunk >= folds_from:
            whole, run, acc = _folds_now(whole, run, acc, chunk, length, scale, LEVEL, DIM, mma)
        k_place.store(arranged_keys(k, DIM))
        v_place.store(arranged_values(even, odd, DIM))
        scores = warpgroup_mma_wait(0, deps=[_scores_begun(q, k_place, mma)])
        is_warmer = (chunk * _N >= compressed_end_at) | (chunk == 0)
        is_seen = gl.expand_dims(key + chunk * _N, 0) < gl.expand_dims(hi, 1)
        is_seen = is_seen & gl.expand_dims(is_warmer, 1)
        weights, shrink, top, total = _weighed(acc, scores, is_seen, scale, mma)
        sums = _sums_begun(weights, v_place, acc[0] * shrink, mma)
        acc = warpgroup_mma_wait(0, deps=[sums]), top, total
    return whole, run, acc


# ---- the kernel


@gluon.jit(
    do_not_specialize=["num_rows", "tiles_per_row", "cold_window", "table_stride", "exact_table_stride",
                       "num_units"]
)  # fmt: skip
def attend_wide_kernel(
    q, exact_keys, exact_values, keys, key_scale, values, value_scale, part, part_top, part_total,
    page_table, exact_page_table, rows, starts, offsets, scale, cold_window, num_rows, tiles_per_row,
    table_stride, exact_table_stride, num_units, q_stride, q_head_stride, exact_stride, key_stride,
    value_stride, scale_stride,
    TOKENS: gl.constexpr, SHARED: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, LEVEL: gl.constexpr, IS_EVEN: gl.constexpr, IS_CAUSAL: gl.constexpr,
    ROW_BLOCK: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend with one tile; grid (tiles, key/value heads, parts), as in `kv_attention`."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32,
                                  is_pure=False, pack=1)  # fmt: skip
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False,
                                  pack=1)  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[_WARPS, 1], instr_shape=[16, _N, 16]
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, mma)
    SHARED_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    group = gl.program_id(1)
    if IS_EVEN:
        row = tile // tiles_per_row
        tile = tile % tiles_per_row
    else:
        row = row_of_tile(offsets, num_rows, tile, TOKENS, ROW_BLOCK, _WARPS)
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
    lane = gl.arange(0, _M, ROWS)
    token = gl.minimum(first + lane // SHARED, last)
    hi = start + (token + 1 if IS_CAUSAL else token * 0 + count)
    tile_hi = start + (last + 1 if IS_CAUSAL else count)
    compressed_end_at = gl.maximum(start + token - cold_window, 0) // _N * _N
    cold_chunk = gl.maximum(start + last - cold_window, 0) // _N  # the first that is compressed for no query
    exact_chunk = gl.maximum(gl.maximum(start + first - cold_window, 0) // _N, 1)  # the first exact for some
    last_chunk = (tile_hi + _N - 1) // _N

    LOAD: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [_WARPS, 1], [1, 0])
    q_lane = gl.arange(0, _M, gl.SliceLayout(1, LOAD))
    q_token = first + q_lane // SHARED
    is_live = (q_lane < TOKENS * SHARED) & (q_token < count)
    q_dim = gl.expand_dims(column_dims(gl.arange(0, DIM, gl.SliceLayout(0, LOAD)), DIM), 0)
    q_at = (stream + q_token) * q_stride + (group * SHARED + q_lane % SHARED) * q_head_stride
    in_tile = gl.expand_dims(is_live, 1) & (q_dim >= 0)
    query = gl.load(q + gl.expand_dims(q_at, 1) + q_dim, mask=in_tile, other=0.0)
    query = gl.allocate_shared_memory(gl.bfloat16, [_M, DIM], SHARED_LAYOUT, query)
    k_place = gl.allocate_shared_memory(gl.bfloat16, [_N, DIM], SHARED_LAYOUT)
    v_place = gl.allocate_shared_memory(gl.bfloat16, [DIM, _N], SHARED_LAYOUT)
    KEPT: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
    run_place = q  # never used
    if LEVEL > 0:
        run_place = gl.allocate_shared_memory(gl.float32, [_M, DIM], KEPT)
    whole_place = run_place
    if LEVEL == 2:
        whole_place = gl.allocate_shared_memory(gl.float32, [_M, DIM], KEPT)

    lengths = segment_chunks(hi)  # the queries of a tile have one or two lengths
    shortest = segment_chunks(start + first + 1 if IS_CAUSAL else tile_hi)
    longest = segment_chunks(tile_hi)
    out_column = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, mma)), 0)
    result = (stream + first + lane // SHARED) * HEADS + group * SHARED + lane % SHARED
    is_kept = (lane < TOKENS * SHARED) & (first + lane // SHARED < count)
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
            acc = _nothing(DIM, mma)
            run = run_place, acc[1], acc[2]
            if LEVEL > 0:
                run = _emptied(run, DIM, mma)
            whole = run
            if LEVEL == 2:
                whole = _emptied((whole_place, acc[1], acc[2]), DIM, mma)
            # Chunk 0, then compressed chunks, then exact ones; the code contains each kind once.
            for phase in range(2):
                whole, run, acc = _attend_exact(
                    whole, run, acc, query, k_place, v_place, exact_keys, exact_values, exact_table,
                    gl.where(phase == 0, begin, gl.maximum(begin, exact_chunk)),
                    gl.where(phase == 0, gl.minimum(end, 1), end),
                    gl.where(phase == 0, 1, cold_chunk), tile_hi, hi, compressed_end_at, length, scale,
                    DIM, PAGE_SIZE, LEVEL, mma,
                )  # fmt: skip
                first_cold = gl.maximum(begin, 1)
                last_cold = gl.where(phase == 0, gl.minimum(end, cold_chunk), 0)
                if first_cold < last_cold:
                    whole, run, acc = _attend_compressed(
                        whole, run, acc, query, k_place, v_place, keys, key_scale, values, value_scale, table,
                        first_cold, last_cold, compressed_end_at, length, scale,
                        DIM, PAGE_SIZE, LEVEL, mma,
                    )  # fmt: skip
            if LEVEL > 0:
                acc = _folded((run[0].load(mma), run[1], run[2]), acc, scale)
            if LEVEL == 2:
                acc = _folded((whole[0].load(mma), whole[1], whole[2]), acc, scale)
            is_mine = is_kept & (lengths == length)
            at = result * num_units + unit
            gl.store(part_top + at, acc[1], mask=is_mine)
            gl.store(part_total + at, acc[2], mask=is_mine)
            place = part + gl.expand_dims(at, 1) * DIM + out_column
            gl.store(place, acc[0], mask=gl.expand_dims(is_mine, 1) & (out_column >= 0))
