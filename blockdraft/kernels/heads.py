"""What a token's heads go through on their way into attention: norms, rotary positions, the cache's slots.

Queries and keys are normalised over a head's values (where the model does that) and rotated to their
positions; keys and values go into their slots. On a GPU this is one kernel, which rounds once; the reference
rounds after each step.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from blockdraft.kernels.choice import takes_reference, takes_triton
from blockdraft.kernels.rows import Angles, rms_norm, rotate, sigmoid


class HeadNorms(NamedTuple):
    """Weights [D] of the norms over queries and over keys."""

    q: Tensor
    k: Tensor
    eps: float


class Slots(NamedTuple):
    """Where keys and values go: token n into slot `place[n]` of keys and values [G, S, D]."""

    keys: Tensor
    values: Tensor
    place: Tensor


def enter(
    q: Tensor, k: Tensor, v: Tensor, *, norms: HeadNorms | None, angles: Angles, slots: Slots
) -> Tensor:
    """The queries [N, H, D] to attend with; k and v [N, G, D] are in their slots afterwards."""
    if takes_reference(q, k, v) or not takes_triton(k, "heads"):
        if norms is not None:
            q = rms_norm(q, norms.q, norms.eps)
        enter_context(k, v, norms=norms, angles=angles, slots=slots)
        return rotate(q, angles)
    entered = _on_gpu(q, k, v, norms, angles, slots)
    assert entered is not None
    return entered


def enter_context(k: Tensor, v: Tensor, *, norms: HeadNorms | None, angles: Angles, slots: Slots) -> None:
    """The same for keys and values [N, G, D] that no query of this forward comes with."""
    if not takes_reference(k, v) and takes_triton(k, "heads"):
        _on_gpu(None, k, v, norms, angles, slots)
        return
    if norms is not None:
        k = rms_norm(k, norms.k, norms.eps)
    write(rotate(k, angles), v, slots)


def open_heads(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [N, H, D]: what each head lets through."""
    if takes_reference(x, gate) or not takes_triton(x, "heads' gates"):
        return x * sigmoid(gate)
    from blockdraft.kernels.triton.rows import open_heads as kernel

    return kernel(x, gate)


def write(k: Tensor, v: Tensor, slots: Slots) -> None:
    """Keys and values [N, G, D] as they are."""
    slots.keys.index_copy_(1, slots.place, k.transpose(0, 1))
    slots.values.index_copy_(1, slots.place, v.transpose(0, 1))


def _on_gpu(
    q: Tensor | None, k: Tensor, v: Tensor, norms: HeadNorms | None, angles: Angles, slots: Slots
) -> Tensor | None:
    from blockdraft.kernels.triton.rows import enter as kernel

    return kernel(
        q,
        k,
        v,
        q_weight=None if norms is None else norms.q,
        k_weight=None if norms is None else norms.k,
        eps=0.0 if norms is None else norms.eps,
        cos=angles[0],
        sin=angles[1],
        keys=slots.keys,
        values=slots.values,
        slots=slots.place,
    )
