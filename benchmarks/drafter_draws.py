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
from blockdraft.kernels.transfer import to_device
from blockdraft.step.pairs import PairDrafter
from blockdraft.training.answers import Document
from blockdraft.training.evaluate import Choice
from blockdraft.training.packing import TrainingBatch, pack
from blockdraft.training.trainer import BlockForward, half


def draws(
    forward: BlockForward, documents: Sequence[Document], sampling: Sequence[RowSampling], length: int
) -> Choice:
    """Return the choice of drafts for documents that were sampled so, in rows of `length` tokens."""
    head = forward.head()
    device = head.weight.device
    table = Rows(
        max_rows=len(sampling),
        max_pages=1,
        vocab_size=len(head.weight),
        scratch_page=SCRATCH_PAGE,
        device=device,
    )
    table.place_all([(number, (0,), 0, one) for number, one in enumerate(sampling)])
    table.activate(range(len(sampling)))
    rows, places = pack(documents, length)
    owners = torch.zeros(rows.tokens.shape, dtype=torch.int64)  # the document of every place
    for place in places:
        owners[place.row, place.begin : int(rows.ends[place.row, place.begin])] = place.document
    owners = owners.to(device)

    @torch.no_grad()
    def choose(
        hidden: Tensor, before: Tensor, batch: TrainingBatch, chosen: list[int], blocks: Tensor
    ) -> Tensor:
        own = owners[to_device(chosen, hidden.device)].gather(1, batch.anchors).flatten()[blocks]
        starts = (batch.anchors - batch.block_starts).flatten()[blocks]
        mine = replace(table.sampling(), rows=own)
        kernels, drafter = forward.target.kernels, forward.drafter
        if not isinstance(drafter, PairDrafter):
            return kernels.choose(forward.draft_logits(head, hidden, before), starts, before[:, :1], mine)
        # A serving drafter walks from draft to draft; here every column is a walk of one step.
        with half(hidden):
            pairs = drafter.pairs(hidden)
        if pairs.mixture is not None:
            if pairs.skips_first:
                pairs.mixture[:, 0] = 0
            pairs = pairs._replace(mixture=pairs.mixture.flatten(0, 1)[:, None], skips_first=False)
        mine = replace(mine, rows=own.repeat_interleave(before.shape[1]))
        positions = (starts[:, None] + torch.arange(before.shape[1], device=starts.device)).flatten()
        logits = head.logits(hidden).flatten(0, 1)[:, None]
        return kernels.walk(logits, pairs, positions, before.reshape(-1, 1), mine).view(before.shape)

    return choose
