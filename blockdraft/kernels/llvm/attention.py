"""Paged attention on a CPU: each query attends to its own range of keys, which are read in place.

The operations for one output do not depend on the query's place in the batch. Keys are numbered from the
sequence's first; a query sees [lo, hi), cut into chunks at multiples of CHUNK. Per chunk, in order:

  score(key) = scale * dot(q, k): lane j sums d = j, j + lanes, … by fused multiply-add, then pairs are added
  max        = the largest score so far; sum and out are multiplied by exp(old max - new max)
  weight     = exp(score - max), 0 outside [lo, hi)
  sum        : lane = key mod SUM_LANES
  out[d]     : one fused multiply-add per key, in order

At the end, out is multiplied by 1 / sum; the lanes of `sum` are added in halves. With a sink, max begins with
its score, and sum with exp(0) = 1 in the first lane. So an output's bits do not depend on page size, other
rows, other queries of the row, threads or tiles. A key is read only if a query of the unit sees it; for
queries that do not see it, it changes neither max, sum nor out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdraft.kernels.llvm.attention_tile import (
    CHUNK,
    GROUP,
    MAX_TILE,
    SUM_LANES,
    State,
    lanes_of,
    least,
    room,
    score,
    seen,
    softmax,
    weigh,
    weigh_alone,
)
from blockdraft.kernels.llvm.compiler import inlined, kernel, taken, unrolled
from blockdraft.kernels.llvm.jit import REALS, Jit
from blockdraft.kernels.llvm.language import (
    Int,
    Longs,
    Real,
    Reals,
    Type,
    largest,
    load,
    select,
    smallest,
    store,
)

if TYPE_CHECKING:
    from blockdraft.kernels.attention import Blocks, Mask

_SERIAL_OPS = 1 << 16  # multiply-adds


class PagedAttention:
    """The kernel for one dtype and head size, a multiple of 4."""

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        assert head_dim % 4 == 0
        self._dim = head_dim
        self._jit = Jit(paged_attention, real=REALS[dtype], dim=head_dim)

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with q [N, H, D] over keys and values [G, S, D]; `sinks` [H] are scores without values."""
        num_groups, num_slots, dim = keys.shape
        assert dim == self._dim
        assert keys.is_contiguous()
        assert values.is_contiguous()
        q, sinks = whole_vectors(q, sinks)
        out, num_heads, where = q.new_empty(q.shape), q.shape[1], places(blocks, blocks.table)
        units = blocks.units(num_heads, num_groups)
        self._jit(
            units.shape[0] * num_groups, num_groups, num_heads // num_groups, q.stride(0), num_slots,
            *mask_fields(mask), blocks.page_size, blocks.table.shape[1], *where, units, q, out, keys, values,
            sinks, is_small=is_small(blocks, num_heads * dim),
        )  # fmt: skip
        return out


