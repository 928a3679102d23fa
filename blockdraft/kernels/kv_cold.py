"""Attention over pages of which most are compressed: the contract, its PyTorch reference, the choice.

A layer keeps two stores. Exact keys and values, in the model's dtype, lie in pages of their own: of a running
row the first tile, the window and the block (`Blocks.exact_table`). Compressed ones lie in the pages that all
layers share (`Blocks.table`). `kv_positions` says which of the two a query reads.

    write      keys and values go into exact slots; with `Turn` (kernels/heads.py) rotated and centred
    compress   tiles that fall behind are encoded from their exact slots into their compressed ones
    attend     both are read in one pass; where keys are rotated so are the queries that come in, and the
               rotation of the values is taken back from what comes out
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from blockdraft.kernels.attention import KEY_CHUNK, Blocks, Mask, Reads, attend_gathered
from blockdraft.kernels.choice import Available
from blockdraft.kernels.failure import named
from blockdraft.kernels.kv_codec import Codec, Encoded, KvFormat, rotate_back
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.kv_positions import PositionRule

if TYPE_CHECKING:
    from blockdraft.kernels.llvm.kv_attention import ColdAttention
    from blockdraft.kernels.llvm.kv_compress import CompressTiles


class Codes(NamedTuple):
    """Compressed keys, or values, of some layers."""

    codes: Tensor  # uint8 [L, G, S, bytes]
    scale: Tensor  # float16 [L, G, S]


class ColdPages(NamedTuple):
    """Keys and values of L layers of the same kind: exact [L, G, X, D] in X slots, compressed in S slots."""

    format: KvFormat
    rule: PositionRule
    exact_keys: Tensor
    exact_values: Tensor
    keys: Codes
    values: Codes

    def layer(self, index: int) -> ColdPages:
        """One of them, L = 1."""
        one = slice(index, index + 1)
        return ColdPages(
            self.format,
            self.rule,
            self.exact_keys[one],
            self.exact_values[one],
            Codes(*(part[one] for part in self.keys)),
            Codes(*(part[one] for part in self.values)),
        )


@dataclass(frozen=True)
class Tiles:
    """What to compress as rows of `starts` tokens grow by `counts`: whole tiles, at most `most` of a row."""

    table: Tensor  # [.., P]: row r reads table[rows[r]]
    exact_table: Tensor  # likewise
    rows: Tensor  # [R]
    starts: Tensor  # [R]
    counts: Tensor  # [R]
    rule: PositionRule
    most: int
    page_size: int

    @functools.cached_property
    def begins(self) -> Tensor:
        """[R] the first position of each row's; a card's kernel finds it by itself."""
        return self.rule.compressed_end(self.starts)

    @functools.cached_property
    def ends(self) -> Tensor:
        """[R] the one behind its last."""
        return self.rule.compressed_end(self.starts + self.counts)


AttendCold = Callable[[Tensor, ColdPages, Blocks, Mask, Tensor | None], Tensor]
Compress = Callable[[ColdPages, Tiles], None]


def pick_attend_cold(at: Available) -> AttendCold:
    """Attention of q [N, H, D] over one layer's ColdPages (L = 1); sinks [H]. Returns [N, H, D]."""
    if at.has_triton("attention"):
        return named("attention", _triton_attend_cold)
    return _llvm_attend_cold(at.dtype) if at.has_llvm() else reference_attend_cold_paged


def _triton_attend_cold(
    q: Tensor, pages: ColdPages, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
) -> Tensor:
    from blockdraft.kernels.triton.kv_attention import attend_cold  # Gluon's import takes a while

    return attend_cold(q, pages, blocks, mask, sinks)


def pick_compress(at: Available) -> Compress:
    if at.has_triton("attention"):
        from blockdraft.kernels.triton.kv_compress import compress

        return named("attention", compress)
    return _llvm_compress(at.dtype) if at.has_llvm() else reference_compress


def _llvm_lanes(form: KvFormat) -> int:
    """What a head must be a multiple of."""
    return 16 if form.is_turned else 4


