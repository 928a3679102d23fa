"""N-gram lookup on a CUDA device: one program per row and piece of its history, then one per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.ngram_lookup import MOST
from blockdraft.kernels.triton.launch import overlap, start_and_wait

PIECE = 1024  # positions per program
ROUND = 4  # earlier tokens that are compared at a time
END_BITS = 32  # of a piece's result: the last match's position, below the number of equal tokens


@triton.jit
def _search(
    found, history, rows, starts, size, num_pieces,
    MOST: tl.constexpr, PIECE: tl.constexpr, ROUND: tl.constexpr, END_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    item, piece = tl.program_id(0), tl.program_id(1)
    last = tl.load(starts + item).to(tl.int32)
    if piece * PIECE >= last:
        return
    text = history + tl.load(rows + item) * size
    position = piece * PIECE + tl.arange(0, PIECE)
    anchor = tl.load(text + last)
    agrees = (position < last) & (tl.load(text + position, mask=position < last, other=-1) == anchor)
    matched = agrees.to(tl.int32)
    first = 1
    while (first < MOST) & (tl.max(agrees.to(tl.int32), axis=0) > 0):
        for step in tl.static_range(ROUND):  # independent loads, all at once
            back = first + step
            inside = (position >= back) & (position < last)  # the anchor has as many tokens before it, too
            before = tl.load(text + position - back, mask=inside, other=-1)
            wanted = tl.load(text + tl.maximum(last - back, 0))
            agrees = agrees & inside & (before == wanted) & (back < MOST)
            matched += agrees.to(tl.int32)
        first += ROUND
    code = tl.where(matched > 0, (matched.to(tl.int64) << END_BITS) + position, 0)
    tl.store(found + item * num_pieces + piece, tl.max(code, axis=0))


@triton.jit(do_not_specialize=["width"])
def _write(
    block, found, history, rows, starts, size, num_pieces, width, least,
    PIECE: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, END_BITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    item = tl.program_id(0)
    last = tl.load(starts + item).to(tl.int32)
    piece = tl.arange(0, PIECES)
    was_searched = (piece < num_pieces) & (piece * PIECE < last)
    best = tl.max(tl.load(found + item * num_pieces + piece, mask=was_searched, other=0), axis=0)
    end, count = (best & ((1 << END_BITS) - 1)).to(tl.int32), (best >> END_BITS).to(tl.int32)
    if (count > 0) & (count >= least):
        text = history + tl.load(rows + item) * size
        column = tl.arange(0, BLOCK)
        is_draft = column + 1 < width
        token = tl.load(text + end + 1 + column % (last - end), mask=is_draft, other=0)
        tl.store(block + item * width + column + 1, token.to(tl.int64), mask=is_draft)


def lookup(block: Tensor, history: Tensor, rows: Tensor, starts: Tensor, least: int) -> None:
    """Implement `ngram_lookup.reference_lookup`."""
    assert block.is_contiguous()
    (num_rows, width), size = block.shape, history.shape[1]
    num_pieces = triton.cdiv(size, PIECE)
    found = torch.empty(num_rows, num_pieces, dtype=torch.int64, device=block.device)
    options = overlap(block.device)
    _search[(num_rows, num_pieces)](
        found, history, rows, starts, size, num_pieces,
        MOST=MOST, PIECE=PIECE, ROUND=ROUND, END_BITS=END_BITS, **options, num_warps=4,
    )  # fmt: skip
    _write[(num_rows,)](
        block, found, history, rows, starts, size, num_pieces, width, least,
        PIECE=PIECE, PIECES=triton.next_power_of_2(num_pieces), BLOCK=triton.next_power_of_2(width),
        END_BITS=END_BITS, **options, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def _remember(history, sampled, rows, length, size, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_and_wait(PDL)
    item = tl.program_id(0)
    row = tl.load(rows + item)
    column = tl.arange(0, BLOCK)
    token = tl.load(sampled + item * width + column, mask=column < width, other=0)
    place = history + row * size + tl.load(length + row) + 1 + column
    tl.store(place, token.to(tl.int32), mask=column < width)


def remember(history: Tensor, sampled: Tensor, rows: Tensor, length: Tensor) -> None:
    """Implement `ngram_lookup.reference_remember`."""
    sampled = sampled.contiguous()
    num_rows, width = sampled.shape
    _remember[(num_rows,)](
        history, sampled, rows, length, history.shape[1], width,
        BLOCK=triton.next_power_of_2(width), **overlap(sampled.device), num_warps=1,
    )  # fmt: skip
