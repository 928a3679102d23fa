"""Attention over exact and compressed pages: the contract and its PyTorch reference.

Exact keys and values, in the model's dtype, are in separate pages: the first tile, the window and the block
of each running row (`Blocks.exact_table`). Compressed keys and values are in the pages that all layers share
(`Blocks.table`). `kv_positions` decides which of the two a query reads.

    write      writes keys and values to exact slots, rotated and centred if there is a `Rotation`
    compress   encodes older tiles from their exact slots to their compressed slots
    attend     reads both in one pass; if keys are rotated, queries are rotated too, and the rotation of the
               values is undone in the output
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.kernels.attention import KEY_CHUNK, Blocks, Mask, Reads, attend_gathered, by_groups
from blockdraft.kernels.kv_codec import Codec, Encoded, KvFormat, rotate_back
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.kv_positions import PositionRule


class Codes(NamedTuple):
    """The compressed keys, or the compressed values, of L layers."""

    codes: Tensor  # uint8 [L, G, S, bytes]
    scale: Tensor  # float16 [L, G, S]


class CompressedPages(NamedTuple):
    """The keys and values of L layers of one spec: exact [L, G, X, D] in X slots, compressed in S slots."""

    format: KvFormat
    rule: PositionRule
    exact_keys: Tensor
    exact_values: Tensor
    keys: Codes
    values: Codes

    def layer(self, index: int) -> CompressedPages:
        one = slice(index, index + 1)
        return CompressedPages(
            self.format,
            self.rule,
            self.exact_keys[one],
            self.exact_values[one],
            Codes(*(part[one] for part in self.keys)),
            Codes(*(part[one] for part in self.values)),
        )


@dataclass(frozen=True)
class Tiles:
    """The tiles to compress when rows of `starts` tokens grow by `counts`: at most `most` tiles per row."""

    table: Tensor  # [.., P]: row r reads table[rows[r]]
    exact_table: Tensor  # [.., P]: row r reads exact_table[rows[r]]
    rows: Tensor  # [R]
    starts: Tensor  # [R]
    counts: Tensor  # [R]
    rule: PositionRule
    most: int
    page_size: int

    @functools.cached_property
    def begins(self) -> Tensor:
        """Return the first position of each row's tiles [R]; the GPU kernel computes it itself."""
        return self.rule.compressed_end(self.starts)

    @functools.cached_property
    def ends(self) -> Tensor:
        """Return the position after each row's last tile [R]."""
        return self.rule.compressed_end(self.starts + self.counts)


AttendCompressed = Callable[[Tensor, CompressedPages, Blocks, Mask, Tensor | None], Tensor]
Compress = Callable[[CompressedPages, Tiles], None]


def reference_attend_compressed_paged(
    q: Tensor, pages: CompressedPages, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
) -> Tensor:
    out = by_groups(q, blocks, lambda block, reads: _attend(block, pages, reads, mask, sinks))
    if not pages.format.is_rotated:
        return out
    return rotate_back(out.to(torch.promote_types(q.dtype, torch.float32))).to(q.dtype)


def _attend(q: Tensor, pages: CompressedPages, reads: Reads, mask: Mask, sinks: Tensor | None) -> Tensor:
    """Return attention over compressed and exact keys, joined; masks let a query see each key once.

    A compressed or exact key that no query of its row reads is replaced by the zero slot, so its value does
    not matter.
    """
    is_compressed = reads.is_compressed(pages.rule)  # [R, B, L]
    compressed_slots = reads.slots.where(is_compressed.any(dim=1), 0)
    exact_slots = reads.exact_slots.where(~is_compressed.all(dim=1), 0)
    both = [
        torch.cat((_decoded(codec, codes, compressed_slots).to(q.dtype), exact[0][:, exact_slots]), dim=2)
        for codec, codes, exact in (
            (pages.format.keys, pages.keys, pages.exact_keys),
            (pages.format.values, pages.values, pages.exact_values),
        )
    ]  # [G, R, 2 L, D]
    k, v = (x.view(*x.shape[:2], -1, KEY_CHUNK, x.shape[-1]) for x in both)
    bias = reads.bias(mask, q.dtype)  # [R, B, L]
    hidden = float("-inf")
    bias = torch.cat(
        (bias.masked_fill(~is_compressed, hidden), bias.masked_fill(is_compressed, hidden)), dim=2
    )
    return attend_gathered(q, k, v, bias, mask, sinks)


def _decoded(codec: Codec, codes: Codes, slots: Tensor) -> Tensor:
    return codec.decode(Encoded(codes.codes[0][:, slots], codes.scale[0][:, slots]))


def reference_compress(pages: CompressedPages, tiles: Tiles) -> None:
    offset = torch.arange(tiles.most * TILE, device=tiles.begins.device)
    positions = tiles.begins[:, None] + offset  # [R, most * TILE]
    is_in_tile = positions < tiles.ends[:, None]
    positions = positions.where(is_in_tile, 0)
    inside = positions % tiles.page_size
    row = tiles.rows[:, None].expand_as(positions)
    source, target = (
        (table[row, positions // tiles.page_size] * tiles.page_size + inside)[is_in_tile]
        for table in (tiles.exact_table, tiles.table)
    )
    for codec, exact, codes in (
        (pages.format.keys, pages.exact_keys, pages.keys),
        (pages.format.values, pages.exact_values, pages.values),
    ):
        encoded = codec.encode(exact[:, :, source])
        codes.codes[:, :, target] = encoded.codes
        codes.scale[:, :, target] = encoded.scale
