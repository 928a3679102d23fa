"""View: everything one forward may read and write. Passed as an argument, never a global."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from blockdraft.cache.paged import PagedKV
from blockdraft.kernels.attention import Blocks, Mask


class View(Protocol):
    """What a model may do while it runs: know its positions, attend, and leave keys and values behind."""

    @property
    def positions(self) -> Tensor: ...  # [N]
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor: ...
    def write(self, layer: int, k: Tensor, v: Tensor) -> None: ...


class PagedView:
    """The View of a serving step: N tokens in row order, `counts[r]` of them for row r.

    Row r writes positions [start, start + count) and reads [0, start + count). Everything at or past
    `start` is scratch until the step commits it.
    """

    def __init__(
        self,
        storage: tuple[PagedKV, ...],
        *,
        pages: Tensor,  # [R, P]
        starts: Tensor,  # [R]
        counts: tuple[int, ...],
        page_size: int,
    ) -> None:
        self._storage = storage
        self._blocks = Blocks(pages=pages, starts=starts, counts=counts, page_size=page_size)
        self.positions = self._blocks.positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Write k, v [N, G, D], then attend q [N, H, D] over the cache. Returns [N, H, D]."""
        self.write(layer, k, v)
        return self._storage[layer].attend(q, self._blocks, mask)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put keys and values [N, G, D] of these positions into their slots."""
        self._storage[layer].write(self._blocks.write_slots, k, v)
