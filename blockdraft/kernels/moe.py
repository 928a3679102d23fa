"""Mixtures of experts: choosing a few feed-forward parts per token, running them, weighing their outputs.

Contract and PyTorch reference. The reference runs one product
per expert over the tokens that chose it: it asks the device which experts those are, so it cannot be captured
in a CUDA graph. The kernels can. They promise that a token's bits do not depend on its neighbours, nor on
Hopper on their number. In the reference that holds where `linear` promises it: every chosen expert's output
has its own place, and places are summed in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.kernels.pointwise import GateMul, reference_gate_mul, sigmoid

Groups = tuple[Tensor, Tensor]  # order and tiles, see `triton.routing`
Weighing = Literal["all", "renormalised", "chosen"]

SLOPE = 1.702  # of the sigmoid that stands in for SiLU's in a clamped SwiGLU

FP4_GROUP = 32  # columns that share a scale in MXFP4
MIN_COLUMNS = 16  # that a step of a product takes


@dataclass(frozen=True, slots=True)
class Activation:
    """What stands between an expert's two products, in words that a kernel can follow.

    silu, gelu: silu(gate) * up, gelu(gate) * up (tanh approximation). swiglu_clamped: (up + 1) * gate *
    sigmoid(SLOPE * gate), with gate at most `limit` and up within +-limit.
    """

    kind: Literal["silu", "gelu", "swiglu_clamped"] = "silu"
    limit: float | None = None

    def function(self, gate_mul: GateMul) -> Callable[[Tensor], Tensor]:
        """On gate and up side by side, [..., 2 I] -> [..., I]."""
        kind = self.kind
        if kind == "swiglu_clamped":
            return functools.partial(clamped_swiglu, limit=self.limit)
        return lambda gate_up: gate_mul(gate_up, kind)


def clamped_swiglu(gate_up: Tensor, *, limit: float | None) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * sigmoid(gate * SLOPE))


class ExpertChoice(NamedTuple):
    """Of a router: weights and expert ids (int64), [N, K] each.

    `groups`: the same by expert, where the kernel that made the choice has grouped it too.
    """

    weights: Tensor
    ids: Tensor
    groups: Groups | None = None


class Matrices(NamedTuple):
    """A matrix [rows, columns] for each of X experts, as stored; the last dimension is contiguous.

    values [X, rows, columns]: the activations' dtype, or fp8 (e4m3) or int8 with scales, or uint8 that holds
    two E2M1 codes, the low half of a byte first, with scales e8m0 for 32 columns each. scale [X, row blocks,
    column blocks], of `block` = (rows, columns) each. bias [X, rows].
    """

    values: Tensor
    scale: Tensor | None = None
    block: tuple[int, int] = (1, 1)
    bias: Tensor | None = None


class ExpertProduct(Protocol):
    """A linear map per expert: gate and up stacked, or down."""

    def __call__(self, x: Tensor, expert: int) -> Tensor:
        """[M, columns] -> [M, rows] of one expert."""

    def matrices(self) -> tuple[Matrices, ...] | None:
        """Of each stacked part; None where the format is one that no kernel reads."""


class Parts(NamedTuple):
    """What the kernels read: gate and up have one layout."""

    gate: Matrices
    up: Matrices
    down: Matrices


class SharedExpertWeights(Protocol):
    """An expert that every token takes; its activation is that of the routed ones."""

    def __call__(self, x: Tensor) -> Tensor:
        """[N, E] -> [N, E]."""

    def parts(self) -> Parts | None:
        """Its matrices, X = 1; None where the format is one that no kernel reads."""


class Shared(NamedTuple):
    """What is added beside the routed experts: sigmoid(gate) * expert(x)."""

    gate: Tensor  # [N, 1], logits
    expert: SharedExpertWeights


class Beside(NamedTuple):
    """The same on its way through the kernels: sigmoid(gate) * value.

    `value` is [N, E], or the expert that makes it where the kernels run it with the routed ones.
    """

    gate: Tensor
    value: Tensor | Parts


RunExperts = Callable[
    [Tensor, ExpertProduct, ExpertProduct, ExpertChoice, Activation, Shared | None, Tensor | None], Tensor
]


def reference_experts(  # noqa: PLR0913
    x: Tensor,
    gate_up: ExpertProduct,
    down: ExpertProduct,
    choice: ExpertChoice,
    activation: Activation,
    shared: Shared | None = None,
    onto: Tensor | None = None,
    *,
    gate_mul: GateMul = reference_gate_mul,
) -> Tensor:
    """One expert after another, by products and `gate_mul` that may have kernels of their own."""
    ids = choice.ids
    activate = activation.function(gate_mul)
    outputs = x.new_empty(*ids.shape, x.shape[-1])  # [N, K, E]
    for expert in torch.unique(ids).tolist():
        token, place = torch.where(ids == expert)
        outputs[token, place] = down(activate(gate_up(x[token], expert)), expert)
    beside = None if shared is None else Beside(shared.gate, shared.expert(x))
    return reference_combine(outputs, choice.weights, beside, onto)


def reference_combine(
    outputs: Tensor, weights: Tensor, beside: Beside | None = None, onto: Tensor | None = None
) -> Tensor:
    """[N, E] of the pairs' outputs [N, K, E]."""
    total = (outputs * weights.to(outputs.dtype)[..., None]).sum(dim=1)
    if beside is not None:
        assert isinstance(beside.value, Tensor)
        total = total + sigmoid(beside.gate) * beside.value
    return total if onto is None else onto + total


Route = Callable[[Tensor, int, Weighing, Tensor | None], ExpertChoice]


def reference_route(
    logits: Tensor, num_chosen: int, weighing: Weighing, expert_scale: Tensor | None = None
) -> ExpertChoice:
    if weighing == "chosen":
        chosen, ids = logits.topk(num_chosen, dim=-1)
        weights = chosen.softmax(dim=-1)
    else:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        weights, ids = wide.softmax(dim=-1).topk(num_chosen, dim=-1)
        if weighing == "renormalised":
            weights = weights / weights.sum(dim=-1, keepdim=True)
    return ExpertChoice(weights if expert_scale is None else weights * expert_scale[ids], ids)
