"""TreeView: the view of a step that verifies trees of drafts.

Each branch is a row of its own to attention: it has a page table whose last pages, those with the tree's
columns, are its own. So each query finds keys and values by position, as in a chain, and computes the same
bits. What a branch shares with others, its ancestors and the committed tokens on its first own page, is
copied to its pages in every layer. The first branch of a row has the row's own pages.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.cache.paged import CompressedLayer, PagedKV
from blockdraft.cache.recurrent import Scan
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView, LayerStorage
from blockdraft.kernels.attention import Blocks
from blockdraft.kernels.kernels import Kernels
from blockdraft.kernels.sampling import Places
from blockdraft.kernels.tree import Tree
from blockdraft.kernels.tree_size import pages_per_branch


class TreePages(NamedTuple):
    """The pages of all branches but the first of each row. They keep nothing from step to step."""

    first: int  # the first page; the others follow
    first_exact: int  # likewise, of exact keys and values, if layers compress
    page_size: int


class Copies(NamedTuple):
    """Slots to copy; 0 to 0 where there is nothing to do."""

    sources: Tensor  # [n]
    targets: Tensor  # [n]


class _Tables(NamedTuple):
    """The pages of each branch's row, and of each branch, for one kind of pages."""

    of_rows: Tensor  # [branches, pages]
    of_branches: Tensor  # [branches, pages]


def _slots(table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Return the slots of positions [n, k] in a table [n, pages], any slot for positions past its end."""
    page = table.gather(1, (positions // page_size).clamp(max=table.shape[1] - 1))
    return page * page_size + positions % page_size


def _copies(is_copied: Tensor, sources: Tensor, targets: Tensor) -> Copies:
    return Copies(*(torch.where(is_copied, one, 0).flatten() for one in (sources, targets)))


class TreeView(CacheView):
    """The View of a step over trees: N tokens, those of each branch after the other."""

    def __init__(
        self, storage: tuple[LayerStorage, ...], *, rows: Rows, tree: Tree, pages: TreePages, kernels: Kernels
    ) -> None:
        self.tree = tree
        size, active = tree.size, rows.active
        self._lengths = rows.length[active]  # [R]
        self._branch = torch.arange(len(active) * size.branches, device=active.device)
        row = self._branch // size.branches
        self._start = self._lengths[row]  # [R * P] of the whole path
        rank = self._branch % size.branches  # among the row's branches
        per_branch = pages_per_branch(size.width, pages.page_size)
        at = torch.arange(rows.page_table.shape[1], device=active.device)
        place = at - (self._start // pages.page_size)[:, None]  # among a branch's own pages
        is_own = (place >= 0) & (place < per_branch) & (rank > 0)[:, None]
        own = (row * (size.branches - 1) + rank - 1)[:, None] * per_branch + place

        def tables(table: Tensor, first: int) -> _Tables:
            of_rows = table[active][row]
            return _Tables(of_rows, torch.where(is_own, first + own, of_rows))

        self._tables = [tables(rows.page_table, pages.first)]
        self._compressing: Blocks | None = None
        on_pages = functools.partial(
            Blocks,
            starts=self._start + tree.firsts,
            counts=_counts(tree, kernels),
            page_size=pages.page_size,
            locate=kernels.locate,
            offsets=tree.offsets,
            most=size.width,
        )
        if rows.exact_table is not None:  # what is compressed is committed: it is on the row's pages
            self._tables.append(tables(rows.exact_table, pages.first_exact))
            own_exact = self._tables[1].of_branches
            self._compressing = on_pages(pages=self._tables[0].of_rows, exact_pages=own_exact)
        blocks = on_pages(pages=self._tables[0].of_branches)
        scan = Scan(active, self._lengths, None, is_known=False, max_count=size.width)
        super().__init__(storage, blocks=blocks, rows=scan, kernels=kernels)
        self._kept: list[PagedKV | CompressedLayer] = []  # the layers that the tree has written
        self._written = [blocks.write_slots]  # the slots [N] that tokens are written to, by kind of page
        if self._compressing is not None:
            self._written.append(self._compressing.exact_write_slots)
        self._shared = [self._shared_slots(kind) for kind in range(len(self._tables))]

    @property
    def places(self) -> Places:
        """The branch and the column of each token."""
        tree = self.tree
        return Places(tree.branches, tree.columns, tree.offsets, tree.size.width)

    @property
    def path_starts(self) -> Tensor:
        """The position [R * P] of the first token, the anchor, of each branch's path."""
        return self._start

    def _shared_slots(self, kind: int) -> Copies:
        """Return the copies of what a branch's own pages share with others."""
        tables, written, page_size = self._tables[kind], self._written[kind], self._blocks.page_size
        width, start = self.tree.size.width, self._start[:, None]
        num_shared = torch.arange(page_size - 1 + width - 1, device=start.device)
        position = start // page_size * page_size + num_shared
        is_later = self._branch % self.tree.size.branches > 0
        is_shared = is_later[:, None] & (position < start + self.tree.firsts[:, None])
        ancestor = self.tree.paths.gather(1, (position - start).clamp(min=0, max=width - 1))
        before = _slots(tables.of_rows, position, page_size)
        source = torch.where(position < start, before, written[ancestor])
        return _copies(is_shared, source, _slots(tables.of_branches, position, page_size))

    def _blocks_of(self, storage: PagedKV | CompressedLayer) -> Blocks:
        if self._compressing is None or not isinstance(storage, CompressedLayer):
            return self._blocks
        return self._compressing

    def _wrote(self, storage: PagedKV | CompressedLayer) -> None:
        self._kept.append(storage)
        self._copy(storage, self._shared)

    def _copy(self, storage: PagedKV | CompressedLayer, copies: list[Copies]) -> None:
        self._kernels.copy_slots(*storage.exact, *copies[isinstance(storage, CompressedLayer)])

    def keep(self, branch: Tensor, num_committed: Tensor) -> None:
        """Move the first `num_committed` [R] columns of each row's `branch` [R] to the row's own pages."""
        size = self.tree.size
        column = torch.arange(size.width, device=branch.device)
        is_kept, position = column < num_committed[:, None], self._lengths[:, None] + column
        copies = []
        for kind, tables in enumerate(self._tables):
            targets = _slots(tables.of_rows[:: size.branches], position, self._blocks.page_size)
            copies.append(_copies(is_kept, self._written[kind][self.tree.paths[branch]], targets))
        for storage in self._kept:
            self._copy(storage, copies)


def _counts(tree: Tree, kernels: Kernels) -> tuple[int, ...]:
    """Return each branch's own tokens.

    A GPU's kernels read `offsets`: of the counts only the sum and the maximum matter to them, and a graph
    cannot ask the device.
    """
    has_kernels = kernels.available.has_triton("attention") and kernels.available.has_triton("slots")
    if tree.offsets.device.type == "cpu" or not has_kernels:
        return tuple(tree.offsets.diff().tolist())
    counts, left = [], len(tree.token_ids)
    for _ in range(len(tree.firsts)):
        counts.append(min(tree.size.width, left))
        left -= counts[-1]
    return tuple(counts)
