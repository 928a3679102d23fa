"""Picks sampling, acceptance, the walk over candidates, and n-gram lookup."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.kernels.acceptance import (
    Advance,
    CountAccepted,
    DrawAccepted,
    reference_advance,
    reference_count_accepted,
    reference_draw_accepted,
)
from blockdraft.kernels.candidates import PairScores, Walk, reference_walk
from blockdraft.kernels.choice import Available
from blockdraft.kernels.failure import named
from blockdraft.kernels.ngram_lookup import Lookup, Remember, reference_lookup, reference_remember
from blockdraft.kernels.sampling import (
    Choose,
    Forbid,
    SamplingBatch,
    adjusted,
    reference_choose,
    reference_forbid,
)


def pick_choose(at: Available) -> Choose:
    if at.has_llvm():
        return _repeated_choose()
    if not at.has_triton("sampling"):
        return reference_choose
    from blockdraft.kernels.triton.sampling import choose

    return named("sampling", choose)


def _repeated_choose() -> Choose:
    """Return the CPU's `choose`, which reads what the rows need at each replay of a captured step."""
    from blockdraft.kernels.llvm.recording import repeat
    from blockdraft.kernels.llvm.sampling import ChooseKernel

    native = ChooseKernel()

    def choose(logits: Tensor, starts: Tensor, recent: Tensor, batch: SamplingBatch) -> Tensor:
        chosen = torch.empty(logits.shape[:2], dtype=torch.int64)

        def run() -> None:
            if logits.dtype == torch.float64:
                chosen.copy_(reference_choose(logits, starts, recent, batch))
            else:
                native(adjusted(logits, starts, recent, batch), starts, batch, chosen)

        repeat(run)
        return chosen

    return choose


def pick_forbid(at: Available) -> Forbid:
    if not at.has_triton("sampling"):
        return reference_forbid
    from blockdraft.kernels.triton.sampling import forbid

    return named("sampling", forbid)


def pick_acceptance(at: Available) -> tuple[CountAccepted, DrawAccepted, Advance]:
    if at.has_llvm():
        from blockdraft.kernels.llvm.acceptance import AcceptanceKernels

        native = AcceptanceKernels()
        return native.count_accepted, reference_draw_accepted, native.advance
    if not at.has_triton("acceptance"):
        return reference_count_accepted, reference_draw_accepted, reference_advance
    from blockdraft.kernels.triton import acceptance as kernels

    return (
        named("acceptance", kernels.count_accepted),
        named("acceptance", kernels.draw_accepted),
        named("acceptance", kernels.advance),
    )


def pick_walk(at: Available) -> Walk:
    if at.has_llvm():
        return _repeated_walk()
    if not at.has_triton("candidates"):
        return reference_walk
    from blockdraft.kernels.triton.candidates import walk

    return named("candidates", walk)


def _repeated_walk() -> Walk:
    """Return the CPU's `walk`, which reads what the rows need at each replay of a captured step."""
    from blockdraft.kernels.llvm.candidates import CandidateKernels
    from blockdraft.kernels.llvm.recording import repeat

    native = CandidateKernels()

    def walk(
        logits: Tensor, pairs: PairScores, starts: Tensor, anchor: Tensor, batch: SamplingBatch
    ) -> Tensor:
        drafts = torch.empty(logits.shape[:2], dtype=torch.int64)

        def run() -> None:
            if native.takes(logits, pairs):
                native.walk(adjusted(logits, starts, anchor, batch), pairs, starts, anchor, batch, drafts)
            else:
                drafts.copy_(reference_walk(logits, pairs, starts, anchor, batch))

        repeat(run)
        return drafts

    return walk


def pick_ngram_lookup(at: Available) -> tuple[Lookup, Remember]:
    if at.has_llvm(torch.float32):  # integers only: the model's dtype does not matter
        from blockdraft.kernels.llvm.ngram_lookup import NgramLookupKernels

        native = NgramLookupKernels()
        return native.lookup, native.remember
    if not at.has_triton("lookup"):
        return reference_lookup, reference_remember
    from blockdraft.kernels.triton import ngram_lookup as kernels

    return named("lookup", kernels.lookup), named("lookup", kernels.remember)
