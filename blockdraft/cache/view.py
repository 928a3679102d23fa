"""View: everything one forward may read and write. Passed as an argument, never a global."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from blockdraft.cache.paged import PagedKV
from blockdraft.kernels.attention import Mask, Reads


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
        self._counts = counts
        device = starts.device
        row = torch.repeat_interleave(
            torch.arange(len(counts), device=device), torch.tensor(counts, device=device)
        )
        first = torch.tensor(counts, device=device).cumsum(0) - torch.tensor(counts, device=device)
        self.positions = starts[row] + torch.arange(len(row), device=device) - first[row]
        page = pages[row, self.positions // page_size]
        self._slots = page * page_size + self.positions % page_size  # [N] where to write
        self._reads = _group(pages, starts, counts, page_size)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Write k, v [N, G, D], then attend q [N, H, D] over the cache. Returns [N, H, D]."""
        self.write(layer, k, v)
        storage = self._storage[layer]
        parts, begin = [], 0
        for reads in self._reads:
            end = begin + reads.starts.shape[0] * reads.width
            block = q[begin:end].view(-1, reads.width, *q.shape[1:])  # [R, B, H, D]
            parts.append(storage.attend(block, reads, mask).flatten(0, 1))
            begin = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put keys and values [N, G, D] of these positions into their slots."""
        self._storage[layer].write(self._slots, k, v)


def _group(pages: Tensor, starts: Tensor, counts: tuple[int, ...], page_size: int) -> list[Reads]:
    """Rows of equal width attend together; a ragged batch attends row by row."""
    if len(set(counts)) == 1:
        return [Reads(pages=pages, starts=starts, width=counts[0], page_size=page_size)]
    return [
        Reads(
            pages=pages[row : row + 1],
            starts=starts[row : row + 1],
            width=count,
            page_size=page_size,
        )
        for row, count in enumerate(counts)
    ]
