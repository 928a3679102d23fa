"""Recalling a text: what followed when its last tokens occurred before.

Each row's tokens stand in `history` [rows, C] int32 by their positions, up to its anchor; what is past it is
scratch. Whole numbers only: reference and kernels agree exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.settings.settings import MAX_NGRAM

MOST = MAX_NGRAM  # tokens that are compared: of occurrences that agree in as many, the last is taken


def reference_lookup(block: Tensor, history: Tensor, rows: Tensor, starts: Tensor, least: int) -> None:
    """Overwrite the drafts of block [R, B], whose anchors are at `starts` [R] of `rows` [R] of the history.

    Of all earlier positions, the one is taken where most tokens up to it equal those up to the anchor, and of
    several the last. Where `least` do, at most MOST, what followed is drafted. Where that runs into the
    anchor it goes on with what has just been drafted: a loop repeats. Other rows keep their drafts.
    """
    text, size = history[rows], history.shape[1]  # [R, C]
    position = torch.arange(size, device=block.device)
    agrees = position < starts[:, None]
    matched = torch.zeros_like(text, dtype=torch.int64)
    for back in range(min(MOST, size)):
        wanted = text.gather(1, (starts - back).clamp(min=0)[:, None])
        agrees = agrees & (functional.pad(text, (back, 0), value=-1)[:, :size] == wanted)  # no token is -1
        matched += agrees
    best = torch.where(matched > 0, matched * size + position, 0).amax(dim=1)
    end, count = best % size, best // size
    period = (starts - end).clamp(min=1)[:, None]
    column = torch.arange(block.shape[1] - 1, device=block.device)
    drafts = text.gather(1, end[:, None] + 1 + column % period).long()
    block[:, 1:] = torch.where((count >= least)[:, None], drafts, block[:, 1:])


def reference_remember(history: Tensor, sampled: Tensor, rows: Tensor, length: Tensor) -> None:
    """Write samples [R, B] behind the anchors of `rows` [R], which stand at `length` [rows].

    All of them: those that are not committed are scratch.
    """
    column = torch.arange(sampled.shape[1], device=sampled.device)
    history[rows[:, None], length[rows][:, None] + 1 + column] = sampled.to(history.dtype)


Recall = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]
Remember = Callable[[Tensor, Tensor, Tensor, Tensor], None]
