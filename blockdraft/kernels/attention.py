"""Attention of a block of queries over paged keys and values: the contract and its PyTorch reference.

A query's result depends on its own visible prefix only, never on its neighbours in the batch. The keys
are therefore cut into fixed chunks counted from position 0, every chunk is reduced at the same shape,
and the chunks are merged in order: a longer neighbour only adds chunks that weigh exactly zero. What the
reference cannot promise: equal bits for another number of queries per row, since the BLAS behind matmul
may choose another order of summation for another shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEY_CHUNK = 256  # tokens; arbitrary, but a constant: it is part of the result's bits
QUERY_SLICE = 64  # queries of one row at a time, which bounds the score matrix


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees, and how its scores are shaped.

    Keys [0, start) are committed context and [start, start + width) is the block itself. A causal query
    sees the block up to itself, otherwise all of it. `window` counts the query's own position, so the
    query at p sees keys in (p - window, p + window); anchored windows are measured from the block's
    first position for all its queries, and reach back to start - window inclusive.
    """

    scale: float
    is_causal: bool = True
    window: int | None = None
    is_anchored: bool = False
    softcap: float | None = None


class Reads:
    """What R rows of equal width read: page tables [R, P], committed lengths [R], block width.

    The index tensors that every layer shares are made once here: `slots` [R, L] with L a multiple of
    KEY_CHUNK, and an additive mask per distinct Mask. Keys out of reach point at slot 0, whose page is
    never written and stays zero: what another sequence left behind, even NaN, is not multiplied in.
    """

    def __init__(self, *, pages: Tensor, starts: Tensor, width: int, page_size: int) -> None:
        self.starts = starts
        self.width = width
        longest = int(starts.max()) + width
        num_chunks = -(-longest // KEY_CHUNK)
        key = torch.arange(num_chunks * KEY_CHUNK, device=pages.device)  # [L]
        table = pages[:, (key // page_size).clamp_(max=pages.shape[1] - 1)]  # [R, L]
        in_reach = key < (starts + width)[:, None]
        self.slots = torch.where(in_reach, table * page_size + key % page_size, 0)
        self._key = key
        self._bias: dict[tuple[bool, int | None, bool, torch.dtype], Tensor] = {}

    def bias(self, mask: Mask, dtype: torch.dtype) -> Tensor:
        """[R, B, L]: 0 where the query sees the key, -inf elsewhere."""
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


def attend(q: Tensor, keys: Tensor, values: Tensor, reads: Reads, mask: Mask) -> Tensor:
    """Attention of q [R, B, H, D] over keys and values [G, S, D] (G key/value heads, S slots).

    The block's own keys and values are in their slots already. Returns [R, B, H, D].
    """
    bias = reads.bias(mask, q.dtype)
    num_heads, num_rows, length = keys.shape[0], q.shape[0], reads.slots.shape[1]
    shape = (num_heads, num_rows, length // KEY_CHUNK, KEY_CHUNK, q.shape[-1])
    index = reads.slots.reshape(-1)
    k = keys.index_select(1, index).view(shape)  # [G, R, C, T, D]
    v = values.index_select(1, index).view(shape)
    if q.shape[1] <= QUERY_SLICE:
        return _attend_chunks(q, k, v, bias, mask)
    slices = range(0, q.shape[1], QUERY_SLICE)
    parts = [
        _attend_chunks(q[:, i : i + QUERY_SLICE], k, v, bias[:, i : i + QUERY_SLICE], mask) for i in slices
    ]
    return torch.cat(parts, dim=1)


def _attend_chunks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Mask) -> Tensor:
    num_groups, num_rows, num_chunks, chunk, dim = k.shape
    width, num_heads = q.shape[1], q.shape[2]
    shared = num_heads // num_groups  # query heads per K/V head
    q = (q * mask.scale).view(num_rows, width, num_groups, shared, dim)
    q = q.permute(2, 0, 3, 1, 4).reshape(num_groups, num_rows, 1, shared * width, dim)
    scores = torch.matmul(q, k.transpose(-1, -2))  # [G, R, C, shared * B, T]
    if mask.softcap is not None:
        scores = torch.tanh(scores / mask.softcap) * mask.softcap
    scores = scores.view(num_groups, num_rows, num_chunks, shared, width, chunk)
    scores += bias.view(num_rows, width, num_chunks, chunk).transpose(1, 2)[None, :, :, None]
    scores -= scores.amax(dim=(2, 5), keepdim=True)
    weights = scores.exp_().view(num_groups, num_rows, num_chunks, shared * width, chunk)
    total = _merge(weights.sum(dim=-1, keepdim=True))
    out = _merge(torch.matmul(weights, v)) / total  # [G, R, shared * B, D]
    out = out.view(num_groups, num_rows, shared, width, dim).permute(1, 3, 0, 2, 4)
    return out.reshape(num_rows, width, num_heads, dim)


def _merge(chunks: Tensor) -> Tensor:
    """Sum over the chunk axis, first to last: trailing zeros change no bit."""
    total = chunks[:, :, 0]
    for index in range(1, chunks.shape[2]):
        total = total + chunks[:, :, index]
    return total
