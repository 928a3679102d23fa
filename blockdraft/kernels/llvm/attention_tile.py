"""The steps of paged attention for one tile of queries: scores of a chunk of keys, softmax, weighted values.

attention.py has the contract and runs these steps chunk by chunk. Keys are numbered from the chunk's first;
`key_at` has each key's offset in the keys and values of one head.
"""

from __future__ import annotations

import functools
import heapq
import math
from functools import reduce
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.kernels.llvm.compiler import inlined, unrolled
from blockdraft.kernels.llvm.jit import repeat
from blockdraft.kernels.llvm.language import (
    Int,
    Longs,
    Pointer,
    Real,
    Reals,
    Registers,
    Type,
    Value,
    exp,
    f32,
    fma,
    i64,
    largest,
    load,
    prefetch,
    smallest,
    store,
)

MAX_VECTORS = 16  # query vectors (tokens x heads of one key head) of a unit
MAX_TILE = 4  # query vectors that share one pass over a chunk of keys
CHUNK = 64  # keys; fits the L1; a multiple of SUM_LANES; results' bits depend on both
SUM_LANES = 16
GROUP = 4  # keys that are scored, or weighted, together
_COLUMNS = {1: 8, 2: 8, 3: 4, 4: 4}  # vectors of `out` summed together, by tile: as many as fit registers
_MANY = 16  # items per thread; with more, the wait for the last item hardly matters
_TILE_COST = (0.0, 1.6, 2.3, 3.2, 4.0)  # by the number of query vectors over the same keys, measured
_ITEM_COST = 0.75  # cost of reading the keys for an item's first tile
_LINE = 64  # bytes of a cache line
_L1, _L2 = 3, 2  # prefetch's levels


class State(NamedTuple):
    """A thread's stack: the state of each query vector that it works on."""

    q: Pointer  # offset in the queries
    out: Pointer  # offset in the outputs
    lo: Pointer  # the vector sees the keys [lo, hi)
    hi: Pointer
    top: Pointer  # largest score so far
    total: Pointer  # sums so far, SUM_LANES per vector
    scores: Pointer  # scores, then weights, of a tile: CHUNK per vector
    key_at: Pointer  # offsets of this chunk's and the next one's keys, and a few unused entries


def room(like: Value, real: Type) -> State:
    q, out, lo, hi = (like.scratch(i64, MAX_VECTORS) for _ in range(4))
    top, total = like.scratch(real, MAX_VECTORS), like.scratch(real, MAX_VECTORS * SUM_LANES)
    scores, key_at = like.scratch(real, MAX_TILE * CHUNK), like.scratch(i64, 2 * CHUNK + GROUP)
    return State(q, out, lo, hi, top, total, scores, key_at)


def lanes_of(real: Type) -> int:
    """Return the lanes of a 16-byte register, which every CPU has: results' bits depend on this number."""
    return 128 // real.bits


def least(real: Type) -> float:
    return torch.finfo(torch.float32 if real == f32 else torch.float64).min


def seen(state: State, vector: Int, chunk: Int) -> tuple[Int, Int]:
    """Return the keys [begin, end) of the chunk that a query vector sees."""
    return largest(state.lo[vector] - chunk, 0), smallest(state.hi[vector] - chunk, CHUNK)


@inlined
def score(
    state: State, first: Int, chunk: Int, key_at: Longs, following: Longs, q: Reals, keys: Reals,
    values: Reals, scale: Real, leads: Int, *, tile: int, dim: int,
) -> None:  # fmt: skip
    """Compute scores[t][key] = scale * dot(q[t], k[key]) for the keys that any vector of the tile sees.

    The range is extended to whole groups; extra scores are ignored. The tile with `leads` also prefetches
    these keys' values, which `weigh` reads in pieces, and the next chunk's keys: the hardware's prefetcher
    does not detect such short reads.
    """
    lanes = lanes_of(keys.element)
    ranges = [seen(state, first + t, chunk) for t in unrolled(tile)]
    begin, end = reduce(smallest, [one[0] for one in ranges]), reduce(largest, [one[1] for one in ranges])
    begin = smallest(begin & -GROUP, CHUNK)
    queries = [q + state.q[first + t] for t in unrolled(tile)]
    ahead = Registers((GROUP,), keys.zeros(i64))
    read(ahead, key_at + begin)
    for key in range(begin, end, GROUP):
        at = [keys + ahead[j] for j in unrolled(GROUP)]
        read(ahead, key_at + key + GROUP)
        if leads:
            for one in range(key, key + GROUP):
                fetch(values + key_at[one], dim, _L1)
                fetch(keys + following[one], dim, _L2)
        dots = Registers((tile, GROUP), keys.zeros(keys.element.wide(lanes)))
        for d in range(0, dim, lanes):
            k = [load(at[j] + d, lanes) for j in unrolled(GROUP)]
            for t in unrolled(tile):
                x = load(queries[t] + d, lanes)
                for j in unrolled(GROUP):
                    dots[t, j] = fma(k[j], x, dots[t, j])
        for t in unrolled(tile):
            sums = add_pairs([dots[t, j] for j in unrolled(GROUP)])
            for index in unrolled(len(sums)):
                store(state.scores + t * CHUNK + key + index * lanes, sums[index] * scale)


