"""The layers that families share. Tokens are a flat stream, [N, E]; only the View knows rows and cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.linear import linear
from blockdraft.kernels.rows import Angles, rms_norm, rotate, silu_mul
from blockdraft.models.config import AttentionConfig, ModelConfig
from blockdraft.models.packed import Packed


class Linear(nn.Module):
    """y = x W^T + b, where W [sum(parts), inputs] may stack several projections of one input.

    It owns the format of W: a plain parameter, or a Packed weight that the loader puts in its place.
    """

    weight: nn.Parameter | Packed

    def __init__(self, inputs: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts), inputs))
        self.bias = nn.Parameter(torch.empty(sum(parts))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Packed):
            return self.weight.matmul(x, self.bias)
        return linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """A row per token, read by token id; a tied head multiplies by the same rows."""

    weight: nn.Parameter | Packed

    def __init__(self, num_tokens: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_tokens, size))
        self.dtype = torch.get_default_dtype()

    def forward(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.weight, Packed):
            return self.weight[token_ids].dequantise(self.dtype)
        return self.weight[token_ids]

    def project(self, hidden: Tensor) -> Tensor:
        """[..., V] for hidden states [..., E]."""
        if isinstance(self.weight, Packed):
            return self.weight.matmul(hidden)
        return linear(hidden, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, where the loader adds `offset` to what the file stores."""

    offset = 0.0

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class WideNorm(RMSNorm):
    """RMSNorm whose weight stays in float32 beside a half-precision stream: one rounding, at the end."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.weight = nn.Parameter(torch.empty(size, dtype=wide_dtype()))


class ZeroCentredNorm(WideNorm):
    """x / rms(x) * (1 + the file's weight)."""

    offset = 1.0


def wide_dtype() -> torch.dtype:
    """The dtype of what must not be rounded to half precision, in a model of the current default dtype."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


class Attention(nn.Module):
    """Grouped-query attention over whatever the View holds."""

    def __init__(self, model: ModelConfig, layer: int, *, has_qk_norm: bool = False) -> None:
        super().__init__()
        config = attention_config(model, layer)
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads
        self.num_rotated = config.num_heads + config.num_kv_heads  # queries and keys
        size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.mask = Mask(scale=config.head_dim**-0.5, window=config.window)
        self.qkv = Linear(model.hidden_size, size, kv_size, kv_size, bias=config.has_bias)
        self.out = Linear(size, model.hidden_size, bias=config.has_out_bias)
        self.q_norm = RMSNorm(config.head_dim, model.norm_eps) if has_qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, model.norm_eps) if has_qk_norm else None

    def forward(self, x: Tensor, angles: Angles, view: View) -> Tensor:
        heads = self.qkv(x).unflatten(1, (-1, self.head_dim))  # [N, H + G + G, D]
        qk, v = heads[:, : self.num_rotated], heads[:, self.num_rotated :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])
            q, k = rotate(q, angles), rotate(k, angles)
        else:
            qk = rotate(qk, angles)
            q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        return self.out(self.attend(q, k, v, view).flatten(1))  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        return view.attend(self.layer, q, k, v, self.mask)


def attention_config(model: ModelConfig, layer: int) -> AttentionConfig:
    mixer = model.layers[layer].mixer
    assert isinstance(mixer, AttentionConfig)
    return mixer


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)); `activate` takes both halves side by side."""

    def __init__(
        self, hidden: int, inner: int, *, bias: bool = False, activate: Callable[[Tensor], Tensor] = silu_mul
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, inner, inner, bias=bias)
        self.down = Linear(inner, hidden, bias=bias)
        self.activate = activate

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.gate_up(x)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Pre-norm mixer and MLP around a residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        mixer: nn.Module,
        mlp: nn.Module,
        *,
        norm: Callable[[int, float], RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__()
        self.mixer_norm = norm(config.hidden_size, config.norm_eps)
        self.mixer = mixer
        self.mlp_norm = norm(config.hidden_size, config.norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, angles: Angles, view: View) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), angles, view)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]
