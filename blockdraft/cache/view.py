"""View: everything that one forward may read and write. It is passed as an argument."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from blockdraft.cache.paged import CompressedLayer, PagedKV
from blockdraft.cache.recurrent import RecurrentState, Scan
from blockdraft.kernels.attention import Blocks, Mask
from blockdraft.kernels.gated_delta import DeltaWeights
from blockdraft.kernels.heads import HeadNorms, apply_rotation, write
from blockdraft.kernels.kernels import Kernels
from blockdraft.kernels.kv_compressed import Tiles
from blockdraft.kernels.pointwise import Angles
from blockdraft.kernels.sampling import Places

LayerStorage = PagedKV | CompressedLayer | RecurrentState


class View(Protocol):
    """A model's interface to the cache: positions, attention, scans and writes."""

    @property
    def positions(self) -> Tensor: ...  # [N]

    def attend(  # noqa: PLR0913
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        mask: Mask,
        *,
        angles: Angles | None,
        norms: HeadNorms | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Normalise and rotate q [N, H, D] and k, write k and v [N, G, D], then attend; return [N, H, D].

        Without angles, q and k must already be normalised and rotated. Without k and v, the layer reads keys
        and values that another layer has written. `sinks` [H] are logits that take part in the softmax and
        have no value.
        """
        ...

    def write(self, layer: int, k: Tensor, v: Tensor, *, angles: Angles, norms: HeadNorms | None) -> None:
        """Normalise and rotate keys; write keys and values [N, G, D] to their slots."""
        ...

    def before(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [R, G, D] of the token before each row's first one; 0 if there is none."""
        ...

    def scan(self, layer: int, x: Tensor, beta: Tensor, gate: Tensor, weights: DeltaWeights) -> Tensor:
        """Convolve x [N, C], apply the gated delta rule by logits beta and gate [N, H]; return [N, H, V]."""
        ...


class CacheView:
    """The View of a serving step: N tokens in row order, `counts[r]` of them for row r.

    Row r writes positions [start, start + count) and reads [0, start + count). Everything from `start` on is
    scratch until the step commits it.
    """

    def __init__(
        self,
        storage: tuple[LayerStorage, ...],
        *,
        blocks: Blocks,
        rows: Scan,
        kernels: Kernels,
        tiles: Tiles | None = None,
    ) -> None:
        self._tiles = tiles  # tiles that compressed layers compress after their writes
        self._storage = storage
        self._kernels = kernels
        self._blocks = blocks
        self._rows = rows

    @property
    def positions(self) -> Tensor:
        return self._blocks.positions

    @property
    def starts(self) -> Tensor:
        """The lengths [R] of the rows before this forward."""
        return self._blocks.starts

    @property
    def offsets(self) -> Tensor:
        """The tokens [offsets[r], offsets[r + 1]) belong to row r; [R + 1]."""
        return self._blocks.offsets

    @property
    def places(self) -> Places | None:
        """The row and the column of each token; None if all rows have equally many tokens."""
        return None if self._blocks.is_even else self._blocks.places

    @property
    def draft_places(self) -> Places | None:
        """The row and the column of each draft, if the rows' widths differ. The first draft has column 0."""
        return None if self._blocks.is_even else self._blocks.draft_places

    def stream(self, box: Tensor) -> Tensor:
        """Return the tokens' entries [N, ...] of a box [R, columns, ...]."""
        return box.flatten(0, 1) if self.places is None else self.places.take(box)

    def box(self, stream: Tensor, num_columns: int) -> Tensor:
        """Return a stream [N, ...] as a box [R, columns, ...], with zeros past a row's tokens."""
        if self.places is None:
            return stream.view(len(self.starts), num_columns, *stream.shape[1:])
        return self.places.put(stream)

    def attend(  # noqa: PLR0913
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        mask: Mask,
        *,
        angles: Angles | None,
        norms: HeadNorms | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        storage = self._pages(layer)
        blocks = self._blocks_of(storage)
        if k is not None and v is not None:
            slots = storage.slots(blocks)
            if angles is None:
                write(k, v, slots)
                q = apply_rotation(q, slots.rotation)
            else:
                rotated = self._kernels.norm_rope_write(q, k, v, norms, angles, slots)
                assert rotated is not None
                q = rotated
            self._wrote(storage)
        elif isinstance(storage, CompressedLayer):
            q = apply_rotation(q, storage.slots(blocks).rotation)
        if isinstance(storage, CompressedLayer):
            return self._kernels.attend_compressed(q, storage.pages, blocks, mask, sinks)
        return self._kernels.attend(q, storage.keys, storage.values, blocks, mask, sinks)

    def _blocks_of(self, storage: PagedKV | CompressedLayer) -> Blocks:
        """Return the tokens of this forward, with the pages that a layer reads."""
        return self._blocks

    def _wrote(self, storage: PagedKV | CompressedLayer) -> None:
        """Do what follows the writes to a layer, before any query reads it."""
        if isinstance(storage, CompressedLayer) and self._tiles is not None:
            storage.compress(self._tiles)

    def write(self, layer: int, k: Tensor, v: Tensor, *, angles: Angles, norms: HeadNorms | None) -> None:
        storage = self._pages(layer)
        slots = storage.slots(self._blocks_of(storage))
        self._kernels.norm_rope_write(None, k, v, norms, angles, slots)
        self._wrote(storage)

    def before(self, layer: int) -> tuple[Tensor, Tensor]:
        storage, blocks = self._storage[layer], self._blocks
        assert isinstance(storage, PagedKV)
        last = (blocks.starts - 1).clamp(min=0)
        page = blocks.table[blocks.rows, last // blocks.page_size]
        # Slot 0 holds zeros.
        slot = (page * blocks.page_size + last % blocks.page_size).masked_fill(blocks.starts == 0, 0)
        return storage.keys[:, slot].transpose(0, 1), storage.values[:, slot].transpose(0, 1)

    def scan(self, layer: int, x: Tensor, beta: Tensor, gate: Tensor, weights: DeltaWeights) -> Tensor:
        storage = self._storage[layer]
        assert isinstance(storage, RecurrentState)
        return storage.scan(x, beta, gate, weights, self._rows)

    def _pages(self, layer: int) -> PagedKV | CompressedLayer:
        storage = self._storage[layer]
        assert not isinstance(storage, RecurrentState)
        return storage
