"""Paged attention on a CPU: every query over its own range of keys, read in place.

The operations for one output do not depend on the query's place in the batch. Keys are counted from the first
of the sequence; a query sees [lo, hi), cut at multiples of CHUNK. Per chunk, in order:

  score(key) = scale * dot(q, k): lane j sums d = j, j + lanes, … by fused multiply-add, then pairs are added
  max        = the largest score so far; sum and out are multiplied by exp(old - new), 1 where it stayed
  weight     = exp(score - max), 0 outside [lo, hi)
  sum        : lane = key mod SUM_LANES
  out[d]     : one fused multiply-add per key, in order

and at the end out * (1 / sum), with the lanes of `sum` halved. With a sink, max and sum begin with its score,
and exp(0) = 1 in the first lane. So page size, other rows, other queries of the row, threads and tiles do not
matter. A key outside [lo, hi) of all queries of a unit is never read; a key that only a neighbour sees
changes neither max, sum nor out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdraft.kernels.llvm.attention_tile import (
    CHUNK,
    GROUP,
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
from blockdraft.kernels.llvm.attention_units import MAX_TILE
from blockdraft.kernels.llvm.compiler import inlined, kernel, taken, unrolled
from blockdraft.kernels.llvm.jit import Jit, real_type
from blockdraft.kernels.llvm.language import (
    Int,
    Longs,
    Real,
    Reals,
    Type,
    halved,
    largest,
    load,
    select,
    smallest,
    store,
    zeros,
)

if TYPE_CHECKING:
    from blockdraft.kernels.attention import Mask

_SERIAL_OPS = 1 << 16  # multiply-adds; below, waking a thread costs more than it saves


class PagedAttention:
    """The kernel for one dtype and head size, a multiple of 4."""

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        assert head_dim % 4 == 0
        self._dim = head_dim
        self._jit = Jit(paged_attention, real=real_type(dtype), dim=head_dim)

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        page_table: Tensor,
        rows: Tensor,
        starts: Tensor,
        offsets: Tensor,
        units: Tensor,
        page_size: int,
        mask: Mask,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with q [N, H, D] over keys and values [G, S, D]; returns [N, H, D].

        `page_table` [.., P], `rows` [R], `starts` [R] and `offsets` [R + 1] are those of attention.Blocks;
        nothing else depends on the rows' lengths. `units` [U, 3] is from `divide`. `sinks` [H] are scores
        without a value, one per head.
        """
        num_groups, num_slots, dim = keys.shape
        num_heads = q.shape[1]
        assert dim == self._dim
        assert keys.is_contiguous()
        assert values.is_contiguous()
        assert page_table.is_contiguous()
        assert page_table.dtype == rows.dtype == starts.dtype == offsets.dtype == torch.int64
        if q.stride()[1:] != (dim, 1):
            q = q.contiguous()
        if sinks is not None:
            assert sinks.shape == (num_heads,)
            sinks = sinks.to(q.dtype).contiguous()
        out = q.new_empty(q.shape)
        self._jit(
            units.shape[0] * num_groups, num_groups, num_heads // num_groups, q.stride(0), num_slots,
            mask.scale, mask.is_causal, -1 if mask.window is None else mask.window, mask.is_anchored,
            sinks is not None,
            page_size, page_table.shape[1], page_table, rows, starts, offsets, units,
            q, out, keys, values, sinks,
            is_small=len(rows) * page_table.shape[1] * page_size * num_heads * dim < _SERIAL_OPS,
        )  # fmt: skip
        return out


@kernel
def paged_attention(
    num_items: Int, num_groups: Int, shared: Int, q_stride: Int, num_slots: Int, scale: Real,
    is_causal: Int, window: Int, is_anchored: Int, has_sinks: Int,
    page_size: Int, num_pages: Int, page_table: Longs, rows: Longs, starts: Longs, offsets: Longs,
    units: Longs, q: Reals, out: Reals, keys: Reals, values: Reals, sinks: Reals, *, real: Type, dim: int,
) -> None:  # fmt: skip
    """Process items: a unit's query vectors over one key head, all tiles chunk by chunk, then divide."""
    state = room(q, real)
    for item in taken(num_items):
        unit, group = units + item // num_groups * 3, item % num_groups
        row, count = unit[0], unit[2] - unit[1]
        low, high = prepare(
            state, unit, group, num_groups, shared, q_stride, starts, offsets, is_causal, window, is_anchored,
            has_sinks, sinks, out, dim,
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
    offsets: Longs, is_causal: Int, window: Int, is_anchored: Int, has_sinks: Int, sinks: Reals, out: Reals,
    dim: int,
) -> tuple[Int, Int]:  # fmt: skip
    """Initialise a unit's vectors; returns the keys [low, high) that at least one of them sees."""
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
        if has_sinks != 0:
            sink = sinks[head]
            state.top[i] = sink
            state.total[i * SUM_LANES] = select(sink != sink, sink, 1.0)
    return low, high


@inlined
def divided(state: State, count: Int, out: Reals, dim: int) -> None:
    """Divide the outputs by the sums of the weights."""
    lanes = lanes_of(out.element)
    for i in range(count):
        result = out + state.out[i]
        share = 1.0 / halved(load(state.total + i * SUM_LANES, SUM_LANES))
        for d in range(0, dim, lanes):
            store(result + d, load(result + d, lanes) * share)


@inlined
def attend(
    state: State, first: Int, size: Int, chunk: Int, key_at: Longs, following: Longs,
    q: Reals, out: Reals, keys: Reals, values: Reals, scale: Real, leads: Int, dim: int,
) -> None:  # fmt: skip
    """Process one chunk for the tile of `size` vectors from `first` on.

    Groups of keys that all vectors see are weighted together, the keys before and behind per vector.
    """
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
    """Return the keys [begin, end) of the chunk that a tile weights together; both are CHUNK if none."""
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
    """Return the keys [lo, hi) that a query of the block [start, end) sees, see attention.Mask."""
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
    store(state.total + i * SUM_LANES, zeros(out, real.wide(SUM_LANES)))
    for d in range(0, dim, lanes_of(real)):
        store(out + d, zeros(out, real.wide(lanes_of(real))))


@inlined
def find(pages: Longs, page_size: Int, key_at: Longs, chunk: Int, low: Int, high: Int, dim: int) -> None:
    """Store at key_at[key - chunk] the offset of each key of the chunk in a head's keys, for [low, high).

    Entries before and behind get the first and the last of these keys: no other key may be read.
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
