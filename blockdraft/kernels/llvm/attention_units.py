"""Divides the work of attention among the threads of a CPU."""

from __future__ import annotations

import functools
import heapq

import torch
from torch import Tensor

MAX_VECTORS = 16  # query vectors (tokens x heads of one key head) that a thread takes at a time
MAX_TILE = 4  # query vectors that share one pass over a chunk of keys
_MANY = 16  # items per thread; with so many, the last one hardly matters
_TILE_COST = (0.0, 1.6, 2.3, 3.2, 4.0)  # by the number of query vectors over the same keys, measured
_ITEM_COST = 0.75  # of reading these keys for the first tile


def divide(counts: tuple[int, ...], shared: int, num_groups: int, num_threads: int) -> Tensor:
    """Divide rows with `counts[r]` tokens into units [U, 3]: a row, and its query vectors [first, end).

    A token has `shared` vectors for each of `num_groups` key heads; a thread takes a unit for one key head.
    The size of units is chosen so that the last thread ends as early as possible. Rows count as equally long.
    """
    units = _units(counts, shared, num_groups, num_threads)
    return torch.tensor(units, dtype=torch.int64).view(-1, 3)


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
    """Divide rows of `totals` vectors into units of at most `most`, as equal as possible."""
    units = []
    for row, total in enumerate(totals):
        size = -(-total // max(1, -(-total // most)))
        units += [(row, i, min(i + size, total)) for i in range(0, total, size or 1)]
    return units


def _time(units: list[tuple[int, int, int]], num_groups: int, num_threads: int) -> float:
    """Estimate when the last thread ends, if each takes the next item as soon as it is free."""
    free = [0.0] * num_threads
    for _, first, last in units:
        tiles, rest = divmod(last - first, MAX_TILE)
        cost = _ITEM_COST + tiles * _TILE_COST[MAX_TILE] + _TILE_COST[rest]
        for _ in range(num_groups):
            heapq.heapreplace(free, free[0] + cost)
    return max(free)
