"""Paged attention of ragged rows on the device: the contract of `kernels.attention`.

A tile is up to `tokens` queries of one row times the query heads that share one key/value head, so that keys
and values are read once for all of them. The keys are cut into chunks of BLOCK_N counted from position 0;
split s of S takes the chunks s, s + S, s + 2S, ... in order with an online softmax, and a second kernel
merges the splits in order. A chunk or split that shows a query nothing changes no bit of it. The bits of an
output therefore follow from its query, the keys and values it sees, their positions, its head's sink and the
`Config`; neither its column in the block nor its neighbours take part.

Nothing outside a tile's own range of keys is read. Inside it a weight of zero is multiplied in: a NaN among
the values of a block's later token reaches the earlier ones of its tile.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.attention import Mask
from blockdraft.kernels.failure import DoesNotFit
from blockdraft.kernels.triton.launch import let_next_start, num_multiprocessors, overlap, wait_for_previous

LOG2_E = 1 / math.log(2)
MAX_SPLIT_COUNT = 64  # tokens of a row; from here on the tiles of a prefill fill the device without splits
MAX_SPLITS = 16  # more only make the merge dearer (H200, benchmarks/log.md)
MAX_STAGES = 3
ROW_BLOCK = 256  # rows looked at together when a tile searches its own


@dataclass(frozen=True, slots=True)
class Config:
    """How the work is cut: part of the result's bits, and a function of host-known shapes only."""

    tokens: int  # queries of one row in a tile
    block_m: int  # those times the query heads of a key/value head, padded to a power of two
    block_n: int  # keys of a chunk
    splits: int
    warps: int
    stages: int


