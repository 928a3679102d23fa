"""Rows: the device's view of the running sequences, one permanent row each.

`length` is the commit: cache slots [0, length) of a row are real, everything at or past it is scratch and
will be overwritten. `anchor` is the token at position `length`: known, but not in the cache yet.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.kernels.sampling import SamplingBatch


@dataclass(frozen=True, slots=True)
class RowSampling:
    """What one request asks of sampling, in plain numbers; the host's side of a row. By default, greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    output_start: int = 0
    min_end: int = 0
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_random(self) -> bool:
        return self.temperature > 0

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_penalised(self) -> bool:
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


class Rows:
    """Persistent tensors for `max_rows` sequences and one scratch row (the last)."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_pages: int,
        vocab_size: int,
        scratch_page: int,
        device: torch.device,
    ) -> None:
        count = max_rows + 1
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.device = device
        self.active = torch.empty(0, dtype=torch.int64, device=device)  # [R] rows of this step
        self.length = self._integers(count)
        self.anchor = self._integers(count)
        self.page_table = self._integers(count, max_pages)
        self.page_table[max_rows] = scratch_page
        self._real = torch.zeros(count, 6, dtype=torch.float32, device=device)
        self._whole = self._integers(count, 4)
        self._stop_ids = self._integers(count, 8) - 1
        self._bias_ids = self._integers(count, 8) - 1
        self._bias_values = torch.zeros(count, 8, dtype=torch.float32, device=device)
        self._prompt_seen = torch.zeros(count, vocab_size, dtype=torch.bool, device=device)
        self._output_counts = torch.zeros(count, vocab_size, dtype=torch.int32, device=device)
        self._host: list[RowSampling | None] = [None] * count
        self._active_host: list[RowSampling] = []

    def _integers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def place(self, row: int, token_ids: Items[int], length: int, sampling: RowSampling) -> None:
        """Give `row` to a sequence: `length` of its tokens are in the cache already.

        Penalty counts are rebuilt from the tokens, so a preempted sequence resumes where it was.
        """
        self.length[row] = length
        self.anchor[row] = token_ids[-1]
        self._host[row] = sampling
        top_k = min(sampling.top_k, self.vocab_size) if sampling.top_k > 0 else self.vocab_size
        self._whole[row] = self._tensor((sampling.seed, top_k, sampling.output_start, sampling.min_end))
        self._real[row] = torch.tensor(
            (
                sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                sampling.repetition,
                sampling.presence,
                sampling.frequency,
            ),
            device=self.device,
        )
        self._stop_ids = _write_padded(self._stop_ids, row, sampling.stop_ids, -1)
        bias_ids = tuple(token for token, _ in sampling.bias)
        self._bias_ids = _write_padded(self._bias_ids, row, bias_ids, -1)
        bias_values = tuple(value for _, value in sampling.bias)
        self._bias_values = _write_padded(self._bias_values, row, bias_values, 0)
        if sampling.is_penalised:
            self._count(row, token_ids, sampling.output_start)

    def _count(self, row: int, token_ids: Items[int], output_start: int) -> None:
        self._prompt_seen[row] = False
        self._prompt_seen[row, self._tensor(token_ids[:output_start])] = True
        outputs = self._tensor(token_ids[output_start:-1])  # the anchor is not counted
        self._output_counts[row] = torch.bincount(outputs, minlength=self.vocab_size)

    def _tensor(self, values: Items[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def set_pages(self, row: int, first: int, pages: Items[int]) -> None:
        """Page-table entries [first, first + len(pages)) of `row`."""
        self.page_table[row, first : first + len(pages)] = self._tensor(pages)

    def activate(self, row_ids: Items[int]) -> None:
        """The rows of the coming step, in order."""
        self.active = self._tensor(row_ids)
        self._active_host = [host for row in row_ids if (host := self._host[row]) is not None]

    def sampling(self) -> SamplingBatch:
        """The active rows' sampling state, gathered."""
        host, real, whole = self._active_host, self._real[self.active], self._whole[self.active]
        has_penalty = any(row.is_penalised for row in host)
        counted = self.active if has_penalty else self.active[:0]
        return SamplingBatch(
            temperature=real[:, 0],
            top_p=real[:, 1],
            min_p=real[:, 2],
            repetition=real[:, 3],
            presence=real[:, 4],
            frequency=real[:, 5],
            seed=whole[:, 0],
            top_k=whole[:, 1],
            output_start=whole[:, 2],
            min_end=whole[:, 3],
            stop_ids=self._stop_ids[self.active],
            bias_ids=self._bias_ids[self.active],
            bias_values=self._bias_values[self.active],
            prompt_seen=self._prompt_seen[counted],
            output_counts=self._output_counts[counted],
            has_random=any(row.is_random for row in host),
            has_filter=any(row.is_random and row.is_filtered for row in host),
            has_penalty=has_penalty,
            has_bias=any(row.bias for row in host),
            has_min_end=any(row.min_end > row.output_start for row in host),
        )

    def advance(self, block: Tensor, sampled: Tensor, num_committed: Tensor) -> None:
        """Commit the first `num_committed` [R] tokens of block [R, B]; the last sample is the new anchor."""
        if any(row.is_penalised for row in self._active_host):
            self._count_block(block, num_committed)
        self.length[self.active] += num_committed
        self.anchor[self.active] = sampled.gather(1, num_committed[:, None] - 1).squeeze(1)

    def _count_block(self, block: Tensor, num_committed: Tensor) -> None:
        column = torch.arange(block.shape[1], device=self.device)
        position = self.length[self.active][:, None] + column
        output_start = self._whole[self.active, 2][:, None]
        counted = (column < num_committed[:, None]) & (position >= output_start)
        row = self.active[:, None].expand_as(block)
        self._output_counts.index_put_((row, block), counted.to(torch.int32), accumulate=True)

    def extend(self, counts: Items[int]) -> None:
        """Commit `counts` prompt tokens of the active rows; the anchor stays the last known token."""
        self.length[self.active] += self._tensor(counts)


def _write_padded(table: Tensor, row: int, values: Items[float], padding: int) -> Tensor:
    """`table` [rows, K] with `values` in `row`; grows K to the next power of two when it must."""
    missing = len(values) - table.shape[1]
    if missing > 0:
        width = 1 << (len(values) - 1).bit_length()
        grown = table.new_full((table.shape[0], width), padding)
        grown[:, : table.shape[1]] = table
        table = grown
    table[row] = padding
    table[row, : len(values)] = torch.tensor(values, dtype=table.dtype, device=table.device)
    return table
