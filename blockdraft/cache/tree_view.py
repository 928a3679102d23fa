"""TreeView: the view of a step that verifies trees of drafts (kernels/branches.py)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from blockdraft.cache.paged import CompressedLayer, PagedKV
from blockdraft.cache.recurrent import Scan
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView, LayerStorage
from blockdraft.kernels.attention import Blocks
from blockdraft.kernels.branches import BranchPages, Copies, Kept, RowPages, Stores
from blockdraft.kernels.kernels import Kernels
from blockdraft.kernels.sampling import Places
from blockdraft.kernels.tree import Tree


class TreePages(NamedTuple):
    """The pages of all branches but the first of each row. They keep nothing from step to step.

    Both fields have an entry for usual pages, and one for those of exact keys and values, if layers compress.
    """

    firsts: tuple[int, ...]  # the first page; the others follow
    stores: tuple[tuple[Stores, ...], ...]  # of the layers that trees write
    page_size: int


class TreeView(CacheView):
    """The View of a step over trees: N tokens, those of each branch after the other."""

    def __init__(
        self, storage: tuple[LayerStorage, ...], *, rows: Rows, tree: Tree, pages: TreePages, kernels: Kernels
    ) -> None:
        """Copy the committed tokens that share a page with a tree to the pages of its branches."""
        self.tree, self._pages_of_trees = tree, pages
        tables = [rows.page_table] if rows.exact_table is None else [rows.page_table, rows.exact_table]
        kinds = [RowPages(*one) for one in zip(tables, pages.firsts, strict=False)]
        found = kernels.lay_out(tree, rows.active, rows.length, kinds, pages.page_size)
        self.branches = found
        counts = _counts(tree, kernels)

        def blocks(own: BranchPages, table: Tensor, exact: Tensor | None = None) -> Blocks:
            return Blocks(
                pages=table,
                starts=found.begins,
                counts=counts,
                page_size=pages.page_size,
                locate=lambda *_, **__: (found.positions, own.slots),
                offsets=tree.offsets,
                exact_pages=exact,
                most=tree.size.width,
            )

        self._compressing: Blocks | None = None
        if rows.exact_table is not None:  # what is compressed is committed: it is on the row's pages
            exact = found.pages[1]
            self._compressing = blocks(exact, rows.page_table[found.rows], exact.table)
        scan = Scan(rows.active, rows.length, None, is_known=False, max_count=tree.size.width)
        own = found.pages[0]
        super().__init__(storage, blocks=blocks(own, own.table), rows=scan, kernels=kernels)
        self._copy(tuple(kind.copies for kind in found.pages))

    @property
    def places(self) -> Places:
        """The branch and the column of each token."""
        tree = self.tree
        return Places(tree.branches, tree.columns, tree.offsets, tree.size.width)

    def keep(self, sampled: Tensor, limits: Tensor) -> Kept:
        """Move the paths that agree with the target's samples [N] to the rows' own pages.

        At most limits[r] > 0 tokens of row r are committed.
        """
        kept = self._kernels.settle(self.tree, self.branches, sampled, limits, self._pages_of_trees.page_size)
        self._copy(kept.copies)
        return kept

    def _blocks_of(self, storage: PagedKV | CompressedLayer) -> Blocks:
        if self._compressing is None or not isinstance(storage, CompressedLayer):
            return self._blocks
        return self._compressing

    def _copy(self, kinds: tuple[Copies, ...]) -> None:
        for stores, copies in zip(self._pages_of_trees.stores, kinds, strict=False):
            for one in stores:
                self._kernels.copy_slots(one, copies)


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
