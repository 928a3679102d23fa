"""Computes the target's hidden states of packed documents, with the prefill code of the server.

Every document is a sequence with its own pages, so all parts of the target (windows, sinks, experts,
recurrent layers) compute the same features as in the server.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blockdraft.cache.cache import SCRATCH_PAGE, Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.spec import NUM_RESERVED_PAGES
from blockdraft.kernels.transfer import array_to_device, to_device
from blockdraft.machine.machine import read_machine
from blockdraft.models.decoder import Decoder
from blockdraft.start.loading import gpu_memory
from blockdraft.training.packing import PackedRows

PAGE = 16
MAX_DOCUMENTS = 256  # in one forward; arbitrary
MAX_STATES = 16  # in one forward of a target with recurrent layers, whose states are large
KEPT_SHARE = 0.9  # of a GPU's free memory, for features that are kept
KEPT_SHARE_OF_ALL = 0.5  # if other programs use that memory, too


class FeatureReader:
    """Computes the features of up to `num_rows` packed rows of `length` tokens at a time."""

    def __init__(self, target: Decoder, *, num_rows: int, length: int) -> None:
        self._target, self._device = target, target.norm.weight.device
        self.hidden_size = target.config.hidden_size
        self._limit = MAX_STATES if target.config.is_hybrid else MAX_DOCUMENTS
        max_pages = -(-length // PAGE)
        self._cache = Cache(
            target.config.layer_specs(),
            num_pages=NUM_RESERVED_PAGES + num_rows * max_pages + self._limit,
            num_rows=self._limit + 1,
            page_size=PAGE,
            dtype=target.norm.weight.dtype,
            device=self._device,
            kernels=target.kernels,
        )
        self._rows = Rows(
            max_rows=self._limit,
            max_pages=max_pages,
            vocab_size=1,  # nothing is sampled here
            scratch_page=SCRATCH_PAGE,
            device=self._device,
        )

    @torch.no_grad()
    def read(self, rows: PackedRows, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return final hidden states [R * L, E] and features [R * L, taps * E] of the rows `chosen`.

        Both are zero outside documents.
        """
        length = rows.tokens.shape[1]
        spans = [
            (place * length + begin, place * length + end)
            for place, row in enumerate(chosen)
            for begin, end in rows.spans[row]
        ]
        tokens = rows.tokens[to_device(chosen, self._device)].flatten().long()
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
        self._rows.page_table[: len(spans)] = array_to_device(table, self._device)
        self._rows.length.zero_()
        self._rows.activate(range(len(spans)))
        index = array_to_device(places, self._device)
        hidden, features = self._target(tokens[index], self._cache.view(self._rows, counts, is_known=True))
        return index, hidden, features


def _spread(values: Tensor, index: Tensor, length: int) -> Tensor:
    out = values.new_zeros(length, values.shape[1])
    out[index] = values
    return out


class KeptFeatures:
    """Reads the features of rows and keeps as many in memory as fit."""

    def __init__(self, reader: FeatureReader, rows: PackedRows, *, has_hidden: bool) -> None:
        self._reader, self._rows = reader, rows
        self._has_hidden = has_hidden  # False: keep features only
        self._kept: Tensor | None = None  # [rows that fit, L, kept values per token]
        self._slots: dict[int, int] = {}  # row -> its place in `_kept`

    def read(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return final hidden states and features [R * L, taps * E] of the rows `chosen`.

        The hidden states are [R * L, E], or [R * L, 0] if `has_hidden` is False.
        """
        both = self._both(chosen)
        size = self._reader.hidden_size if self._has_hidden else 0
        return both[:, :size], both[:, size:].contiguous()

    def _both(self, chosen: Sequence[int]) -> Tensor:
        new = [row for row in dict.fromkeys(chosen) if row not in self._slots]
        if not new:
            assert self._kept is not None
            slots = [self._slots[row] for row in chosen]
            return self._kept[to_device(slots, self._kept.device)].flatten(0, 1)
        hidden, features = self._reader.read(self._rows, new)
        both = torch.cat((hidden, features), dim=1) if self._has_hidden else features
        read = dict(zip(new, both.chunk(len(new)), strict=True))
        if self._kept is None:
            return torch.cat([read[row] for row in chosen])
        parts = [read[row] if row in read else self._kept[self._slots[row]] for row in chosen]
        for row in new[: len(self._kept) - len(self._slots)]:
            self._slots[row] = len(self._slots)
            self._kept[self._slots[row]] = read[row]
        return torch.cat(parts)

    def keep(self, num_rows: int) -> None:
        """Keep the features that are read from now on, for up to `num_rows` rows or until memory is full."""
        like = self._both([0])  # [L, kept values per token]
        num_kept = _room_bytes(like.device) // like.nbytes
        self._kept = like.new_empty(min(num_rows, num_kept), *like.shape)

    def change(self) -> None:
        """Drop the kept rows, so that the rows read next are kept instead."""
        self._slots.clear()

    @property
    def num_kept(self) -> int:
        """Return the number of rows that can be kept."""
        return 0 if self._kept is None else len(self._kept)

    def forget(self) -> None:
        """Drop the kept rows and free their memory."""
        self._kept = None
        self._slots.clear()


def _room_bytes(device: torch.device) -> int:
    machine = read_machine()
    if device.type != "cuda":
        return int(KEPT_SHARE_OF_ALL * machine.memory_bytes)
    share = KEPT_SHARE_OF_ALL if machine.is_unified else KEPT_SHARE
    return int(share * gpu_memory(device)[0])
