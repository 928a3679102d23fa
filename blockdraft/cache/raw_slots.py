"""RawSlots: copies pages or saved states out of a cache, and into another one, as bytes."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor


class RawSlots:
    """The tensors that hold something for each page, or for each state, over all layers.

    `tensors`: each with its dimension of slots. An item is `size` slots of every tensor.
    """

    def __init__(self, tensors: Items[tuple[Tensor, int]], size: int = 1) -> None:
        self._views = [
            tensor.view(*tensor.shape[:dim], -1, size, *tensor.shape[dim + 1 :]).movedim(dim, 0)
            for tensor, dim in tensors
        ]
        self._num_bytes = [view[0].nbytes for view in self._views]
        self.num_bytes = sum(self._num_bytes)  # of an item

    @torch.inference_mode()
    def read(self, numbers: Items[int]) -> Tensor:
        """Return the bytes [items, num_bytes] of these items, on the host."""
        # One tensor after the other: a full card has no memory for all of them.
        parts = [view[list(numbers)].flatten(1).contiguous().view(torch.uint8).cpu() for view in self._views]
        return torch.cat(parts, dim=1)

    @torch.inference_mode()
    def write(self, numbers: Items[int], raw: Tensor) -> None:
        """Fill these items with the bytes [items, num_bytes] that `read` returned for as many others."""
        for view, part in zip(self._views, torch.split(raw, self._num_bytes, dim=1), strict=True):
            values = part.contiguous().view(view.dtype).view(-1, *view.shape[1:])
            view[list(numbers)] = values.to(view.device)
