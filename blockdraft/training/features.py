"""The target's hidden states of packed documents, by the very prefill that serves them.

Every document is a sequence with pages of its own, so whatever the target is made of (windows, sinks,
experts, recurrent layers) reads here as it does when it serves, and so do its features.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from blockdraft.cache.cache import NUM_RESERVED_PAGES, SCRATCH_PAGE, Cache
from blockdraft.cache.rows import Rows as CacheRows
from blockdraft.kernels.transfer import to_device
from blockdraft.models.decoder import Decoder
from blockdraft.training.packing import Batch

PAGE = 16
MAX_DOCUMENTS = 256  # of one forward; arbitrary
MAX_STATES = 16  # the same where each document has a recurrent state, which is large


class FeatureReader:
    """Reads up to `num_rows` packed rows of `length` tokens."""

    def __init__(
        self, target: Decoder, *, num_rows: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._target, self._device = target, device
        self._limit = MAX_STATES if target.config.is_hybrid else MAX_DOCUMENTS
        max_pages = -(-length // PAGE)
        self._cache = Cache(
            target.config.layer_specs(),
            num_pages=NUM_RESERVED_PAGES + num_rows * max_pages + self._limit,
            num_rows=self._limit + 1,
            page_size=PAGE,
            dtype=dtype,
            device=device,
        )
        self._rows = CacheRows(
            max_rows=self._limit,
            max_pages=max_pages,
            vocab_size=1,  # nothing is sampled here
            scratch_page=SCRATCH_PAGE,
            device=device,
        )

    @torch.no_grad()
    def read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hidden states before the head [R * L, E] and features [R * L, taps * E]; zero outside documents."""
        length = batch.tokens.shape[1]
        spans = [
            (row * length + begin, row * length + end)
            for row, documents in enumerate(batch.spans)
            for begin, end in documents
        ]
        tokens = batch.tokens.flatten()
        parts = [self._forward(tokens, spans[i : i + self._limit]) for i in range(0, len(spans), self._limit)]
        hidden, features = (torch.cat(part) for part in zip(*(part[1:] for part in parts), strict=True))
        index = torch.cat([part[0] for part in parts])
        return _spread(hidden, index, len(tokens)), _spread(features, index, len(tokens))

    def _forward(self, tokens: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        counts = tuple(end - begin for begin, end in spans)
        table = np.full((len(spans), self._rows.page_table.shape[1]), SCRATCH_PAGE)
        sizes = [-(-count // PAGE) for count in counts]
        firsts = itertools.accumulate(sizes[:-1], initial=NUM_RESERVED_PAGES)
        for row, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
            table[row, :size] = range(first, first + size)
        places = np.concatenate([np.arange(begin, end) for begin, end in spans])
        self._rows.page_table[: len(spans)] = torch.from_numpy(table).to(self._device)
        self._rows.length.zero_()
        self._rows.activate(range(len(spans)))
        index = to_device(places.tolist(), self._device)
        hidden, features = self._target(tokens[index], self._cache.view(self._rows, counts, is_known=True))
        return index, hidden, features


def _spread(values: Tensor, index: Tensor, length: int) -> Tensor:
    out = values.new_zeros(length, values.shape[1])
    out[index] = values
    return out
