"""Which keys and values a query reads compressed: a rule of positions, and attention by it as a reference.

The query at position t reads some keys and values compressed, and the others as they were computed:

    [0, TILE) exact   [TILE, c(t)) compressed   [c(t), t] exact
    c(t) = TILE * floor((t - window) / TILE), at least 0

Nothing but t decides, so decoding, verification of any width and prefill in any chunks are one model: a query
of a chunk reads even keys of its own chunk compressed once they lie far enough behind. The window is at least
as wide as the widest block: whatever is compressed has been committed, and is never written again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.errors import SettingsError
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.kv_formats import TILE, WIDEST_BLOCK, WINDOW

KeysValues = tuple[Tensor, Tensor]  # [L, G, D] each
Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True, slots=True)
class PositionRule:
    """See above. `stride` and `sinks` are TILE wherever this is served; experiments vary them."""

    window: int = WINDOW
    stride: int = TILE
    sinks: int = TILE
    block: int = WIDEST_BLOCK  # tokens that a step may verify

    def __post_init__(self) -> None:
        if self.window < self.block:
            raise SettingsError(
                f"An exact window of {self.window} tokens is narrower than a block of {self.block}, "
                f"whose drafts would be compressed before they are verified: use at least {self.block}."
            )
        if self.stride < 1 or self.sinks < 0:
            raise SettingsError(
                f"Keys cannot be compressed {self.stride} tokens at a time behind {self.sinks} exact ones: "
                "use a positive number of tokens, and none or more exact ones."
            )

    def cold_end(self, position: Position) -> Position:
        """c(t)"""
        tiles = (position - self.window) // self.stride * self.stride
        return tiles.clamp(min=0) if isinstance(tiles, Tensor) else max(0, tiles)

    def compressed_end(self, length: Position) -> Position:
        """Where compressed tokens end in a row of that length: at least what its next block will read so."""
        return self.cold_end(length + self.block - 1)

    def group(self, position: int) -> int:
        """Queries of one group, `stride` positions, have the same c."""
        return (position - self.window) // self.stride

    def group_begin(self, group: int) -> int:
        """The first position of a group; below 0 in the first ones."""
        return group * self.stride + self.window


def reference_attend_cold(
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
        cold_end = rule.cold_end(first)
        k = _mixed(exact_k, cold_k, rule.sinks, cold_end, end)
        v = _mixed(exact_v, cold_v, rule.sinks, cold_end, end)
        block = functional.pad(
            q[first - start : last - start].to(wide), (0, 0, 0, 0, first - begin, end - last)
        )
        parts.append(_attend_group(block, k, v, begin, mask)[first - begin : last - begin])
    return torch.cat(parts).to(q.dtype)


def _mixed(exact: Tensor, cold: Tensor, sinks: int, cold_end: int, end: int) -> Tensor:
    """[G, end, D]: of each position what is read, and zeros past the last one."""
    first = min(sinks, cold_end)
    mixed = torch.cat((exact[:, :first], cold[:, first:cold_end], exact[:, cold_end:end]), dim=1)
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
