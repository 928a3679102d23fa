"""Acceptance: counts the tokens of a verified block to commit, and updates the rows' state.

A draft is accepted if it equals the sample of the column before it, and all earlier drafts are accepted. All
values are integers, so the reference and the kernels agree exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.kernels.noise import philox
from blockdraft.kernels.sampling import SamplingBatch
from blockdraft.kernels.sampling_tables import Whole

_WORD = 0xFFFFFFFF


def reference_count_accepted(sampled: Tensor, block: Tensor, limits: Tensor) -> Tensor:
    """Return how many tokens to commit [R], 1 to B, for samples and block [R, B]: accepted drafts + 1.

    At most limits[r] > 0 tokens of row r are committed; columns from there on may hold anything.
    """
    agrees = sampled[:, :-1] == block[:, 1:]  # [R, B - 1]
    return (1 + agrees.long().cumprod(dim=1).sum(dim=1)).minimum(limits)


def reference_draw_accepted(rates: Tensor, starts: Tensor, limits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return how many tokens to commit [R], for timing only: draft j counts with probability rates[j].

    The probabilities rates [B - 1] must not increase, as a draft counts only if all earlier ones do. One
    random number per row, keyed by its seed and length, decides. At most limits[r] tokens are committed.
    """
    seeds = batch.integers(Whole.SEED)
    zero = torch.zeros_like(starts)
    words = philox(
        (zero, starts & _WORD, starts >> 32, zero + 1), key=(seeds & _WORD, (seeds >> 32) & _WORD)
    )  # the fourth word makes these numbers differ from those of sampling
    uniform = ((words[0] >> 9).float() + 0.5) * 2.0**-23
    return (1 + (uniform[:, None] < rates).sum(dim=1)).minimum(limits)


class Progress(NamedTuple):
    """The committed length and the anchor of every row; `advance` updates both tensors."""

    length: Tensor  # [rows]
    anchor: Tensor  # [rows]


def reference_advance(
    progress: Progress, block: Tensor, sampled: Tensor, num_committed: Tensor, batch: SamplingBatch
) -> None:
    """Commit the first num_committed[r] tokens of block [R, B]; the last sample is the new anchor.

    Committed output tokens of rows with penalties are counted in their tables. The last row of the tables is
    scratch and does not change.
    """
    rows, (length, anchor) = batch.rows, progress
    is_real = rows != len(length) - 1
    last = sampled.gather(1, num_committed[:, None] - 1).squeeze(1)
    num_committed = num_committed * is_real
    if batch.needs.penalty:
        column = torch.arange(block.shape[1], device=block.device)
        is_output = length[rows][:, None] + column >= batch.whole[rows, Whole.OUTPUT_START][:, None]
        is_penalised = batch.whole[rows, Whole.IS_PENALISED][:, None] != 0
        counted = (column < num_committed[:, None]) & is_output & is_penalised
        row = rows[:, None].expand_as(block)
        batch.output_counts.index_put_((row, block), counted.to(torch.int32), accumulate=True)
    length[rows] += num_committed
    anchor[rows] = torch.where(is_real, last, anchor[rows])


CountAccepted = Callable[[Tensor, Tensor, Tensor], Tensor]
DrawAccepted = Callable[[Tensor, Tensor, Tensor, SamplingBatch], Tensor]
Advance = Callable[[Progress, Tensor, Tensor, Tensor, SamplingBatch], None]
