"""Builds a target by the module of its family, which is imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import nn

from blockdraft.models.config import Family, ModelConfig
from blockdraft.models.decoder import Decoder
from blockdraft.models.layers import RMSNorm

# Qwen2 is Llama with biases, and Qwen's mixtures differ from the dense models only in their configuration.
_MODULES: dict[Family, str] = {"qwen2": "llama", "qwen3_moe": "qwen3", "qwen3_5_moe": "qwen3_5"}


class FamilyModule(Protocol):
    """The interface of a family's module."""

    norm: Callable[[int, float], RMSNorm]

    def layer(self, config: ModelConfig, index: int) -> nn.Module: ...


def build_decoder(
    config: ModelConfig, *, taps: tuple[int, ...], max_positions: int, device: torch.device
) -> Decoder:
    """Build a target without weights, with rope tables on `device`; checkpoints/weights.py fills it."""
    name = _MODULES.get(config.family, config.family)
    family = cast(FamilyModule, importlib.import_module(f"blockdraft.models.{name}"))
    layers = [family.layer(config, index) for index in range(config.num_layers)]
    norm = family.norm(config.hidden_size, config.norm_eps)
    return Decoder(config, layers, norm, taps=taps, max_positions=max_positions, device=device)
