"""DFlash2Drafter: pairs are weighed by each column's own mixture."""

from __future__ import annotations

from torch import Tensor

from blockdraft.models.dflash2 import DFlash2
from blockdraft.step.pairs import PairDrafter

LEAST_WALKED = 7  # drafts: what a walk costs and what it gains are about even there (docs/models.md)


class DFlash2Drafter(PairDrafter):
    """Drafts with a DFlash2 model, whose selector knows the pairs (models/dflash2.py)."""

    model: DFlash2

    def weighs_pairs(self, num_drafts: int) -> bool:
        """Not for narrow blocks where the selector alone was trained: late drafts are what gains by it."""
        return self.model.is_convolved or num_drafts >= min(LEAST_WALKED, self.block - 1)

    def tables(self) -> tuple[Tensor, Tensor]:
        selector = self.model.candidate_selector
        return selector.predecessor_codebook, selector.successor_codebook

    @property
    def skips_first(self) -> bool:
        return self.model.candidate_selector.skips_first

    def mixture(self, hidden: Tensor) -> Tensor:
        return self.model.candidate_selector.mixture(hidden)
