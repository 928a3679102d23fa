"""Mixtures of experts: a router chooses a few experts per token; their weighted outputs are summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockdraft.kernels.moe import Activation, ExpertChoice, Matrices, Onto, Parts, Shared, Summed, Weighing
from blockdraft.kernels.pick.mixtures import why_no_kernel
from blockdraft.models.config import ModelConfig, MoEConfig
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.layers import GatedMLP, Linear, RMSNorm
from blockdraft.models.packed import Packed, Scaled, Stacked
from blockdraft.models.packed_groups import Fp4Groups, IntGroups

_SILU = Activation("silu")


class ExpertLinear(KernelModule):
    """One Linear per expert: weight [experts, sum(parts), inputs], plain or packed."""

    weight: nn.Parameter | Packed

    def __init__(self, num_experts: int, inputs: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(num_experts, sum(parts), inputs))
        self.bias = nn.Parameter(torch.empty(num_experts, sum(parts))) if bias else None

    def forward(self, x: Tensor, expert: int) -> Tensor:
        bias = None if self.bias is None else self.bias[expert]
        if isinstance(self.weight, Packed):
            return self.weight[expert].matmul(x, bias, kernels=self.kernels)
        return self.kernels.linear(x, self.weight[expert], bias, None)

    def matrices(self) -> tuple[Matrices, ...] | None:
        """Return each part in the form that kernels read; None if no kernel reads the weight's format."""
        return _matrices(self)


def _matrices(part: ExpertLinear | Linear) -> tuple[Matrices, ...] | None:
    """Return the parts of all experts; a Linear counts as one expert. None as in `matrices`."""
    pieces = part.weight.members() if isinstance(part.weight, Stacked) else [part.weight]
    found: list[Matrices] = []
    for piece in pieces:
        stored, counts = _stored(piece), list(part.parts) if len(pieces) == 1 else [piece.shape[-2]]
        if stored is None or any(count % stored.block[0] != 0 for count in counts[:-1]):
            return None
        found += _cut(stored, counts)
    if part.bias is None:
        return tuple(found)
    biases = torch.split(_by_expert(part.bias, 2), list(part.parts), 1)
    return tuple(matrices._replace(bias=bias) for matrices, bias in zip(found, biases, strict=True))


def _stored(weight: Tensor | Packed) -> Matrices | None:
    """Return `weight` [experts, rows, columns] or [rows, columns] in a kernel's form, or None."""
    if isinstance(weight, Tensor):
        return Matrices(_by_expert(weight, 3))
    if isinstance(weight, Scaled) and weight.zero is None:
        values, scale = _by_expert(weight.values, 3), _by_expert(weight.scale, 3)
        if weight.block[0] >= values.shape[1]:  # all rows have the same scale
            return Matrices(values, scale.expand(-1, values.shape[1], -1), (1, weight.block[1]))
        return Matrices(values, scale, weight.block)
    if isinstance(weight, Fp4Groups) and weight.column_factors is None:
        return _stored_fp4(weight)
    if isinstance(weight, IntGroups) and weight.bits == 4 and weight.group_index is None:
        codes, scale = _by_expert(weight.codes, 3), _by_expert(weight.scale, 3)
        zero = None if weight.zero is None else _by_expert(weight.zero, 3)
        return Matrices(codes, scale, (1, weight.group_size), code="int4", zero=zero)
    return None


def _stored_fp4(weight: Fp4Groups) -> Matrices | None:
    codes, scale, block = _by_expert(weight.codes, 3), _by_expert(weight.scale, 3), (1, weight.group_size)
    second = weight.multiplier if weight.divisor is None else weight.divisor
    if scale.dtype == torch.float8_e8m0fnu:
        return Matrices(codes, scale, block, code="mxfp4") if second is None else None
    if second is None or (weight.multiplier is not None and weight.divisor is not None):
        return None
    second, is_divisor = _by_expert(second, 3), weight.divisor is not None
    return Matrices(codes, scale, block, code="nvfp4", second=second, is_divisor=is_divisor)


