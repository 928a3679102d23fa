"""Cache: all layers of target and drafter over one page table, and one state per row.

A token's slot holds its keys and values in the drafter, too, so prefix reuse, preemption and freeing need no
extra code for the drafter. Page 0 is never written: masked reads go to its zero slot. Page 1 belongs to the
scratch row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from blockdraft.cache.paged import CompressedKV, CompressedLayer, PagedKV
from blockdraft.cache.raw_slots import RawSlots
from blockdraft.cache.recurrent import RecurrentState, RecurrentStates, Scan
from blockdraft.cache.rows import Rows
from blockdraft.cache.spec import Compressed, LayerSpec, Paged, Recurrent, SharedWith
from blockdraft.cache.tree_view import TreePages, TreeView
from blockdraft.cache.view import CacheView, LayerStorage
from blockdraft.kernels.attention import Blocks
from blockdraft.kernels.branches import Stores, stores_of
from blockdraft.kernels.kernels import REFERENCE, Kernels
from blockdraft.kernels.kv_compressed import Tiles
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.kv_positions import PositionRule
from blockdraft.kernels.tree import Tree

SCRATCH_PAGE = 1


class Cache:
    """Storage for every layer in `specs`; `num_pages` and `num_rows` include the reserved ones.

    `num_slots` is the number of states that may be saved, and a scratch slot; or 0.
    """

    def __init__(  # noqa: PLR0913
        self,
        specs: tuple[LayerSpec, ...],
        *,
        num_pages: int,
        num_rows: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels = REFERENCE,
        rule: PositionRule | None = None,
        num_exact_pages: int = 0,
        num_slots: int = 0,
        num_tree_pages: int = 0,
        num_tree_layers: int = 0,
    ) -> None:
        """`num_tree_pages`: pages for the branches of trees, beside the others of each kind.

        `num_tree_layers`: the number of the target's layers, which come first.
        """
        self._kernels = kernels
        self._rule = rule or PositionRule()
        self.page_size = page_size
        self.num_pages = num_pages
        self._states = {
            spec: RecurrentStates(
                spec,
                num_layers=specs.count(spec),
                num_rows=num_rows,
                dtype=dtype,
                device=device,
                kernels=kernels,
                num_slots=num_slots,
            )
            for spec in dict.fromkeys(specs)
            if isinstance(spec, Recurrent)
        }
        self._compressed = {
            spec: CompressedKV(
                spec,
                num_layers=specs.count(spec),
                num_slots=num_pages * page_size,
                num_exact_slots=(num_exact_pages + num_tree_pages) * page_size,
                rule=self._rule,
                dtype=dtype,
                device=device,
                kernels=kernels,
            )
            for spec in dict.fromkeys(specs)
            if isinstance(spec, Compressed)
        }
        paged = functools.partial(
            PagedKV, num_slots=(num_pages + num_tree_pages) * page_size, dtype=dtype, device=device
        )
        self.storage = self._layers(specs, paged)
        firsts, stores = (num_pages, num_exact_pages), self._stores(num_tree_layers)
        self._tree_pages = TreePages(firsts, stores, page_size)

    def _layers(
        self, specs: tuple[LayerSpec, ...], paged: Callable[[Paged], PagedKV]
    ) -> tuple[LayerStorage, ...]:
        """Return the storage of each layer; `paged` allocates one."""
        storage: list[LayerStorage] = []
        for index, spec in enumerate(specs):
            if isinstance(spec, SharedWith):
                storage.append(storage[spec.layer])
            elif isinstance(spec, Recurrent):
                storage.append(RecurrentState(self._states[spec], specs[:index].count(spec)))
            elif isinstance(spec, Compressed):
                storage.append(CompressedLayer(self._compressed[spec], specs[:index].count(spec)))
            else:
                storage.append(paged(spec))
        return tuple(storage)

    def view(
        self,
        rows: Rows,
        counts: int | tuple[int, ...],
        *,
        num_tokens: int | None = None,
        is_known: bool = False,
        offsets: Tensor | None = None,
        shift: int = 0,
    ) -> CacheView:
        """Return the view of one forward over the active rows: `counts` tokens each, from `length` on.

        If `num_tokens` in all are fewer than `counts` each, each row has its own width (Rows.activate), at
        most `counts`. With `shift`, the tokens begin that many positions after `length`, or at 0 if it were
        negative.

        Set `is_known` for tokens of a prompt: they need no verification, so recurrent layers fold them at
        once, as they do with a block's first token if it is alone. `offsets` is described in Blocks.
        """
        active = rows.active
        most = counts if isinstance(counts, int) else max(counts, default=0)
        if isinstance(counts, int):
            if num_tokens is not None and num_tokens < counts * len(active):
                assert sum(rows.widths) == num_tokens
                assert max(rows.widths) <= counts
                offsets = rows.offsets
            counts = (counts,) * len(active) if offsets is None else rows.widths
        starts = rows.length[active]
        if shift:
            starts = (starts + shift).clamp_(min=0)
        blocks = Blocks(
            pages=rows.page_table,
            rows=active,
            starts=starts,
            counts=counts,
            page_size=self.page_size,
            locate=self._kernels.locate,
            offsets=offsets,
            exact_pages=rows.exact_table,
            most=most,
        )
        tiles = None
        if self._compressed and is_known:  # queries of a prompt read some of its tokens compressed
            num_each = blocks.offsets.diff()
            tiles = self._tiles(rows, starts, num_each, max_count=max(counts, default=0))
        begins = blocks.offsets if self._states else None
        told = counts if offsets is None else None
        is_known = is_known or most <= 1
        is_boxed = bool(self._states) and self._kernels.scan_in_place is None
        places = blocks.places if is_boxed and not is_known and not blocks.is_even else None
        scan = Scan(active, starts, told, is_known, begins, most, rows.saves, places)
        return CacheView(self.storage, blocks=blocks, rows=scan, kernels=self._kernels, tiles=tiles)

    def tree_view(self, rows: Rows, tree: Tree) -> TreeView:
        """Return the view of a step that verifies a tree of each active row."""
        assert not self._states, "a state belongs to one path"
        return TreeView(self.storage, rows=rows, tree=tree, pages=self._tree_pages, kernels=self._kernels)

    def _stores(self, num_layers: int) -> tuple[tuple[Stores, ...], ...]:
        """Return the keys and values of the first layers, by kind of pages: all, and exact ones."""
        layers = {id(one): one for one in self.storage[:num_layers]}.values()
        kinds = PagedKV, CompressedLayer
        return tuple(stores_of([one.exact for one in layers if isinstance(one, kind)]) for kind in kinds)

    def _tiles(self, rows: Rows, starts: Tensor, counts: Tensor, *, max_count: int) -> Tiles:
        """Return the tiles to compress if the active rows grow from starts [R] by counts [R] <= max_count."""
        assert rows.exact_table is not None
        most = -(-max_count // TILE) + (0 if max_count < TILE else 1)
        tables = rows.page_table, rows.exact_table
        return Tiles(*tables, rows.active, starts, counts, self._rule, most, self.page_size)

    def commit(self, rows: Rows, starts: Tensor, num_committed: Tensor) -> None:
        """Commit the first `num_committed` [R] tokens of the block that was verified from `starts` [R] on.

        Paged layers have nothing to do: `length` is the commit. Recurrent layers fold their tape. Compressed
        layers compress the tiles that the next block will read compressed.
        """
        for states in self._states.values():
            states.commit(rows.active, starts, num_committed)
        if self._compressed:
            tiles = self._tiles(rows, starts, num_committed, max_count=self._rule.block)
            for group in self._compressed.values():
                group.compress(tiles)

    def restore(self, slot: int, row: int) -> None:
        """Give a row the recurrent states in a slot."""
        for states in self._states.values():
            states.restore(slot, row)

    def centre_keys(self, centres: Mapping[int, Tensor]) -> None:
        """Subtract a mean key [G, D] per layer from the keys of rotated formats; the cache must be empty."""
        for layer, centre in centres.items():
            storage = self.storage[layer]
            if isinstance(storage, CompressedLayer):
                storage.centre_on(centre)

    @property
    def compressed(self) -> tuple[CompressedKV, ...]:
        """The layers that compress, one group per spec."""
        return tuple(self._compressed.values())

    def raw(self) -> tuple[RawSlots, RawSlots, RawSlots]:
        """Return the bytes of pages, of exact pages and of recurrent states, over target and drafter."""
        paged = {id(one): one for one in self.storage if isinstance(one, PagedKV)}.values()
        groups = [group.pages for group in self.compressed]
        pages = [(part, 1) for one in paged for part in (one.keys, one.values)]
        pages += [(part, 2) for group in groups for codes in (group.keys, group.values) for part in codes]
        exact = [(part, 2) for group in groups for part in (group.exact_keys, group.exact_values)]
        states = [(part, 1) for one in self._states.values() for part in (one.state, one.tail)]
        return RawSlots(pages, self.page_size), RawSlots(exact, self.page_size), RawSlots(states)

    @property
    def reads_offsets(self) -> bool:
        """Say if forwards can take the counts from `offsets` alone. The references of scans cannot."""
        return not self._states or self._kernels.scan_in_place is not None

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in {id(layer): layer for layer in self.storage}.values())
