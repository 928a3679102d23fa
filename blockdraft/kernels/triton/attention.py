"""Paged attention of ragged rows on a CUDA device; see `kernels.attention` for the contract.

A tile is up to `tokens` queries of one row times the query heads that share a key/value head, so keys and
values are read once for all of them. The keys that a query sees are divided only by position: into chunks of
BLOCK_N, and into at most MAX_SEGMENTS segments of equal length (`segment_length`). A program computes an
online softmax over the chunks of a segment. Segments are folded in order: by the program itself if there are
enough tiles to fill the device, otherwise by a second kernel, after several programs shared the segments.

Both ways do equal operations in equal order, and a chunk or segment that a query does not see changes none of
its bits. A query's bits depend only on the query, the keys and values that it sees, their positions and its
head's sink. For this, weights are summed on the tensor cores, as a product with ones (a sum over a tile's
columns depends on the tile's layout), and multiply-adds are explicit (the compiler would choose which to
fuse).

A tile reads only keys in its own range. Keys that a query does not see get a weight of zero, so a NaN among
the values of a later token reaches the earlier tokens of its tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.attention import Blocks, Mask
from blockdraft.kernels.failure import DoesNotFit
from blockdraft.kernels.triton.launch import (
    let_next_start,
    num_multiprocessors,
    overlap,
    shared_memory,
    wait_for_previous,
)

LOG2_E = 1 / math.log(2)
MAX_SPLIT_COUNT = 64  # tokens of a row; with more, the tiles of a prefill fill the device without splitting
MAX_SEGMENTS = 16  # of a query: enough for one row to fill the device
MAX_STAGES = 3
ROW_BLOCK = 256  # rows read at a time when a tile searches for its row

SUMS = tl.constexpr(8)  # equal columns of the product that sums weights: the fewest a tensor core takes


@dataclass(frozen=True, slots=True)
class Config:
    """The division of the work, chosen only by shapes that the host knows."""

    tokens: int  # the queries of one row in a tile
    block_m: int  # `tokens` times the query heads per key/value head, padded to a power of two
    block_n: int  # keys of a chunk; the result's bits depend on it
    warps: int
    stages: int
    parts: int  # programs that share the segments of a tile
    segment: int = 128  # keys of the shortest segments; the result's bits depend on it


@triton.jit
def segment_length(hi, SEGMENT: tl.constexpr, MAX: tl.constexpr):
    """Return the keys per segment for a query that sees the keys before `hi`, from 1 to 2 ** 24 - 1.

    It is SEGMENT times the least multiple with which MAX segments suffice, rounded up to three significant
    bits (1 to 8, 10, 12, 14, 16, 20, ...). A query that sees more than 4 * MAX * SEGMENT keys has more than
    four fifths of MAX segments. A length holds for at least MAX * SEGMENT consecutive queries, more than a
    tile has, so the queries of a tile have at most two lengths.
    """
    multiple = (hi - 1) // (MAX * SEGMENT) + 1
    # float32 holds it exactly. Two of the 23 bits after the leading one stay; a carry raises the exponent.
    bits = tl.cast(multiple, tl.float32).to(tl.int32, bitcast=True)
    bits = ((bits + 0x1FFFFF) >> 21) << 21
    return bits.to(tl.float32, bitcast=True).to(tl.int32) * SEGMENT


@triton.jit
def visible_keys(
    start, token, count, window,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_ANCHORED: tl.constexpr,
):  # fmt: skip
    """Return the range of keys [lo, hi) that token number `token` of a row's `count` sees."""
    lo = token * 0
    hi = start + token + 1 if IS_CAUSAL else lo + start + count
    if HAS_WINDOW:
        if IS_ANCHORED:
            lo += tl.maximum(start - window, 0)
        else:
            lo = tl.maximum(start + token - window + 1, 0)
            hi = tl.minimum(hi, start + token + window)
    return lo, hi


