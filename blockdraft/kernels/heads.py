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
    """Keys and values [G, S, D] to write to: token n goes to slot `slot_ids[n]`."""

    keys: Tensor
    values: Tensor
    slot_ids: Tensor
    rotation: Rotation | None = None


NormRopeWrite = Callable[[Tensor | None, Tensor, Tensor, HeadNorms | None, Angles, Slots], Tensor | None]
CopySlots = Callable[[Tensor, Tensor, Tensor, Tensor], None]
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
    slots.keys.index_copy_(1, slots.slot_ids, k.transpose(0, 1))
    slots.values.index_copy_(1, slots.slot_ids, v.transpose(0, 1))


def reference_copy_slots(keys: Tensor, values: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy slots of keys and values [G, S, D]. No target is another's source; 0 to 0 may repeat."""
    for stored in (keys, values):
        stored.index_copy_(1, targets, stored.index_select(1, sources))


def reference_gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), both [N, H, D]."""
    return x * sigmoid(gate)
