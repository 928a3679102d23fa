"""PagedKV: one layer's keys and values in slots."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockdraft.cache.spec import Paged
from blockdraft.kernels.attention import Blocks
from blockdraft.kernels.heads import Slots
from blockdraft.machine.private_memory import private_memory


class PagedKV:
    """Keys and values [G, S, D] in the model's dtype; slot = page * page_size + offset.

    Only slot 0, where masked reads go, is initialised: every other slot is written before it is read, and
    untouched memory costs nothing.
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
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def untouched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory that becomes resident when it is written.

    It has no huge pages: a cache is sized for the worst case, and a huge page makes 2 MB resident around the
    first token of every head (360 MB for SmolLM2-135M, at the same speed; 2 x Neoverse-N1, 2026-11).
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    memory = private_memory(math.prod(shape) * dtype.itemsize, has_huge_pages=False)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
