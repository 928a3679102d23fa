"""Picks sampling, acceptance, the walk over candidates, and n-gram lookup."""

from __future__ import annotations

import torch

from blockdraft.kernels.acceptance import (
    Advance,
    CountAccepted,
    DrawAccepted,
    reference_advance,
    reference_count_accepted,
    reference_draw_accepted,
)
from blockdraft.kernels.branches import (
    CopySlots,
    LayOut,
    Settle,
    reference_copy_slots,
    reference_lay_out,
    reference_settle,
)
from blockdraft.kernels.candidates import WalkCandidates, reference_walk
from blockdraft.kernels.choice import Available
from blockdraft.kernels.failure import named
from blockdraft.kernels.llvm import acceptance as llvm_acceptance
from blockdraft.kernels.llvm import candidates as llvm_candidates
from blockdraft.kernels.llvm import ngram_lookup as llvm_lookup
from blockdraft.kernels.llvm import sampling as llvm_sampling
from blockdraft.kernels.ngram_lookup import Lookup, Remember, reference_lookup, reference_remember
from blockdraft.kernels.sampling import Choose, Forbid, reference_choose, reference_forbid
from blockdraft.kernels.tree import Grow, Weigh, reference_grow, reference_weigh


def pick_choose(at: Available) -> Choose:
    if at.has_llvm():
        return llvm_sampling.choose
    if not at.has_triton("sampling"):
        return reference_choose
    from blockdraft.kernels.triton.sampling import choose

    return named("sampling", choose)


def pick_forbid(at: Available) -> Forbid:
    if not at.has_triton("sampling"):
        return reference_forbid
    from blockdraft.kernels.triton.sampling import forbid

    return named("sampling", forbid)


def pick_acceptance(at: Available) -> tuple[CountAccepted, DrawAccepted, Advance]:
    if at.has_llvm():
        return llvm_acceptance.count_accepted, reference_draw_accepted, llvm_acceptance.advance
    if not at.has_triton("acceptance"):
        return reference_count_accepted, reference_draw_accepted, reference_advance
    from blockdraft.kernels.triton import acceptance as kernels

    return (
        named("acceptance", kernels.count_accepted),
        named("acceptance", kernels.draw_accepted),
        named("acceptance", kernels.advance),
    )


def pick_walk(at: Available) -> WalkCandidates:
    if at.has_llvm():
        return llvm_candidates.walk
    if not at.has_triton("candidates"):
        return reference_walk
    from blockdraft.kernels.triton.candidates import walk

    return named("candidates", walk)


def pick_branches(at: Available) -> tuple[LayOut, Settle, CopySlots]:
    if not at.has_triton("trees"):
        return reference_lay_out, reference_settle, reference_copy_slots
    from blockdraft.kernels.triton.branches import copy_slots, lay_out, settle

    return named("trees", lay_out), named("trees", settle), named("trees", copy_slots)


def pick_trees(at: Available) -> tuple[Weigh, Grow]:
    if not at.has_triton("trees"):
        return reference_weigh, reference_grow
    from blockdraft.kernels.triton.tree import grow, weigh

    return named("trees", weigh), named("trees", grow)


def pick_ngram_lookup(at: Available) -> tuple[Lookup, Remember]:
    if at.has_llvm(torch.float32):  # integers only: the model's dtype does not matter
        return llvm_lookup.lookup, llvm_lookup.remember
    if not at.has_triton("lookup"):
        return reference_lookup, reference_remember
    from blockdraft.kernels.triton import ngram_lookup as kernels

    return named("lookup", kernels.lookup), named("lookup", kernels.remember)
