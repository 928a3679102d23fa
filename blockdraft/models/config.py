"""Typed, asserted reads of config.json. No torch here: the plan reads it before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from blockdraft.cache.spec import LayerSpec, Paged, Windowed
from blockdraft.errors import ModelError

T = TypeVar("T", int, float, bool, str)
Family = Literal["llama", "qwen2", "qwen3"]

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


class Fields:
    """A mapping that answers with the asked type, or with an error that names the key and the value."""

    def __init__(self, raw: Mapping[str, object], *, owner: str, prefix: str = "") -> None:
        self.raw = raw
        self.owner = owner
        self.prefix = prefix

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`; None in the file counts as absent."""
        value = self.optional(key, kind)
        if value is not None:
            return value
        if default is None:
            raise self.error(f"has no '{self.prefix}{key}'")
        return default

    def optional(self, key: str, kind: type[T]) -> T | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(f"says {self.prefix}{key} = {value!r}, expected {kind.__name__}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if value <= 0:
            raise self.error(f"says {self.prefix}{key} = {value}, expected a positive number")
        return value

    def items(self, key: str, kind: type[T]) -> tuple[T, ...] | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.error(f"says {self.prefix}{key} = {value!r}, expected a list")
        one = (Fields({key: item}, owner=self.owner, prefix=self.prefix) for item in value)
        return tuple(fields.get(key, kind) for fields in one)

    def section(self, key: str) -> Fields:
        """A nested object; an absent one reads as empty."""
        value = self.raw.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(f"says {self.prefix}{key} = {value!r}, expected an object")
        return Fields(value, owner=self.owner, prefix=f"{self.prefix}{key}.")

    def refuse(self, key: str, *allowed: object) -> None:
        """A key that we implement for `allowed` (and absence) only."""
        value = self.raw.get(key)
        if value is not None and value not in allowed:
            raise self.error(f"asks for {self.prefix}{key} = {value!r}, which is not implemented")

    def error(self, what: str) -> ModelError:
        return ModelError(f"'{self.owner}': config.json {what}. See docs/models.md.")


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions become angles; `kind` names the frequency rule."""

    theta: float
    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()  # GGUF stores llama3's rule as one divisor per frequency


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a target, in our words."""

    name: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_positions: int
    ties_embeddings: bool
    has_attention_bias: bool
    has_mlp_bias: bool
    windows: tuple[int | None, ...]  # per layer; None sees everything

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        return tuple(layer_spec(self.num_kv_heads, self.head_dim, window) for window in self.windows)


def layer_spec(num_kv_heads: int, head_dim: int, window: int | None) -> LayerSpec:
    """What an attention layer stores."""
    if window is None:
        return Paged(num_kv_heads=num_kv_heads, head_dim=head_dim)
    return Windowed(num_kv_heads=num_kv_heads, head_dim=head_dim, window=window)


def read_model_config(raw: Mapping[str, object], *, name: str) -> ModelConfig:
    """The target described by a config.json; everything we would get wrong is refused here."""
    fields = Fields(raw, owner=name)
    family = _family(fields)
    refuse_quantised(fields)
    fields.refuse("hidden_act", "silu", "swish")
    fields.refuse("pretraining_tp", 1)
    if family == "qwen2":
        fields.refuse("attention_bias", True)
    hidden_size = fields.positive("hidden_size")
    num_heads, num_kv_heads, head_dim = read_heads(fields, hidden_size)
    num_layers = fields.positive("num_hidden_layers")
    rope = read_rope(fields)
    if rope.kind == "factors" and len(rope.factors) != head_dim // 2:
        raise fields.error(f"has {len(rope.factors)} rope factors for {head_dim // 2} rotated pairs")
    return ModelConfig(
        name=name,
        family=family,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.get("rms_norm_eps", float, 1e-6),
        rope=rope,
        max_positions=fields.positive("max_position_embeddings", 2048),
        ties_embeddings=fields.get("tie_word_embeddings", bool, False),
        has_attention_bias=fields.get("attention_bias", bool, family == "qwen2"),
        has_mlp_bias=fields.get("mlp_bias", bool, False),
        windows=read_windows(fields, num_layers),
    )


def _family(fields: Fields) -> Family:
    architectures = fields.items("architectures", str) or ()
    for architecture in architectures:
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    raise ModelError(
        f"'{fields.owner}': architecture {', '.join(architectures) or 'missing'} is not supported; "
        f"supported: {', '.join(FAMILIES)}. See docs/models.md."
    )


def refuse_quantised(fields: Fields) -> None:
    section = fields.section("quantization_config")
    if section.raw:
        method = section.raw.get("quant_method", "unnamed")
        raise ModelError(
            f"'{fields.owner}': quantised checkpoint ({method}); this version reads unquantised "
            "safetensors and GGUF files. Use the bf16 checkpoint. See docs/models.md."
        )


def read_heads(fields: Fields, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, key/value heads and their dimension."""
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(f"has {num_heads} query heads for {num_kv_heads} key/value heads")
    head_dim = fields.positive("head_dim", max(hidden_size // num_heads, 1))
    if head_dim % 2:
        raise fields.error(f"says head_dim = {head_dim}, but rotary positions need an even one")
    return num_heads, num_kv_heads, head_dim


def read_rope(fields: Fields) -> Rope:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    section = fields.section("rope_parameters")
    if not section.raw:
        section = fields.section("rope_scaling")
    nested = [key for key, value in section.raw.items() if isinstance(value, Mapping)]
    if nested:
        raise section.error(f"has a rope of its own for {nested[0]!r}, which is not implemented")
    theta = section.optional("rope_theta", float) or fields.get("rope_theta", float, 10000.0)
    fields.refuse("partial_rotary_factor", 1, 1.0)
    section.refuse("partial_rotary_factor", 1, 1.0)
    kind = section.optional("rope_type", str) or section.get("type", str, "default")
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=_above_zero(section, "factor"))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind="llama3",
            factor=_above_zero(section, "factor"),
            low_freq_factor=_above_zero(section, "low_freq_factor"),
            high_freq_factor=_above_zero(section, "high_freq_factor"),
            original_max_positions=section.positive("original_max_position_embeddings"),
        )
    if kind == "factors":
        return Rope(theta=theta, kind="factors", factors=section.items("factors", float) or ())
    raise section.error(f"asks for rope_type '{kind}', which models/layers.py does not implement")


def _above_zero(section: Fields, key: str) -> float:
    value = section.get(key, float)
    if value <= 0:
        raise section.error(f"says {section.prefix}{key} = {value}, expected a positive number")
    return value


def read_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer: `layer_types` where given, else the older Qwen2 keys."""
    layer_types = fields.items("layer_types", str)
    window = fields.optional("sliding_window", int)
    is_used = fields.optional("use_sliding_window", bool)
    if is_used is False or (layer_types is None and is_used is None):
        return (None,) * num_layers  # as in transformers, where the switch overrules layer_types
    if layer_types is None:
        first = fields.get("max_window_layers", int, 28)  # transformers' default for Qwen2 and Qwen3
        layer_types = tuple(
            "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
        )
    if len(layer_types) != num_layers:
        raise fields.error(f"lists {len(layer_types)} layer_types for {num_layers} layers")
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise fields.error(f"has layer type {sorted(unknown)[0]!r}, which is not implemented")
    if "sliding_attention" in layer_types and (window is None or window <= 0):
        raise fields.error(f"has sliding layers and sliding_window = {window}")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
