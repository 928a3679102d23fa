"""The View of a drafter in training: a whole batch at once, without a cache.

A batch has R rows of L tokens and A blocks of C columns. Queries are the A * C block tokens of a row. Keys
are the L context vectors of the row, followed by its block tokens. A block whose anchor is at place a, in a
document that begins at s, attends to

    context vectors [s, a)     but not the anchor's, whose feature almost reveals the first draft
    its own block              all of it, or only up to the query if the layer is causal

as with `cache.view.CacheView` in the server. On a GPU, FlexAttention skips masked tiles; a CPU uses a dense
mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from blockdraft.kernels.attention import Mask
from blockdraft.kernels.gated_delta import DeltaWeights
from blockdraft.kernels.heads import HeadNorms
from blockdraft.kernels.pointwise import Angles, reference_rms_norm, reference_rotate
from blockdraft.training.packing import TrainingBatch

TILE = 128  # of FlexAttention's block masks

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, head, query, key) -> bool, elementwise
Seen = Tensor | BlockMask
Kept = dict[int, tuple[Tensor, Tensor]]  # keys and values of the context, by layer


def block_masks(batch: TrainingBatch, layers: Mapping[int, Mask]) -> dict[int, Seen]:
    """Return the attention mask of each layer; layers of the same kind share one mask."""
    build: Callable[[TrainingBatch, Sees], Seen] = _tiles if batch.tokens.is_cuda else dense_mask
    kinds = {kind: build(batch, sees(batch, kind)) for kind in set(layers.values())}
    return {layer: kinds[kind] for layer, kind in layers.items()}


def sees(batch: TrainingBatch, mask: Mask) -> Sees:
    """Return the rule in this module's docstring as a function, for one kind of layer."""
    length, block, window = batch.tokens.shape[1], batch.num_columns, mask.window
    anchors, starts = batch.anchors, batch.block_starts

    def see(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        number = query // block
        anchor, start = anchors[row, number], starts[row, number]
        in_context = (key >= start) & (key < anchor)
        own = (key >= length) & ((key - length) // block == number)
        if mask.is_causal:
            own = own & (key - length <= query)
        seen = in_context | own
        if window is None:
            return seen
        place = torch.where(key < length, key, anchor + (key - length) % block)
        if mask.is_anchored:
            return seen & (place >= anchor - window)
        at = anchor + query % block
        return seen & (place > at - window) & (place < at + window)

    return see


def dense_mask(batch: TrainingBatch, see: Sees) -> Tensor:
    """Return the mask as a tensor [R, 1, A * C, L + A * C]."""
    num_rows, length = batch.tokens.shape
    size = batch.anchors.shape[1] * batch.num_columns
    row = torch.arange(num_rows, device=batch.tokens.device)[:, None, None, None]
    query = torch.arange(size, device=row.device)[:, None]
    return see(row, row, query, torch.arange(length + size, device=row.device))


def _tiles(batch: TrainingBatch, see: Sees) -> BlockMask:
    """Return the mask for FlexAttention; compute the used tiles without testing every pair of tokens."""
    length, block, device = batch.tokens.shape[1], batch.num_columns, batch.tokens.device
    size = batch.anchors.shape[1] * block
    first = torch.arange(0, length + size, TILE, device=device)  # the first key of each tile
    anchors, starts = batch.anchors[..., None], batch.block_starts[..., None]
    own = torch.arange(length, length + size, block, device=device)[:, None]
    context = (starts < anchors) & (first < anchors) & (first + TILE > starts)
    itself = (first < own + block) & (first + TILE > own)
    by_query = (context | itself).repeat_interleave(block, dim=1)  # [R, A * C, key tiles]
    by_query = functional.pad(by_query, (0, 0, 0, -size % TILE))
    is_used = by_query.view(len(batch.tokens), -1, TILE, len(first)).any(dim=2)  # [R, query tiles, key tiles]
    counts = is_used.sum(dim=-1, dtype=torch.int32)[:, None]
    order = is_used.int().argsort(dim=-1, descending=True, stable=True).int()[:, None]
    return BlockMask.from_kv_blocks(
        counts, order, BLOCK_SIZE=TILE, mask_mod=see, seq_lengths=(size, length + size)
    )


class TrainView:
    """The View of a training forward. `write` stores the context's keys and values in `kept` for `attend`."""

    def __init__(self, positions: Tensor, kept: Kept, *, num_rows: int, masks: Mapping[int, Seen]) -> None:
        self.positions = positions  # [R * L], or [R * A * C]
        self._kept = kept
        self._num_rows = num_rows
        self._masks = masks

    def write(self, layer: int, k: Tensor, v: Tensor, *, angles: Angles, norms: HeadNorms | None) -> None:
        self._kept[layer] = _placed(k, None if norms is None else norms.k, norms, angles), v

    def before(self, layer: int) -> tuple[Tensor, Tensor]:
        """Do as View says, for one block per row."""
        last = self.positions.view(self._num_rows, -1)[:, 0] - 1
        rows = torch.arange(self._num_rows, device=last.device)
        k, v = (
            x.view(self._num_rows, -1, *x.shape[1:])[rows, last.clamp(min=0)] * (last >= 0)[:, None, None]
            for x in self._kept[layer]
        )
        return k, v

    def scan(self, layer: int, x: Tensor, beta: Tensor, gate: Tensor, weights: DeltaWeights) -> Tensor:
        raise AssertionError("a drafter has no recurrent layers")

    def attend(  # noqa: PLR0913
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        mask: Mask,
        *,
        angles: Angles | None,
        norms: HeadNorms | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert k is not None
        assert v is not None
        assert angles is not None
        assert sinks is None
        q = _placed(q, None if norms is None else norms.q, norms, angles)
        k = _placed(k, None if norms is None else norms.k, norms, angles)
        seen_k, seen_v = self._kept[layer]
        keys = torch.cat((self._by_row(seen_k), self._by_row(k)), dim=2)
        values = torch.cat((self._by_row(seen_v), self._by_row(v)), dim=2)
        out = _attend(self._by_row(q), keys, values, self._masks[layer], mask.scale)
        return out.transpose(1, 2).reshape(q.shape)

    def _by_row(self, x: Tensor) -> Tensor:
        """Reshape [R * T, H, D] to [R, H, T, D]."""
        return x.view(self._num_rows, -1, *x.shape[1:]).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Seen, scale: float) -> Tensor:
    if isinstance(mask, BlockMask):
        out = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _placed(x: Tensor, weight: Tensor | None, norms: HeadNorms | None, angles: Angles) -> Tensor:
    """Return `x` normalised per head (if there are `norms`) and rotated to its position, in its own dtype."""
    if norms is not None:
        x = reference_rms_norm(x, weight, norms.eps)
    return reference_rotate(x, angles).to(x.dtype)
