"""The steps of paged attention over one tile of queries: scores of a chunk of keys, softmax, weighed values.

attention.py, which has the contract, does them chunk by chunk. Keys are counted from the chunk's first, and
`places` has where each of them begins in the keys and values of one head.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch

from blockdraft.kernels.llvm.compiler import inlined, unrolled
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
    halved,
    i64,
    largest,
    load,
    prefetch,
    scratch,
    smallest,
    store,
    zeros,
)

CHUNK = 256  # keys; a multiple of SUM_LANES, and part of a result's bits
SUM_LANES = 16  # likewise
MAX_VECTORS = 16  # query vectors (tokens x heads of one key head) that a thread takes at a time
MAX_TILE = 4  # query vectors that share one pass over a chunk of keys
_KEYS = {1: 8, 2: 8, 3: 4, 4: 4}  # keys scored together, by tile: what registers hold
_COLUMNS = {1: 16, 2: 8, 3: 4, 4: 4}  # vectors of `out` summed together, by tile
_L2 = 2


class State(NamedTuple):
    """What a thread keeps on its stack of the query vectors it works on, by their number."""

    q: Pointer  # where the vector begins in the queries
    out: Pointer  # and in the outputs
    lo: Pointer  # it sees the keys [lo, hi)
    hi: Pointer
    top: Pointer  # its largest score so far
    total: Pointer  # its sum so far, SUM_LANES of them
    scores: Pointer  # a tile's, CHUNK of them for each; then weights
    places: Pointer  # a chunk's


def room(like: Value, real: Type) -> State:
    numbers = [scratch(like, i64, MAX_VECTORS) for _ in range(4)]
    reals = [scratch(like, real, count) for count in (MAX_VECTORS, MAX_VECTORS * SUM_LANES, MAX_TILE * CHUNK)]
    return State(*numbers, *reals, places=scratch(like, i64, CHUNK))


def lanes_of(real: Type) -> int:
    """Vectors have 16 bytes, which every CPU has: their size is part of a result's bits."""
    return 128 // real.bits


def seen(state: State, vector: Int, chunk: Int) -> tuple[Int, Int]:
    """The keys of the chunk that a query vector sees: from the first on, up to the second."""
    begin = largest(state.lo[vector], chunk) - chunk
    return begin, smallest(state.hi[vector] - chunk, CHUNK)


@inlined
def attend_tile(
    state: State, first: Int, chunk: Int, q: Reals, out: Reals, keys: Reals, values: Reals, scale: Real,
    *, tile: int, dim: int, real: Type,
) -> None:  # fmt: skip
    """One chunk for the `tile` vectors from `first` on.

    Values that all of them see are weighed together, the others for one vector at a time.
    """
    begins = [seen(state, first + t, chunk)[0] for t in unrolled(tile)]
    ends = [seen(state, first + t, chunk)[1] for t in unrolled(tile)]
    low, high = reduce(smallest, begins), reduce(largest, ends)  # some vector sees these keys
    inner, outer = reduce(largest, begins), reduce(smallest, ends)  # all of them see these
    queries = [q + state.q[first + t] for t in unrolled(tile)]
    score(queries, keys, values, state.places, state.scores, scale, low, high, dim=dim, real=real)
    is_shared = inner < outer
    for t in range(tile):
        begin, end = seen(state, first + t, chunk)
        weights, one = state.scores + t * CHUNK, out + state.out[first + t]
        total = state.total + (first + t) * SUM_LANES
        softmax(weights, one, state.top + first + t, total, begin, end, dim=dim, real=real)
        if tile > 1:
            weigh([one], values, state.places, weights, begin, inner if is_shared else end, dim=dim, real=real)
    outs = [out + state.out[first + t] for t in unrolled(tile)]
    weigh(outs, values, state.places, state.scores, inner, outer, dim=dim, real=real)
    if tile > 1 and is_shared:
        for t in range(tile):
            begin, end = seen(state, first + t, chunk)
            one = out + state.out[first + t]
            weigh([one], values, state.places, state.scores + t * CHUNK, outer, end, dim=dim, real=real)


