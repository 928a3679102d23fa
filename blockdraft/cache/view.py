"""View: everything one forward may read and write. Passed as an argument, never a global."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from blockdraft.cache.paged import PagedKV
from blockdraft.cache.recurrent import RecurrentState, Scan
from blockdraft.kernels.attention import Blocks, Mask

LayerStorage = PagedKV | RecurrentState


class View(Protocol):
    """What a model may do while it runs: know its positions, attend, scan, and leave things behind."""

    @property
    def positions(self) -> Tensor: ...  # [N]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        mask: Mask,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write k, v [N, G, D], then attend q [N, H, D] over the cache. Returns [N, H, D].

        None for both: the layer that this one shares with has written them. `sinks` [H] are logits that
        take part in the softmax and have no value.
        """
        ...

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put keys and values [N, G, D] of these positions into their slots."""
        ...

    def scan(self, layer: int, x: Tensor, conv: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
        """The gated delta rule over x [N, C] convolved by conv [C, W], gate and beta [N, H]: [N, H, V]."""
        ...


class CacheView:
    """The View of a serving step: N tokens in row order, `counts[r]` of them for row r.

    Row r writes positions [start, start + count) and reads [0, start + count). Everything at or past
    `start` is scratch until the step commits it.
    """

    def __init__(self, storage: tuple[LayerStorage, ...], *, blocks: Blocks, rows: Scan) -> None:
        self._storage = storage
        self._blocks = blocks
        self._rows = rows
        self.positions = blocks.positions

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        mask: Mask,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if k is not None and v is not None:
            self.write(layer, k, v)
        return self._pages(layer).attend(q, self._blocks, mask, sinks)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._pages(layer).write(self._blocks.write_slots, k, v)

    def scan(self, layer: int, x: Tensor, conv: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
        storage = self._storage[layer]
        assert isinstance(storage, RecurrentState)
        return storage.scan(x, conv, gate, beta, self._rows)

    def _pages(self, layer: int) -> PagedKV:
        storage = self._storage[layer]
        assert isinstance(storage, PagedKV)
        return storage
