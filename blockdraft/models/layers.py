"""Layers that several families use. Tokens are a flat stream [N, E]; only the View has rows and cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from blockdraft.cache.view import View
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.heads import HeadNorms
from blockdraft.kernels.moe import Onto
from blockdraft.kernels.pointwise import Angles, Gate
from blockdraft.models.config import AttentionConfig, ModelConfig
from blockdraft.models.kernel_module import KernelModule
from blockdraft.models.packed import Packed
from blockdraft.models.packed_int8 import Int8Matrix


class Linear(KernelModule):
    """x W^T + b; W [sum(parts), inputs], plain or Packed, may stack several projections of one input."""

    weight: nn.Parameter | Packed
    why_unpacked = ""  # set by the loader: why a packed weight of the file has no packed form here

    def __init__(self, inputs: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts), inputs))
        self.bias = nn.Parameter(torch.empty(sum(parts))) if bias else None

    def forward(self, x: Tensor, onto: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        """Return onto + W norm(x) + b; leave out `onto` or `norm` if it is None."""
        x = x if norm is None else norm(x)
        if isinstance(self.weight, Packed):
            return self.weight.matmul(x, self.bias, onto=onto, kernels=self.kernels)
        return self.kernels.linear(x, self.weight, self.bias, onto)

    def gated(self, x: Tensor, gate: Gate, norm: RMSNorm | None = None) -> Tensor:
        """Return gate(a) * b, where a and b are the halves of the product with x."""
        x = x if norm is None else norm(x)
        if isinstance(self.weight, Packed):
            return self.weight.gated(x, self.bias, gate, kernels=self.kernels)
        return self.kernels.gated_linear(x, self.weight, self.bias, gate)

    def last(self, x: Tensor, num_parts: int) -> Tensor:
        """Return the product with the last `num_parts` parts of the weight only."""
        begin = sum(self.parts[:-num_parts])
        bias = None if self.bias is None else self.bias[begin:]
        if isinstance(self.weight, Packed):
            return self.weight.rows_from(begin).matmul(x, bias, kernels=self.kernels)
        return self.kernels.linear(x, self.weight[begin:], bias, None)


class PlainLinear(Linear):
    """A Linear whose weight is never quantised, for small layers of DFlash2 drafters."""


class Embedding(KernelModule):
    """A vector per token; with a tied head, `project` multiplies by the same vectors."""

    weight: nn.Parameter | Packed

    def __init__(self, num_tokens: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_tokens, size))
        self.dtype = torch.get_default_dtype()

    def forward(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.weight, Int8Matrix):
            return self.weight.look_up(token_ids, self.kernels)
        if isinstance(self.weight, Packed):
            return self.weight[token_ids].dequantise(self.dtype)
        return self.weight[token_ids]

    def project(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] for hidden states [..., E]."""
        if isinstance(self.weight, Packed):
            return self.weight.matmul(hidden, kernels=self.kernels)
        return self.kernels.linear(hidden, self.weight, None, None)


class RMSNorm(KernelModule):
    """x / rms(x) * weight; the loader adds `offset` to the stored weight."""

    offset = 0.0

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def onto(self, stream: Tensor) -> Onto:
        """Return the stream and this norm, for a kernel that adds to the stream and normalises the sum."""
        return Onto(stream, self.weight, self.eps)


class WideNorm(RMSNorm):
    """RMSNorm with a float32 weight in half-precision models: it rounds once, at the end."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.weight = nn.Parameter(torch.empty(size, dtype=wide_dtype()))


class ZeroCentredNorm(WideNorm):
    """x / rms(x) * (1 + the file's weight)."""

    offset = 1.0


def wide_dtype() -> torch.dtype:
    """Return the dtype for values that must not be rounded to half precision: at least float32."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


class Attention(nn.Module):
    """Computes x + grouped-query attention over the cache, of x after a norm."""

    sinks: nn.Parameter | None

    def __init__(self, model: ModelConfig, layer: int, *, has_qk_norm: bool = False) -> None:
        super().__init__()
        config = attention_config(model, layer)
        self.layer = layer
        self.head_dim = config.head_dim
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.mask = Mask(scale=config.head_dim**-0.5, window=config.window)
        self.qkv = Linear(model.hidden_size, size, kv_size, kv_size, bias=config.has_bias)
        self.out = Linear(size, model.hidden_size, bias=config.has_out_bias)
        self.q_norm = RMSNorm(config.head_dim, model.norm_eps) if has_qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, model.norm_eps) if has_qk_norm else None
        self.register_parameter("sinks", None)

    def forward(self, x: Tensor, normed: Tensor, angles: Angles, view: View) -> Tensor:
        heads = self.qkv(normed).unflatten(1, (-1, self.head_dim))  # [N, H + G + G, D]
        q, k, v = heads.split(self.heads, dim=1)
        attended = view.attend(
            self.layer, q, k, v, self.mask, angles=angles, norms=self.norms(), sinks=self.sinks
        )
        return self.out(attended.flatten(1), x)  # type: ignore[no-any-return]

    def norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


def attention_config(model: ModelConfig, layer: int) -> AttentionConfig:
    mixer = model.layers[layer].mixer
    assert isinstance(mixer, AttentionConfig)
    return mixer


class GatedMLP(nn.Module):
    """Computes down(gate(a(x)) * b(x)); `gate_up` has the rows of a, then those of b."""

    def __init__(self, hidden: int, inner: int, *, bias: bool = False, gate: Gate = "silu") -> None:
        super().__init__()
        self.gate_up = Linear(hidden, inner, inner, bias=bias)
        self.down = Linear(inner, hidden, bias=bias)
        self.gate = gate

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """Return mlp(x) [N, E]; with a norm, x + mlp(norm(x))."""
        inner = self.gate_up.gated(x, self.gate, norm)
        return self.down(inner, None if norm is None else x)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """A decoder layer. Mixer and feed-forward part each read the normalised residual stream and add to it."""

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

    def forward(
        self, x: Tensor, normed: Tensor, angles: Angles, view: View, *, next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Return the output y [N, E], and next_norm(y); `normed` is mixer_norm(x)."""
        x = self.mixer(x, normed, angles, view)
        if isinstance(self.mlp, GatedMLP):
            y = self.mlp(x, self.mlp_norm)
            return y, next_norm(y)
        return self.mlp(x, self.mlp_norm, next_norm=next_norm)  # type: ignore[no-any-return]
