"""The steps of paged attention over one tile of queries: scores of a chunk of keys, softmax, weighed values.

attention.py, which has the contract, does them chunk by chunk. Keys are counted from the chunk's first, and
`places` has where each of them begins in the keys and values of one head.
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import product
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

CHUNK = 64  # keys; a multiple of SUM_LANES, and part of a result's bits
SUM_LANES = 16  # likewise
MAX_VECTORS = 16  # query vectors (tokens x heads of one key head) that a thread takes at a time
MAX_TILE = 4  # query vectors that share one pass over a chunk of keys
_KEYS = {1: 8, 2: 8, 3: 4, 4: 4}  # keys scored together, by tile: what registers hold
_COLUMNS = {1: 16, 2: 8, 3: 4, 4: 4}  # vectors of `out` summed together, by tile
_WEIGHED = 4  # keys weighed together
_LINE = 64  # bytes of a cache line
_L1, _L2 = 3, 2  # prefetch's levels


class State(NamedTuple):
    """What a thread keeps on its stack of the query vectors it works on, by their number."""

    q: Pointer  # where the vector begins in the queries
    out: Pointer  # and in the outputs
    lo: Pointer  # it sees the keys [lo, hi)
    hi: Pointer
    top: Pointer  # its largest score so far
    total: Pointer  # its sum so far, SUM_LANES of them
    factor: Pointer  # what its output so far is multiplied by, as `top` grew
    scores: Pointer  # a tile's, CHUNK of them for each; then weights
    places: Pointer  # a chunk's


def room(like: Value, real: Type) -> State:
    q, out, lo, hi = (scratch(like, i64, MAX_VECTORS) for _ in range(4))
    top, factor = (scratch(like, real, MAX_VECTORS) for _ in range(2))
    total = scratch(like, real, MAX_VECTORS * SUM_LANES)
    scores, places = scratch(like, real, MAX_TILE * CHUNK), scratch(like, i64, 2 * CHUNK + 8)
    return State(q, out, lo, hi, top, total, factor, scores, places)


def lanes_of(real: Type) -> int:
    """Vectors have 16 bytes, which every CPU has: their size is part of a result's bits."""
    return 128 // real.bits


def least(real: Type) -> float:
    return torch.finfo(torch.float32 if real == f32 else torch.float64).min


def seen(state: State, vector: Int, chunk: Int) -> tuple[Int, Int]:
    """The keys [begin, end) of the chunk that a query vector sees."""
    return largest(state.lo[vector] - chunk, 0), smallest(state.hi[vector] - chunk, CHUNK)


@inlined
def score(
    state: State, first: Int, chunk: Int, places: Longs, following: Longs, q: Reals, keys: Reals,
    values: Reals, scale: Real, *, tile: int, dim: int,
) -> None:  # fmt: skip
    """scores[t][key] = scale * dot(q[t], k[key]) for the keys that some vector of the tile sees.

    They are rounded out to whole groups: nobody looks at the scores of the others.
    """
    lanes, group = lanes_of(keys.element), _KEYS[tile]
    ranges = [seen(state, first + t, chunk) for t in unrolled(tile)]
    begin, end = reduce(smallest, [one[0] for one in ranges]), reduce(largest, [one[1] for one in ranges])
    queries = [q + state.q[first + t] for t in unrolled(tile)]
    steps = lanes * (2 if dim % (2 * lanes) == 0 else 1)
    ahead = Registers((group,), zeros(keys, i64))
    read(ahead, places + (begin & -group), group)
    for key in range(begin & -group, end, group):
        now = [ahead[j] for j in unrolled(group)]
        read(ahead, places + key + group, group)
        if first == 0:  # for the other tiles as well
            for one in range(key, key + group):
                fetch(values + places[one], dim, _L1)
                fetch(keys + following[one], dim, _L2)
        at = [keys + now[j] for j in unrolled(group)]
        dots = Registers((tile, group), zeros(keys, keys.element.wide(lanes)))
        for d in range(0, dim, steps):
            add_products(dots, [one + d for one in queries], [one + d for one in at], range(0, steps, lanes))
        for t in unrolled(tile):
            sums = add_pairs([dots[t, j] for j in unrolled(group)])
            for index in unrolled(len(sums)):
                store(state.scores + t * CHUNK + key + index * lanes, sums[index] * scale)


def add_products(dots: Registers, queries: list[Pointer], keys: list[Pointer], steps: range) -> None:
    """dots[t, j] += queries[t] * keys[j], a vector at each of `steps`."""
    sums = {cell: dots[cell] for cell in product(range(len(queries)), range(len(keys)))}
    for step in steps:
        k = [load(key + step, steps.step) for key in keys]
        for t, query in enumerate(queries):
            x = load(query + step, steps.step)
            for j in range(len(keys)):
                sums[t, j] = fma(k[j], x, sums[t, j])
    for cell, total in sums.items():
        dots[cell] = total


