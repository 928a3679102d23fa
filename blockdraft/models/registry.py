"""Builds a target: the layers and the norm of each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from blockdraft.models.config import Family, ModelConfig
from blockdraft.models.decoder import Decoder
from blockdraft.models.gated_delta import hybrid_layer
from blockdraft.models.gemma4 import GemmaLayer
from blockdraft.models.gpt_oss import gpt_oss_layer
from blockdraft.models.layers import Attention, DecoderLayer, RMSNorm, WideNorm, ZeroCentredNorm
from blockdraft.models.moe import feed_forward

Layer = Callable[[ModelConfig, int], nn.Module]


def build_decoder(
    config: ModelConfig, *, taps: tuple[int, ...], max_positions: int, device: torch.device
) -> Decoder:
    """Build a target with rope tables on `device`; checkpoints/weights.py loads its weights."""
    layer, norm = _FAMILIES.get(config.family, (_dense_layer, RMSNorm))
    layers = [layer(config, index) for index in range(config.num_layers)]
    top = norm(config.hidden_size, config.norm_eps)
    return Decoder(config, layers, top, taps=taps, max_positions=max_positions, device=device)


def _dense_layer(config: ModelConfig, index: int) -> DecoderLayer:
    """Build a layer of Llama (also SmolLM2 and TinyLlama), of Qwen2, or of Qwen3 and its mixtures."""
    has_qk_norm = config.family in ("qwen3", "qwen3_moe")
    attention = Attention(config, index, has_qk_norm=has_qk_norm)
    return DecoderLayer(config, attention, feed_forward(config, index))


_HYBRID = (hybrid_layer, ZeroCentredNorm)
_FAMILIES: Mapping[Family, tuple[Layer, type[RMSNorm]]] = {  # the others are dense
    "qwen3_next": _HYBRID,
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": _HYBRID,
    "gemma4": (GemmaLayer, WideNorm),
    "gpt_oss": (gpt_oss_layer, WideNorm),
}
