"""What a token's heads go through on their way into attention: norms, rotary positions, the cache's slots.

Queries and keys are normalised over a head's values (where the model does that) and rotated to their
positions; keys and values go into their slots. On a GPU this is one kernel, which rounds once; the reference
rounds after each step, and so does the one kernel of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from blockdraft.kernels import kv_codec
from blockdraft.kernels.pointwise import Angles, sigmoid

if TYPE_CHECKING:
    pass


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


def reference_gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [N, H, D]: what each head lets through."""
    return x * sigmoid(gate)