def fetch(at: Reals, dim: int, level: int) -> None:
    """Ask for a key's value, which `weigh` reads in pieces: too short for the hardware's own prefetcher."""
    for d in range(0, dim, _LINE * 8 // at.element.bits):
        prefetch(at + d, level=level)


def add_pairs(sums: list[Value]) -> list[Value]:
    """Neighbouring lanes are added until each vector is one lane of a result."""
    lanes = sums[0].type.lanes
    for _ in range(lanes.bit_length() - 1):
        pairs = list(zip(sums[::2], sums[1::2], strict=True))
        sums = [a.lanes(range(0, 2 * lanes, 2), b) + a.lanes(range(1, 2 * lanes, 2), b) for a, b in pairs]
    return sums


@inlined
def softmax(state: State, vector: Int, scores: Reals, chunk: Int) -> None:
    """A vector's scores of the keys it sees become weights; its max and sum follow."""
    real = scores.element
    begin, end = seen(state, vector, chunk)
    old = state.top[vector]
    state.factor[vector] = 1.0
    if begin < end:
        first, last = begin & -SUM_LANES, (end + SUM_LANES - 1) & -SUM_LANES
        for i in range(first, begin):  # what lies around them weighs exp(-inf) = 0
            scores[i] = -math.inf
        for i in range(end, last):
            scores[i] = -math.inf
        best = old.constant(least(real), real.wide(SUM_LANES))
        for i in range(first, end, SUM_LANES):
            best = largest(best, load(scores + i, SUM_LANES))
        new = largest(old, halved(best, largest))
        total = state.total + vector * SUM_LANES
        factor = exp(old - new)
        state.top[vector], state.factor[vector] = new, factor
        added = load(total, SUM_LANES) * factor
        for i in range(first, end, SUM_LANES):
            weight = exp(load(scores + i, SUM_LANES) - new)
            store(scores + i, weight)
            added = added + weight
        store(total, added)


@inlined
def weigh(
    state: State, first: Int, chunk: Int, places: Longs, out: Reals, values: Reals, *, tile: int, dim: int
) -> None:
    """out[t][d] = factor[t] * out[t][d] + weights[t][key] * v[key][d] for the keys that t sees, in order.

    Where all vectors of the tile see the keys, several are done at a time. The places of those that follow
    are read before: the processor would wait for their addresses.
    """
    real = values.element
    lanes = lanes_of(real)
    ranges = [seen(state, first + t, chunk) for t in unrolled(tile)]
    begins, ends = [one[0] for one in ranges], [one[1] for one in ranges]
    low, high = reduce(smallest, begins), reduce(largest, ends)  # some vector sees these keys
    inner, outer = (
        reduce(largest, begins),
        reduce(smallest, ends) - (_WEIGHED - 1),
    )  # all see what begins here
    outs = [out + state.out[first + t] for t in unrolled(tile)]
    weights = [state.scores + t * CHUNK for t in unrolled(tile)]
    factors = [state.factor[first + t].spread(lanes) for t in unrolled(tile)]
    ahead = Registers((_WEIGHED,), zeros(values, i64))
    if low < high:
        for begin, end, size in columns(dim // lanes, tile):
            for d in range(begin * lanes, end * lanes, size * lanes):
                sums = Registers((tile, size), zeros(values, real.wide(lanes)))
                for t, c in product(range(tile), range(size)):
                    sums[t, c] = load(outs[t] + d + c * lanes, lanes) * factors[t]
                read(ahead, places + low, _WEIGHED)
                key = low
                while key < high:
                    if key >= inner and key < outer:
                        at = [values + d + ahead[j] for j in unrolled(_WEIGHED)]
                        read(ahead, places + key + _WEIGHED, _WEIGHED)
                        add_weighed(sums, [one + key for one in weights], at, size)
                        key = key + _WEIGHED
                    else:
                        v = [load(values + d + ahead[0] + c * lanes, lanes) for c in unrolled(size)]
                        read(ahead, places + key + 1, _WEIGHED)
                        for t in unrolled(tile):
                            if key >= begins[t] and key < ends[t]:
                                weight = weights[t][key].spread(lanes)
                                for c in unrolled(size):
                                    sums[t, c] = fma(v[c], weight, sums[t, c])
                        key = key + 1
                for t, c in product(range(tile), range(size)):
                    store(outs[t] + d + c * lanes, sums[t, c])


def read(ahead: Registers, places: Pointer, count: int) -> None:
    for j in range(count):
        ahead[j] = places[j]


def add_weighed(sums: Registers, weights: list[Pointer], values: list[Pointer], size: int) -> None:
    """sums[t, c] += weights[t][key] * vector c of values[key], for these keys in order."""
    lanes = lanes_of(values[0].element)
    new = {cell: sums[cell] for cell in product(range(len(weights)), range(size))}
    for key, value in enumerate(values):
        lane = key % lanes
        if lane == 0:
            some = [load(weight + key, lanes) for weight in weights]
        v = [load(value + c * lanes, lanes) for c in range(size)]
        for t in range(len(weights)):
            weight = some[t].lanes([lane] * lanes)
            for c in range(size):
                new[t, c] = fma(v[c], weight, new[t, c])
    for cell, total in new.items():
        sums[cell] = total


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
