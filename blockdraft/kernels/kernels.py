"""Kernels: the implementations of all operations, chosen once for a model and bound to its modules."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from blockdraft.kernels import (
    acceptance,
    attention,
    block_conv,
    branches,
    candidates,
    gated_delta,
    heads,
    int8,
    kv_compressed,
    moe,
    packed,
    pointwise,
    sampling,
    tree,
)
from blockdraft.kernels import linear as products
from blockdraft.kernels import ngram_lookup as ngram_lookup
from blockdraft.kernels.choice import OPERATIONS, Available, Operation
from blockdraft.kernels.pick.attention import pick_attend, pick_attend_compressed, pick_compress, pick_locate
from blockdraft.kernels.pick.choosing import (
    pick_acceptance,
    pick_branches,
    pick_choose,
    pick_forbid,
    pick_ngram_lookup,
    pick_trees,
    pick_walk,
)
from blockdraft.kernels.pick.mixtures import pick_experts, pick_route
from blockdraft.kernels.pick.pointwise import (
    pick_block_convs,
    pick_gate_heads,
    pick_gate_mul,
    pick_norm_rope_write,
    pick_rms_norm,
    pick_rotate,
)
from blockdraft.kernels.pick.products import (
    pick_gated_linear,
    pick_int8,
    pick_linear,
    pick_packed_linear,
    pick_scaled_linear,
)
from blockdraft.kernels.pick.recurrent import pick_convolve, pick_gated_norm, pick_in_place, pick_scan


@dataclass(frozen=True, slots=True)
class Kernels:
    """A callable for every operation; the contracts are those of the references in this package.

    Only the references have gradients, and only they can be compiled by torch.compile.
    """

    available: Available  # decided which were chosen
    rms_norm: pointwise.RmsNorm
    gate_mul: pointwise.GateMul
    rotate: pointwise.Rotate
    linear: products.Multiply
    gated_linear: products.GatedMultiply
    scaled_linear: products.ScaledMultiply
    packed_linear: packed.PackedMultiply
    int8_linear: int8.Int8Multiply
    int8_look_up: int8.Int8LookUp
    norm_rope_write: heads.NormRopeWrite
    gate_heads: heads.GateHeads
    attend: attention.Attend
    locate: attention.Locate | None
    attend_compressed: kv_compressed.AttendCompressed
    compress: kv_compressed.Compress
    scan: gated_delta.DeltaScan
    fold: gated_delta.DeltaFold
    convolve: gated_delta.Convolve
    scan_in_place: gated_delta.InPlace | None
    gated_norm: gated_delta.GatedNorm
    route: moe.Route
    experts: moe.RunExperts
    choose: sampling.Choose
    forbid: sampling.Forbid
    count_accepted: acceptance.CountAccepted
    draw_accepted: acceptance.DrawAccepted
    advance: acceptance.Advance
    conv_before: block_conv.ConvBefore
    conv_after: block_conv.ConvAfter
    walk: candidates.WalkCandidates
    weigh: tree.Weigh
    grow: tree.Grow
    lay_out: branches.LayOut
    settle: branches.Settle
    copy_slots: branches.CopySlots
    lookup: ngram_lookup.Lookup
    remember: ngram_lookup.Remember

    @property
    def is_reference(self) -> bool:
        return self.available.path == "reference"

    @property
    def off(self) -> tuple[Operation, ...]:
        """Return the operations that use references because their kernels do not compile on this GPU."""
        return tuple(operation for operation in OPERATIONS if operation in self.available.off)

    def __deepcopy__(self, memo: dict[int, object]) -> Kernels:
        """Return self, as compiled kernels cannot be copied: a copy of a model shares them."""
        return self

    def without(self, operation: Operation) -> Kernels:
        """Return these kernels, but with the reference for `operation`."""
        return _assembled(replace(self.available, off=self.available.off | {operation}))

    def references(self) -> Kernels:
        """Return references to compare these kernels with; they round tokens to fp8 if these kernels do."""
        return _assembled(Available("reference", off=self.available.off, is_fast=self.available.is_fast))


def kernels_for(
    dtype: torch.dtype,
    device: torch.device,
    *,
    off: frozenset[Operation] = frozenset(),
    is_fast: bool = False,
    is_interpreted: bool = False,
) -> Kernels:
    """Return the kernels for a model of `dtype` on `device`, with references for the operations `off`.

    A token's bits do not depend on the number of tokens in the batch, unless `is_fast` allows it.
    `is_interpreted`, for tests, chooses the GPU kernels, which Triton's interpreter then runs.
    """
    is_gpu = device.type == "cuda" or is_interpreted
    return _assembled(Available("triton" if is_gpu else "llvm", dtype, device, off, is_fast))


def _assembled(at: Available) -> Kernels:
    rms_norm, gate_mul, rotate = pick_rms_norm(at), pick_gate_mul(at), pick_rotate(at)
    linear = pick_linear(at)
    gated_linear = pick_gated_linear(at, linear, gate_mul)
    int8_linear, int8_look_up = pick_int8(at)
    scan, fold = pick_scan(at)
    count_accepted, draw_accepted, advance = pick_acceptance(at)
    weigh, grow = pick_trees(at)
    lay_out, settle, copy_slots = pick_branches(at)
    lookup, remember = pick_ngram_lookup(at)
    conv_before, conv_after = pick_block_convs(at, linear, rms_norm)
    return Kernels(
        available=at,
        rms_norm=rms_norm,
        gate_mul=gate_mul,
        rotate=rotate,
        linear=linear,
        gated_linear=gated_linear,
        scaled_linear=pick_scaled_linear(at, gate_mul),
        packed_linear=pick_packed_linear(at, linear, gated_linear),
        int8_linear=int8_linear,
        int8_look_up=int8_look_up,
        norm_rope_write=pick_norm_rope_write(at, rms_norm, rotate),
        gate_heads=pick_gate_heads(at),
        attend=pick_attend(at),
        locate=pick_locate(at),
        attend_compressed=pick_attend_compressed(at),
        compress=pick_compress(at),
        scan=scan,
        fold=fold,
        convolve=pick_convolve(at),
        scan_in_place=pick_in_place(at),
        gated_norm=pick_gated_norm(at, rms_norm),
        route=pick_route(at),
        experts=pick_experts(at, gate_mul, rms_norm),
        choose=pick_choose(at),
        forbid=pick_forbid(at),
        count_accepted=count_accepted,
        draw_accepted=draw_accepted,
        advance=advance,
        conv_before=conv_before,
        conv_after=conv_after,
        walk=pick_walk(at),
        weigh=weigh,
        grow=grow,
        lay_out=lay_out,
        settle=settle,
        copy_slots=copy_slots,
        lookup=lookup,
        remember=remember,
    )


REFERENCE = _assembled(Available("reference"))