def read(ahead: Registers, key_at: Pointer) -> None:
    """Read the offsets of a group before they are needed, so that the processor does not wait for them."""
    for j in range(GROUP):
        ahead[j] = key_at[j]


def fetch(at: Reals, dim: int, level: int) -> None:
    for d in range(0, dim, _LINE * 8 // at.element.bits):
        prefetch(at + d, level=level)


def add_pairs(sums: list[Value]) -> list[Value]:
    """Sum each vector's lanes by adding neighbours; return the sums as lanes of vectors."""
    lanes = sums[0].type.lanes
    for _ in range(lanes.bit_length() - 1):
        pairs = list(zip(sums[::2], sums[1::2], strict=True))
        sums = [a.lanes(range(0, 2 * lanes, 2), b) + a.lanes(range(1, 2 * lanes, 2), b) for a, b in pairs]
    return sums


@inlined
def softmax(state: State, vector: Int, scores: Reals, out: Reals, begin: Int, end: Int, dim: int) -> None:
    """Turn a vector's scores of the keys [begin, end) into weights; update its max, sum and output."""
    real = scores.element
    lanes = lanes_of(real)
    if begin < end:
        first, last = begin & -SUM_LANES, (end + SUM_LANES - 1) & -SUM_LANES
        for i in range(first, begin):  # scores outside [begin, end) get the weight exp(-inf) = 0
            scores[i] = -math.inf
        for i in range(end, last):
            scores[i] = -math.inf
        old = state.top[vector]
        best = old.constant(least(real), real.wide(SUM_LANES))
        for i in range(first, end, SUM_LANES):
            best = largest(best, load(scores + i, SUM_LANES))
        new = largest(old, best.halved(largest))
        factor = exp(old - new)  # 1 if the max is unchanged
        state.top[vector] = new
        if new > old:
            for d in range(0, dim, lanes):
                store(out + d, load(out + d, lanes) * factor)
        total = state.total + vector * SUM_LANES
        added = load(total, SUM_LANES) * factor
        for i in range(first, end, SUM_LANES):
            weight = exp(load(scores + i, SUM_LANES) - new)
            store(scores + i, weight)
            added = added + weight
        store(total, added)


@inlined
def weigh_alone(
    out: Reals, weights: Reals, key_at: Longs, values: Reals, begin: Int, end: Int, dim: int
) -> None:
    """Add weights[key] * v[key][d] to out[d] for keys [begin, end) in order, for one vector."""
    lanes = lanes_of(values.element)
    if begin < end:
        for first, last, size in columns(dim // lanes, 1):
            for d in range(first * lanes, last * lanes, size * lanes):
                sums = Registers((size,), values.zeros(values.element.wide(lanes)))
                for c in unrolled(size):
                    sums[c] = load(out + d + c * lanes, lanes)
                at = key_at[begin]
                for key in range(begin, end):
                    v = [load(values + d + at + c * lanes, lanes) for c in unrolled(size)]
                    at = key_at[key + 1]
                    weight = weights[key].spread(lanes)
                    for c in unrolled(size):
                        sums[c] = fma(v[c], weight, sums[c])
                for c in unrolled(size):
                    store(out + d + c * lanes, sums[c])


@inlined
def weigh(
    state: State, first: Int, key_at: Longs, out: Reals, values: Reals, begin: Int, end: Int,
    *, tile: int, dim: int,
) -> None:  # fmt: skip
    """Do as `weigh_alone`, for a tile whose vectors all see the keys [begin, end), in whole groups."""
    lanes = lanes_of(values.element)
    outs = [out + state.out[first + t] for t in unrolled(tile)]
    weights = [state.scores + t * CHUNK for t in unrolled(tile)]
    ahead = Registers((GROUP,), values.zeros(i64))
    for start, stop, size in columns(dim // lanes, tile):
        for d in range(start * lanes, stop * lanes, size * lanes):
            sums = Registers((tile, size), values.zeros(values.element.wide(lanes)))
            for t, c in product(range(tile), range(size)):
                sums[t, c] = load(outs[t] + d + c * lanes, lanes)
            read(ahead, key_at + begin)
            for key in range(begin, end, GROUP):
                at = [values + d + ahead[j] for j in unrolled(GROUP)]
                read(ahead, key_at + key + GROUP)
                add_weighed(sums, [one + key for one in weights], at, size)
            for t, c in product(range(tile), range(size)):
                store(outs[t] + d + c * lanes, sums[t, c])


def add_weighed(sums: Registers, weights: list[Pointer], values: list[Pointer], size: int) -> None:
    """Add weights[t][key] * (vector c of values[key]) to sums[t, c], for each key in order."""
    lanes = lanes_of(values[0].element)
    new = {cell: sums[cell] for cell in product(range(len(weights)), range(size))}
    for key, value in enumerate(values):
        lane = key % lanes
        if lane == 0:
            some = [load(weight + key, lanes) for weight in weights]
        v = [load(value + c * lanes, lanes) for c in range(size)]
        for t in range(len(weights)):
            weight = some[t].lanes([lane] * lanes)  # free: part of the multiply-add
            for c in range(size):
                new[t, c] = fma(v[c], weight, new[t, c])
    for cell, total in new.items():
        sums[cell] = total


def columns(vectors: int, tile: int) -> list[tuple[int, int, int]]:
    """Return pieces (first, last, size) of an output's vectors: `size` vectors at a time fit registers."""
    found, first, size = [], 0, _COLUMNS[tile]
    while first < vectors:
        last = vectors - (vectors - first) % size
        if last > first:
            found.append((first, last, size))
        first, size = last, size // 2
    return found


def divide(counts: tuple[int, ...], shared: int, num_groups: int, num_threads: int) -> Tensor:
    """Return units [U, 3] of rows with `counts[r]` tokens: row, first and end of its query vectors.

    A token has `shared` vectors for each of `num_groups` key heads; an item of work is a unit and a key head.
    The size of units is chosen so that the last thread ends as early as possible if all rows have equally
    many keys.
    """
    units = _units(counts, shared, num_groups, num_threads)
    return torch.tensor(units, dtype=torch.int64).view(-1, 3)


def divide_again(offsets: Tensor, num_tokens: int, shared: int, num_groups: int, num_threads: int) -> Tensor:
    """Return units [U, 3] as `divide` does, for rows with tokens [offsets[r], offsets[r + 1]).

    Each replay of a captured step reads `offsets` again, so there are as many units as any rows with
    `num_tokens` in all may need; the last ones may have no vectors.
    """
    num_rows = len(offsets) - 1
    most = _size_for(num_tokens * shared, num_rows, num_groups, num_threads)
    units = torch.zeros(num_tokens * shared // most + num_rows, 3, dtype=torch.int64)

    def run() -> None:
        totals = [(end - begin) * shared for begin, end in pairwise(offsets.tolist())]
        found = _cut(totals, most)
        units[: len(found)] = torch.tensor(found, dtype=torch.int64).view(-1, 3)
        units[len(found) :] = 0

    repeat(run)
    return units


@functools.lru_cache(maxsize=256)
def _size_for(num_vectors: int, num_rows: int, num_groups: int, num_threads: int) -> int:
    """Return the most vectors of a unit with which rows of equally many vectors end earliest."""
    even = [num_vectors // num_rows + (row < num_vectors % num_rows) for row in range(num_rows)]
    if num_threads == 1 or len(_cut(even, MAX_VECTORS)) * num_groups >= _MANY * num_threads:
        return MAX_VECTORS
    return min(range(MAX_VECTORS, 0, -1), key=lambda most: _time(_cut(even, most), num_groups, num_threads))


@functools.lru_cache(maxsize=256)
def _units(
    counts: tuple[int, ...], shared: int, num_groups: int, num_threads: int
) -> list[tuple[int, int, int]]:
    totals = [count * shared for count in counts]
    units = _cut(totals, MAX_VECTORS)
    if num_threads > 1 and len(units) * num_groups < _MANY * num_threads:
        cuts = (_cut(totals, most) for most in range(MAX_VECTORS, 0, -1))
        units = min(cuts, key=lambda cut: _time(cut, num_groups, num_threads))
    return units


def _cut(totals: list[int], most: int) -> list[tuple[int, int, int]]:
    """Divide rows with `totals[r]` vectors into units of at most `most`, as equal as possible."""
    units = []
    for row, total in enumerate(totals):
        size = -(-total // max(1, -(-total // most)))
        units += [(row, i, min(i + size, total)) for i in range(0, total, size or 1)]
    return units


def _time(units: list[tuple[int, int, int]], num_groups: int, num_threads: int) -> float:
    """Estimate when the last thread ends, if each free thread takes the next item."""
    free = [0.0] * num_threads
    for _, first, last in units:
        tiles, rest = divmod(last - first, MAX_TILE)
        cost = _ITEM_COST + tiles * _TILE_COST[MAX_TILE] + _TILE_COST[rest]
        for _ in range(num_groups):
            heapq.heapreplace(free, free[0] + cost)
    return max(free)
