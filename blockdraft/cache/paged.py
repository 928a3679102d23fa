"""Keys and values in slots: PagedKV of one layer, CompressedKV of all layers that compress."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockdraft.cache.spec import Compressed, Paged
from blockdraft.kernels import kv_codec
from blockdraft.kernels.attention import Blocks
from blockdraft.kernels.heads import Rotation, Slots
from blockdraft.kernels.kernels import Kernels
from blockdraft.kernels.kv_compressed import Codes, CompressedPages, Tiles
from blockdraft.kernels.kv_formats import SCALE_BYTES
from blockdraft.kernels.kv_positions import PositionRule
from blockdraft.machine.private_memory import private_memory


class PagedKV:
    """Keys and values [G, S, D] in the model's dtype; slot = page * page_size + offset.

    Only slot 0, where masked reads go, is initialised. Every other slot is written before it is read, and
    memory that was never written costs nothing.
    """

    def __init__(self, spec: Paged, *, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (spec.num_kv_heads, num_slots, spec.head_dim)
        self.keys = untouched(shape, dtype, device)
        self.values = untouched(shape, dtype, device)
        self.keys[:, 0] = 0
        self.values[:, 0] = 0

    def slots(self, blocks: Blocks) -> Slots:
        return Slots(self.keys, self.values, blocks.write_slots)

    @property
    def exact(self) -> tuple[Tensor, Tensor]:
        """The keys and values [G, S, D] that forwards write."""
        return self.keys, self.values

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class CompressedKV:
    """All layers of one spec: `num_slots` compressed slots and `num_exact_slots` exact ones."""

    def __init__(  # noqa: PLR0913
        self,
        spec: Compressed,
        *,
        num_layers: int,
        num_slots: int,
        num_exact_slots: int,
        rule: PositionRule,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        form = kv_codec.kv_format(spec.format, spec.head_dim)
        lead, dim = (num_layers, spec.num_kv_heads), spec.head_dim
        exact = [untouched((*lead, num_exact_slots, dim), dtype, device) for _ in range(2)]
        stores = [
            Codes(
                untouched((*lead, num_slots, codec.num_bytes(dim) - SCALE_BYTES), torch.uint8, device),
                untouched((*lead, num_slots), torch.float16, device),
            )
            for codec in (form.keys, form.values)
        ]
        for tensor in (*exact, *stores[0], *stores[1]):
            tensor[:, :, 0] = 0  # masked reads go here
        self.pages = CompressedPages(form, rule, exact[0], exact[1], stores[0], stores[1])
        # A constant per head that is subtracted from keys before they are stored: zero until `centre_keys`.
        self.centre = torch.zeros((*lead, dim), dtype=torch.float32, device=device)
        self._signs = kv_codec.signs(dim, device) if form.is_rotated else None

    def slots(self, layer: int, blocks: Blocks) -> Slots:
        """Return the exact slots that this forward writes."""
        rotation = None if self._signs is None else Rotation(self._signs, self.centre[layer])
        pages = self.pages
        return Slots(pages.exact_keys[layer], pages.exact_values[layer], blocks.exact_write_slots, rotation)

    def compress(self, tiles: Tiles, layer: int | None = None) -> None:
        """Compress tiles in `layer`, or in all layers if it is None."""
        self._kernels.compress(self.pages if layer is None else self.pages.layer(layer), tiles)

    @property
    def num_bytes(self) -> int:
        pages = self.pages
        tensors = (pages.exact_keys, pages.exact_values, *pages.keys, *pages.values)
        return sum(tensor.nbytes for tensor in tensors)


class CompressedLayer:
    """One layer of CompressedKV."""

    def __init__(self, group: CompressedKV, layer: int) -> None:
        self.group = group
        self.pages = group.pages.layer(layer)
        self._layer = layer

    def slots(self, blocks: Blocks) -> Slots:
        return self.group.slots(self._layer, blocks)

    @property
    def exact(self) -> tuple[Tensor, Tensor]:
        """The keys and values [G, S, D] that forwards write."""
        pages = self.group.pages
        return pages.exact_keys[self._layer], pages.exact_values[self._layer]

    def compress(self, tiles: Tiles) -> None:
        self.group.compress(tiles, self._layer)

    def centre_on(self, mean: Tensor) -> None:
        """Subtract the rotated `mean` [G, D] from keys before they are stored; the cache must be empty."""
        if self.pages.format.is_rotated:
            self.group.centre[self._layer] = kv_codec.rotate(mean)

    @property
    def num_bytes(self) -> int:
        return self.group.num_bytes // len(self.group.pages.exact_keys)


def untouched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory that becomes resident only when it is written.

    Huge pages are switched off: a cache is sized for the worst case, and each huge page would make 2 MB
    resident for the first token of a head (360 MB for SmolLM2-135M, at the same speed; 2 x Neoverse-N1,
    2026-11).
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    memory = private_memory(math.prod(shape) * dtype.itemsize, has_huge_pages=False)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
