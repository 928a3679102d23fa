"""Picks the operations on single tokens: norms, activations, rotary positions, heads, block convolutions."""

from __future__ import annotations

import functools

from torch import Tensor

from blockdraft.kernels.block_conv import ConvAfter, ConvBefore, in_turn, reference_block_conv
from blockdraft.kernels.choice import Available
from blockdraft.kernels.failure import named
from blockdraft.kernels.heads import (
    GateHeads,
    HeadNorms,
    NormRopeWrite,
    Slots,
    apply_rotation,
    reference_gate_heads,
    write,
)
from blockdraft.kernels.linear import Multiply
from blockdraft.kernels.llvm.block_conv import BlockConvKernel
from blockdraft.kernels.llvm.heads import HeadKernels
from blockdraft.kernels.llvm.pointwise import llvm_rows
from blockdraft.kernels.pointwise import (
    Angles,
    GateMul,
    RmsNorm,
    Rotate,
    reference_gate_mul,
    reference_rms_norm,
    reference_rotate,
)

_llvm_heads = functools.cache(HeadKernels)


def pick_rms_norm(at: Available) -> RmsNorm:
    if at.has_triton("norms"):
        from blockdraft.kernels.triton.pointwise import rms_norm

        return named("norms", rms_norm)
    return llvm_rows(at.dtype).rms_norm if at.has_llvm() else reference_rms_norm


def pick_gate_mul(at: Available) -> GateMul:
    if at.has_triton("activations"):
        from blockdraft.kernels.triton.pointwise import gate_mul

        return named("activations", gate_mul)
    return llvm_rows(at.dtype).gate_mul if at.has_llvm() else reference_gate_mul


def pick_rotate(at: Available) -> Rotate:
    return llvm_rows(at.dtype).rotate if at.has_llvm() else reference_rotate


def pick_norm_rope_write(at: Available, rms_norm: RmsNorm, rotate: Rotate) -> NormRopeWrite:
    """Pick the step that normalises and rotates q [N, H, D] and k, writes k and v [N, G, D], and returns q.

    q may be None: then only k and v are written, and the step returns None.
    """
    if at.has_triton("heads"):
        from blockdraft.kernels.triton.pointwise import norm_rope_write as kernel

        return named("heads", kernel)
    llvm = _llvm_heads(at.dtype).norm_rope_write if at.has_llvm() else None

    def norm_rope_write(
        q: Tensor | None, k: Tensor, v: Tensor, norms: HeadNorms | None, angles: Angles, slots: Slots
    ) -> Tensor | None:
        # The rotation of the CPU kernel writes whole registers of 16 values.
        if llvm is not None and (slots.rotation is None or k.shape[-1] % 16 == 0):
            return llvm(q, k, v, norms, angles, slots)
        if norms is not None:
            q = None if q is None else rms_norm(q, norms.q, norms.eps)
            k = rms_norm(k, norms.k, norms.eps)
        write(rotate(k, angles), v, slots)
        return None if q is None else apply_rotation(rotate(q, angles), slots.rotation)

    return norm_rope_write


def pick_gate_heads(at: Available) -> GateHeads:
    if not at.has_triton("heads' gates"):
        return reference_gate_heads
    from blockdraft.kernels.triton.pointwise import gate_heads

    return named("heads' gates", gate_heads)


def pick_block_convs(at: Available, linear: Multiply, rms_norm: RmsNorm) -> tuple[ConvBefore, ConvAfter]:
    """Return the convolution before a sublayer, with its projection, and the one after, with a norm."""
    if at.has_llvm():
        return in_turn(BlockConvKernel(at.dtype), linear, rms_norm)
    if not at.has_triton("block convolutions"):
        return in_turn(reference_block_conv, linear, rms_norm)
    from blockdraft.kernels.triton.block_conv import conv_after, conv_before

    return named("block convolutions", conv_before), named("block convolutions", conv_after)
