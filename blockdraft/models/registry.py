"""From a family's name to its layers, imported on use."""

from __future__ import annotations

from blockdraft.models.config import ModelConfig
from blockdraft.models.decoder import Decoder
from blockdraft.models.layers import DecoderLayer


def build_decoder(config: ModelConfig, *, taps: tuple[int, ...], max_positions: int) -> Decoder:
    """An empty target of `config`'s family; models/weights.py fills it."""
    layers = [_layer(config, index) for index in range(config.num_layers)]
    return Decoder(config, layers, taps=taps, max_positions=max_positions)


def _layer(config: ModelConfig, index: int) -> DecoderLayer:
    match config.family:
        case "llama":
            from blockdraft.models import llama

            return llama.layer(config, index)
        case "qwen2":
            from blockdraft.models import qwen2

            return qwen2.layer(config, index)
        case "qwen3":
            from blockdraft.models import qwen3

            return qwen3.layer(config, index)