@triton.jit
def _attend_chunks(
    acc, top, total, q, keys, values, table, first_chunk, last_chunk, tile_lo, tile_hi, lo, hi, score_scale,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, HAS_LO: tl.constexpr, IS_MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the chunks [first_chunk, last_chunk) in steps of SPLITS, in powers of 2.

    Not IS_MASKED: every query of the tile sees all keys of these chunks.
    """
    dim = tl.arange(0, DIM_PAD)
    key = first_chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    # Page ids are loaded a turn ahead: the keys and values wait for them, and are loaded ahead themselves.
    page = tl.load(table + key // PAGE_SIZE, mask=(key >= tile_lo) & (key < tile_hi), other=0).to(tl.int32)
    for chunk in tl.range(first_chunk, last_chunk, SPLITS):
        key = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
        where = (page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE)[:, None] * DIM + dim[None, :]
        next_key = key + SPLITS * BLOCK_N
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
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale
        if IS_MASKED:
            visible = key[None, :] < hi[:, None]
            if HAS_LO:
                visible = visible & (key[None, :] >= lo[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen nothing yet keeps its sums at zero.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["num_rows", "tiles_per_row", "window", "table_stride"])
def _attend_kernel(
    q, keys, values, out, part, part_top, part_total, page_table, rows, starts, offsets, sinks, score_scale,
    window, num_rows, tiles_per_row, table_stride, q_stride, q_head_stride, group_stride,
    TOKENS: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    IS_EVEN: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_ANCHORED: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_BODY: tl.constexpr, PRECISION: tl.constexpr, ROW_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, key/value heads, splits). The last tiles of a row have most to read and go first."""
    let_next_start(PDL)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    split = tl.program_id(2)
    wait_for_previous(PDL)

    if IS_EVEN:
        row = tile // tiles_per_row
        tile = tile % tiles_per_row
    else:
        # Row r owns the tiles from offsets[r] // TOKENS + r on: as many as it needs, or one more.
        row = -1
        for begin in range(0, num_rows, ROW_BLOCK):
            r = begin + tl.arange(0, ROW_BLOCK)
            first_tile = tl.load(offsets + r, mask=r < num_rows, other=0) // TOKENS + r
            row += tl.sum(((first_tile <= tile) & (r < num_rows)).to(tl.int32), 0)
        tile -= (tl.load(offsets + row) // TOKENS + row).to(tl.int32)
    stream = tl.load(offsets + row)
    count = (tl.load(offsets + row + 1) - stream).to(tl.int32)
    first = tile * TOKENS
    if first >= count:
        return
    start = tl.load(starts + row).to(tl.int32)
    table = page_table + tl.load(rows + row) * table_stride
    keys += group.to(tl.int64) * group_stride
    values += group.to(tl.int64) * group_stride

    # Keys [lo, hi) of each query, and [tile_lo, tile_hi) of them together.
    lane = tl.arange(0, BLOCK_M)
    token = first + lane // SHARED
    head = group * SHARED + lane % SHARED
    is_live = (lane < TOKENS * SHARED) & (token < count)
    last = tl.minimum(first + TOKENS, count) - 1
    end = start + count
    lo = tl.zeros([BLOCK_M], tl.int32)
    tile_lo = 0
    if IS_CAUSAL:
        hi = start + token + 1
        tile_hi = start + last + 1
    else:
        hi = tl.zeros([BLOCK_M], tl.int32) + end
        tile_hi = end
    if HAS_WINDOW:
        if IS_ANCHORED:
            lo += start - window
            tile_lo = tl.maximum(start - window, 0)
        else:
            lo += start + token - window + 1
            tile_lo = tl.maximum(start + first - window + 1, 0)
            hi = tl.minimum(hi, start + token + window)
            tile_hi = tl.minimum(tile_hi, start + last + window)

    lo_chunk = tile_lo // BLOCK_N
    last_chunk = (tile_hi + BLOCK_N - 1) // BLOCK_N
    first_chunk = lo_chunk + (split + SPLITS - lo_chunk % SPLITS) % SPLITS
    result = (stream + token) * HEADS + head  # [BLOCK_M] int64, a row of the output
    if SPLITS > 1 and first_chunk >= last_chunk:
        tl.store(part_top + result * SPLITS + split, float("-inf"), mask=is_live)
        return

    dim = tl.arange(0, DIM_PAD)
    in_tile = is_live[:, None] & (dim < DIM)[None, :]
    where = (stream + token)[:, None] * q_stride + head[:, None] * q_head_stride + dim[None, :]
    queries = tl.load(q + where, mask=in_tile, other=0.0)

    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS and SPLITS == 1:  # a score of its own with no value; the merge adds it otherwise
        top = tl.load(sinks + head, mask=is_live, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    if HAS_BODY:  # without a window: the chunks that every query of the tile sees whole
        body = (start + first + 1 if IS_CAUSAL else end) // BLOCK_N
        acc, top, total = _attend_chunks(
            acc, top, total, queries, keys, values, table, first_chunk, body,
            tile_lo, tile_hi, lo, hi, score_scale,
            PAGE_SIZE, DIM, DIM_PAD, BLOCK_N, SPLITS, False, False, PRECISION,
        )  # fmt: skip
        first_chunk = tl.maximum(first_chunk, body)
    acc, top, total = _attend_chunks(
        acc, top, total, queries, keys, values, table, first_chunk, last_chunk,
        tile_lo, tile_hi, lo, hi, score_scale,
        PAGE_SIZE, DIM, DIM_PAD, BLOCK_N, SPLITS, HAS_WINDOW, True, PRECISION,
    )  # fmt: skip

    if SPLITS == 1:
        acc = acc / tl.where(is_live, total, 1.0)[:, None]
        tl.store(out + result[:, None] * DIM + dim[None, :], acc.to(out.dtype.element_ty), mask=in_tile)
    else:
        result = result * SPLITS + split
        tl.store(part_top + result, top, mask=is_live)
        tl.store(part_total + result, total, mask=is_live)
        tl.store(part + result[:, None] * DIM + dim[None, :], acc, mask=in_tile)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    part, part_top, part_total, out, offsets, sinks, num_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, query heads). A split that saw no key left its top, -inf, and nothing else to read."""
    let_next_start(PDL)
    head = tl.program_id(1)
    token = tl.program_id(0)
    wait_for_previous(PDL)
    if token >= tl.load(offsets + num_rows):
        return
    result = token.to(tl.int64) * HEADS + head
    split = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, DIM_PAD)
    tops = tl.load(part_top + result * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    has_seen = tops > float("-inf")
    totals = tl.load(part_total + result * SPLITS + split, mask=has_seen, other=0.0)
    top = tl.max(tops, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    weights = tl.exp2(tops - top)
    total = tl.sum(weights * totals, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    where = (result * SPLITS + split)[:, None] * DIM + dim[None, :]
    parts = tl.load(part + where, mask=has_seen[:, None] & (dim < DIM)[None, :], other=0.0)
    merged = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + result * DIM + dim, merged.to(out.dtype.element_ty), mask=dim < DIM)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    page_table: Tensor,
    rows: Tensor,
    starts: Tensor,
    offsets: Tensor,
    max_count: int,
    max_length: int,
    page_size: int,
    mask: Mask,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [N, H, D] over keys and values [G, S, D] (slot = page * page_size + place). [N, H, D].

    Batch row r owns the tokens [offsets[r], offsets[r + 1]) of the stream, at the positions from starts[r]
    on; its pages are page_table[rows[r]]. Their own keys and values are in their slots. Index tensors are
    int64 and on the device. No row has more than `max_count` tokens; `max_length`, the longest context that
    may come, serves the choice of splits only. Outputs past offsets[R] are undefined; sinks [H].
    """
    reach = max_length if mask.window is None else min(max_length, mask.window + max_count)
    config = _config(
        num_rows=rows.shape[0],
        num_groups=keys.shape[0],
        shared=q.shape[1] // keys.shape[0],
        head_dim=q.shape[2],
        element_size=q.element_size(),
        max_count=max_count,
        max_length=reach,
        multiprocessors=num_multiprocessors(q.device),
        shared_memory=_shared_memory(q.device),
    )
    return _attend(
        q,
        keys,
        values,
        config=config,
        page_table=page_table,
        rows=rows,
        starts=starts,
        offsets=offsets,
        max_count=max_count,
        page_size=page_size,
        mask=mask,
        sinks=sinks,
    )


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    config: Config,
    page_table: Tensor,
    rows: Tensor,
    starts: Tensor,
    offsets: Tensor,
    max_count: int,
    page_size: int,
    mask: Mask,
    sinks: Tensor | None,
) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_groups, num_rows = keys.shape[0], rows.shape[0]
    _check(q, keys, values, page_table, sinks)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    splits, tokens = config.splits, config.tokens
    part = part_top = part_total = out  # never touched without splits
    if splits > 1:
        shape = (num_tokens, num_heads, splits)
        part = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        part_top = torch.empty(shape, dtype=torch.float32, device=q.device)
        part_total = torch.empty(shape, dtype=torch.float32, device=q.device)
    tiles_per_row = -(-max_count // tokens)
    is_even = num_rows * tiles_per_row <= num_tokens // tokens + num_rows
    num_tiles = num_rows * tiles_per_row if is_even else num_tokens // tokens + num_rows
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    _attend_kernel[(num_tiles, num_groups, splits)](
        q,
        keys,
        values,
        out,
        part,
        part_top,
        part_total,
        page_table,
        rows,
        starts,
        offsets,
        out if sinks is None else sinks,
        mask.scale * LOG2_E,  # exp2 takes the place of exp
        0 if mask.window is None else mask.window,
        num_rows,
        tiles_per_row,
        page_table.stride(0),
        q.stride(0),
        q.stride(1),
        keys.stride(0),
        TOKENS=tokens,
        SHARED=num_heads // num_groups,
        HEADS=num_heads,
        DIM=head_dim,
        DIM_PAD=dim_pad,
        PAGE_SIZE=page_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SPLITS=splits,
        IS_EVEN=is_even,
        IS_CAUSAL=mask.is_causal,
        HAS_WINDOW=mask.window is not None,
        IS_ANCHORED=mask.is_anchored,
        HAS_SINKS=sinks is not None,
        HAS_BODY=splits == 1 and mask.window is None and max_count > tokens,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        ROW_BLOCK=ROW_BLOCK,
        num_warps=config.warps,
        num_stages=config.stages,
        **overlap(q.device),
    )
    if splits > 1:
        splits_pad = triton.next_power_of_2(splits)
        _merge_kernel[(num_tokens, num_heads)](
            part,
            part_top,
            part_total,
            out,
            offsets,
            out if sinks is None else sinks,
            num_rows,
            HEADS=num_heads,
            DIM=head_dim,
            DIM_PAD=dim_pad,
            SPLITS=splits,
            SPLITS_PAD=splits_pad,
            HAS_SINKS=sinks is not None,
            num_warps=max(1, min(16, splits_pad * dim_pad // 2048)),
            **overlap(q.device),
        )
    return out


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


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes a multiprocessor has for its blocks; that of an H200 where there is none."""
    if device.type != "cuda":
        return 228 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def _config(
    *,
    num_rows: int,
    num_groups: int,
    shared: int,
    head_dim: int,
    element_size: int,
    max_count: int,
    max_length: int,
    multiprocessors: int,
    shared_memory: int,
) -> Config:
    """The whole block in one tile where it fits; then as many splits as keep every multiprocessor busy."""
    if shared > 128:
        raise DoesNotFit(f"{shared} query heads share a key/value head: paged attention takes at most 128")
    row_bytes = max(16, triton.next_power_of_2(head_dim)) * element_size
    widest = max(_widest(row_bytes, element_size, shared_memory), triton.next_power_of_2(shared))
    block_m = min(max(16, triton.next_power_of_2(max_count * shared)), widest)
    # Two programs per multiprocessor overlap one's sums with the other's loads, where both fit.
    programs_each = 2 if block_m <= 64 and row_bytes <= 256 else 1
    budget = shared_memory // programs_each - 2048  # 1 KB is the device's own; reductions take some
    block_n = 128 if row_bytes <= 128 else 64 if row_bytes <= 256 else 32
    while (stages := _stages(budget, block_m, block_n, row_bytes)) < 2:
        if block_n > 16:
            block_n //= 2
        elif block_m // 2 >= max(16, shared):
            block_m //= 2
        else:
            raise DoesNotFit(
                f"paged attention of {shared} query heads per key/value head of size {head_dim}: "
                f"the {shared_memory // 1024} KB of shared memory of this device are too few"
            )
    tokens = block_m // shared
    splits = 1
    if max_count <= MAX_SPLIT_COUNT:
        programs = num_rows * -(-max_count // tokens) * num_groups
        wanted = programs_each * multiprocessors // max(programs, 1)
        splits = max(1, min(wanted, -(-max_length // block_n), MAX_SPLITS))
    # The accumulators of 64 queries of size 256 spill from four warps; so do the sums of float32.
    warps = 8 if block_m > 64 or block_m * row_bytes >= 32768 or element_size == 4 else 4
    # float32 has no tensor cores: its sums, not its loads, are what takes time.
    stages = min(stages, 2 if element_size == 4 else MAX_STAGES)
    return Config(tokens, block_m, block_n, splits, warps, stages)


def _widest(row_bytes: int, element_size: int, shared_memory: int) -> int:
    """Queries times heads of a tile whose sums stay in registers."""
    if element_size == 4:
        return 16
    has_wgmma = shared_memory > 200 * 1024  # then the queries are read from shared memory, not from registers
    if row_bytes <= 256 or (row_bytes <= 512 and has_wgmma):
        return 128
    return 64 if row_bytes <= 512 or has_wgmma else 32


def _stages(budget: int, block_m: int, block_n: int, row_bytes: int) -> int:
    return (budget - block_m * row_bytes) // (2 * block_n * row_bytes)
