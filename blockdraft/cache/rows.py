"""Rows: tensors on the device with the state of the running sequences, one row each.

Cache slots [0, length) of a row are committed; everything from `length` on is scratch and will be
overwritten. `anchor` is the token at position `length`: known, but not in the cache yet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockdraft.kernels.acceptance import Progress
from blockdraft.kernels.gated_delta import SaveTable
from blockdraft.kernels.kernels import REFERENCE, Kernels
from blockdraft.kernels.sampling import NEVER, Needs, SamplingBatch
from blockdraft.kernels.sampling_tables import MAX_LISTED, Real, Whole
from blockdraft.kernels.transfer import array_to_device, to_device

NO_LIMIT = 1 << 30
_Given = tuple[tuple[int, ...], ...]  # what `activate` got: rows, widths and limits


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling parameters of one row, on the host. The default is greedy."""

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
    """Persistent tensors for `max_rows` sequences and one scratch row (the last).

    The tensors never move: CUDA graphs hold their addresses.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        max_rows: int,
        max_pages: int,
        vocab_size: int,
        scratch_page: int,
        device: torch.device,
        kernels: Kernels = REFERENCE,
        has_exact: bool = False,
        history_size: int = 0,
        hidden_size: int = 0,
        dtype: torch.dtype | None = None,
        save_grid: int = 0,
        max_saves: int = 0,
    ) -> None:
        """`history_size` is the number of positions whose token ids are kept for n-gram lookup.

        `hidden_size` is the size of the hidden state, of `dtype`, that is kept for an MTP head; 0: none.
        With `max_saves`, a row can save its first states at multiples of `save_grid` tokens.
        """
        count = max_rows + 1
        self.kernels = kernels
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.device = device
        self._given: _Given = ()
        self._step = self._integers(3 * count + 1)  # active, limits, offsets; a copy sets all three
        self.active = self._step[:0]  # [R] rows of this step
        self.limits = self._step[:0]  # [R] the most tokens that the step may commit
        self.offsets = self._step[:1]  # [R + 1] where the rows' tokens begin, if their widths differ
        self.widths: tuple[int, ...] = ()  # the same, on the host: the tokens of each row
        self.length = self._integers(count)
        self.anchor = self._integers(count)
        self.page_table = self._integers(count, max_pages)
        self.page_table[max_rows] = scratch_page
        self.exact_table = self.page_table.clone() if has_exact else None  # for layers that compress
        self.history: Tensor | None = None  # [rows, positions]: [0, length] known, past it scratch
        if history_size:
            self.history = torch.zeros(count, history_size, dtype=torch.int32, device=device)
        self.last_hidden: Tensor | None = None  # [rows, E]: the target's at position `length` - 1
        if hidden_size:
            self.last_hidden = torch.zeros(count, hidden_size, dtype=dtype, device=device)
        self.saves: SaveTable | None = None
        if max_saves:
            self.saves = SaveTable(self._integers(count, max_saves), save_grid)
        self._real = torch.zeros(count, len(Real), dtype=torch.float32, device=device)
        self._whole = self._integers(count, len(Whole))
        self._stop_ids = self._integers(count, MAX_LISTED) - 1
        self._bias_ids = self._integers(count, MAX_LISTED) - 1
        self._bias_values = torch.zeros(count, MAX_LISTED, dtype=torch.float32, device=device)
        self._prompt_seen = torch.zeros(count, vocab_size, dtype=torch.bool, device=device)
        self._output_counts = torch.zeros(count, vocab_size, dtype=torch.int32, device=device)
        self._host: list[RowSampling | None] = [None] * count
        self._needs = Needs()

    def _integers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def place(self, row: int, token_ids: Items[int], length: int, sampling: RowSampling) -> None:
        """Give `row` to a sequence that already has `length` tokens in the cache.

        Penalty counts and history are rebuilt from the tokens, so a preempted sequence resumes unchanged.
        """
        self.place_all([(row, token_ids, length, sampling)])

    def place_all(self, entries: Items[tuple[int, Items[int], int, RowSampling]]) -> None:
        """Place several rows at once; only penalty counts and history are copied row by row."""
        if not entries:
            return
        self._given = ()  # the same rows may need other parts of sampling now
        index = self._tensor([row for row, *_ in entries])
        samplings = [sampling for *_, sampling in entries]
        if self.last_hidden is not None:
            self.last_hidden[index] = 0  # until a token of the sequence is computed
        self.length[index] = self._tensor([length for _, _, length, _ in entries])
        self.anchor[index] = self._tensor([token_ids[-1] for _, token_ids, _, _ in entries])
        self._real[index] = self._table([self._reals(one) for one in samplings], torch.float32)
        self._whole[index] = self._table([self._wholes(one) for one in samplings])
        if self.saves is not None:
            self.saves.slots[index] = 0
        bias = [sorted(one.bias) for one in samplings]
        self._write_lists(self._stop_ids, index, [sorted(one.stop_ids) for one in samplings], padding=-1)
        self._write_lists(self._bias_ids, index, [[token for token, _ in one] for one in bias], padding=-1)
        self._write_lists(self._bias_values, index, [[value for _, value in one] for one in bias], padding=0)
        for row, token_ids, _, sampling in entries:
            self._host[row] = sampling
            if sampling.is_penalised:
                self._count(row, token_ids, sampling.output_start)
            if self.history is not None:
                self.history[row, : len(token_ids)] = self._tensor(token_ids, torch.int32)

    def _reals(self, sampling: RowSampling) -> list[float]:
        real = {
            Real.TEMPERATURE: sampling.temperature,
            Real.TOP_P: sampling.top_p,
            Real.LOG_MIN_P: math.log(sampling.min_p) if sampling.min_p > 0 else NEVER,
            Real.REPETITION: sampling.repetition,
            Real.PRESENCE: sampling.presence,
            Real.FREQUENCY: sampling.frequency,
        }
        return [real[column] for column in Real]

    def _wholes(self, sampling: RowSampling) -> list[int]:
        whole = {
            Whole.SEED: sampling.seed,
            Whole.TOP_K: min(sampling.top_k, self.vocab_size) if sampling.top_k > 0 else self.vocab_size,
            Whole.OUTPUT_START: sampling.output_start,
            Whole.MIN_END: sampling.min_end,
            Whole.NUM_STOPS: len(sampling.stop_ids),
            Whole.NUM_BIASES: len(sampling.bias),
            Whole.IS_FILTERED: sampling.is_filtered,
            Whole.IS_PENALISED: sampling.is_penalised,
        }
        return [int(whole[column]) for column in Whole]

    def _table(self, values: Items[Items[float]], dtype: torch.dtype = torch.int64) -> Tensor:
        """Copy n lists of k values to a tensor [n, k]."""
        return self._tensor([value for one in values for value in one], dtype).view(len(values), -1)

    def _write_lists(self, table: Tensor, index: Tensor, lists: Items[Items[float]], padding: int) -> None:
        """Replace the rows `index` of `table` by `lists`, padded with `padding`."""
        longest = max(len(one) for one in lists)
        assert longest <= MAX_LISTED, "Engine._check refuses longer lists"
        table[index] = padding
        if longest:
            padded = [[*one, *(padding,) * (longest - len(one))] for one in lists]
            table[index, :longest] = self._table(padded, table.dtype)

    def _count(self, row: int, token_ids: Items[int], output_start: int) -> None:
        self._prompt_seen[row] = False
        self._prompt_seen[row, self._tensor(token_ids[:output_start])] = True
        outputs = self._tensor(token_ids[output_start:-1])  # without the anchor
        ones = torch.ones_like(outputs, dtype=torch.int32)
        self._output_counts[row].zero_().index_add_(0, outputs, ones)

    def _tensor(self, values: Items[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return to_device(values, self.device, dtype)

    def set_pages(self, entries: Items[tuple[int, int, Items[int]]]) -> None:
        """Set page-table entries [first, first + len(pages)) of `row`, for each (row, first, pages)."""
        self._set_entries(self.page_table, entries)

    def set_exact_pages(self, entries: Items[tuple[int, int, Items[int]]]) -> None:
        """Set entries as `set_pages` does, for the pages of exact keys and values."""
        assert self.exact_table is not None
        self._set_entries(self.exact_table, entries)

    def set_saves(self, entries: Items[tuple[int, int, Items[int]]]) -> None:
        """Set entries as `set_pages` does, for the slots of the states that rows will save."""
        assert self.saves is not None
        self._set_entries(self.saves.slots, entries)

    def _set_entries(self, table: Tensor, entries: Items[tuple[int, int, Items[int]]]) -> None:
        width, cells, found = table.shape[1], list[int](), list[int]()
        for row, first, values in entries:
            begin = row * width + first
            cells += range(begin, begin + len(values))
            found += values
        if cells:
            where, new = array_to_device(np.array(cells + found, dtype=np.int64), self.device).chunk(2)
            table.view(-1)[where] = new

    def activate(
        self,
        row_ids: Items[int],
        num_rows: int | None = None,
        *,
        widths: Items[int] = (),
        limits: Items[int] = (),
    ) -> None:
        """Set the active rows of the next step, in order; pad them to `num_rows` with the scratch row.

        `widths`: the tokens of each row, padding included, if they differ. `limits`: the most tokens of each
        row that the step may commit, if fewer than its width.
        """
        missing = 0 if num_rows is None else num_rows - len(row_ids)
        padded = (*row_ids, *(self.max_rows,) * missing)
        count, given = len(padded), (padded, tuple(widths), tuple(limits))
        if given == self._given:
            return
        self._given = ()  # an interrupted change must not count as done
        self.active, self.limits, self.offsets = torch.split(
            self._step[: 3 * count + 1], [count, count, count + 1]
        )
        self.widths = tuple(widths)
        least = [min(pair) for pair in itertools.zip_longest(widths, limits, fillvalue=NO_LIMIT)]
        least += [NO_LIMIT] * (count - len(least))
        offsets = [0, *itertools.accumulate(widths)] if widths else []
        self._step[: 2 * count + len(offsets)].copy_(self._tensor([*padded, *least, *offsets]))
        host = [host for row in row_ids if (host := self._host[row]) is not None]
        self._needs.random = any(row.is_random for row in host)
        self._needs.filter = any(row.is_random and row.is_filtered for row in host)
        self._needs.penalty = any(row.is_penalised for row in host)
        self._needs.bias = any(row.bias for row in host)
        self._needs.min_end = any(row.min_end > row.output_start for row in host)
        self._given = given

    def sampling(self) -> SamplingBatch:
        return SamplingBatch(
            real=self._real,
            whole=self._whole,
            stop_ids=self._stop_ids,
            bias_ids=self._bias_ids,
            bias_values=self._bias_values,
            prompt_seen=self._prompt_seen,
            output_counts=self._output_counts,
            rows=self.active,
            needs=self._needs,
        )

    def advance(self, block: Tensor, sampled: Tensor, num_committed: Tensor) -> None:
        """Commit the first `num_committed` [R] tokens of block [R, B]; the last sample is the new anchor."""
        if self.history is not None:
            self.kernels.remember(self.history, sampled, self.active, self.length)
        progress = Progress(self.length, self.anchor)
        self.kernels.advance(progress, block, sampled, num_committed, self.sampling())

    def extend(self, counts: Items[int] | Tensor) -> None:
        """Commit `counts` prompt tokens of the active rows; the anchor stays."""
        if not isinstance(counts, Tensor):
            counts = self._tensor(counts)
        self.length[self.active] += counts * (self.active != self.max_rows)  # the scratch row stays
