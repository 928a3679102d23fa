"""Paged attention on a CPU: every query over its own range of keys, read where they lie.

The operations behind one output, the same wherever the query stands. Keys are counted from the sequence's
first; a query sees [lo, hi), cut at multiples of CHUNK. Per chunk, in order:

  score(key) = scale * dot(q, k): lane j sums d = j, j + lanes, … by fused multiply-add, then pairs are added
  max        = the largest score so far; where it grew, sum and out are multiplied by exp(old - new)
  weight     = exp(score - max), 0 outside [lo, hi)
  sum        : lane = key mod SUM_LANES
  out[d]     : one fused multiply-add per key, in order

and last out / sum, the lanes of `sum` halved. A sink is where max and sum begin: its score, and exp(0) = 1 in
the first lane. So page size, other rows, other queries of the row, threads and tiles do not enter. A key
outside [lo, hi) of every query of a tile is never read; one that only a neighbour sees reaches neither max,
sum nor out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdraft.kernels.llvm.attention_tile import (
    CHUNK,
    MAX_TILE,
    MAX_VECTORS,
    SUM_LANES,
    State,
    attend_tile,
    lanes_of,
    least,
    room,
)
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

_SERIAL_OPS = 1 << 16  # multiply-adds below which waking a thread costs more than it saves


class PagedAttention:
    """The kernel for one dtype and head size, a multiple of 4."""

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        assert head_dim % 4 == 0
        self._dim = head_dim
        self._jit = Jit(paged_attention, real=real_type(dtype), dim=head_dim)

    def __call__(  # noqa: PLR0913
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
        """q [N, H, D] over keys and values [G, S, D]; returns [N, H, D].

        `page_table` [.., P], `rows` [R], `starts` [R] and `offsets` [R + 1] are those of attention.Blocks: only
        the memory behind them says how long rows are. `units` [U, 3] is from `divide`. `sinks` [H]: one more
        score per head, which has no value.
        """
        num_groups, num_slots, dim = keys.shape
        num_heads = q.shape[1]
        assert dim == self._dim
        assert page_table.stride(1) == 1
        whole = (rows, starts, offsets, units)
        assert all(one.is_contiguous() for one in (keys, values, *whole))
        assert all(one.dtype == torch.int64 for one in (page_table, *whole))
        if q.stride()[1:] != (dim, 1):
            q = q.contiguous()
        if sinks is not None:
            assert sinks.shape == (num_heads,)
            sinks = sinks.to(q.dtype).contiguous()
        out = q.new_empty(q.shape)
        self._jit(
            units.shape[0] * num_groups, num_groups, num_heads // num_groups, q.stride(0), num_slots, mask.scale,
            mask.is_causal, -1 if mask.window is None else mask.window, mask.is_anchored, sinks is not None,
            page_size, page_table.stride(0), page_table, rows, starts, offsets, units,
            q, out, keys, values, sinks,
            is_small=len(rows) * page_table.shape[1] * page_size * num_heads * dim < _SERIAL_OPS,
        )  # fmt: skip
        return out


def divide(counts: tuple[int, ...], shared: int) -> Tensor:
    """The work [U, 3] of rows with `counts[r]` tokens, `shared` query vectors each: row, first and last vector."""
    units = []
    for row, count in enumerate(counts):
        total = count * shared
        pieces = max(1, -(-total // MAX_VECTORS))
        size = max(1, -(-total // pieces))
        size += -size % MAX_TILE if pieces > 1 else 0
        units += [(row, i, min(i + size, total)) for i in range(0, total, size)]
    return torch.tensor(units, dtype=torch.int64).view(-1, 3)


@kernel
def paged_attention(
    num_items: Int, num_groups: Int, shared: Int, q_stride: Int, num_slots: Int, scale: Real,
    is_causal: Int, window: Int, is_anchored: Int, has_sinks: Int,
    page_size: Int, num_pages: Int, page_table: Longs, rows: Longs, starts: Longs, offsets: Longs, units: Longs,
    q: Reals, out: Reals, keys: Reals, values: Reals, sinks: Reals, *, real: Type, dim: int,
) -> None:  # fmt: skip
    """Every item is a unit's query vectors over one key head: begin them, chunk by chunk all tiles, divide."""
    state = room(q, real)
    for item in taken(num_items):
        unit, group = units + item // num_groups * 3, item % num_groups
        row, first = unit[0], unit[1]
        count = unit[2] - first
        start, token = starts[row], offsets[row]
        end = start + offsets[row + 1] - token
        low, high = end, 0  # some vector sees keys [low, high)
        for i in range(count):
            at = (first + i) // shared
            head = group * shared + (first + i) % shared
            lo, hi = visible(start, start + at, end, is_causal, window, is_anchored)
            state.lo[i], state.hi[i] = lo, hi
            low, high = smallest(low, lo), largest(high, hi)
            state.q[i] = (token + at) * q_stride + head * dim
            state.out[i] = ((token + at) * num_groups * shared + head) * dim
            clear(state, i, out + state.out[i], dim=dim, real=real)
            if has_sinks != 0:
                sink = sinks[head]
                state.top[i] = sink
                state.total[i * SUM_LANES] = select(sink != sink, sink, 1.0)
        pages = page_table + rows[row] * num_pages
        head_at = group * num_slots * dim
        for chunk in range(low & -CHUNK, high, CHUNK):
            find(pages, page_size, state.places, chunk, largest(low, chunk), smallest(high, chunk + CHUNK), dim=dim)
            for i in range(0, count, MAX_TILE):
                for tile in unrolled(1, MAX_TILE + 1):
                    if smallest(count - i, MAX_TILE) == tile:
                        attend_tile(
                            state, i, chunk, q, out, keys + head_at, values + head_at, scale,
                            tile=tile, dim=dim, real=real,
                        )  # fmt: skip
        for i in range(count):
            result = out + state.out[i]
            total = halved(load(state.total + i * SUM_LANES, SUM_LANES))
            for d in range(0, dim, lanes_of(real)):
                store(result + d, load(result + d, lanes_of(real)) / total)


def visible(
    start: Int, position: Int, end: Int, is_causal: Int, window: Int, is_anchored: Int
) -> tuple[Int, Int]:
    """The keys [lo, hi) that the query at `position` of the block [start, end) sees, as attention.Mask has it."""
    hi = select(is_causal != 0, position + 1, end)
    near = select(is_anchored != 0, start - window, position - window + 1)
    far = select(is_anchored != 0, hi, smallest(hi, position + window))
    has_window = window >= 0
    return select(has_window, largest(near, 0), 0), select(has_window, far, hi)


@inlined
def clear(state: State, i: Int, out: Reals, *, dim: int, real: Type) -> None:
    """A vector that has seen no key yet."""
    state.top[i] = least(real)
    store(state.total + i * SUM_LANES, zeros(out, real.wide(SUM_LANES)))
    for d in range(0, dim, lanes_of(real)):
        store(out + d, zeros(out, real.wide(lanes_of(real))))


@inlined
def find(
    pages: Longs, page_size: Int, places: Longs, chunk: Int, first: Int, last: Int, *, dim: int
) -> None:
    """places[key - chunk] = where the key begins in a head's keys, for keys [first, last): page by page."""
    key = first
    while key < last:
        inside = key % page_size
        at = (pages[key // page_size] * page_size + inside) * dim
        until = smallest(last, key + page_size - inside)
        for one in range(key, until):
            places[one - chunk] = at
            at = at + dim
        key = until
