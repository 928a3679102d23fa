"""gpt-oss: attention with sinks, sliding in every other layer; experts with biases and clamped SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.kernels.moe import Activation
from blockdraft.models.config import ModelConfig, MoEConfig
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.layers import Attention, DecoderLayer, RMSNorm, WideNorm, attention_config
from blockdraft.models.moe import Experts


def gpt_oss_layer(config: ModelConfig, index: int) -> DecoderLayer:
    moe = config.layers[index].moe
    assert moe is not None
    return DecoderLayer(config, SinkAttention(config, index), GptOssMoE(config, moe), norm=WideNorm)


class SinkAttention(Attention):
    """Attention with a learned logit per head that takes part in the softmax and has no value."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__(model, layer)
        self.sinks = nn.Parameter(torch.empty(attention_config(model, layer).num_heads))


class GptOssMoE(KernelModule):
    """Experts whose weights are a softmax over the chosen logits only."""

    def __init__(self, model: ModelConfig, config: MoEConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_chosen
        self.router = nn.Parameter(torch.empty(config.num_experts, model.hidden_size))
        self.router_bias = nn.Parameter(torch.empty(config.num_experts))
        activation = Activation("swiglu_clamped", model.swiglu_limit)
        self.experts = Experts(model.hidden_size, config, bias=True, activation=activation)

    def forward(self, x: Tensor, norm: RMSNorm, *, next_norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Return y = x + experts(norm(x)), and next_norm(y)."""
        h = norm(x)
        logits = self.kernels.linear(h, self.router, self.router_bias, None)
        choice = self.kernels.route(logits, self.num_chosen, "chosen", None)
        return self.experts(h, choice, onto=next_norm.onto(x))  # type: ignore[no-any-return]

    def scores(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Return the router's logits [N, X], as `forward` uses them."""
        return self.kernels.linear(norm(x), self.router, self.router_bias, None)
