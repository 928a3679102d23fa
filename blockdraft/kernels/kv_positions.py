"""PositionRule: decides by position which keys and values a query reads compressed.

The query at position t reads some keys and values compressed, and the others exact:

    [0, TILE) exact   [TILE, c(t)) compressed   [c(t), t] exact
    c(t) = TILE * floor((t - window) / TILE), at least 0

Only t matters, so decoding, verification of any width and prefill in any chunks compute the same: a query of
a chunk reads even keys of its own chunk compressed if they are old enough. The window is at least as wide as
the widest block, so only committed tokens are compressed, and they are never written again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from blockdraft.errors import SettingsError
from blockdraft.kernels.kv_formats import TILE, WIDEST_BLOCK, WINDOW

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True, slots=True)
class PositionRule:
    """See above. `stride` and `sinks` are TILE in serving; experiments vary them."""

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

    def compressed_end_at(self, position: Position) -> Position:
        """c(t)"""
        tiles = (position - self.window) // self.stride * self.stride
        return tiles.clamp(min=0) if isinstance(tiles, Tensor) else max(0, tiles)

    def compressed_end(self, length: Position) -> Position:
        """Return the end of compressed tokens in a row of that length, as its next block will read them."""
        return self.compressed_end_at(length + self.block - 1)

    def group(self, position: int) -> int:
        """Return the group of a query: `stride` consecutive positions with the same c."""
        return (position - self.window) // self.stride

    def group_begin(self, group: int) -> int:
        """Return the first position of a group, which may be below 0."""
        return group * self.stride + self.window
