"""The sizes of steps, and how a batch's rows fill one.

The tokens of a step are a stream: those of row 0, then those of row 1, and so on. Each row has a width of its
own, so a size is a number of rows, the number of all tokens, and the width that no row may exceed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
FEW_ROWS = 16  # up to so many rows, the means are shares of the block
# Beyond: the most rows, and the means that lose least in simulation (2026-11-19, benchmarks/log.md).
MEANS = ((64, (4, 8, 12)), (96, (3, 6, 12)), (192, (2, 4, 8)), (math.inf, (2, 3, 4, 8)))
RANGE = 4  # how much wider than the mean a row of an uneven step may be


class StepSize(NamedTuple):
    """The numbers by which a step's work is divided, so that each is captured on its own."""

    rows: int
    width: int  # the most tokens of a row
    tokens: int  # of all rows; each has at least one

    @property
    def is_even(self) -> bool:
        """Say if every row has `width` tokens."""
        return self.tokens == self.rows * self.width

    def has_room(self, other: StepSize) -> bool:
        """Say if a batch of size `other` fits. Each row that it lacks takes a token."""
        missing = self.rows - other.rows
        return missing >= 0 and self.width >= other.width and self.tokens >= other.tokens + missing


Means = Callable[[int, int], tuple[int, ...]]  # (rows, block): the mean widths that steps may have


def all_means(num_rows: int, block: int) -> tuple[int, ...]:
    """Return the mean widths of steps where padding is expensive and a capture cheap, the block included."""
    return tuple(sorted({mean for mean in (*WIDTHS, block) if mean <= block}))


def few_means(num_rows: int, block: int) -> tuple[int, ...]:
    """Return the mean widths of steps where each must be captured: 49 kinds of steps for 256 rows.

    Few rows have time to spare for wide blocks. With many, arithmetic takes the time.
    """
    means: tuple[int, ...] = (block // 4, block // 2, block)
    if num_rows > FEW_ROWS:
        means = next(means for most, means in MEANS if num_rows <= most)
    return tuple(sorted({1, *(mean for mean in means if 1 < mean <= block)}))


def means_on(device: torch.device) -> Means:
    return all_means if device.type == "cpu" else few_means


def uneven_places(row_counts: Iterable[int], block: int, means: Means) -> list[StepSize]:
    """Return the sizes of all steps with these mean widths, whose rows have widths of their own."""
    return [uneven(rows, mean, block) for rows in row_counts for mean in means(rows, block)]


def even(num_rows: int, width: int) -> StepSize:
    return StepSize(num_rows, width, num_rows * width)


def even_sizes(row_counts: Iterable[int], widths: Iterable[int]) -> list[StepSize]:
    widths = list(widths)
    return [even(rows, width) for rows in row_counts for width in widths]


def tight(widths: Items[int]) -> StepSize:
    """Return the size of a batch whose rows have these widths, without padding."""
    return StepSize(len(widths), max(widths), sum(widths))


class Filled(NamedTuple):
    """The rows of a step that fill its size; see Rows.activate."""

    widths: tuple[int, ...]  # () if the size is even
    limits: tuple[int, ...]  # () if no row has more tokens than it may commit


EVEN = Filled((), ())


def fill(widths: Items[int], size: StepSize) -> Filled:
    """Give the tokens that a size has beyond the rows' widths to rows: padding rows first.

    A row commits no more tokens than its own width, so padding changes no answer.
    """
    wanted = tight(widths)
    assert size.has_room(wanted)
    if size == wanted and size.is_even:
        return EVEN
    found = [*widths, *(1,) * (size.rows - len(widths))]
    extra = size.tokens - sum(found)
    for row in reversed(range(size.rows)):
        more = min(extra, size.width - found[row])
        found[row] += more
        extra -= more
    is_padded = any(own < its for own, its in zip(widths, found, strict=False))
    return Filled(() if size.is_even else tuple(found), tuple(widths) if is_padded else ())


def widest(size: StepSize) -> tuple[int, ...]:
    """Return widths that fill a size and have its maximum: kernels are chosen by it."""
    extra, found = size.tokens - size.rows, []
    for _ in range(size.rows):
        more = min(extra, size.width - 1)
        found.append(1 + more)
        extra -= more
    assert extra == 0
    assert found[0] == size.width
    return tuple(found)


def uneven(num_rows: int, mean: int, block: int) -> StepSize:
    """Return the size of a step with this mean width, in which rows have widths of their own.

    It is even for one row, for plain decoding and for whole blocks.
    """
    width = min(block, RANGE * mean, num_rows * (mean - 1) + 1)
    return StepSize(num_rows, width, num_rows * mean)
