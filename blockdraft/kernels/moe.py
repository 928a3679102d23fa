"""Mixtures of experts: choosing a few feed-forward parts per token, running them, weighing their outputs.

Contract, PyTorch reference, and which of that and `triton.moe` a model has. The reference runs one product
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

from blockdraft.kernels.choice import Available
from blockdraft.kernels.failure import named
from blockdraft.kernels.rows import GateMul, reference_gate_mul, sigmoid

Groups = tuple[Tensor, Tensor]  # order and tiles, see `triton.routing`
Weighing = Literal["all", "renormalised", "chosen"]

SLOPE = 1.702  # of the sigmoid that stands in for SiLU's in a clamped SwiGLU

FP4_GROUP = 32  # columns that share a scale in MXFP4
MIN_COLUMNS = 16  # that a step of a product takes
_HALVES = (torch.bfloat16, torch.float16)


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


def pick_experts(at: Available, gate_mul: GateMul) -> RunExperts:
    """[N, E] for x [N, E]: sum over a token's choice of weight * down(activation(gate_up(x))).

    Weights are rounded to x's dtype, and so is each weighed output; their sum is float32 or wider and
    rounded, then `shared` is added and rounded, then `onto` (the residual stream) is added and rounded.
    """
    one_by_one = functools.partial(reference_experts, gate_mul=gate_mul)
    if not at.has_triton("experts"):
        return one_by_one
    from blockdraft.kernels.triton import moe

    run = named("experts", moe.run_experts)

    def experts(
        x: Tensor,
        gate_up: ExpertProduct,
        down: ExpertProduct,
        choice: ExpertChoice,
        activation: Activation,
        shared: Shared | None,
        onto: Tensor | None,
    ) -> Tensor:
        parts = _readable(at, gate_up, down)
        if isinstance(parts, str):
            return one_by_one(x, gate_up, down, choice, activation, shared, onto)
        beside = None if shared is None else _beside(x, shared, parts, choice.ids.numel())
        return run(x, parts, choice, activation, beside, onto)

    return experts


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


def pick_route(at: Available) -> Route:
    """The `num_chosen` largest of each row of logits [N, X], the largest first, and their weights.

    Weights are a softmax over all experts ("all"), the same made to sum to one ("renormalised"), or a softmax
    over the chosen alone ("chosen"): the last two are equal but for rounding. They are float32 or wider,
    those of "chosen" may have the logits' dtype. Each is multiplied by its expert's `expert_scale`.
    The kernel gives ties to the lowest id; PyTorch promises no order for them.
    """
    if not at.has_triton("routing"):
        return reference_route
    from blockdraft.kernels.triton import routing

    alone, grouped = named("routing", routing.route), named("routing", routing.route_and_group)

    def route(
        logits: Tensor, num_chosen: int, weighing: Weighing, expert_scale: Tensor | None
    ) -> ExpertChoice:
        num_tokens, num_experts = logits.shape
        is_small = routing.can_group_at_once(num_tokens, num_experts, num_chosen)
        kernel = grouped if is_small else alone
        return ExpertChoice(
            *kernel(logits, num_chosen, is_over_all=weighing == "all", expert_scale=expert_scale)
        )

    return route


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


def why_no_kernel(at: Available, gate_up: ExpertProduct, down: ExpertProduct) -> str | None:
    """None where the kernels run these experts, and a CUDA graph can hold them; else why not."""
    found = at.why_reference("experts") or _readable(at, gate_up, down)
    return found if isinstance(found, str) else None


def _readable(at: Available, gate_up: ExpertProduct, down: ExpertProduct) -> Parts | str:
    """What the kernels read, or why they cannot."""
    dtype, device = at.dtype, at.device
    stacked, single = gate_up.matrices(), down.matrices()
    if stacked is None or single is None:
        return "no kernel reads the format of these experts"
    parts = Parts(*stacked, *single)
    if _layout(parts.gate) != _layout(parts.up):
        return "an expert's gate and up are stored in different formats"
    return _why_unreadable(parts.gate, dtype, device) or _why_unreadable(parts.down, dtype, device) or parts


def _layout(part: Matrices, begin: int = 0) -> tuple[object, ...]:
    """How it lies in memory, from dimension `begin` on: 1 leaves out that of the experts."""
    values, scale, bias = (
        None if tensor is None else (tensor.dtype, tensor.shape[begin:], tensor.stride()[begin:])
        for tensor in (part.values, part.scale, part.bias)
    )
    return values, scale, bias, part.block


def _beside(x: Tensor, shared: Shared, parts: Parts, num_pairs: int) -> Beside:
    """The shared expert as one more of the routed, or its output.

    For many pairs a product of its own is the faster one, and launches count for nothing. Of plain weights it
    has the same bits.
    """
    from blockdraft.kernels.triton.routing import MAX_FEW

    if num_pairs <= MAX_FEW or parts.gate.scale is not None:
        stored = shared.expert.parts()
        if stored is not None and all(map(_can_join, stored, parts)):
            return Beside(shared.gate, stored)
    return Beside(shared.gate, shared.expert(x))


def _can_join(shared: Matrices, routed: Matrices) -> bool:
    """Whether one kernel reads both, and loses no wide loads by it."""
    return _layout(shared, 1) == _layout(routed, 1) and shared.values.data_ptr() % 16 == 0


def _why_unreadable(part: Matrices, dtype: torch.dtype, device: torch.device) -> str | None:
    stored, scale = part.values.dtype, part.scale
    if scale is None:
        return None if stored == dtype else f"experts in {stored} cannot be multiplied by {dtype}"
    is_fp4 = stored == torch.uint8 and scale.dtype == torch.float8_e8m0fnu and part.block == (1, FP4_GROUP)
    is_scaled = stored in (torch.float8_e4m3fn, torch.int8) and scale.dtype in (*_HALVES, torch.float32)
    if not is_fp4 and not is_scaled:
        return f"no kernel reads experts in {stored} with scales in {scale.dtype}"
    if is_scaled and part.block[1] < part.values.shape[2] and part.block[1] % MIN_COLUMNS != 0:
        return f"no kernel reads experts with a scale for every {part.block[1]} columns"
    is_old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
    if stored == torch.float8_e4m3fn and dtype != torch.bfloat16 and is_old:
        return f"this card cannot convert fp8 to {dtype} (compute capability 8.9 and above can)"
    if dtype not in _HALVES and stored != torch.int8:
        return f"the kernels read {stored} beside half precision only, not {dtype}"
    return None