@triton.jit
def fold(whole, acc, scale):
    """Return the sums, tops and totals of earlier segments (`whole`) and a segment (`acc`) together."""
    whole_sums, whole_top, whole_total = whole
    sums, top, total = acc
    new_top = tl.maximum(whole_top, top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    before = tl.exp2((whole_top - base) * scale)[:, None]
    after = tl.exp2((top - base) * scale)[:, None]
    whole_sums = tl.fma(sums, after, whole_sums * before)
    whole_total = tl.fma(total, after, whole_total * before)
    return whole_sums, new_top, whole_total


@triton.jit
def _where(condition, one, other):
    """Select sums, tops and totals from `one` where condition [M] holds, else from `other`."""
    both = condition[:, None]
    return (
        tl.where(both, one[0], other[0]),
        tl.where(condition, one[1], other[1]),
        tl.where(both, one[2], other[2]),
    )


@triton.jit
def nothing(M: tl.constexpr, DIM_PAD: tl.constexpr, SUMS: tl.constexpr):
    """Return the sums, tops and totals of no keys."""
    sums = tl.zeros([M, DIM_PAD], tl.float32)
    return sums, tl.full([M], float("-inf"), tl.float32), tl.zeros([M, SUMS], tl.float32)


@triton.jit
def divided(whole, sink, scale, HAS_SINKS: tl.constexpr):
    """Return the outputs, sums / totals. A sink [M], in powers of 2, is a score without a value."""
    sums, top, total = whole
    total = tl.max(total, 1)  # all columns are equal
    if HAS_SINKS:
        scaled = top * scale
        base = tl.maximum(scaled, sink)
        shrink = tl.exp2(scaled - base)
        sums = sums * shrink[:, None]
        total = tl.fma(total, shrink, tl.exp2(sink - base))
    return sums / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _attend_chunks(
    whole, acc, q, keys, values, table, first_chunk, last_chunk, tile_lo, tile_hi, lo, hi, length, shortest,
    longest, scale,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    FOLDS: tl.constexpr, HAS_LO: tl.constexpr, IS_MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute an online softmax over the chunks [first_chunk, last_chunk), in powers of 2.

    With FOLDS, where a segment of a query begins, its previous segment is folded into `whole`. Segments have
    `length` [M] keys, which is `shortest` or `longest`. Without IS_MASKED, every query of the tile sees all
    keys of these chunks.
    """
    dim = tl.arange(0, DIM_PAD)
    ones = tl.full([BLOCK_N, SUMS], 1.0, q.dtype)
    key = first_chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    # Page ids are loaded one iteration ahead, as keys and values depend on them and are loaded ahead, too.
    page = tl.load(table + key // PAGE_SIZE, mask=(key >= tile_lo) & (key < tile_hi), other=0).to(tl.int32)
    for chunk in tl.range(first_chunk, last_chunk):
        key = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
        where = (page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE)[:, None] * DIM + dim[None, :]
        next_key = key + BLOCK_N
        is_next = (next_key >= tile_lo) & (next_key < tile_hi)
        page = tl.load(table + next_key // PAGE_SIZE, mask=is_next, other=0).to(tl.int32)
        if IS_MASKED:
            is_read = ((key >= tile_lo) & (key < tile_hi))[:, None] & (dim < DIM)[None, :]
            k = tl.load(keys + where, mask=is_read, other=0.0)
            v = tl.load(values + where, mask=is_read, other=0.0)
        elif DIM < DIM_PAD:
            k = tl.load(keys + where, mask=(dim < DIM)[None, :], other=0.0)
            v = tl.load(values + where, mask=(dim < DIM)[None, :], other=0.0)
        else:
            k = tl.load(keys + where)
            v = tl.load(values + where)
        if FOLDS:
            is_short_new = chunk * BLOCK_N % shortest == 0
            is_long_new = chunk * BLOCK_N % longest == 0
            if is_short_new | is_long_new:
                is_new = tl.where(length == shortest, is_short_new, is_long_new)
                whole = _where(is_new, fold(whole, acc, scale), whole)
                acc = _where(is_new, nothing(q.shape[0], DIM_PAD, SUMS), acc)
        sums, top, total = acc
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if IS_MASKED:
            visible = key[None, :] < hi[:, None]
            if HAS_LO:
                visible = visible & (key[None, :] >= lo[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # Sums of a query that has seen no key stay zero.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tl.fma(scores, scale, -(base * scale)[:, None])).to(v.dtype)
        shrink = tl.exp2((top - base) * scale)[:, None]
        # In the opposite order, the compiler gives every warp all of a low tile.
        total = tl.dot(weights, ones, total * shrink, input_precision=PRECISION)
        sums = tl.dot(weights, v, sums * shrink, input_precision=PRECISION)
        acc = sums, new_top, total
    return whole, acc


@triton.jit
def row_of(offsets, num_rows, number, PER_TILE: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """Return the row of tile `number`; if PER_TILE is 0, the row of token `number` of the stream.

    The tiles of row r begin at offsets[r] // PER_TILE + r; a row may have one unused tile.
    """
    row = -1
    for begin in range(0, num_rows, ROW_BLOCK):
        r = begin + tl.arange(0, ROW_BLOCK)
        first = tl.load(offsets + r, mask=r < num_rows, other=0)
        if PER_TILE > 0:
            first = first // PER_TILE + r
        row += tl.sum(((first <= number) & (r < num_rows)).to(tl.int32), 0)
    return row


@triton.jit(do_not_specialize=["num_rows", "tiles_per_row", "window", "table_stride", "num_segments"])
def _attend_kernel(
    q, keys, values, out, part, part_top, part_total, page_table, rows, starts, offsets, sinks, scale,
    window, num_rows, tiles_per_row, table_stride, num_segments, q_stride, q_head_stride, group_stride,
    TOKENS: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLDS: tl.constexpr,
    IS_EVEN: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_ANCHORED: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_BODY: tl.constexpr, PRECISION: tl.constexpr, ROW_BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr, MAX_SEGMENTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with one tile; grid (tiles, key/value heads, parts).

    The last tiles of a row have most to read, so they start first. With FOLDS there is one part, which writes
    the outputs. Otherwise the parts store each segment for `_merge_kernel`.
    """
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
    table = page_table + tl.load(rows + row) * table_stride
    first = tile * TOKENS
    if first >= count:  # after the loads, so that they run concurrently
        return
    keys += group.to(tl.int64) * group_stride
    values += group.to(tl.int64) * group_stride

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

    dim = tl.arange(0, DIM_PAD)
    in_tile = is_live[:, None] & (dim < DIM)[None, :]
    where = (stream + token)[:, None] * q_stride + head[:, None] * q_head_stride + dim[None, :]
    queries = tl.load(q + where, mask=in_tile, other=0.0)

    result = (stream + token) * HEADS + head  # [BLOCK_M] int64, a row of the output
    first_chunk = tile_lo // BLOCK_N
    last_chunk = (tile_hi + BLOCK_N - 1) // BLOCK_N
    body = (start + first + 1 if IS_CAUSAL else start + count) // BLOCK_N
    if FOLDS:
        whole = nothing(BLOCK_M, DIM_PAD, SUMS)
        acc = nothing(BLOCK_M, DIM_PAD, SUMS)
        if HAS_BODY:  # no window: first the chunks of which all queries of the tile see all keys
            whole, acc = _attend_chunks(
                whole, acc, queries, keys, values, table, first_chunk, body,
                tile_lo, tile_hi, lo, hi, length, shortest, longest, scale,
                PAGE_SIZE, DIM, DIM_PAD, BLOCK_N, FOLDS, False, False, PRECISION,
            )  # fmt: skip
            first_chunk = body
        whole, acc = _attend_chunks(
            whole, acc, queries, keys, values, table, first_chunk, last_chunk,
            tile_lo, tile_hi, lo, hi, length, shortest, longest, scale,
            PAGE_SIZE, DIM, DIM_PAD, BLOCK_N, FOLDS, HAS_WINDOW, True, PRECISION,
        )  # fmt: skip
        sink = lane * 0.0
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_live, other=0.0).to(tl.float32) * 1.4426950408889634
        outputs = divided(fold(whole, acc, scale), sink, scale, HAS_SINKS)
        tl.store(out + result[:, None] * DIM + dim[None, :], outputs.to(out.dtype.element_ty), mask=in_tile)
    else:
        num_passes = tl.where(shortest == longest, 1, 2)  # a pass for each length
        for number in range(num_passes):
            pass_length = tl.where(number == 0, shortest, longest)
            is_mine = is_live & (length == pass_length)
            pass_hi = tl.minimum(tile_hi, pass_length * MAX_SEGMENTS)  # queries of the other pass see more
            each = tl.cdiv(tl.cdiv(pass_hi, pass_length), tl.num_programs(2))
            last = tl.minimum(tl.cdiv(pass_hi, pass_length), (tl.program_id(2) + 1) * each)
            for segment in range(tl.maximum(tile_lo // pass_length, tl.program_id(2) * each), last):
                begin = tl.maximum(first_chunk, segment * pass_length // BLOCK_N)
                end = tl.minimum(last_chunk, (segment + 1) * pass_length // BLOCK_N)
                acc = nothing(BLOCK_M, DIM_PAD, SUMS)
                acc = _attend_chunks(
                    acc, acc, queries, keys, values, table, begin, end,
                    tile_lo, tile_hi, lo, hi, length, shortest, longest, scale,
                    PAGE_SIZE, DIM, DIM_PAD, BLOCK_N, FOLDS, HAS_WINDOW, True, PRECISION,
                )[1]  # fmt: skip
                sums, top, total = acc
                at = result * num_segments + segment
                tl.store(part_top + at, top, mask=is_mine)
                tl.store(part_total + at, tl.max(total, 1), mask=is_mine)
                is_kept = is_mine[:, None] & (dim < DIM)[None, :]
                tl.store(part + at[:, None] * DIM + dim[None, :], sums, mask=is_kept)


@triton.jit(do_not_specialize=["num_rows", "tokens_per_row", "window"])
def _merge_kernel(
    part, part_top, part_total, out, starts, offsets, sinks, scale, window, num_rows, tokens_per_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_ANCHORED: tl.constexpr, HAS_SINKS: tl.constexpr,
    ROW_BLOCK: tl.constexpr, SEGMENT: tl.constexpr, MAX_SEGMENTS: tl.constexpr, NUM_SEGMENTS: tl.constexpr,
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
    whole = nothing(1, DIM_PAD, 1)
    for segment in tl.static_range(NUM_SEGMENTS):
        is_there = (segment * length < hi) & ((segment + 1) * length > lo)
        at = result * NUM_SEGMENTS + segment + lane
        top = tl.load(part_top + at, mask=is_there, other=float("-inf"))
        total = tl.load(part_total + at, mask=is_there, other=0.0)[:, None]
        sums = tl.load(part + at[:, None] * DIM + dim, mask=is_there & (dim < DIM), other=0.0)
        whole = fold(whole, (sums, top, total), scale)
    sink = lane * 0.0
    if HAS_SINKS:
        sink += tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
    outputs = divided(whole, sink, scale, HAS_SINKS)
    tl.store(out + result * DIM + dim, outputs.to(out.dtype.element_ty), mask=dim < DIM)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Blocks,
    mask: Mask,
    sinks: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Return attention [N, H, D] of q over keys and values [G, S, D]; slot = page * page_size + offset.

    Index tensors are int64 and on the device. No row has more than max(blocks.counts) tokens, nor more
    positions than its pages have. Outputs past the last of blocks.offsets are undefined; sinks [H].
    """
    _check(q, keys, values, blocks.table, sinks)
    num_tokens, num_heads, head_dim = q.shape
    num_groups, num_rows, max_count = keys.shape[0], blocks.rows.shape[0], max(blocks.counts)
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
            window=mask.window,
            multiprocessors=num_multiprocessors(q.device),
            shared_memory=shared_memory(q.device),
        )
    is_split = config.parts > 1
    segments = min(MAX_SEGMENTS, -(-blocks.table.shape[1] * blocks.page_size // config.segment))
    parts = empty_parts((num_tokens, num_heads, segments), head_dim, q.device) if is_split else (out,) * 3
    num_tiles, tiles_per_row, is_even = divide_rows(blocks, num_tokens, config.tokens)
    read_sinks, scale = out if sinks is None else sinks, mask.scale * LOG2_E  # exp2 is used instead of exp
    window = 0 if mask.window is None else mask.window
    constants = {
        "DIM_PAD": max(16, triton.next_power_of_2(head_dim)),
        "SEGMENT": config.segment,
        "MAX_SEGMENTS": MAX_SEGMENTS,
        **shared_constants(q, mask, sinks),
    }
    _attend_kernel[(num_tiles, num_groups, min(config.parts, segments))](
        q, keys, values, out, *parts, blocks.table, blocks.rows, blocks.starts, blocks.offsets, read_sinks,
        scale, window, num_rows, tiles_per_row, blocks.table.stride(0), segments, *q.stride()[:2],
        keys.stride(0),
        TOKENS=config.tokens, SHARED=num_heads // num_groups, PAGE_SIZE=blocks.page_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, FOLDS=not is_split, IS_EVEN=is_even,
        HAS_BODY=mask.window is None and not is_split,  # two loops are faster if they are long
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.warps, num_stages=config.stages, **constants,
    )  # fmt: skip
    if is_split:
        _merge_kernel[(num_tokens, num_heads)](
            *parts, out, blocks.starts, blocks.offsets, read_sinks, scale, window, num_rows, max_count,
            IS_EVEN=num_tokens == num_rows * max_count, NUM_SEGMENTS=segments, num_warps=1, **constants,
        )  # fmt: skip
    return out


def divide_rows(blocks: Blocks, num_tokens: int, tokens: int) -> tuple[int, int, bool]:
    """Return the number of tiles of `tokens` queries, the most per row, and whether all rows get as many."""
    num_rows, per_row = blocks.rows.shape[0], -(-max(blocks.counts) // tokens)
    most = num_tokens // tokens + num_rows
    is_even = num_rows * per_row <= most
    return num_rows * per_row if is_even else most, per_row, is_even


def empty_parts(shape: tuple[int, ...], head_dim: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return uninitialised sums, tops and totals for tokens, heads and parts [N, H, P]."""
    return tuple(
        torch.empty(size, dtype=torch.float32, device=device) for size in ((*shape, head_dim), shape, shape)
    )


def shared_constants(q: Tensor, mask: Mask, sinks: Tensor | None) -> dict[str, int | bool]:
    """Return the constants that an attention kernel shares with its merge."""
    return {
        "HEADS": q.shape[1],
        "DIM": q.shape[2],
        "IS_CAUSAL": mask.is_causal,
        "HAS_WINDOW": mask.window is not None,
        "IS_ANCHORED": mask.is_anchored,
        "HAS_SINKS": sinks is not None,
        "ROW_BLOCK": ROW_BLOCK,
        **overlap(q.device),
    }


def _check(q: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, sinks: Tensor | None) -> None:
    if (
        q.dtype not in (torch.bfloat16, torch.float16, torch.float32)
        or not q.dtype == keys.dtype == values.dtype
    ):
        raise ValueError(
            f"paged attention in {q.dtype} over keys in {keys.dtype} and values in {values.dtype}: "
            "it wants one of bfloat16, float16 and float32 for all three"
        )
    assert keys.shape == values.shape
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert q.stride(2) == 1
    assert page_table.stride(1) == 1
    assert q.shape[1] % keys.shape[0] == 0
    assert sinks is None or (sinks.shape == q.shape[1:2] and sinks.is_contiguous())


def choose(
    *,
    num_rows: int,
    num_groups: int,
    shared: int,
    head_dim: int,
    element_size: int,
    max_count: int,
    window: int | None,
    multiprocessors: int,
    shared_memory: int,
) -> Config:
    """Choose one tile for the whole block if it fits, and several programs per tile if tiles are few.

    A window of few chunks has one program per tile, which needs no second kernel.
    """
    if shared > 128:
        raise DoesNotFit(f"{shared} query heads share a key/value head: paged attention takes at most 128")

    def num_tiles(block_m: int) -> int:
        return num_rows * -(-max_count // (block_m // shared)) * num_groups

    row_bytes = max(16, triton.next_power_of_2(head_dim)) * element_size
    widest, block_n = _largest(row_bytes, element_size, shared, shared_memory)
    if max_count > MAX_SPLIT_COUNT and row_bytes <= 256:
        widest = max(64, triton.next_power_of_2(shared))  # sums of 128 queries would need too many registers
    block_m = min(max(16, triton.next_power_of_2(max_count * shared)), widest)
    is_wide = _is_wide(row_bytes, element_size, shared_memory)
    if is_wide:  # the tiles of a row find its keys in the L2 cache
        while block_m // 2 >= max(16, shared) and 10 * num_tiles(block_m) < 9 * multiprocessors:
            block_m //= 2
    # If two programs fit a multiprocessor, the sums of one overlap with the loads of the other.
    half = _stages(shared_memory // 2, block_m, block_n, row_bytes)
    programs_each = 2 if block_m <= 64 and row_bytes <= 256 and half >= 2 else 1
    stages = half if programs_each == 2 else _stages(shared_memory, block_m, block_n, row_bytes)
    if stages < 2:
        raise DoesNotFit(
            f"paged attention of {shared} query heads per key/value head of size {head_dim}: "
            f"the {shared_memory // 1024} KB of shared memory of this device are too few"
        )
    parts = 1
    if max_count <= MAX_SPLIT_COUNT and (window is None or window > 2 * block_n):
        programs = programs_each * multiprocessors
        if is_wide:  # either no merge, or many short programs
            programs = 2 * multiprocessors if 2 * num_tiles(block_m) <= multiprocessors else 0
        while parts < MAX_SEGMENTS and 2 * parts * num_tiles(block_m) <= programs:
            parts *= 2
    # The accumulators of 64 queries of size 256 spill from four warps; so do the sums of float32.
    warps = 8 if block_m > 64 or block_m * row_bytes >= 32768 or element_size == 4 else 4
    # float32 has no tensor cores: sums, not loads, take the time.
    stages = min(stages, 2 if element_size == 4 or (is_wide and parts > 1) else MAX_STAGES)
    return Config(block_m // shared, block_m, block_n, warps, stages, parts)


def _is_wide(row_bytes: int, element_size: int, shared_memory: int) -> bool:
    """Return whether heads are of size 256, whose sums take half the registers of a multiprocessor.

    For them, tiles and parts are chosen differently. Measured on an H200 (benchmarks/log.md).
    """
    return element_size == 2 and row_bytes == 512 and _has_wgmma(shared_memory)


def _has_wgmma(shared_memory: int) -> bool:
    """Return whether products can read both operands from shared memory, not from registers."""
    return shared_memory > 200 * 1024


def _largest(row_bytes: int, element_size: int, shared: int, shared_memory: int) -> tuple[int, int]:
    """Return the widest tile (queries times heads) whose sums fit registers, and the keys per chunk.

    All tiles use the chunk of the widest tile, as the result's bits depend on its size.
    """
    has_wgmma = _has_wgmma(shared_memory)
    if element_size == 4:
        widest = 16
    elif row_bytes <= 256 or (row_bytes <= 512 and has_wgmma):
        widest = 128
    else:
        widest = 64 if row_bytes <= 512 or has_wgmma else 32
    narrowest = max(16, triton.next_power_of_2(shared))
    widest = max(widest, narrowest)
    block_n = 128 if row_bytes <= 128 else 64 if row_bytes <= 256 else 32
    if _is_wide(row_bytes, element_size, shared_memory):
        block_n = 64
    while _stages(shared_memory, widest, block_n, row_bytes) < 2:
        if block_n > 16:
            block_n //= 2
        elif widest > narrowest:
            widest //= 2
        else:
            break
    return widest, block_n


def _stages(shared_memory: int, block_m: int, block_n: int, row_bytes: int) -> int:
    """Return how many chunks fit next to a tile's queries; 2 KB are reserved, partly for reductions."""
    return (shared_memory - 2048 - block_m * row_bytes) // (2 * block_n * row_bytes)