def _by_expert(tensor: Tensor, num_dims: int) -> Tensor:
    """Return the tensor with a dimension for experts; add one to a single matrix."""
    return tensor if tensor.dim() == num_dims else tensor[None]


def _cut(matrices: Matrices, counts: list[int]) -> list[Matrices]:
    """Return the rows in parts of `counts` rows; all parts but the last are whole blocks of scales."""
    values = torch.split(matrices.values, counts, 1)
    if matrices.scale is None:
        return [matrices._replace(values=part) for part in values]
    heights = [-(-count // matrices.block[0]) for count in counts]
    scales = torch.split(matrices.scale, heights, 1)
    zeros: Sequence[Tensor | None] = [None] * len(counts)
    if matrices.zero is not None:
        zeros = torch.split(matrices.zero, heights, 1)
    return [
        matrices._replace(values=part, scale=scale, zero=zero)
        for part, scale, zero in zip(values, scales, zeros, strict=True)
    ]


class Experts(KernelModule):
    """Gated feed-forward parts; each token runs through its chosen experts."""

    def __init__(
        self, hidden: int, config: MoEConfig, *, bias: bool = False, activation: Activation = _SILU
    ) -> None:
        super().__init__()
        self.gate_up = ExpertLinear(
            config.num_experts, hidden, config.inner_size, config.inner_size, bias=bias
        )
        self.down = ExpertLinear(config.num_experts, config.inner_size, hidden, bias=bias)
        self.activation = activation

    def forward(
        self, x: Tensor, choice: ExpertChoice, shared: Shared | None = None, onto: Onto | None = None
    ) -> Summed:
        """Return the experts' weighted outputs; see `kernels.pick.mixtures.pick_experts`."""
        return self.kernels.experts(x, self.gate_up, self.down, choice, self.activation, shared, onto)

    def why_not_captured(self) -> str | None:
        """Return why a CUDA graph cannot capture these experts; None if it can."""
        return why_no_kernel(self.kernels.available, self.gate_up, self.down)


class SharedExpert(GatedMLP):
    """The expert that runs for every token."""

    def parts(self) -> Parts | None:
        """Return the matrices in the form that experts' kernels read; None if no kernel reads the format."""
        stacked, single = _matrices(self.gate_up), _matrices(self.down)
        return None if stacked is None or single is None else Parts(*stacked, *single)


class MoE(KernelModule):
    """Routed experts, with a gated shared expert if the config has one.

    The router computes a softmax over all experts, and chooses the `num_chosen` likeliest. The shared
    expert's gate is one more row of the router: both have the same input, and neither is ever quantised.
    """

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts, self.num_chosen = config.num_experts, config.num_chosen
        self.weighing: Weighing = "renormalised" if config.is_normalised else "all"
        has_shared = config.shared_size is not None
        self.router = Linear(hidden, config.num_experts, *((1,) if has_shared else ()))
        self.experts = Experts(hidden, config)
        self.shared = None
        if has_shared:  # with silu like the routed experts, so that kernels can run it as one more
            self.shared = SharedExpert(hidden, config.shared_size or 0)

    def forward(self, x: Tensor, norm: RMSNorm, *, next_norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Return y = x + experts(norm(x)), and next_norm(y)."""
        h = norm(x)
        logits, gate = self.router(h).tensor_split([self.num_experts], dim=-1)
        choice = self.kernels.route(logits, self.num_chosen, self.weighing, None)
        shared = None if self.shared is None else Shared(gate, self.shared)
        return self.experts(h, choice, shared, next_norm.onto(x))  # type: ignore[no-any-return]

    def scores(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Return the router's logits [N, X], as `forward` uses them."""
        return self.router(norm(x))[:, : self.num_experts]  # type: ignore[no-any-return]


def feed_forward(config: ModelConfig, index: int) -> nn.Module:
    """Build a layer's mixture of experts or dense feed-forward part."""
    part = config.layers[index]
    if part.moe is not None:
        return MoE(config.hidden_size, part.moe)
    assert part.mlp is not None
    return GatedMLP(config.hidden_size, part.mlp.inner_size, bias=part.mlp.has_bias)
