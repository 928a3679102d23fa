"""Finds the slots of trees' tokens, and the longest path that the target agrees with.

To attention each branch is a row of its own: it has a page table whose last pages, those with the tree's
columns, are its own. So each query finds keys and values by position, as in a chain, and computes the same
bits. What a branch shares with others is kept on its pages, too: its ancestors are written to several slots,
and the committed tokens on its first own page are copied. The first branch of a row has the row's own pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.kernels.acceptance import reference_count_accepted
from blockdraft.kernels.tree import Tree
from blockdraft.kernels.tree_size import pages_per_branch


class Copies(NamedTuple):
    """Slots to copy; 0 to 0 where there is nothing to do."""

    sources: Tensor  # [n]
    targets: Tensor  # [n]


class RowPages(NamedTuple):
    """The pages of one kind: of rows, and from `first` on those of all branches but the first of each row."""

    table: Tensor  # [rows, pages]
    first: int


class BranchPages(NamedTuple):
    """The pages of R rows' branches, of one kind."""

    table: Tensor  # [R * P, pages]
    slots: Tensor  # [R * K, P]: each token's own slot, and one for each branch that it is an ancestor of
    copies: Copies  # [R * P * (page size - 1)] of the committed tokens on each branch's first own page


class Branches(NamedTuple):
    """The branches of R rows' trees, as rows of a forward."""

    rows: Tensor  # [R * P]: the row that a branch belongs to
    starts: Tensor  # [R * P]: the position of the anchor
    begins: Tensor  # [R * P]: the position of the branch's first own token
    path_ids: Tensor  # [R * P, width]: the token ids along each path
    positions: Tensor  # [R * K] of all tokens
    pages: tuple[BranchPages, ...]  # of each kind


class Kept(NamedTuple):
    """The longest path of each row that the target agrees with. Entries past `num_committed` are not read."""

    num_committed: Tensor  # [R]
    numbers: Tensor  # [R, width]: the number in the stream of each column's token
    token_ids: Tensor  # [R, width]
    sampled: Tensor  # [R, width]
    chains: Tensor  # [R, 3]: a chain's width, what it would commit, and how many columns the tree tried
    copies: tuple[Copies, ...]  # [R * width] of its tokens to the row's own pages, for each kind of pages


class LayOut(Protocol):
    """Finds the places of a tree's tokens, as `reference_lay_out` does."""

    def __call__(
        self, tree: Tree, rows: Tensor, length: Tensor, kinds: Sequence[RowPages], page_size: int
    ) -> Branches: ...


def reference_lay_out(
    tree: Tree, rows: Tensor, length: Tensor, kinds: Sequence[RowPages], page_size: int
) -> Branches:
    """Return the branches of the trees of rows [R], whose lengths are in `length` [rows].

    In `slots` a token that a branch does not share has its own slot again, and its own is in column 0.
    """
    home = rows.repeat_interleave(tree.size.branches)
    starts = length[home]
    positions = starts[tree.branches] + tree.columns
    found = Branches(home, starts, starts + tree.firsts, tree.path_ids, positions, ())
    return found._replace(pages=tuple(_pages_of(tree, found, kind, page_size) for kind in kinds))


