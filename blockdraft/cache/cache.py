"""Cache: all layers of target and drafter over one page table.

The drafter's context for a token sits in that token's slot of the same page, so prefix reuse, preemption
and freeing keep it without code of their own. Page 0 is never written: what is masked out reads its zero
slot. Page 1 belongs to the scratch row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.cache.paged import PagedKV
from blockdraft.cache.rows import Rows
from blockdraft.cache.spec import LayerSpec, Recurrent, SharedWith
from blockdraft.cache.view import PagedView
from blockdraft.errors import ModelError

SCRATCH_PAGE = 1
NUM_RESERVED_PAGES = 2


class Cache:
    """Storage for every layer in `specs`; `num_pages` includes the two reserved ones."""

    def __init__(
        self,
        specs: tuple[LayerSpec, ...],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        storage: list[PagedKV] = []
        for spec in specs:
            if isinstance(spec, Recurrent):
                raise ModelError("recurrent layers are not supported yet. See docs/models.md.")
            if isinstance(spec, SharedWith):
                storage.append(storage[spec.layer])
                continue
            slots = num_pages * page_size
            storage.append(PagedKV(spec, num_slots=slots, dtype=dtype, device=device))
        self._storage = tuple(storage)

    def view(self, rows: Rows, counts: int | tuple[int, ...]) -> PagedView:
        """The view of one forward over the active rows: `counts` tokens each, from `length` on."""
        active = rows.active
        if isinstance(counts, int):
            counts = (counts,) * len(active)
        return PagedView(
            self._storage,
            pages=rows.page_table[active],
            starts=rows.length[active],
            counts=counts,
            page_size=self.page_size,
        )

    def commit(self, rows: Rows, num_committed: Tensor) -> None:
        """Make the first `num_committed` [R] tokens of the block permanent.

        Paged layers have nothing to do: `length` is the commit. Recurrent layers fold their tape here.
        """

    @property
    def num_bytes(self) -> int:
        layers = {id(layer): layer for layer in self._storage}.values()
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
