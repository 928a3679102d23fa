"""Attention of blocks of queries over paged keys and values: the contract and its PyTorch reference.

A query's result depends only on the prefix that it sees, never on other sequences of the batch. So `attend`
divides the keys into fixed chunks counted from position 0, reduces every chunk at the same shape, and merges
the chunks in order: a longer sequence only adds chunks with weights of exactly zero. The result's bits may
change with the number of queries per row, as matmul's BLAS may sum in another order for another shape. The
bits of the CPU kernel, `llvm.attention`, do not change.

A sink is an additional, unscaled score per query head: it takes part in the maximum and the sum of the
softmax, but has no value.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.llvm.attention_tile import divide, divide_again
from blockdraft.kernels.sampling import Places, places_of
from blockdraft.kernels.transfer import to_device

if TYPE_CHECKING:
    from blockdraft.kernels.kv_positions import PositionRule

KEY_CHUNK = 256  # tokens; arbitrary, but constant: the result's bits depend on it
QUERY_SLICE = 64  # queries of one row at a time, to limit the score matrix


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys that a query sees, and the scale of its scores.

    Keys [0, start) are committed context, and keys [start, start + width) are the block. A causal query sees
    the block up to its own position, any other query the whole block. `window` counts the query's own
    position: the query at p sees keys in (p - window, p + window). Anchored windows are measured from the
    block's first position for all its queries, and reach back to start - window inclusive.
    """

    scale: float
    is_causal: bool = True
    window: int | None = None
    is_anchored: bool = False


