"""Acceptance on a CUDA device, with one program per row; see `kernels/acceptance.py` for the contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.sampling import SamplingBatch
from blockdraft.kernels.sampling_tables import Whole
from blockdraft.kernels.triton.launch import overlap, start_and_wait

if TYPE_CHECKING:
    from blockdraft.kernels.acceptance import Progress


@triton.jit(do_not_specialize=["width"])
def _count(sampled, block, limits, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_and_wait(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    is_draft = column + 1 < width
    sample = tl.load(sampled + row * width + column, mask=is_draft, other=0)
    draft = tl.load(block + row * width + column + 1, mask=is_draft, other=0)
    # The block ends at the first draft that differs, or at the last column.
    wrong = tl.where(is_draft & (sample != draft), column, width - 1)
    tl.store(out + row, tl.minimum((tl.min(wrong, axis=0) + 1).to(tl.int64), tl.load(limits + row)))


def count_accepted(sampled: Tensor, block: Tensor, limits: Tensor) -> Tensor:
    """Implement `acceptance.reference_count_accepted`."""
    sampled, block = sampled.contiguous(), block.contiguous()
    num_rows, width = block.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=block.device)
    _count[(num_rows,)](
        sampled, block, limits, out, width,
        BLOCK=triton.next_power_of_2(width), **overlap(block.device), num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _draw(
    rates, starts, limits, rows, whole, out, num_rates, num_columns,
    SEED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    row = tl.program_id(0)
    start = tl.load(starts + row)
    seed = tl.load(whole + tl.load(rows + row) * num_columns + SEED)
    low = (start & 0xFFFFFFFF).to(tl.uint32)
    high = (start >> 32).to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox(seed, zero, low, high, zero + 1)
    uniform = ((word >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    column = tl.arange(0, BLOCK)
    rate = tl.load(rates + column, mask=column < num_rates, other=0.0)
    count = (1 + tl.sum((uniform < rate).to(tl.int32), axis=0)).to(tl.int64)
    tl.store(out + row, tl.minimum(count, tl.load(limits + row)))


def draw_accepted(rates: Tensor, starts: Tensor, limits: Tensor, batch: SamplingBatch) -> Tensor:
    """Implement `acceptance.reference_draw_accepted`."""
    out = torch.empty(len(starts), dtype=torch.int64, device=starts.device)
    _draw[(len(starts),)](
        rates, starts, limits, batch.rows, batch.whole, out, len(rates), batch.whole.shape[1],
        SEED=int(Whole.SEED), BLOCK=triton.next_power_of_2(max(len(rates), 1)), **overlap(starts.device),
        num_warps=1,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["width"])
def _advance(
    length, anchor, block, sampled, num_committed, rows, whole, output_counts, width, num_columns, vocab_size,
    scratch,
    OUTPUT_START: tl.constexpr, IS_PENALISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    index = tl.program_id(0)
    row = tl.load(rows + index)
    if row == scratch:
        return
    committed = tl.load(num_committed + index)
    start = tl.load(length + row)
    if tl.load(whole + row * num_columns + IS_PENALISED) != 0:
        first = tl.load(whole + row * num_columns + OUTPUT_START)
        for column in range(committed.to(tl.int32)):  # one by one: a token may occur twice
            if start + column >= first:
                at = output_counts + row * vocab_size + tl.load(block + index * width + column)
                tl.atomic_add(at, 1)
    tl.store(length + row, start + committed)
    tl.store(anchor + row, tl.load(sampled + index * width + committed - 1))


def advance(
    progress: Progress, block: Tensor, sampled: Tensor, num_committed: Tensor, batch: SamplingBatch
) -> None:
    """Implement `acceptance.reference_advance`."""
    block, sampled = block.contiguous(), sampled.contiguous()
    num_rows, width = block.shape
    _advance[(num_rows,)](
        progress.length, progress.anchor, block, sampled, num_committed, batch.rows, batch.whole,
        batch.output_counts, width, batch.whole.shape[1], batch.output_counts.shape[1],
        len(progress.length) - 1,
        OUTPUT_START=int(Whole.OUTPUT_START), IS_PENALISED=int(Whole.IS_PENALISED), **overlap(block.device),
        num_warps=1,
    )  # fmt: skip
