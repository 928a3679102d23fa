"""Counts a model's values from its configuration, by how they are stored."""

from __future__ import annotations

from dataclasses import dataclass

from blockdraft.models.config import (
    AttentionConfig,
    DeltaConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from blockdraft.models.draft_config import DraftConfig, LiLiCorrHead
from blockdraft.models.mtp_config import MtpConfig


@dataclass(frozen=True, slots=True)
class Values:
    """Counts of values. Only projections and experts are quantised, row by row."""

    embedding: int = 0
    head: int = 0  # 0: tied to the embedding
    projections: int = 0
    projection_rows: int = 0
    experts: int = 0
    expert_rows: int = 0
    plain: int = 0  # norms, biases, routers, convolutions
    wide: int = 0  # plain values that stay in float32
    tables: int = 0  # plain values in tables that are looked up by token: a step reads a few rows

    def __add__(self, other: Values) -> Values:
        return Values(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.projections + self.experts + self.plain


def target_values(config: ModelConfig) -> Values:
    """Count the values of the decoder that models/registry.py builds."""
    table = config.vocab_size * config.hidden_size
    has_wide_norms = config.family in ("gemma4", "gpt_oss", "qwen3_next", "qwen3_5", "qwen3_5_moe")
    count = Values(embedding=table, head=0 if config.ties_embeddings else table)
    count += _norms(config.hidden_size, is_wide=has_wide_norms)
    for layer in config.layers:
        count += _layer(config, layer, is_wide=has_wide_norms)
    return count


def mtp_values(config: MtpConfig) -> Values:
    """Count the values of an MTP head; embedding and logits are the target's."""
    size = config.hidden_size
    count = _linear(2 * size, size) + _norms(3 * size, is_wide=True)
    return count + _layer(config.shape, config.shape.layers[config.layer_index], is_wide=True)


def _layer(config: ModelConfig, layer: LayerConfig, *, is_wide: bool) -> Values:
    count = _mixer(config, layer.mixer)
    if layer.moe is not None:
        count += _experts(config, layer.moe)
    if layer.mlp is not None:
        count += _dense(config.hidden_size, layer.mlp)
    return count + _layer_norms(config, has_experts=layer.moe is not None, is_wide=is_wide)


def draft_values(config: DraftConfig, *, has_head: bool) -> Values:
    hidden, kv_size = config.hidden_size, config.num_kv_heads * config.head_dim
    size = config.num_heads * config.head_dim
    layer = _linear(hidden, size, kv_size, kv_size, has_bias=config.has_bias)
    layer += _linear(size, hidden, has_bias=config.has_bias)
    layer += _dense(hidden, MLPConfig(config.intermediate_size))
    layer += Values(plain=2 * hidden + 2 * config.head_dim)
    count = _linear(len(config.taps) * config.target_hidden_size, hidden) + Values(plain=2 * hidden)
    if config.dflash2 is not None:
        head = config.dflash2
        kernels = 2 * head.conv_taps * hidden * (1 + hidden // head.conv_group)
        layer += Values(plain=2 * kernels)  # around attention, and around the feed-forward part
        codebooks = 2 * config.vocab_size * head.rank
        count += Values(plain=codebooks + head.rank * hidden, tables=codebooks)
    for _ in range(config.num_layers):
        count += layer
    count += Values(head=config.draft_vocab_size * hidden if has_head else 0)
    rank = config.markov_rank
    if config.xpress is not None:
        rank = config.xpress.rank
        count += _dense(rank, MLPConfig(config.xpress.inner_size))
        count += Values(plain=rank * (2 * hidden + 3 * rank + config.num_columns**2))
    if config.domino is not None:
        domino = config.domino
        inputs, after = hidden + domino.state_size, config.draft_vocab_size * domino.rank
        count += Values(plain=inputs * (3 * domino.state_size + domino.rank) + after, tables=after)
    if config.lilicorr is not None:
        count += _lattice(config, config.lilicorr)
    tables = (config.vocab_size + config.draft_vocab_size) * rank  # never quantised
    return count + Values(plain=tables, tables=tables)


def _lattice(config: DraftConfig, head: LiLiCorrHead) -> Values:
    size, hidden, inner = head.size, config.hidden_size, int(head.size * head.mlp_ratio)
    layer = 2 * size + 4 * size * (size + 1) + inner * (size + 1) + size * (inner + 1)
    projections = (2 + (size != hidden)) * size * (hidden + 1) + size * (3 * size + 1)
    factors = 3 * head.factor_size * (size + 1)
    features = 10 + size * (5 + 1) + size * (size + 1)
    learned = size * (config.block - 1 + head.top_k) + head.num_heads * 2 * config.block
    plain = head.num_layers * layer + projections + factors + features + learned + 2 * size
    return Values(plain=plain)


def _linear(inputs: int, *parts: int, has_bias: bool = False) -> Values:
    rows = sum(parts)
    return Values(projections=inputs * rows, projection_rows=rows, plain=rows if has_bias else 0)


def _norms(num_values: int, *, is_wide: bool) -> Values:
    return Values(plain=num_values, wide=num_values if is_wide else 0)


def _dense(hidden: int, mlp: MLPConfig) -> Values:
    gate_up = _linear(hidden, mlp.inner_size, mlp.inner_size, has_bias=mlp.has_bias)
    return gate_up + _linear(mlp.inner_size, hidden, has_bias=mlp.has_bias)


def _mixer(config: ModelConfig, mixer: AttentionConfig | DeltaConfig) -> Values:
    if isinstance(mixer, DeltaConfig):
        return _delta(config, mixer)
    hidden, size = config.hidden_size, mixer.num_heads * mixer.head_dim
    kv_size = mixer.num_kv_heads * mixer.head_dim
    is_hybrid = config.is_hybrid
    queries = 2 * size if is_hybrid else size  # Qwen3-Next and Qwen3.5 also project a gate
    own = 0 if mixer.shared_with is not None else 2 if mixer.has_values else 1
    count = _linear(hidden, queries, *(kv_size,) * own, has_bias=mixer.has_bias)
    count += _linear(size, hidden, has_bias=mixer.has_out_bias)
    if config.family == "gpt_oss":
        return count + Values(plain=mixer.num_heads)  # sinks
    if config.family in ("llama", "qwen2"):
        return count
    num_norms = 1 if mixer.shared_with is not None else 2
    is_wide = config.family == "gemma4" or is_hybrid
    return count + _norms(num_norms * mixer.head_dim, is_wide=is_wide)


def _delta(config: ModelConfig, delta: DeltaConfig) -> Values:
    values = delta.num_value_heads * delta.value_dim
    keys = delta.num_key_heads * delta.key_dim
    count = _linear(config.hidden_size, 2 * keys + 2 * values, 2 * delta.num_value_heads)
    count += _linear(values, config.hidden_size)
    conv = delta.spec().conv_channels * delta.conv_width
    decay = 2 * delta.num_value_heads
    return count + Values(plain=conv + decay + delta.value_dim, wide=decay)


def _experts(config: ModelConfig, moe: MoEConfig) -> Values:
    hidden, inner, has_bias = config.hidden_size, moe.inner_size, config.family == "gpt_oss"
    rows = moe.num_experts * (2 * inner + hidden)
    count = Values(experts=3 * moe.num_experts * inner * hidden, expert_rows=rows)
    router = moe.num_experts * hidden
    if has_bias:
        count += Values(plain=rows + moe.num_experts)
    if config.family == "gemma4":
        router += hidden + moe.num_experts  # a scale for each input, and for each expert
    if moe.shared_size is not None:
        router += hidden  # its gate
        count += _dense(hidden, MLPConfig(moe.shared_size))
    return count + Values(plain=router)


def _layer_norms(config: ModelConfig, *, has_experts: bool, is_wide: bool) -> Values:
    if config.family != "gemma4":
        return _norms(2 * config.hidden_size, is_wide=is_wide)
    count = 7 if has_experts else 4
    return _norms(count * config.hidden_size, is_wide=is_wide) + Values(plain=1)  # a scale of the stream
