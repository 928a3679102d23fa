"""Acceptance of drafts on a CPU; see `kernels/acceptance.py` for the contracts."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.kernels.acceptance import Progress
from blockdraft.kernels.llvm.compiler import kernel, taken
from blockdraft.kernels.llvm.jit import Jit
from blockdraft.kernels.llvm.language import Int, Longs, Words, i64, smallest
from blockdraft.kernels.sampling import SamplingBatch
from blockdraft.kernels.sampling_tables import Whole


def count_accepted(sampled: Tensor, block: Tensor, limits: Tensor) -> Tensor:
    counts = torch.empty(len(block), dtype=torch.int64)
    assert limits.is_contiguous()
    _COUNT(*block.shape, sampled.contiguous(), block.contiguous(), limits, counts, is_small=True)
    return counts


def advance(
    progress: Progress, block: Tensor, sampled: Tensor, num_committed: Tensor, batch: SamplingBatch
) -> None:
    counts = batch.output_counts
    assert counts.dtype == torch.int32
    assert counts.is_contiguous()
    assert batch.whole.is_contiguous()
    _ADVANCE(
        *block.shape, len(progress.length) - 1, counts.shape[1], batch.whole.shape[1], batch.rows,
        progress.length, progress.anchor, block.contiguous(), sampled.contiguous(), num_committed,
        batch.whole, counts, is_small=True,
    )  # fmt: skip


@kernel
def count_drafts(
    num_rows: Int, width: Int, sampled: Longs, block: Longs, limits: Longs, counts: Longs
) -> None:
    """Set counts[row] to 1 plus the number of drafts before the first that differs from its sample."""
    for row in taken(num_rows):
        drafts, samples = block + row * width, sampled + row * width
        count = counts.zeros(i64) + 1
        is_accepted = count == 1
        for i in range(1, width):
            is_accepted = is_accepted & (samples[i - 1] == drafts[i])
            count = count + is_accepted.to(i64)
        counts[row] = smallest(count, limits[row])


@kernel
def advance_rows(
    num_rows: Int, width: Int, scratch_row: Int, vocabulary: Int, columns: Int, rows: Longs, length: Longs,
    anchor: Longs, block: Longs, sampled: Longs, num_committed: Longs, whole: Longs, counts: Words,
    *, penalised: int, first: int,
) -> None:  # fmt: skip
    """Update `length`, `anchor` and, for rows with penalties, output `counts`; skip the scratch row."""
    for item in taken(num_rows):
        row, count = rows[item], num_committed[item]
        if row != scratch_row:
            rules = whole + row * columns
            if rules[penalised] != 0:
                for i in range(count):
                    if length[row] + i >= rules[first]:
                        at = row * vocabulary + block[item * width + i]
                        counts[at] = counts[at] + 1
            length[row] = length[row] + count
            anchor[row] = sampled[item * width + count - 1]


_COUNT = Jit(count_drafts)
_ADVANCE = Jit(advance_rows, penalised=int(Whole.IS_PENALISED), first=int(Whole.OUTPUT_START))
