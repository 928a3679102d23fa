"""ModelConfig: the shape of a model, layer by layer, for all families. It is usable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blockdraft.cache.spec import LayerSpec, Paged, Recurrent, SharedWith, Windowed

Family = Literal[
    "llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma4", "gpt_oss"
]

# How weights are stored. keep: as in the file; none: in the model's dtype; else: quantised at load time.
Storage = Literal["keep", "none", "both", "fp8", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class Rope:
    """The parameters of rotary positions; `kind` is the rule for the frequencies."""

    theta: float
    kind: Literal["default", "linear", "llama3", "factors", "yarn", "proportional"] = "default"
    part: float = 1.0  # share of a head that is rotated; the rest stays unchanged
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()  # a divisor per frequency, as GGUF stores llama3's rule
    beta_fast: float = 32.0  # yarn: with more rotations, a frequency is kept
    beta_slow: float = 1.0  # yarn: with fewer rotations, it is divided by `factor`
    is_truncated: bool = True  # yarn: the ramp between these starts and ends at whole pairs
    attention_scale: float = 1.0  # yarn: multiplies cosines and sines


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The shape of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None  # None: full attention
    has_bias: bool = False  # on queries, keys and values
    has_out_bias: bool = False
    has_values: bool = True  # False: the values are the unrotated keys
    shared_with: int | None = None  # the layer whose keys and values this one reads

    def spec(self) -> LayerSpec:
        if self.shared_with is not None:
            return SharedWith(self.shared_with)
        return layer_spec(self.num_kv_heads, self.head_dim, self.window)


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The shape of a gated delta layer, which has a state instead of keys and values."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def spec(self) -> Recurrent:
        return Recurrent(
            num_key_heads=self.num_key_heads,
            num_heads=self.num_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            conv_width=self.conv_width,
        )


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """The shape of a dense feed-forward part."""

    inner_size: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The shape of a mixture of experts; `num_chosen` of `num_experts` run for each token."""

    num_experts: int
    num_chosen: int
    inner_size: int
    is_normalised: bool = True  # the chosen experts' weights sum to one
    shared_size: int | None = None  # inner size of an expert that always runs, with its own gate


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer, with `mlp` or `moe`; layers of Gemma 4's mixtures have both."""

    mixer: AttentionConfig | DeltaConfig
    mlp: MLPConfig | None = None
    moe: MoEConfig | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a target model."""

    name: str
    family: Family
    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_positions: int
    ties_embeddings: bool
    layers: tuple[LayerConfig, ...]
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    swiglu_limit: float | None = None  # gpt-oss clamps the inputs of its activation
    left_out: tuple[str, ...] = ()  # parts of the checkpoint that are not text: "vision", "audio"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_hybrid(self) -> bool:
        """Return True if some layers have a recurrent state, which prefix reuse cannot restore."""
        return any(isinstance(layer.mixer, DeltaConfig) for layer in self.layers)

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        return tuple(layer.mixer.spec() for layer in self.layers)


def layer_spec(num_kv_heads: int, head_dim: int, window: int | None) -> LayerSpec:
    if window is None:
        return Paged(num_kv_heads=num_kv_heads, head_dim=head_dim)
    return Windowed(num_kv_heads=num_kv_heads, head_dim=head_dim, window=window)
