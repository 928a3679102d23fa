"""The sizes of trees of drafts, and of the pages that their branches need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

NUM_CHOICES = 8  # tokens of a column that a tree may have, if the drafter does not say how many
MAX_ROWS = 4  # of a step with trees: with more rows, a step's time grows with its tokens
LEAST_WIDTH = 3  # of a drafter's blocks: with one column of drafts there are no paths
NODES_PER_BRANCH = 4  # on average; more branches gain little, and each reads the context once more


class TreeSize(NamedTuple):
    """The numbers that fix the shapes of a row's tree."""

    nodes: int  # the anchor included
    branches: int
    width: int  # the columns of the longest path, the anchor included

    @property
    def spare(self) -> int:
        """How many more nodes there would be room for if all branches but the first began in column 2."""
        columns = self.width - 1
        return columns + (self.branches - 1) * (columns - 1) - (self.nodes - 1)

    def num_pages(self, num_rows: int, page_size: int) -> int:
        """Return the number of pages of all branches that have pages of their own."""
        return num_rows * (self.branches - 1) * pages_per_branch(self.width, page_size)


def tree_size(num_nodes: int, width: int) -> TreeSize:
    """Return the size of trees of `num_nodes` tokens that a drafter of this width can grow."""
    assert width >= LEAST_WIDTH
    columns = width - 1
    least = 1 + max(0, -(-(num_nodes - 1 - columns) // (columns - 1)))
    return TreeSize(num_nodes, max(least, num_nodes // NODES_PER_BRANCH), width)


def trees_for(sizes: Iterable[int], width: int, num_choices: int) -> tuple[int, ...]:
    """Return the sizes of trees that can always be filled, with so many choices in a column.

    Branches that begin in the first two columns always leave enough room, and as many as the choices squared
    can begin there.
    """
    if width < LEAST_WIDTH:
        return ()
    return tuple(size for size in sizes if tree_size(size, width).branches <= num_choices**2)


def pages_per_branch(width: int, page_size: int) -> int:
    """Return how many pages hold the columns of a path and the committed tokens on the first of them."""
    return -(-(page_size - 1 + width) // page_size)
