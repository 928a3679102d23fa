"""N-gram lookup: drafts the tokens that followed an earlier occurrence of the row's last tokens.

`history` [rows, C] int32 holds each row's tokens by position, up to its anchor; positions after the anchor
are scratch. All values are integers, so the reference and the kernels agree exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from blockdraft.settings.settings import MAX_NGRAM

MOST = MAX_NGRAM  # the most tokens to compare; among occurrences that match in all of them, the last is used


def reference_lookup(block: Tensor, history: Tensor, rows: Tensor, starts: Tensor, least: int) -> None:
    """Overwrite the drafts of block [R, B], whose anchors are at `starts` [R] of `rows` [R] of the history.

    For each row, find the earlier position at which most tokens, counted back from it, equal those counted
    back from the anchor. At most MOST are compared; ties go to the last position. If at least `least` tokens
    match, draft the tokens from there up to the anchor, again and again, so a loop goes on. Rows with fewer
    matches keep their drafts.
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
    """Write samples [R, B] after the anchors of `rows` [R], which are at `length` [rows].

    It writes all samples; those that are not committed count as scratch.
    """
    column = torch.arange(sampled.shape[1], device=sampled.device)
    history[rows[:, None], length[rows][:, None] + 1 + column] = sampled.to(history.dtype)


Lookup = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]
Remember = Callable[[Tensor, Tensor, Tensor, Tensor], None]