def whole_vectors(q: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return queries with contiguous vectors, and contiguous sinks in the queries' dtype."""
    if q.stride()[1:] != (q.shape[2], 1):
        q = q.contiguous()
    if sinks is not None:
        assert sinks.shape == q.shape[1:2]
        sinks = sinks.to(q.dtype).contiguous()
    return q, sinks


def places(blocks: Blocks, *tables: Tensor) -> tuple[Tensor, ...]:
    """Return the page tables, row numbers, first positions and token offsets that the kernel reads."""
    found = (*tables, blocks.rows, blocks.starts, blocks.offsets)
    assert all(one.dtype == torch.int64 and one.is_contiguous() for one in found)
    return found


def mask_fields(mask: Mask) -> tuple[float, int, int, int]:
    return mask.scale, mask.is_causal, -1 if mask.window is None else mask.window, mask.is_anchored


def is_small(blocks: Blocks, size: int) -> bool:
    """Return True if waking a thread costs more than it saves; `size` is the size of a token's queries."""
    return len(blocks.rows) * blocks.table.shape[1] * blocks.page_size * size < _SERIAL_OPS


@kernel
def paged_attention(
    num_items: Int, num_groups: Int, shared: Int, q_stride: Int, num_slots: Int, scale: Real, is_causal: Int,
    window: Int, is_anchored: Int, page_size: Int, num_pages: Int, page_table: Longs, rows: Longs,
    starts: Longs, offsets: Longs, units: Longs, q: Reals, out: Reals, keys: Reals, values: Reals,
    sinks: Reals, *, real: Type, dim: int,
) -> None:  # fmt: skip
    """Attend. An item is a unit's query vectors over one key head: all tiles chunk by chunk, then divide."""
    state = room(q, real)
    for item in taken(num_items):
        unit, group = units + item // num_groups * 3, item % num_groups
        row, count = unit[0], unit[2] - unit[1]
        low, high = prepare(
            state, unit, group, num_groups, shared, q_stride, starts, offsets, is_causal, window, is_anchored,
            sinks, out, dim,
        )  # fmt: skip
        pages = page_table + rows[row] * num_pages
        head_at = group * num_slots * dim
        if low < high:
            find(pages, page_size, state.key_at + (low & CHUNK), low & -CHUNK, low, high, dim)
        for chunk in range(low & -CHUNK, high, CHUNK):
            key_at = state.key_at + (chunk & CHUNK)
            following = key_at
            if chunk + CHUNK < high:
                following = state.key_at + (CHUNK - (chunk & CHUNK))
                find(pages, page_size, following, chunk + CHUNK, low, high, dim)
            for i in range(0, count, MAX_TILE):
                attend(
                    state, i, smallest(count - i, MAX_TILE), chunk, key_at, following,
                    q, out, keys + head_at, values + head_at, scale, i == 0, dim,
                )  # fmt: skip
        divided(state, count, out, dim)


@inlined
def prepare(
    state: State, unit: Longs, group: Int, num_groups: Int, shared: Int, q_stride: Int, starts: Longs,
    offsets: Longs, is_causal: Int, window: Int, is_anchored: Int, sinks: Reals, out: Reals, dim: int,
) -> tuple[Int, Int]:  # fmt: skip
    """Initialise a unit's vectors; return the range [low, high) of keys that any vector sees."""
    row, first = unit[0], unit[1]
    start, token = starts[row], offsets[row]
    end = start + offsets[row + 1] - token
    low, high = end, start
    for i in range(unit[2] - first):
        at = (first + i) // shared
        head = group * shared + (first + i) % shared
        lo, hi = visible(start, start + at, end, is_causal, window, is_anchored)
        state.lo[i], state.hi[i] = lo, hi
        low, high = smallest(low, lo), largest(high, hi)
        state.q[i] = (token + at) * q_stride + head * dim
        state.out[i] = ((token + at) * num_groups * shared + head) * dim
        clear(state, i, out + state.out[i], dim)
        if sinks.is_given:
            sink = sinks[head]
            state.top[i] = sink
            state.total[i * SUM_LANES] = select(sink != sink, sink, 1.0)
    return low, high


@inlined
def divided(state: State, count: Int, out: Reals, dim: int) -> None:
    """Divide `count` outputs by the sums of their weights."""
    lanes = lanes_of(out.element)
    for i in range(count):
        result = out + state.out[i]
        share = 1.0 / load(state.total + i * SUM_LANES, SUM_LANES).halved()
        for d in range(0, dim, lanes):
            store(result + d, load(result + d, lanes) * share)


@inlined
def attend(
    state: State, first: Int, size: Int, chunk: Int, key_at: Longs, following: Longs,
    q: Reals, out: Reals, keys: Reals, values: Reals, scale: Real, leads: Int, dim: int,
) -> None:  # fmt: skip
    """Process a chunk for a tile: keys that all vectors see in groups, other keys vector by vector."""
    for tile in unrolled(1, MAX_TILE + 1):
        if size == tile:
            score(state, first, chunk, key_at, following, q, keys, values, scale, leads, tile=tile, dim=dim)
    begin, end = together(state, first, size, chunk)
    for t in range(size):
        lo, hi = seen(state, first + t, chunk)
        weights, one = state.scores + t * CHUNK, out + state.out[first + t]
        softmax(state, first + t, weights, one, lo, hi, dim)
        weigh_alone(one, weights, key_at, values, lo, smallest(hi, begin), dim)
    for tile in unrolled(2, MAX_TILE + 1):
        if size == tile and begin < end:
            weigh(state, first, key_at, out, values, begin, end, tile=tile, dim=dim)
    for t in range(size):
        lo, hi = seen(state, first + t, chunk)
        weigh_alone(
            out + state.out[first + t], state.scores + t * CHUNK, key_at, values, largest(lo, end), hi, dim
        )


@inlined
def together(state: State, first: Int, size: Int, chunk: Int) -> tuple[Int, Int]:
    """Return the keys [begin, end) of the chunk that a tile weights together; (CHUNK, CHUNK) without any."""
    begin, end = seen(state, first, chunk)
    for t in range(1, size):
        lo, hi = seen(state, first + t, chunk)
        begin, end = largest(begin, lo), smallest(end, hi)
    end = end - ((end - begin) & (GROUP - 1))
    has_some = size > 1 and begin < end
    return select(has_some, begin, CHUNK), select(has_some, end, CHUNK)


def visible(
    start: Int, position: Int, end: Int, is_causal: Int, window: Int, is_anchored: Int
) -> tuple[Int, Int]:
    """Return the keys [lo, hi) that a query at `position` of block [start, end) sees (attention.Mask)."""
    hi = select(is_causal != 0, position + 1, end)
    near = select(is_anchored != 0, start - window, position - window + 1)
    far = select(is_anchored != 0, hi, smallest(hi, position + window))
    has_window = window >= 0
    return select(has_window, largest(near, 0), 0), select(has_window, far, hi)


@inlined
def clear(state: State, i: Int, out: Reals, dim: int) -> None:
    """Initialise a vector before its first key."""
    real = out.element
    state.top[i] = least(real)
    store(state.total + i * SUM_LANES, out.zeros(real.wide(SUM_LANES)))
    for d in range(0, dim, lanes_of(real)):
        store(out + d, out.zeros(real.wide(lanes_of(real))))


@inlined
def find(pages: Longs, page_size: Int, key_at: Longs, chunk: Int, low: Int, high: Int, dim: int) -> None:
    """Store in key_at[key - chunk] the offset of each key of the chunk in [low, high) in a head's keys.

    Entries before and after get the offset of the first and the last of these keys: no other may be read.
    """
    begin, end = largest(low - chunk, 0), smallest(high - chunk, CHUNK)
    key = begin
    while key < end:
        inside = (chunk + key) % page_size
        at = (pages[(chunk + key) // page_size] * page_size + inside) * dim
        until = smallest(key + page_size - inside, end)
        for one in range(key, until):
            key_at[one] = at
            at = at + dim
        key = until
    first, last = key_at[begin], key_at[end - 1]
    for one in range(begin):
        key_at[one] = first
    for one in range(end, CHUNK):
        key_at[one] = last
