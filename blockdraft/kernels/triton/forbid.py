"""Masks tokens for structured output on a CUDA device: a program per column and piece of the vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blockdraft.kernels.sampling import NEVER, Allowed

_WORDS = 64  # of 32 tokens each, in one program


@triton.jit(do_not_specialize=["width"])
def _forbid(
    logits, words, counts, width, vocab_size, num_words,
    NEVER: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0).to(tl.int64)
    if column % width < tl.load(counts + column // width):
        word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        bits = tl.load(words + column * num_words + word, mask=word < num_words, other=0)
        bit = tl.arange(0, 32)
        token = word[:, None] * 32 + bit[None, :]
        is_forbidden = ((bits[:, None] >> bit[None, :]) & 1) == 0
        never = tl.full((WORDS, 32), NEVER, logits.dtype.element_ty)
        tl.store(logits + column * vocab_size + token, never, mask=is_forbidden & (token < vocab_size))


def forbid(logits: Tensor, allowed: Allowed) -> None:
    """sampling.reference_forbid: writes forbidden logits only, and reads none."""
    num_rows, width, vocab_size = logits.shape
    num_words = allowed.words.shape[-1]
    assert logits.is_contiguous()
    assert allowed.words.is_contiguous()
    _forbid[(num_rows * width, triton.cdiv(num_words, _WORDS))](
        logits,
        allowed.words,
        allowed.counts,
        width,
        vocab_size,
        num_words,
        NEVER=NEVER,
        WORDS=_WORDS,
        num_warps=4,
    )
