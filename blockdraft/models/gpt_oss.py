"""gpt-oss: attention with sinks, every other layer sliding; experts with biases and a clamped SwiGLU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.linear import linear
from blockdraft.kernels.rows import sigmoid
from blockdraft.models.config import ModelConfig, MoEConfig
from blockdraft.models.layers import Attention, DecoderLayer, WideNorm, attention_config
from blockdraft.models.moe import Choice, Experts

SLOPE = 1.702  # of the sigmoid that stands in for SiLU's

norm = WideNorm


def layer(config: ModelConfig, index: int) -> DecoderLayer:
    moe = config.layers[index].moe
    assert moe is not None
    return DecoderLayer(config, SinkAttention(config, index), GptOssMoE(config, moe), norm=norm)


class SinkAttention(Attention):
    """A learned logit per head joins the softmax and has no value: a head may look at nothing."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__(model, layer)
        self.sinks = nn.Parameter(torch.empty(attention_config(model, layer).num_heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        return view.attend(self.layer, q, k, v, self.mask, sinks=self.sinks)


class GptOssMoE(nn.Module):
    """Experts weighed by a softmax over the chosen logits alone."""

    def __init__(self, model: ModelConfig, config: MoEConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_chosen
        self.router = nn.Parameter(torch.empty(config.num_experts, model.hidden_size))
        self.router_bias = nn.Parameter(torch.empty(config.num_experts))
        activate = functools.partial(clamped_swiglu, limit=model.swiglu_limit)
        self.experts = Experts(model.hidden_size, config, bias=True, activate=activate)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.choose(x))  # type: ignore[no-any-return]

    def choose(self, x: Tensor) -> Choice:
        logits, ids = linear(x, self.router, self.router_bias).topk(self.num_chosen, dim=-1)
        return logits.softmax(dim=-1), ids


def clamped_swiglu(gate_up: Tensor, *, limit: float | None) -> Tensor:
    """(up + 1) * gate * sigmoid(SLOPE * gate), both clamped."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * sigmoid(gate * SLOPE))