@inlined
def score(
    queries: list[Reals], keys: Reals, values: Reals, places: Longs, scores: Reals, scale: Real,
    begin: Int, end: Int, *, dim: int, real: Type,
) -> None:  # fmt: skip
    """scores[t][key] = scale * dot(q[t], k[key]) for keys [begin, end), rounded out to whole groups."""
    tile, lanes = len(queries), lanes_of(real)
    group, steps = _KEYS[tile], _steps(dim // lanes)
    for first in range(begin & -group, end, group):
        # Outside [begin, end) a neighbour's key stands in: nobody looks at its score.
        at = [places[smallest(largest(first + j, begin), end - 1)] for j in unrolled(group)]
        if len(columns(dim // lanes, tile)) > 1 or columns(dim // lanes, tile)[0].size < dim // lanes:
            for j in unrolled(group):
                fetch(values + at[j], dim, real)
        dots = Registers((tile, group), zeros(scale, real.wide(lanes)))
        for d in range(0, dim, lanes * steps):
            for step in unrolled(0, lanes * steps, lanes):
                k = [load(keys + at[j] + d + step, lanes) for j in unrolled(group)]
                for t in unrolled(tile):
                    x = load(queries[t] + d + step, lanes)
                    for j in unrolled(group):
                        dots[t, j] = fma(k[j], x, dots[t, j])
        for t in unrolled(tile):
            sums = add_pairs([dots[t, j] for j in unrolled(group)])
            for index in unrolled(len(sums)):
                store(scores + t * CHUNK + first + index * lanes, sums[index] * scale)


def _steps(vectors: int) -> int:
    return next(steps for steps in (4, 2, 1) if vectors % steps == 0)


def fetch(at: Reals, dim: int, real: Type) -> None:
    """Ask for a key's value, which `weigh` reads in pieces: too short for the hardware's own prefetcher.

    156 -> 112 us for one token over 512 keys, 9 heads, 3 key heads, float32 (one Neoverse-N1, 2026-11).
    """
    for d in range(0, dim, 512 // real.bits):
        prefetch(at + d, level=_L2)


def add_pairs(sums: list[Value]) -> list[Value]:
    """Neighbouring lanes are added until each vector is one lane of a result."""
    lanes = sums[0].type.lanes
    for _ in range(lanes.bit_length() - 1):
        pairs = list(zip(sums[::2], sums[1::2], strict=True))
        sums = [a.lanes(range(0, 2 * lanes, 2), b) + a.lanes(range(1, 2 * lanes, 2), b) for a, b in pairs]
    return sums


@inlined
def softmax(
    scores: Reals, out: Reals, top: Reals, total: Reals, begin: Int, end: Int, *, dim: int, real: Type
) -> None:
    """Scores [begin, end) of one query become weights; its max, sum and out so far follow."""
    if begin < end:
        first, last = begin & -SUM_LANES, (end + SUM_LANES - 1) & -SUM_LANES
        for i in range(first, begin):  # what lies around them weighs exp(-inf) = 0
            scores[i] = -math.inf
        for i in range(end, last):
            scores[i] = -math.inf
        old = top[0]
        best = old.constant(least(real), real.wide(SUM_LANES))
        for i in range(first, end, SUM_LANES):
            best = largest(best, load(scores + i, SUM_LANES))
        new = largest(old, halved(best, largest))
        if new > old:
            top[0] = new
            factor = exp(old - new)
            store(total, load(total, SUM_LANES) * factor)
            for d in range(0, dim, lanes_of(real)):
                store(out + d, load(out + d, lanes_of(real)) * factor)
        added = load(total, SUM_LANES)
        for i in range(first, end, SUM_LANES):
            weight = exp(load(scores + i, SUM_LANES) - new)
            store(scores + i, weight)
            added = added + weight
        store(total, added)


def least(real: Type) -> float:
    return torch.finfo(torch.float32 if real == f32 else torch.float64).min


@inlined
def weigh(
    outs: list[Reals], values: Reals, places: Longs, weights: Reals, begin: Int, end: Int, *, dim: int, real: Type
) -> None:
    """out[t][d] += weights[t][key] * v[key][d] for keys [begin, end) in order."""
    tile, lanes = len(outs), lanes_of(real)
    if begin < end:
        for piece in columns(dim // lanes, tile):
            for column in range(piece.first, piece.last, piece.size):
                d = column * lanes
                sums = Registers((tile, piece.size), zeros(weights, real.wide(lanes)))
                for t in unrolled(tile):
                    for c in unrolled(piece.size):
                        sums[t, c] = load(outs[t] + d + c * lanes, lanes)
                for key in range(begin, end):
                    at = values + d + places[key]
                    v = [load(at + c * lanes, lanes) for c in unrolled(piece.size)]
                    for t in unrolled(tile):
                        weight = weights[key + t * CHUNK].spread(lanes)
                        for c in unrolled(piece.size):
                            sums[t, c] = fma(v[c], weight, sums[t, c])
                for t in unrolled(tile):
                    for c in unrolled(piece.size):
                        store(outs[t] + d + c * lanes, sums[t, c])


class Columns(NamedTuple):
    """Vectors [first, last) of an output, done `size` at a time."""

    first: int
    last: int
    size: int


def columns(vectors: int, tile: int) -> list[Columns]:
    """An output's vectors in pieces that fit the registers."""
    found, first, size = [], 0, _COLUMNS[tile]
    while first < vectors:
        last = vectors - (vectors - first) % size
        if last > first:
            found.append(Columns(first, last, size))
        first, size = last, size // 2
    return found
