"""ReplayingDrafter: drafts answers that are known already, with errors sown in.

Random weights never agree with a random drafter, so every draft would be refused and only the first column of
a block be tested. This one is right most of the time, whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.cache.cache import Cache
from blockdraft.cache.rows import Rows
from blockdraft.cache.view import CacheView, View
from blockdraft.kernels.sampling_tables import Whole
from blockdraft.step.drafter import Drafter, Weightless

WRONG = 1 / 7  # of all positions: a block of 16 is accepted at every length, whole ones included


class ReplayingDrafter(Weightless):
    """Stands in for `own`, which goes on absorbing features, as when it is served.

    A row's seed is the number of its answer. The table never moves and the host is never asked, so a graph
    that was captured before the answers were known replays them.
    """

    def __init__(self, own: Drafter, *, num_answers: int, num_positions: int, device: torch.device) -> None:
        self.block = own.block
        self._own = own
        self._drafts = torch.zeros((num_answers, num_positions), dtype=torch.int64, device=device)
        self._columns = torch.arange(1, self.block, device=device)

    def learn(self, texts: Sequence[Sequence[int]], *, vocab_size: int) -> None:
        """Draft these from now on, prompt and answer each, but for one token in seven."""
        table = torch.zeros(self._drafts.shape, dtype=torch.int64)
        for row, token_ids in zip(table, texts, strict=True):
            row[: len(token_ids)] = torch.tensor(token_ids)
        is_wrong = torch.rand(table.shape, generator=torch.Generator().manual_seed(0)) < WRONG
        self._drafts.copy_(torch.where(is_wrong, (table + 1) % vocab_size, table))

    def draft(self, rows: Rows, cache: Cache, view: CacheView, width: int) -> Tensor:
        anchor = rows.anchor[rows.active][:, None]  # [R, 1]
        if width == 1:
            return anchor
        numbers = rows.sampling().integers(Whole.SEED)[:, None]
        places = view.starts[:, None] + self._columns[: width - 1]
        drafts = self._drafts[numbers, places.clamp(max=self._drafts.shape[1] - 1)]
        return torch.cat((anchor, drafts), dim=1)

    def absorb(self, features: Tensor, view: View) -> None:
        self._own.absorb(features, view)