class Reads:
    """The index tensors for R rows of one width, which all layers share.

    They are built from page tables [R, P], committed lengths [R] and the width: `slots` [R, L] with L a
    multiple of KEY_CHUNK, and an additive mask per distinct Mask. Keys past the block have slot 0, whose page
    is never written and stays zero, so values of other sequences, even NaN, are not multiplied in.
    """

    def __init__(
        self, *, pages: Tensor, starts: Tensor, width: int, page_size: int, exact_pages: Tensor | None = None
    ) -> None:
        self.starts = starts
        self.width = width
        longest = int(starts.max()) + width
        num_chunks = -(-longest // KEY_CHUNK)
        self._key = torch.arange(num_chunks * KEY_CHUNK, device=pages.device)  # [L]
        self._page_size = page_size
        self.slots = self._slots(pages)
        self.exact_slots = self.slots if exact_pages is None else self._slots(exact_pages)
        self._bias: dict[tuple[bool, int | None, bool, torch.dtype], Tensor] = {}

    def _slots(self, pages: Tensor) -> Tensor:
        key, page_size = self._key, self._page_size
        table = pages[:, (key // page_size).clamp_(max=pages.shape[1] - 1)]  # [R, L]
        in_reach = key < (self.starts + self.width)[:, None]
        return torch.where(in_reach, table * page_size + key % page_size, 0)

    def is_compressed(self, rule: PositionRule) -> Tensor:
        """Return a mask [R, B, L]: True where the query reads the key compressed."""
        query = self.starts[:, None, None] + torch.arange(self.width, device=self._key.device)[:, None]
        return (self._key >= TILE) & (self._key < rule.compressed_end_at(query))

    def bias(self, mask: Mask, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [R, B, L]: 0 where the query sees the key, -inf elsewhere."""
        kind = (mask.is_causal, mask.window, mask.is_anchored, dtype)
        if kind not in self._bias:
            hidden = ~self._visible(mask)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._bias[kind] = zeros.masked_fill_(hidden, float("-inf"))
        return self._bias[kind]

    def _visible(self, mask: Mask) -> Tensor:
        start = self.starts[:, None, None]  # [R, 1, 1]
        offset = torch.arange(self.width, device=start.device)[:, None]  # [B, 1]
        query = start + offset
        end = query + 1 if mask.is_causal else start + self.width
        visible = (self._key < end).expand(-1, self.width, -1)
        if mask.window is None:
            return visible
        if mask.is_anchored:
            return visible & (self._key >= start - mask.window)
        return visible & (self._key > query - mask.window) & (self._key < query + mask.window)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, reads: Reads, mask: Mask, sinks: Tensor | None = None
) -> Tensor:
    """Return attention [R, B, H, D] of q over keys and values [G, S, D] (G key/value heads, S slots).

    The caller has already written the block's own keys and values to their slots. q [R, B, H, D], sinks [H].
    """
    num_heads, num_rows, length = keys.shape[0], q.shape[0], reads.slots.shape[1]
    shape = (num_heads, num_rows, length // KEY_CHUNK, KEY_CHUNK, q.shape[-1])
    index = reads.slots.reshape(-1)
    k = keys.index_select(1, index).view(shape)
    v = values.index_select(1, index).view(shape)
    return attend_gathered(q, k, v, reads.bias(mask, q.dtype), mask, sinks)


def attend_gathered(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Mask, sinks: Tensor | None
) -> Tensor:
    """Do `attend` with gathered keys and values [G, R, C, T, D] in C chunks, masked by bias [R, B, C * T]."""
    if q.shape[1] <= QUERY_SLICE:
        return _attend_chunks(q, k, v, bias, mask, sinks)
    slices = range(0, q.shape[1], QUERY_SLICE)
    parts = [
        _attend_chunks(q[:, i : i + QUERY_SLICE], k, v, bias[:, i : i + QUERY_SLICE], mask, sinks)
        for i in slices
    ]
    return torch.cat(parts, dim=1)


def _attend_chunks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Mask, sinks: Tensor | None) -> Tensor:
    if q.dtype in (torch.bfloat16, torch.float16):  # half precision is too coarse for long sums
        return _attend_chunks(q.float(), k.float(), v.float(), bias.float(), mask, sinks).to(q.dtype)
    num_groups, num_rows, num_chunks, chunk, dim = k.shape
    width, num_heads = q.shape[1], q.shape[2]
    shared = num_heads // num_groups  # query heads per K/V head
    q = (q * mask.scale).view(num_rows, width, num_groups, shared, dim)
    q = q.permute(2, 0, 3, 1, 4).reshape(num_groups, num_rows, 1, shared * width, dim)
    scores = torch.matmul(q, k.transpose(-1, -2))  # [G, R, C, shared * B, T]
    scores = scores.view(num_groups, num_rows, num_chunks, shared, width, chunk)
    scores += bias.view(num_rows, width, num_chunks, chunk).transpose(1, 2)[None, :, :, None]
    top = scores.amax(dim=(2, 5), keepdim=True)  # [G, R, 1, shared, B, 1]
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(num_groups, 1, 1, shared, 1, 1)
        top = torch.maximum(top, sinks)
    scores -= top
    weights = scores.exp_().view(num_groups, num_rows, num_chunks, shared * width, chunk)
    total = _merge(weights.sum(dim=-1, keepdim=True))
    if sinks is not None:
        total = total + (sinks - top).exp().view(num_groups, num_rows, shared * width, 1)
    out = _merge(torch.matmul(weights, v)) / total  # [G, R, shared * B, D]
    out = out.view(num_groups, num_rows, shared, width, dim).permute(1, 3, 0, 2, 4)
    return out.reshape(num_rows, width, num_heads, dim)


def _merge(chunks: Tensor) -> Tensor:
    """Sum over the chunk axis, first to last, so that trailing zeros change no bit."""
    total = chunks[:, :, 0]
    for index in range(1, chunks.shape[2]):
        total = total + chunks[:, :, index]
    return total


# (page table, rows, starts, offsets, num_tokens=, page_size=): position and slot [N] of each token of Blocks
Locate = Callable[..., tuple[Tensor, Tensor]]


class Blocks:
    """The tokens of one forward: `counts[r]` tokens of row r that follow its committed length starts[r].

    Row r reads pages[rows[r]] of pages [.., P] (pages[r] without `rows`). Token n of the flat stream is at
    `positions[n]`. Index tensors that all layers share are built once, on first use. With `offsets`, which
    GPU kernels read, only the sum and the maximum of `counts` matter. exact_pages [.., P] are the pages of
    exact keys and values, for layers that compress. `most`: the columns of a box of these tokens, by default
    as many as the widest row has.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        pages: Tensor,
        starts: Tensor,
        counts: tuple[int, ...],
        page_size: int,
        rows: Tensor | None = None,
        locate: Locate | None = None,
        offsets: Tensor | None = None,
        exact_pages: Tensor | None = None,
        most: int | None = None,
    ) -> None:
        self._most = max(counts, default=0) if most is None else most
        self._offsets = offsets  # counts are read from here if a captured step is replayed
        self.exact_table = exact_pages
        self.table, self.starts, self.page_size, self._locate = pages, starts, page_size, locate
        self.rows = torch.arange(len(counts), device=starts.device) if rows is None else rows
        self.counts = counts
        self._units: dict[tuple[int, int, int], Tensor] = {}

    @functools.cached_property
    def offsets(self) -> Tensor:
        """Return offsets [R + 1]: tokens [offsets[r], offsets[r + 1]) of the stream belong to row r."""
        if self._offsets is not None:
            return self._offsets
        if len(set(self.counts)) == 1:  # without a copy from the host, which a CUDA graph cannot repeat
            width = self.counts[0]
            return torch.arange(0, len(self.counts) * width + 1, width, device=self.starts.device)
        return to_device((0, *itertools.accumulate(self.counts)), self.starts.device)

    @functools.cached_property
    def _row(self) -> Tensor:
        """Return the row [N] of every token in the stream."""
        row = torch.arange(len(self.counts), device=self.starts.device)
        return torch.repeat_interleave(row, torch.tensor(self.counts, device=self.starts.device))

    @functools.cached_property
    def _located(self) -> tuple[Tensor, Tensor]:
        return self._locate_in(self.table)

    @functools.cached_property
    def exact_write_slots(self) -> Tensor:
        """Return the exact slot [N] of every token in the stream, for layers that compress."""
        assert self.exact_table is not None
        return self._locate_in(self.exact_table)[1]

    def _locate_in(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position and the slot [N] of every token in the stream."""
        if self._locate is not None:
            given = table, self.rows, self.starts, self.offsets
            return self._locate(*given, num_tokens=sum(self.counts), page_size=self.page_size)
        offset = torch.arange(len(self._row), device=self.starts.device) - self.offsets[self._row]
        positions = self.starts[self._row] + offset
        page = table[self.rows][self._row, positions // self.page_size]
        return positions, page * self.page_size + positions % self.page_size

    @property
    def positions(self) -> Tensor:
        return self._located[0]

    @property
    def write_slots(self) -> Tensor:
        """Return the slot [N] of every token in the stream."""
        return self._located[1]

    @functools.cached_property
    def groups(self) -> list[Reads]:
        """Return the reference's Reads: one for all rows if they have one width, otherwise one per row."""
        if len(set(self.counts)) == 1:
            return [self._reads(slice(None), self.counts[0])]
        return [self._reads(slice(row, row + 1), count) for row, count in enumerate(self.counts) if count]

    def _reads(self, rows: slice, width: int) -> Reads:
        return Reads(
            pages=self.table[self.rows[rows]],
            starts=self.starts[rows],
            width=width,
            page_size=self.page_size,
            exact_pages=None if self.exact_table is None else self.exact_table[self.rows[rows]],
        )

    @property
    def is_even(self) -> bool:
        """Say if all rows have equally many tokens, now and whenever a captured step is replayed."""
        return self._offsets is None and len(set(self.counts)) == 1

    @functools.cached_property
    def places(self) -> Places:
        """Return the row and the column of every token in the stream."""
        return places_of(self.offsets, sum(self.counts), self._most)

    @functools.cached_property
    def draft_places(self) -> Places:
        """Return the row and the column of every draft: of all tokens but each row's first."""
        num_rows = len(self.counts)
        offsets = self.offsets - torch.arange(num_rows + 1, device=self.starts.device)
        return places_of(offsets, sum(self.counts) - num_rows, self._most - 1)

    def units(self, num_heads: int, num_groups: int) -> Tensor:
        """Return the CPU kernel's units of work; see `divide`. Each replay of a captured step renews them."""
        threads, shared = torch.get_num_threads(), num_heads // num_groups
        kind = (num_heads, num_groups, threads)
        if kind not in self._units and self._offsets is None:
            self._units[kind] = divide(self.counts, shared, num_groups, threads)
        elif kind not in self._units:
            self._units[kind] = divide_again(self.offsets, sum(self.counts), shared, num_groups, threads)
        return self._units[kind]


Attend = Callable[[Tensor, Tensor, Tensor, Blocks, Mask, Tensor | None], Tensor]


def reference_attend_paged(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
) -> Tensor:
    return by_groups(q, blocks, lambda block, reads: attend(block, keys, values, reads, mask, sinks))


def by_groups(q: Tensor, blocks: Blocks, attend: Callable[[Tensor, Reads], Tensor]) -> Tensor:
    """Return `attend` of q [N, H, D], called once for each of `blocks.groups` with its part [R, B, H, D]."""
    parts, begin = [], 0
    for reads in blocks.groups:
        end = begin + reads.starts.shape[0] * reads.width
        parts.append(attend(q[begin:end].reshape(-1, reads.width, *q.shape[1:]), reads).flatten(0, 1))
        begin = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)
