"""Mixtures of experts, which weight and sum the outputs of a few experts: contract and PyTorch reference.

The reference runs one expert after another over the tokens that chose it. It reads the chosen experts from
the device, so a CUDA graph cannot capture it, unlike the kernels. In the kernels, a token's bits do not
depend on other tokens (on Hopper not even on their number). The reference guarantees this if `linear` is
batch-invariant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.kernels.pointwise import GateMul, RmsNorm, reference_gate_mul, reference_rms_norm, sigmoid

ExpertCode = Literal["mxfp4", "nvfp4", "int4"]
Weighing = Literal["all", "renormalised", "chosen"]

SLOPE = 1.702  # of the sigmoid in a clamped SwiGLU

FP4_GROUPS = {"mxfp4": 32, "nvfp4": 16}  # columns that share a scale
MIN_COLUMNS = 16  # the fewest columns of one step of a product


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between an expert's two products.

    "silu" is silu(gate) * up, "gelu" is gelu(gate) * up (tanh approximation), and "swiglu_clamped" is
    (up + 1) * gate * sigmoid(SLOPE * gate), with gate at most `limit` and up within +-limit.
    """

    kind: Literal["silu", "gelu", "swiglu_clamped"] = "silu"
    limit: float | None = None

    def function(self, gate_mul: GateMul) -> Callable[[Tensor], Tensor]:
        """Return the function [..., 2 I] -> [..., I] of gate and up, which are concatenated."""
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
    """A router's result: weights and expert ids (int64), [N, K] each; a token's ids are distinct."""

    weights: Tensor
    ids: Tensor


class Matrices(NamedTuple):
    """A stored matrix [rows, columns] for each of X experts; the last dimension is contiguous.

    values [X, rows, columns] are in the activations' dtype, or fp8 (e4m3) or int8 with scales. Or they are
    uint8 with two 4-bit codes in each byte, the first in its low half. scale [X, row blocks, column blocks]
    has one scale per block of `block` = (rows, columns). bias [X, rows].

    Codes are E2M1 with e8m0 scales of 32 columns (MXFP4), or with fp8 scales of 16 columns, which `second`
    [X, 1, 1] multiplies or divides (NVFP4); or integers less `zero`, uint8 of the scale's shape, or 8 (int4).
    """

    values: Tensor
    scale: Tensor | None = None
    block: tuple[int, int] = (1, 1)
    bias: Tensor | None = None
    code: ExpertCode | None = None
    zero: Tensor | None = None
    second: Tensor | None = None  # float32
    is_divisor: bool = False


class ExpertProduct(Protocol):
    """A linear map for each expert: gate and up stacked, or down."""

    def __call__(self, x: Tensor, expert: int) -> Tensor:
        """Multiply x [M, columns] by the matrix of `expert`; return [M, rows]."""

    def matrices(self) -> tuple[Matrices, ...] | None:
        """Return the matrices of each stacked part, or None if no kernel reads the format."""


class Parts(NamedTuple):
    """The matrices of experts, as the kernels read them; gate and up have the same layout."""

    gate: Matrices
    up: Matrices
    down: Matrices


class SharedExpertWeights(Protocol):
    """An expert that runs for every token, with the activation of the routed experts."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the expert's output [N, E] for x [N, E]."""

    def parts(self) -> Parts | None:
        """Return the expert's matrices (X = 1), or None if no kernel reads the format."""


class Shared(NamedTuple):
    """A term that is added to the routed experts' output: sigmoid(gate) * expert(x)."""

    gate: Tensor  # [N, 1], logits
    expert: SharedExpertWeights


class Beside(NamedTuple):
    """The shared expert's term of the output, as an argument of the kernels: sigmoid(gate) * value.

    `value` is the expert's output [N, E], or its matrices if the kernels run it with the routed experts.
    """

    gate: Tensor
    value: Tensor | Parts


class Onto(NamedTuple):
    """The residual stream to which the experts' output is added, and the norm of the sum."""

    stream: Tensor  # [N, E]
    weight: Tensor  # [E]
    eps: float


Summed = tuple[Tensor, Tensor | None]  # the experts' output, and with `Onto` its norm, [N, E] each
RunExperts = Callable[
    [Tensor, ExpertProduct, ExpertProduct, ExpertChoice, Activation, Shared | None, Onto | None], Summed
]


def reference_experts(  # noqa: PLR0913
    x: Tensor,
    gate_up: ExpertProduct,
    down: ExpertProduct,
    choice: ExpertChoice,
    activation: Activation,
    shared: Shared | None = None,
    onto: Onto | None = None,
    *,
    gate_mul: GateMul = reference_gate_mul,
    rms_norm: RmsNorm = reference_rms_norm,
) -> Summed:
    """Run the chosen experts one by one and combine them; products, `gate_mul` and norm may be kernels."""
    ids = choice.ids
    activate = activation.function(gate_mul)
    outputs = x.new_empty(*ids.shape, x.shape[-1])  # [N, K, E]
    for expert in torch.unique(ids).tolist():
        token, choice_index = torch.where(ids == expert)
        outputs[token, choice_index] = down(activate(gate_up(x[token], expert)), expert)
    beside = None if shared is None else Beside(shared.gate, shared.expert(x))
    return reference_combine(outputs, choice.weights, beside, onto, rms_norm=rms_norm)


def reference_combine(
    outputs: Tensor,
    weights: Tensor,
    beside: Beside | None = None,
    onto: Onto | None = None,
    *,
    rms_norm: RmsNorm = reference_rms_norm,
) -> Summed:
    """Return the weighted sum [N, E] of the chosen experts' outputs [N, K, E], plus `beside` and `onto`."""
    total = (outputs * weights.to(outputs.dtype)[..., None]).sum(dim=1)
    if beside is not None:
        assert isinstance(beside.value, Tensor)
        total = total + sigmoid(beside.gate) * beside.value
    if onto is None:
        return total, None
    total = onto.stream + total
    return total, rms_norm(total, onto.weight, onto.eps)


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
