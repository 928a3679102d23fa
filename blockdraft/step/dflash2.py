"""DFlash2Drafter: pairs are weighed by each column's own mixture."""

from __future__ import annotations

from torch import Tensor

from blockdraft.cache.rows import Rows
from blockdraft.models.dflash2 import DFlash2
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.pairs import PairDrafter

LEAST_WALKED = 7  # drafts of a block, where the selector alone was trained: fewer gain less than a walk costs


class DFlash2Drafter(PairDrafter):
    """Drafts with a DFlash2 model, whose selector knows the pairs (models/dflash2.py)."""

    model: DFlash2

    def propose(self, hidden: Tensor, anchor: Tensor, starts: Tensor, rows: Rows) -> Tensor:
        if not self.model.is_convolved and hidden.shape[1] < LEAST_WALKED:
            return DFlashDrafter.propose(self, hidden, anchor, starts, rows)
        return super().propose(hidden, anchor, starts, rows)

    def tables(self) -> tuple[Tensor, Tensor]:
        selector = self.model.candidate_selector
        return selector.predecessor_codebook, selector.successor_codebook

    @property
    def skips_first(self) -> bool:
        return self.model.candidate_selector.skips_first

    def mixture(self, hidden: Tensor) -> Tensor:
        return self.model.candidate_selector.mixture(hidden)
