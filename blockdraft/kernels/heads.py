"""The steps of heads before attention: norms, rotary positions, and writes to the cache's slots.

Queries and keys are normalised per head (if the model does so) and rotated to their positions; keys and
values are written to their slots. On a GPU one kernel does all this and rounds once. The reference and the
CPU kernel round after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.kernels import kv_codec
from blockdraft.kernels.pointwise import Angles, sigmoid


class HeadNorms(NamedTuple):
    """Weights [D] of the norms over queries and over keys."""

    q: Tensor
    k: Tensor
    eps: float


class Rotation(NamedTuple):
    """The Hadamard rotation of queries, keys and values for compressed formats (kv_codec.rotate), in float32.

    It is the last step before they are rounded to their dtype; `centre` is subtracted from rotated keys.
    """

    signs: Tensor  # [D] of 1 and -1
    centre: Tensor  # [G, D]


class Slots(NamedTuple):
    """Keys and values [G, S, D] to write to: token n goes to slot `slot_ids[n]`, or to several slots.

    A slot may repeat among a token's own.
    """

    keys: Tensor
    values: Tensor
    slot_ids: Tensor  # [N] or [N, slots]
    rotation: Rotation | None = None


NormRopeWrite = Callable[[Tensor | None, Tensor, Tensor, HeadNorms | None, Angles, Slots], Tensor | None]
GateHeads = Callable[[Tensor, Tensor], Tensor]


def apply_rotation(x: Tensor, rotation: Rotation | None, centre: Tensor | None = None) -> Tensor:
    """Return queries, keys or values [N, H, D], rotated, less `centre`; unchanged without `rotation`."""
    if rotation is None:
        return x
    y = kv_codec.rotate(x.to(torch.promote_types(x.dtype, torch.float32)))
    return (y if centre is None else y - centre).to(x.dtype)


def write(k: Tensor, v: Tensor, slots: Slots) -> None:
    """Write keys and values [N, G, D], normalised and rotated to their positions, to their slots."""
    rotation = slots.rotation
    k, v = (
        apply_rotation(k, rotation, None if rotation is None else rotation.centre),
        apply_rotation(v, rotation),
    )
    if slots.slot_ids.dim() > 1:
        k, v = (part.repeat_interleave(slots.slot_ids.shape[1], dim=0) for part in (k, v))
    slot_ids = slots.slot_ids.flatten()
    slots.keys.index_copy_(1, slot_ids, k.transpose(0, 1))
    slots.values.index_copy_(1, slot_ids, v.transpose(0, 1))


def reference_gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), both [N, H, D]."""
    return x * sigmoid(gate)
