"""From a family's name to its module, imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import nn

from blockdraft.models.config import Family, ModelConfig
from blockdraft.models.decoder import Decoder
from blockdraft.models.layers import RMSNorm

# Qwen2 is Llama with biases, and Qwen3.5's mixtures differ from the dense ones in their config only.
_MODULES: dict[Family, str] = {"qwen2": "llama", "qwen3_5_moe": "qwen3_5"}


class FamilyModule(Protocol):
    """What a family file offers."""

    norm: Callable[[int, float], RMSNorm]

    def layer(self, config: ModelConfig, index: int) -> nn.Module: ...


def build_decoder(
    config: ModelConfig, *, taps: tuple[int, ...], max_positions: int, device: torch.device
) -> Decoder:
    """An empty target of `config`'s family, rope tables on `device`; checkpoints/weights.py fills it."""
    name = _MODULES.get(config.family, config.family)
    family = cast(FamilyModule, importlib.import_module(f"blockdraft.models.{name}"))
    layers = [family.layer(config, index) for index in range(config.num_layers)]
    norm = family.norm(config.hidden_size, config.norm_eps)
    return Decoder(config, layers, norm, taps=taps, max_positions=max_positions, device=device)
