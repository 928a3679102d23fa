"""The Drafter protocol: propose a block, and absorb the target's features."""

from __future__ import annotations

from typing import Protocol, Self

from torch import Tensor, nn

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView, View
from blockdraft.models.decoder import Decoder


class Drafter(Protocol):
    """A drafter changes how many tokens a step yields, but never which tokens."""

    @property
    def block(self) -> int: ...  # the width it was trained for, anchor included

    @property
    def drafts_alone(self) -> bool: ...  # it takes time by the drafts of all rows, not by the widest row

    @property
    def model(self) -> nn.Module | None: ...  # None: it has no weights

    @property
    def vocab_map(self) -> Tensor | None: ...  # the target's token id for each row of a reduced head

    def beside(self, target: Decoder) -> Drafter:
        """Return a copy of this drafter, with shared weights, for another copy of its target."""

    def draft(self, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        """Return blocks [R, width] for the active rows: column 0 is the anchor, the rest are proposals.

        `view` is the view that the target will verify with: a drafter of the same width may use it too.
        """

    def absorb(self, features: Tensor, view: View) -> None:
        """Remember the target's features [N, F] of the view's positions as context."""

    def follow(self, hidden: Tensor, next_ids: Tensor, num_kept: Tensor, view: CacheView, rows: Rows) -> None:
        """Remember the target's hidden states [N, E] of the view's positions, and the tokens [N] after them.

        The first `num_kept` [R] positions of each row are committed.
        """


class Weightless:
    """The base of drafters without a model."""

    model: None = None
    vocab_map: None = None
    drafts_alone = True

    def beside(self, target: Decoder) -> Self:
        return self

    def absorb(self, features: Tensor, view: View) -> None:
        """Remember nothing."""

    def follow(self, hidden: Tensor, next_ids: Tensor, num_kept: Tensor, view: CacheView, rows: Rows) -> None:
        """Remember nothing."""


class NoDrafter(Weightless):
    """Drafts nothing: a step with it is plain decoding.

    At width 1 a step decodes one token. At a larger width it verifies copies of the anchor: the shapes are
    those of speculation, so its arithmetic is a baseline to compare speculation with bit for bit.
    """

    def __init__(self, block: int = 1) -> None:
        self.block = block

    def draft(self, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        return rows.anchor[rows.active][:, None].repeat(1, width)