def _llvm_attend_cold(dtype: torch.dtype) -> AttendCold:
    def attend_cold(
        q: Tensor, pages: ColdPages, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
    ) -> Tensor:
        if q.shape[-1] % _llvm_lanes(pages.format) != 0:
            return reference_attend_cold_paged(q, pages, blocks, mask, sinks)
        return _llvm_attention(dtype, q.shape[-1], pages.format)(q, pages, blocks, mask, sinks)

    return attend_cold


@functools.cache
def _llvm_attention(dtype: torch.dtype, head_dim: int, form: KvFormat) -> ColdAttention:
    from blockdraft.kernels.llvm.kv_attention import ColdAttention

    return ColdAttention(dtype, head_dim, form)


def _llvm_compress(dtype: torch.dtype) -> Compress:
    def compress(pages: ColdPages, tiles: Tiles) -> None:
        head_dim = pages.exact_keys.shape[-1]
        if head_dim % _llvm_lanes(pages.format) != 0:
            reference_compress(pages, tiles)
        else:
            _llvm_tiles(dtype, head_dim, pages.format)(pages, tiles)

    return compress


@functools.cache
def _llvm_tiles(dtype: torch.dtype, head_dim: int, form: KvFormat) -> CompressTiles:
    from blockdraft.kernels.llvm.kv_compress import CompressTiles

    return CompressTiles(dtype, head_dim, form)


def reference_attend_cold_paged(
    q: Tensor, pages: ColdPages, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
) -> Tensor:
    parts, begin = [], 0
    for reads in blocks.groups:
        end = begin + reads.starts.shape[0] * reads.width
        block = q[begin:end].reshape(-1, reads.width, *q.shape[1:])  # [R, B, H, D]
        parts.append(_attend(block, pages, reads, mask, sinks).flatten(0, 1))
        begin = end
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if not pages.format.is_turned:
        return out
    return rotate_back(out.to(torch.promote_types(q.dtype, torch.float32))).to(q.dtype)


def _attend(q: Tensor, pages: ColdPages, reads: Reads, mask: Mask, sinks: Tensor | None) -> Tensor:
    """All keys twice, compressed ones first: each query is shown every key in one place only.

    What no query of a row reads in one place is the zero slot there: whatever it holds is not multiplied in.
    """
    is_cold = reads.is_cold(pages.rule)  # [R, B, L]
    cold_slots = reads.slots.where(is_cold.any(dim=1), 0)
    exact_slots = reads.exact_slots.where(~is_cold.all(dim=1), 0)
    both = [
        torch.cat((_decoded(codec, codes, cold_slots).to(q.dtype), exact[0][:, exact_slots]), dim=2)
        for codec, codes, exact in (
            (pages.format.keys, pages.keys, pages.exact_keys),
            (pages.format.values, pages.values, pages.exact_values),
        )
    ]  # [G, R, 2 L, D]
    k, v = (x.view(*x.shape[:2], -1, KEY_CHUNK, x.shape[-1]) for x in both)
    bias = reads.bias(mask, q.dtype)  # [R, B, L]
    hidden = float("-inf")
    bias = torch.cat((bias.masked_fill(~is_cold, hidden), bias.masked_fill(is_cold, hidden)), dim=2)
    return attend_gathered(q, k, v, bias, mask, sinks)


def _decoded(codec: Codec, codes: Codes, slots: Tensor) -> Tensor:
    return codec.decode(Encoded(codes.codes[0][:, slots], codes.scale[0][:, slots]))


def reference_compress(pages: ColdPages, tiles: Tiles) -> None:
    offset = torch.arange(tiles.most * TILE, device=tiles.begins.device)
    positions = tiles.begins[:, None] + offset  # [R, most * TILE]
    is_meant = positions < tiles.ends[:, None]
    positions = positions.where(is_meant, 0)
    inside = positions % tiles.page_size
    row = tiles.rows[:, None].expand_as(positions)
    places = [
        table[row, positions // tiles.page_size] * tiles.page_size + inside
        for table in (tiles.exact_table, tiles.table)
    ]
    source, target = (place[is_meant] for place in places)
    for codec, exact, codes in (
        (pages.format.keys, pages.exact_keys, pages.keys),
        (pages.format.values, pages.exact_values, pages.values),
    ):
        encoded = codec.encode(exact[:, :, source])
        codes.codes[:, :, target] = encoded.codes
        codes.scale[:, :, target] = encoded.scale
