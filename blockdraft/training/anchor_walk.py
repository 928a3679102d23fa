"""Where the steps of a drafter begin: anchors it will be asked for, as far as its last blocks tell.

A block at anchor a whose first n drafts are right would be followed by one at a + n + 1, and the places
between are passed over. So a drafter that serves meets mostly the places where drafting is hard, and few of
those inside a run that it foresees; drawn evenly, most blocks of a batch have nothing to teach.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.kernels.transfer import to_device
from blockdraft.training.packing import TrainingBatch

FLOOR = 0.05  # least weight of a place, since drafters change
BELIEF = 0.5  # weight of the last block in a place's chance


class Walk:
    """The probability that a step begins at each place [rows, length]."""

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self.chance = torch.ones(shape, dtype=torch.float16, device=device)

    def weights(self, chosen: Sequence[int]) -> Tensor:
        index = to_device(chosen, self.chance.device)
        return self.chance[index].float().clamp(min=FLOOR)

    @torch.no_grad()
    def learn(self, chosen: Sequence[int], batch: TrainingBatch, matches: Tensor) -> None:
        """Update the chances from the blocks of the rows `chosen`, whose matches are [R * A, B - 1]."""
        num_rows, num_blocks = batch.anchors.shape
        matches = matches.view(num_rows, num_blocks, -1)
        reach = matches.long().cumprod(dim=2).sum(dim=2, keepdim=True)  # drafts that were right
        offset = torch.arange(matches.shape[2], device=reach.device)  # place a + 1 + offset
        is_known = (batch.labels >= 0) & (offset <= reach)
        place = (batch.anchors[..., None] + 1 + offset).clamp(max=self.chance.shape[1] - 1).flatten(1)
        # Blocks overlap: the largest value wins, whatever the order of writes.
        begins = self._spread(place, (is_known & (offset == reach)).flatten(1))
        is_known = self._spread(place, is_known.flatten(1))
        index = to_device(chosen, self.chance.device)
        before = self.chance[index]
        after = torch.lerp(before, begins.to(before.dtype), BELIEF)
        self.chance[index] = torch.where(is_known > 0, after, before)

    def _spread(self, place: Tensor, values: Tensor) -> Tensor:
        out = torch.zeros(len(place), self.chance.shape[1], device=place.device)
        return out.scatter_reduce_(1, place, values.float(), reduce="amax")
