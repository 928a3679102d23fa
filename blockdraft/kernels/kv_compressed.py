"""Attention over pages of which most are compressed: the contract and its PyTorch reference.

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
from torch.nn import functional

from blockdraft.kernels.attention import KEY_CHUNK, Blocks, Mask, Reads, attend_gathered
from blockdraft.kernels.kv_codec import Codec, Encoded, KvFormat, rotate_back
from blockdraft.kernels.kv_formats import TILE
from blockdraft.kernels.kv_positions import PositionRule

if TYPE_CHECKING:
    pass


class Codes(NamedTuple):
    """Compressed keys, or values, of some layers."""

    codes: Tensor  # uint8 [L, G, S, bytes]
    scale: Tensor  # float16 [L, G, S]


class CompressedPages(NamedTuple):
    """Keys and values of L layers of the same kind: exact [L, G, X, D] in X slots, compressed in S slots."""

    format: KvFormat
    rule: PositionRule
    exact_keys: Tensor
    exact_values: Tensor
    keys: Codes
    values: Codes

    def layer(self, index: int) -> CompressedPages:
        """One of them, L = 1."""
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


KeysValues = tuple[Tensor, Tensor]  # [L, G, D] each
AttendCompressed = Callable[[Tensor, CompressedPages, Blocks, Mask, Tensor | None], Tensor]
Compress = Callable[[CompressedPages, Tiles], None]


def reference_attend_compressed_paged(
    q: Tensor, pages: CompressedPages, blocks: Blocks, mask: Mask, sinks: Tensor | None = None
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


def _attend(q: Tensor, pages: CompressedPages, reads: Reads, mask: Mask, sinks: Tensor | None) -> Tensor:
    """All keys twice, compressed ones first: each query is shown every key in one place only.

    What no query of a row reads in one place is the zero slot there: whatever it holds is not multiplied in.
    """
    is_compressed = reads.is_compressed(pages.rule)  # [R, B, L]
    cold_slots = reads.slots.where(is_compressed.any(dim=1), 0)
    exact_slots = reads.exact_slots.where(~is_compressed.all(dim=1), 0)
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
    bias = torch.cat(
        (bias.masked_fill(~is_compressed, hidden), bias.masked_fill(is_compressed, hidden)), dim=2
    )
    return attend_gathered(q, k, v, bias, mask, sinks)


def _decoded(codec: Codec, codes: Codes, slots: Tensor) -> Tensor:
    return codec.decode(Encoded(codes.codes[0][:, slots], codes.scale[0][:, slots]))


def reference_compress(pages: CompressedPages, tiles: Tiles) -> None:
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


def reference_attend_compressed(
    q: Tensor, exact: KeysValues, compressed: KeysValues, rule: PositionRule, mask: Mask
) -> Tensor:
    """Attention of q [N, H, D], the last N of L positions. `compressed` are all keys and values come back.

    Causal, in float32 or wider. A query's bits follow from its position and what it sees: each group of
    queries is computed whole, at a shape that its number decides, with zeros for whoever is not there.
    """
    assert mask.is_causal
    assert not mask.is_anchored
    wide = torch.promote_types(q.dtype, torch.float32)
    length, start = len(exact[0]), len(exact[0]) - len(q)
    exact_k, exact_v, cold_k, cold_v = (x.to(wide).transpose(0, 1) for x in (*exact, *compressed))
    parts = []
    for group in range(rule.group(start), rule.group(length - 1) + 1):
        begin = rule.group_begin(group)
        end, first, last = begin + rule.stride, max(begin, start), min(begin + rule.stride, length)
        compressed_end_at = rule.compressed_end_at(first)
        k = _mixed(exact_k, cold_k, rule.sinks, compressed_end_at, end)
        v = _mixed(exact_v, cold_v, rule.sinks, compressed_end_at, end)
        block = functional.pad(
            q[first - start : last - start].to(wide), (0, 0, 0, 0, first - begin, end - last)
        )
        parts.append(_attend_group(block, k, v, begin, mask)[first - begin : last - begin])
    return torch.cat(parts).to(q.dtype)


def _mixed(exact: Tensor, cold: Tensor, sinks: int, compressed_end_at: int, end: int) -> Tensor:
    """[G, end, D]: of each position what is read, and zeros past the last one."""
    first = min(sinks, compressed_end_at)
    mixed = torch.cat(
        (exact[:, :first], cold[:, first:compressed_end_at], exact[:, compressed_end_at:end]), dim=1
    )
    return functional.pad(mixed, (0, 0, 0, end - mixed.shape[1]))


def _attend_group(q: Tensor, k: Tensor, v: Tensor, begin: int, mask: Mask) -> Tensor:
    """q [stride, H, D] from position `begin` on, over k and v [G, end, D]."""
    count, num_heads, dim = q.shape
    num_groups, end = k.shape[:2]
    shared = num_heads // num_groups
    rows = (q * mask.scale).view(count, num_groups, shared, dim).permute(1, 2, 0, 3)  # [G, shared, stride, D]
    scores = rows.reshape(num_groups, shared * count, dim) @ k.mT
    scores = scores.view(num_groups, shared, count, end)
    query = torch.arange(begin, begin + count, device=q.device).clamp(min=0)[:, None]
    key = torch.arange(end, device=q.device)
    own = max(begin, 0)  # what lies before is seen by the whole group
    scores[..., own:].masked_fill_(key[own:] > query, float("-inf"))
    if mask.window is not None:
        scores.masked_fill_(key <= query - mask.window, float("-inf"))
    weights = scores.softmax(dim=-1).view(num_groups, shared * count, end)
    out = (weights @ v).view(num_groups, shared, count, dim)
    return out.permute(2, 0, 1, 3).reshape(count, num_heads, dim)