def _pages_of(tree: Tree, branches: Branches, kind: RowPages, page_size: int) -> BranchPages:
    size, starts = tree.size, branches.starts[:, None]
    branch = torch.arange(len(starts), device=starts.device)
    rank, row = branch % size.branches, branch // size.branches
    of_rows, per_branch = kind.table[branches.rows], pages_per_branch(size.width, page_size)
    place = torch.arange(of_rows.shape[1], device=starts.device) - starts // page_size
    is_own = (place >= 0) & (place < per_branch) & (rank > 0)[:, None]
    own = kind.first + (row * (size.branches - 1) + rank - 1)[:, None] * per_branch + place
    table = torch.where(is_own, own, of_rows)

    token, column = torch.arange(len(tree.token_ids), device=starts.device)[:, None], tree.columns[:, None]
    others = tree.branches[:, None] // size.branches * size.branches + rank[: size.branches]  # [N, P]
    is_ancestor = (tree.paths[others, column] == token) & (column < tree.firsts[others])
    holder, position = torch.where(is_ancestor, others, tree.branches[:, None]), branches.positions[:, None]
    slots = table[holder, position // page_size] * page_size + position % page_size

    place = torch.arange(page_size - 1, device=starts.device)
    is_copied = (place < starts % page_size) & ((rank > 0) & (tree.lengths > 1))[:, None]
    copies = (
        torch.where(is_copied, one.gather(1, starts // page_size) * page_size + place, 0).flatten()
        for one in (of_rows, table)
    )
    return BranchPages(table, slots, Copies(*copies))


class Settle(Protocol):
    """Finds the paths to keep, as `reference_settle` does."""

    def __call__(
        self, tree: Tree, branches: Branches, sampled: Tensor, limits: Tensor, page_size: int
    ) -> Kept: ...


def reference_settle(tree: Tree, branches: Branches, sampled: Tensor, limits: Tensor, page_size: int) -> Kept:
    """Return the paths to keep, for the target's samples [N] behind all tokens.

    At most limits[r] > 0 tokens of row r are committed. The chain is the first branch and the draft that
    follows it: the branch ends where the drafter is unsure, and that draft counts as much as others. The
    tree tried a column if a token there follows tokens that were all right.
    """
    size, num_rows = tree.size, len(limits)
    counts = reference_count_accepted(sampled[tree.paths], branches.path_ids, tree.lengths)
    counts = counts.view(num_rows, size.branches)
    first = torch.arange(num_rows, device=sampled.device) * size.branches
    branch = first + counts.argmax(dim=1)  # the first of the best
    num_committed, numbers = counts.amax(dim=1).minimum(limits), tree.paths[branch]
    column = torch.arange(size.width, device=sampled.device)
    is_kept, position = column < num_committed[:, None], branches.starts[branch][:, None] + column
    copies = []
    for kind in branches.pages:
        page = (position // page_size).clamp(max=kind.table.shape[1] - 1)
        targets = kind.table[first].gather(1, page) * page_size + position % page_size
        parts = kind.slots[:, 0][numbers], targets
        copies.append(Copies(*(torch.where(is_kept, part, 0).flatten() for part in parts)))
    width, alone = tree.lengths[first], counts[:, 0]
    followed = sampled[tree.paths[first, width - 1]]
    alone = alone + ((alone == width) & (followed == tree.following))
    width = width + (tree.following >= 0)
    best = counts.amax(dim=1, keepdim=True)
    deepest = torch.where(counts == best, tree.lengths.view_as(counts), 0).amax(dim=1)
    chains = torch.stack((width, alone, deepest.minimum(best[:, 0] + 1)), dim=1)
    return Kept(num_committed, numbers, tree.token_ids[numbers], sampled[numbers], chains, tuple(copies))


class Stores(NamedTuple):
    """The keys and values [G, S, D] of several layers of one shape."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    offsets: Tensor  # [layers, 2]: how many elements keys and values are behind keys[0] in memory


def stores_of(layers: Sequence[tuple[Tensor, Tensor]]) -> tuple[Stores, ...]:
    """Return the keys and values of layers, by shape. They must not move."""
    found = []
    for shape in dict.fromkeys(keys.shape for keys, _ in layers):
        keys, values = zip(*(one for one in layers if one[0].shape == shape), strict=True)
        first, size = keys[0].data_ptr(), keys[0].element_size()
        bytes_behind = [[one.data_ptr() - first for one in layer] for layer in zip(keys, values, strict=True)]
        assert all(one.is_contiguous() and one.dtype == keys[0].dtype for one in (*keys, *values))
        assert all(one % size == 0 for layer in bytes_behind for one in layer)
        offsets = torch.tensor(bytes_behind, device=keys[0].device) // size
        found.append(Stores(keys, values, offsets))
    return tuple(found)


class CopySlots(Protocol):
    """Copies slots, as `reference_copy_slots` does."""

    def __call__(self, stores: Stores, copies: Copies) -> None: ...


def reference_copy_slots(stores: Stores, copies: Copies) -> None:
    """Copy slots of all layers. No target is another's source; 0 to 0 may repeat."""
    for stored in (*stores.keys, *stores.values):
        stored.index_copy_(1, copies.targets, stored.index_select(1, copies.sources))
