"""What a token's heads go through on their way into attention: norms, rotary positions, the cache's slots.

Queries and keys are normalised over a head's values (where the model does that) and rotated to their
positions; keys and values go into their slots. On a GPU this is one kernel, which rounds once; the reference
rounds after each step, and so does the one kernel of a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from blockdraft.kernels import kv_codec
from blockdraft.kernels.choice import Available
from blockdraft.kernels.failure import named
from blockdraft.kernels.rows import Angles, RmsNorm, Rotate, sigmoid

if TYPE_CHECKING:
    from blockdraft.kernels.llvm.heads import HeadKernels


class HeadNorms(NamedTuple):
    """Weights [D] of the norms over queries and over keys."""

    q: Tensor
    k: Tensor
    eps: float


class Turn(NamedTuple):
    """How queries, keys and values are rotated where those are compressed (kv_codec.rotate), in float32.

    Last of all, before they are rounded to their dtype; of rotated keys `centre` is taken off.
    """

    signs: Tensor  # [D] of 1 and -1
    centre: Tensor  # [G, D]


class Slots(NamedTuple):
    """Where keys and values go: token n into slot `place[n]` of keys and values [G, S, D]."""

    keys: Tensor
    values: Tensor
    place: Tensor
    turn: Turn | None = None


NormRopeWrite = Callable[[Tensor | None, Tensor, Tensor, HeadNorms | None, Angles, Slots], Tensor | None]
GateHeads = Callable[[Tensor, Tensor], Tensor]


def pick_norm_rope_write(at: Available, rms_norm: RmsNorm, rotate: Rotate) -> NormRopeWrite:
    """The queries [N, H, D] to attend with, where some come; k and v [N, G, D] are in their slots afterwards.

    One kernel does all of it, or `rms_norm`, `rotate` and `write` one after the other.
    """
    if at.has_triton("heads"):
        from blockdraft.kernels.triton.rows import norm_rope_write as kernel

        return named("heads", kernel)
    llvm = _llvm_heads(at.dtype).norm_rope_write if at.has_llvm() else None

    def norm_rope_write(
        q: Tensor | None, k: Tensor, v: Tensor, norms: HeadNorms | None, angles: Angles, slots: Slots
    ) -> Tensor | None:
        # Its rotation has registers of 16 values, and writes whole ones.
        if llvm is not None and (slots.turn is None or k.shape[-1] % 16 == 0):
            return llvm(q, k, v, norms, angles, slots)
        if norms is not None:
            q = None if q is None else rms_norm(q, norms.q, norms.eps)
            k = rms_norm(k, norms.k, norms.eps)
        write(rotate(k, angles), v, slots)
        return None if q is None else turned(rotate(q, angles), slots.turn)

    return norm_rope_write


@functools.cache
def _llvm_heads(dtype: torch.dtype) -> HeadKernels:
    from blockdraft.kernels.llvm.heads import HeadKernels

    return HeadKernels(dtype)


def turned(x: Tensor, turn: Turn | None, centre: Tensor | None = None) -> Tensor:
    """Queries, keys or values [N, H, D], rotated where that is asked for."""
    if turn is None:
        return x
    y = kv_codec.rotate(x.to(torch.promote_types(x.dtype, torch.float32)))
    return (y if centre is None else y - centre).to(x.dtype)


def write(k: Tensor, v: Tensor, slots: Slots) -> None:
    """Keys and values [N, G, D], normalised and with their positions."""
    turn = slots.turn
    k, v = turned(k, turn, None if turn is None else turn.centre), turned(v, turn)
    slots.keys.index_copy_(1, slots.place, k.transpose(0, 1))
    slots.values.index_copy_(1, slots.place, v.transpose(0, 1))


def pick_gate_heads(at: Available) -> GateHeads:
    if not at.has_triton("heads' gates"):
        return reference_gate_heads
    from blockdraft.kernels.triton.rows import gate_heads

    return named("heads' gates", gate_heads)


def reference_gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [N, H, D]: what each head lets through."""
    return x * sigmoid(gate)
