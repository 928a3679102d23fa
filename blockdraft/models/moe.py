"""Mixtures of experts: a router picks a few feed-forward parts per token, and their outputs are weighed.

A token's bits do not depend on its neighbours in the batch where `linear` promises that: every chosen
expert's output lands in its own place, and the places are summed in the router's order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from blockdraft.kernels.linear import linear
from blockdraft.kernels.rows import sigmoid, silu_mul
from blockdraft.models.config import MoEConfig
from blockdraft.models.layers import GatedMLP, Linear
from blockdraft.models.packed import Packed

Choice = tuple[Tensor, Tensor]  # weights and expert ids, [N, K] each


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


class Experts(nn.Module):
    """Gated feed-forward parts, of which each token takes the ones chosen for it."""

    def __init__(
        self,
        hidden: int,
        config: MoEConfig,
        *,
        bias: bool = False,
        activate: Callable[[Tensor], Tensor] = silu_mul,
    ) -> None:
        super().__init__()
        self.gate_up = ExpertLinear(
            config.num_experts, hidden, config.inner_size, config.inner_size, bias=bias
        )
        self.down = ExpertLinear(config.num_experts, config.inner_size, hidden, bias=bias)
        self.activate = activate

    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        """[N, E] for x [N, E]: each expert runs once, on all tokens that chose it."""
        weights, ids = choice
        outputs = x.new_empty(*ids.shape, x.shape[-1])  # [N, K, E]
        for expert in torch.unique(ids).tolist():
            token, place = torch.where(ids == expert)
            inner = self.activate(self.gate_up(x[token], expert))
            outputs[token, place] = self.down(inner, expert)
        return (outputs * weights.to(x.dtype)[..., None]).sum(dim=1)


class Router(nn.Module):
    """Softmax over all experts, then the `num_chosen` likeliest; never quantised."""

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_chosen
        self.is_normalised = config.is_normalised
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden))

    def forward(self, x: Tensor) -> Choice:
        return choose(linear(x, self.weight), self.num_chosen, is_normalised=self.is_normalised)


def choose(logits: Tensor, num_chosen: int, *, is_normalised: bool) -> Choice:
    """The `num_chosen` experts of each row of logits [N, experts], in float32 or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weights, ids = wide.softmax(dim=-1).topk(num_chosen, dim=-1)
    if is_normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids


class MoE(nn.Module):
    """Routed experts, and beside them a gated one that every token takes, if the config has it."""

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(hidden, config)
        self.experts = Experts(hidden, config)
        has_shared = config.shared_size is not None
        self.shared = GatedMLP(hidden, config.shared_size or 0) if has_shared else None
        self.shared_gate = Linear(hidden, 1) if has_shared else None

    def forward(self, x: Tensor) -> Tensor:
        routed = self.experts(x, self.router(x))
        if self.shared is None or self.shared_gate is None:
            return routed  # type: ignore[no-any-return]
        return routed + sigmoid(self.shared_gate(x)) * self.shared(x)  # type: ignore[no-any-return]
