"""The layers that families share. Tokens are a flat stream, [N, E]; only the View knows rows and cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.linear import linear
from blockdraft.kernels.rows import Angles, rms_norm, rotate, silu_mul
from blockdraft.models.config import ModelConfig, Rope


class Linear(nn.Module):
    """y = x W^T + b, where W [sum(parts), inputs] may stack several projections of one input."""

    def __init__(self, inputs: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts), inputs))
        self.bias = nn.Parameter(torch.empty(sum(parts))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Rotary(nn.Module):
    """Angles by position, from a table of `max_positions` rows; halves are rotated (neox style)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope, head_dim: int, max_positions: int) -> None:
        super().__init__()
        position = torch.arange(max_positions, dtype=torch.float32)
        angle = torch.outer(position, inverse_frequencies(rope, head_dim))
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def forward(self, positions: Tensor) -> Angles:
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[D / 2] radians per position, float32 as the published models were trained."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequency = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "factors":
        return frequency / torch.tensor(rope.factors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3(frequency, rope)
    return frequency


def _llama3(frequency: Tensor, rope: Rope) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
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


class Attention(nn.Module):
    """Grouped-query attention over whatever the View holds."""

    def __init__(
        self, config: ModelConfig, layer: int, *, bias: bool, out_bias: bool, has_qk_norm: bool
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads
        self.num_rotated = config.num_heads + config.num_kv_heads  # queries and keys
        size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.mask = Mask(scale=config.head_dim**-0.5, window=config.windows[layer])
        self.qkv = Linear(config.hidden_size, size, kv_size, kv_size, bias=bias)
        self.out = Linear(size, config.hidden_size, bias=out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if has_qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if has_qk_norm else None

    def forward(self, x: Tensor, angles: Angles, view: View) -> Tensor:
        heads = self.qkv(x).unflatten(1, (-1, self.head_dim))  # [N, H + G + G, D]
        qk, v = heads[:, : self.num_rotated], heads[:, self.num_rotated :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])
            q, k = rotate(q, angles), rotate(k, angles)
        else:
            qk = rotate(qk, angles)
            q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        attended = view.attend(self.layer, q, k, v, self.mask)
        return self.out(attended.flatten(1))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, inner, inner, bias=bias)
        self.down = Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP around a residual stream."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, angles: Angles, view: View) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, view)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]
