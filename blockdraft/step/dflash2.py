"""DFlash2Drafter: DFlash's block, from whose candidates the drafts are walked pair by pair."""

from __future__ import annotations

from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.models.dflash2 import DFlash2
from blockdraft.step.dflash import DFlashDrafter, add_hints


class DFlash2Drafter(DFlashDrafter):
    """Drafts with a DFlash2 model, by the noise that the target will draw with."""

    model: DFlash2

    def propose(self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows) -> Tensor:
        pairs = self.model.candidate_selector.pairs(hidden)
        return rows.kernels.walk_pairs(self.column_logits(hidden), pairs, starts, anchor, rows.sampling())

    def hints(self, hidden: Tensor, before: Tensor) -> Tensor:
        pairs = self.model.candidate_selector.pairs(hidden)
        return pairs.predecessors[before] * pairs.mixture

    def hinted(self, logits: Tensor, hints: Tensor) -> Tensor:
        selector = self.model.candidate_selector
        return add_hints(logits, hints, selector.successor_codebook, selector.top_k)
