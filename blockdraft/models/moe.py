"""Mixtures of experts: a router picks a few feed-forward parts per token, and their outputs are weighed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.kernels.linear import linear
from blockdraft.kernels.moe import (
    Activation,
    Choice,
    Matrices,
    Shared,
    Weighing,
    experts,
    route,
    why_no_kernel,
)
from blockdraft.models.config import MoEConfig
from blockdraft.models.layers import GatedMLP, Linear, RMSNorm
from blockdraft.models.packed import Packed, Scaled, Stacked
from blockdraft.models.packed_groups import Fp4Groups

_SILU = Activation("silu")


class ExpertLinear(nn.Module):
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
            return self.weight[expert].matmul(x, bias)
        return linear(x, self.weight[expert], bias)

    def matrices(self) -> tuple[Matrices, ...] | None:
        """Each part as a kernel reads it; None where the weight is in a format that no kernel reads."""
        pieces = self.weight.members() if isinstance(self.weight, Stacked) else [self.weight]
        found: list[Matrices] = []
        for piece in pieces:
            stored, counts = _stored(piece), list(self.parts) if len(pieces) == 1 else [piece.shape[1]]
            if stored is None or any(count % stored.block[0] != 0 for count in counts[:-1]):
                return None
            found += _cut(stored, counts)
        biases = [None] * len(found) if self.bias is None else torch.split(self.bias, list(self.parts), 1)
        return tuple(part._replace(bias=bias) for part, bias in zip(found, biases, strict=True))


def _stored(weight: Tensor | Packed) -> Matrices | None:
    """What a kernel reads of `weight` [experts, rows, columns], if there is one for its format."""
    if isinstance(weight, Tensor):
        return Matrices(weight)
    if isinstance(weight, Scaled) and weight.zero is None:
        if weight.block[0] >= weight.shape[1]:  # one scale for all rows: the same for each
            scale = weight.scale.expand(-1, weight.shape[1], -1)
            return Matrices(weight.values, scale, (1, weight.block[1]))
        return Matrices(weight.values, weight.scale, weight.block)
    if isinstance(weight, Fp4Groups) and weight.multiplier is None and weight.divisor is None:
        return Matrices(weight.codes, weight.scale, (1, weight.group_size))
    return None


def _cut(matrices: Matrices, counts: list[int]) -> list[Matrices]:
    """Some rows after the others; all counts but the last are whole blocks of scales."""
    values = torch.split(matrices.values, counts, 1)
    if matrices.scale is None:
        return [matrices._replace(values=part) for part in values]
    scales = torch.split(matrices.scale, [-(-count // matrices.block[0]) for count in counts], 1)
    return [matrices._replace(values=part, scale=scale) for part, scale in zip(values, scales, strict=True)]


class Experts(nn.Module):
    """Gated feed-forward parts, of which each token takes the ones chosen for it."""

    def __init__(
        self, hidden: int, config: MoEConfig, *, bias: bool = False, activation: Activation = _SILU
    ) -> None:
        super().__init__()
        self.gate_up = ExpertLinear(
            config.num_experts, hidden, config.inner_size, config.inner_size, bias=bias
        )
        self.down = ExpertLinear(config.num_experts, config.inner_size, hidden, bias=bias)
        self.activation = activation
        self.activate = activation.function

    def forward(
        self, x: Tensor, choice: Choice, shared: Shared | None = None, onto: Tensor | None = None
    ) -> Tensor:
        """[N, E] for x [N, E]; see `kernels.moe.experts`."""
        return experts(x, self.gate_up, self.down, choice, self.activation, shared, onto)

    def why_not_captured(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why a CUDA graph cannot hold these experts for activations of `dtype`; None where it can."""
        return why_no_kernel(dtype, device, self.gate_up, self.down)


class MoE(nn.Module):
    """Routed experts, and beside them a gated one that every token takes, if the config has it.

    A softmax over all experts, then the `num_chosen` likeliest. The shared expert's gate is one more row of
    the router: they read the same values, and neither is ever quantised.
    """

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts, self.num_chosen = config.num_experts, config.num_chosen
        self.weighing: Weighing = "renormalised" if config.is_normalised else "all"
        has_shared = config.shared_size is not None
        self.router = Linear(hidden, config.num_experts, *((1,) if has_shared else ()))
        self.experts = Experts(hidden, config)
        self.shared = GatedMLP(hidden, config.shared_size or 0) if has_shared else None

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x + what the experts make of it, normalised."""
        h = norm(x)
        logits, gate = self.router(h).tensor_split([self.num_experts], dim=-1)
        choice = route(logits, self.num_chosen, self.weighing)
        shared = None if self.shared is None else Shared(gate, self.shared(h))
        return self.experts(h, choice, shared, x)  # type: ignore[no-any-return]
