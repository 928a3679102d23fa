"""Runs the experts of each kind of mixture once for each size of tiles that the server can reach.

A GPU's tiles grow with the number of pairs per expert, so the largest need thousands of tokens. That many
tokens through a whole layer and its oracle would slow down the start. Instead the experts alone get some
tokens many times over, in random order, and the outputs are compared with those of a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockdraft.check.comparison import Numbers, distinct, parts_of
from blockdraft.engine.engine import Engine
from blockdraft.kernels import moe
from blockdraft.kernels.pick.mixtures import tile_counts
from blockdraft.models.gemma4 import GemmaFeedForward
from blockdraft.models.gpt_oss import GptOssMoE
from blockdraft.models.moe import Experts, MoE, SharedExpert

NUM_TOKENS = 256  # different tokens; of 256 experts, with 8 for each token, an expert then has 8 tokens
FEW = 32  # tokens at a time; with up to 16 experts for each token, they have at most 512 pairs


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a mixture layer, and how they are chosen for a token."""

    experts: Experts
    num_chosen: int
    weighing: moe.Weighing
    expert_scale: Tensor | None = None
    shared: SharedExpert | None = None

    def kind(self) -> tuple[object, ...]:
        parts = (self.experts.gate_up, self.experts.down)
        stored = [(tuple(part.weight.shape), type(part.weight), part.bias is None) for part in parts]
        chosen = (self.num_chosen, self.weighing, self.expert_scale is None, self.shared is None)
        return *stored, self.experts.activation, *chosen

    def __str__(self) -> str:
        num_experts, *shape = self.experts.down.weight.shape
        return f"{self.num_chosen} of {num_experts} experts, {shape}"


def mixtures(engine: Engine) -> list[Mixture]:
    """Return one mixture layer of each kind."""
    found = []
    for part in parts_of(engine, nn.Module):
        if isinstance(part, MoE):
            found.append(Mixture(part.experts, part.num_chosen, part.weighing, shared=part.shared))
        elif isinstance(part, GptOssMoE):
            found.append(Mixture(part.experts, part.num_chosen, "chosen"))
        elif isinstance(part, GemmaFeedForward) and part.has_experts:
            router = part.router
            found.append(Mixture(part.experts, router.num_chosen, "renormalised", router.expert_scale))
    return distinct(found, Mixture.kind)


class TileRun(NamedTuple):
    """The experts' outputs [N, E] for all tokens at once, and for a few of them at a time."""

    where: str
    got: Tensor
    expected: Tensor


def tile_runs(engine: Engine, mixture: Mixture, numbers: Numbers) -> Iterator[TileRun]:
    """Yield a run with the least number of tokens for each size of tiles that a step can reach."""
    plan, experts = engine.plan, mixture.experts
    most = max(plan.max_prefill_tokens, plan.max_num_seqs * plan.block)
    counts = tile_counts(
        experts.kernels.available, experts.gate_up, experts.down, mixture.num_chosen, most_tokens=most
    )
    if not counts:
        return
    num_experts, _, hidden = experts.gate_up.weight.shape
    x = numbers.normal(NUM_TOKENS, hidden)
    scores = numbers.normal(NUM_TOKENS, num_experts, dtype=torch.float32)
    choice = numbers.kernels.route(scores, mixture.num_chosen, mixture.weighing, None)

    def run(tokens: Tensor) -> Tensor:
        chosen = moe.ExpertChoice(choice.weights[tokens], choice.ids[tokens])
        return experts(x[tokens], chosen)[0]  # type: ignore[no-any-return]

    every = torch.arange(NUM_TOKENS, device=x.device)
    few = torch.cat([run(tokens) for tokens in torch.split(every, FEW)])
    for count in counts:
        tokens = numbers.integers(NUM_TOKENS, count)
        yield TileRun(f"{mixture}, {count} tokens", run(tokens), few[tokens])
