"""Rotary positions: a table of angles for the frequencies that the configuration defines."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from blockdraft.kernels.pointwise import Angles
from blockdraft.models.config import Rope


class Rotary(nn.Module):
    """A table of angles for `max_positions` positions; the halves of a head form the pairs (neox style)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope, head_dim: int, max_positions: int, device: torch.device) -> None:
        super().__init__()
        # The device is explicit: the rest of a model is built on the meta device.
        position = torch.arange(max_positions, dtype=torch.float32, device=device)
        angle = torch.outer(position, inverse_frequencies(rope, head_dim).to(device))
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", (angle.cos() * rope.attention_scale).to(dtype), persistent=False)
        self.register_buffer("sin", (angle.sin() * rope.attention_scale).to(dtype), persistent=False)

    def forward(self, positions: Tensor) -> Angles:
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return radians per position [R / 2] for the R rotated values of a head, in float32 as in training."""
    if rope.kind == "proportional":
        return _proportional(rope, head_dim)
    dim = int(head_dim * rope.part)
    frequency = 1.0 / (rope.theta ** _exponents(dim, dim))
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "factors":
        return frequency / torch.tensor(rope.factors, dtype=torch.float32, device="cpu")
    if rope.kind == "llama3":
        return _llama3(frequency, rope)
    if rope.kind == "yarn":
        return _yarn(frequency, rope, dim)
    return frequency


def _exponents(count: int, dim: int) -> Tensor:
    return torch.arange(0, count, 2, dtype=torch.int64, device="cpu").float() / dim


def _proportional(rope: Rope, head_dim: int) -> Tensor:
    """Return frequencies spaced for the whole head, zero for the pairs that are not rotated."""
    num_rotated = int(rope.part * head_dim // 2)
    frequency = torch.zeros(head_dim // 2, dtype=torch.float32, device="cpu")
    frequency[:num_rotated] = 1.0 / (rope.theta ** _exponents(2 * num_rotated, head_dim))
    return frequency / rope.factor


def _llama3(frequency: Tensor, rope: Rope) -> Tensor:
    """Return frequencies: divided by `factor` for long wavelengths, kept for short ones, blended between."""
    wavelength = 2 * math.pi / frequency
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    kept = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - kept) * frequency / rope.factor + kept * frequency
    stretched = torch.where(wavelength > longest, frequency / rope.factor, frequency)
    is_between = (wavelength <= longest) & (wavelength >= shortest)
    return torch.where(is_between, blended, stretched)


def _yarn(frequency: Tensor, rope: Rope, dim: int) -> Tensor:
    """Return frequencies: kept for fast pairs, divided by `factor` for slow ones, with a ramp between."""

    def pair_with(num_rotations: float) -> float:
        positions = rope.original_max_positions / (num_rotations * 2 * math.pi)
        return dim * math.log(positions) / (2 * math.log(rope.theta))

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = (last - first) or 0.001
    pair = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    stretched = ((pair - first) / span).clamp(0, 1)
    return frequency / rope.factor * stretched + frequency * (1 - stretched)
