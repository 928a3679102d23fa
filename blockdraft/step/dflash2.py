"""DFlash2Drafter: pairs are weighed by each column's own mixture."""

from __future__ import annotations

from torch import Tensor

from blockdraft.models.dflash2 import DFlash2
from blockdraft.step.pairs import PairDrafter

LEAST_WALKED = 7  # drafts: what a walk costs and what it gains are about even there (docs/models.md)
MOST_WALKED = 4  # rows: of 16, a greedy walk takes more than it gains; between them nothing was measured


class DFlash2Drafter(PairDrafter):
    """Drafts with a DFlash2 model, whose selector knows the pairs (models/dflash2.py)."""

    model: DFlash2

    def weighs_pairs(self, num_drafts: int, num_rows: int = 1) -> bool:
        """Where a selector alone was trained, not for narrow blocks, nor for many: it gains late in one."""
        if self.model.is_convolved:
            return True
        return num_drafts >= min(LEAST_WALKED, self.block - 1) and num_rows <= MOST_WALKED

    def tables(self) -> tuple[Tensor, Tensor]:
        selector = self.model.candidate_selector
        return selector.predecessor_codebook, selector.successor_codebook

    @property
    def skips_first(self) -> bool:
        return self.model.candidate_selector.skips_first

    def mixture(self, hidden: Tensor) -> Tensor:
        return self.model.candidate_selector.mixture(hidden)
