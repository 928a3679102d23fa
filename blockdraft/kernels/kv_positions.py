"""PositionRule decides by position which keys and values a query reads compressed.

The query at position t reads keys and values in three ranges:

    [0, TILE) exact   [TILE, c(t)) compressed   [c(t), t] exact
    c(t) = TILE * floor((t - window) / TILE), at least 0

Only t matters, so decoding, verification of any width and prefill in any chunks compute equal results: in a
prefill, a query reads even keys of its own chunk compressed if they are old enough. The window is at least as
wide as the widest block, so only committed tokens are compressed, and they are never written again.
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
    """The rule in this module's docstring."""

    window: int = WINDOW
    block: int = WIDEST_BLOCK  # tokens that a step may verify

    def __post_init__(self) -> None:
        if self.window < self.block:
            raise SettingsError(
                f"An exact window of {self.window} tokens is narrower than a block of {self.block}, "
                f"whose drafts would be compressed before they are verified: use at least {self.block}."
            )

    def compressed_end_at(self, position: Position) -> Position:
        """Return c(t) for the query at `position` t."""
        end = (position - self.window) // TILE * TILE
        return end.clamp(min=0) if isinstance(end, Tensor) else max(0, end)

    def compressed_end(self, length: Position) -> Position:
        """Return the end of the tokens to compress before the next block of a row of `length` tokens."""
        return self.compressed_end_at(length + self.block - 1)
