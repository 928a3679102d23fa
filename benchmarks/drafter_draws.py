"""Draws drafts as the engine does, for the simulation of answers that were sampled.

Each block is drawn with the temperature, the filters and the noise of its document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blockdraft.cache.cache import SCRATCH_PAGE
from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.pairs import PairDrafter
from blockdraft.training.probe import Choice
from blockdraft.training.trainer import half


def draws(drafter: DFlashDrafter, sampling: Sequence[RowSampling]) -> Choice:
    """Return the choice of drafts for documents that were sampled so."""
    target = drafter.target
    table = Rows(
        max_rows=len(sampling),
        max_pages=1,
        vocab_size=drafter.model.config.vocab_size,
        scratch_page=SCRATCH_PAGE,
        device=target.norm.weight.device,
    )
    table.place_all([(number, (0,), 0, one) for number, one in enumerate(sampling)])
    table.activate(range(len(sampling)))

    def choose(hidden: Tensor, before: Tensor, draft: int, starts: Tensor, numbers: Tensor) -> Tensor:
        """Draw one column: a serving drafter walks from draft to draft, here a walk has one step."""
        own = replace(table.sampling(), rows=numbers)
        with half(hidden):
            logits = drafter.logits(hidden)[:, None]
            pairs = drafter.pairs(hidden[:, None]) if isinstance(drafter, PairDrafter) else None
        if pairs is None:
            return target.kernels.choose(logits, starts + draft, before[:, None], own)[:, 0]
        if pairs.mixture is not None:
            mixture = torch.zeros_like(pairs.mixture) if pairs.skips_first and draft == 0 else pairs.mixture
            pairs = pairs._replace(mixture=mixture, skips_first=False)
        return target.kernels.walk(logits, pairs, starts + draft, before[:, None], own)[:, 0]

    return choose
