"""NgramDrafter: if a row's last tokens have occurred before, drafts the tokens that followed them then.

It has no weights. With another drafter, `overwrite_matches` replaces its drafts if enough tokens match.
"""

from __future__ import annotations

from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView
from blockdraft.step.drafter import Weightless

# How often draft i + 1 was accepted, averaged over the sets of benchmarks/ngram.py: a start assumes this.
_ACCEPTED = (0.22, 0.13, 0.11, 0.09, 0.08, 0.07, 0.06, 0.06, 0.05, 0.05, 0.05, 0.04, 0.04, 0.04, 0.04)
NGRAM_ACCEPTANCE = {"usual texts": _ACCEPTED}


class NgramDrafter(Weightless):
    """Drafts from the row's own tokens, prompt and answer. It works for any target."""

    def __init__(self, block: int, least: int) -> None:
        """`least`: how many last tokens, the anchor included, must have occurred before."""
        self.block = block
        self.least = least

    def draft(self, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        """Draft the tokens that followed the match. Without a match, repeat the anchor."""
        block = rows.anchor[rows.active][:, None].repeat(1, width)
        overwrite_matches(block, rows, view, self.least)
        return block


def overwrite_matches(block: Tensor, rows: Rows, view: CacheView, least: int) -> None:
    """Overwrite the drafts [R, width] of the active rows whose last `least` tokens have occurred before."""
    assert rows.history is not None, "the plan says that drafts come from it"
    if block.shape[1] > 1:
        rows.kernels.lookup(block, rows.history, rows.active, view.starts, least)
