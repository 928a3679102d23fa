"""Describes a model's shape for the planner, also for families that only other engines support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from blockdraft.cache.spec import Compressed, LayerSpec, Newest, Paged, Recurrent, SharedWith, Windowed
from blockdraft.checkpoints.config_fields import Fields, read_heads
from blockdraft.models.config import DeltaConfig, ModelConfig
from blockdraft.models.draft_config import DraftConfig
from blockdraft.models.mtp_config import MtpConfig
from blockdraft.planner.values import Values, draft_values, mtp_values, target_values


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: one compressed vector and one rotated key for each token."""

    rank: int
    rope_dim: int

    def bytes_per_token(self, element_bytes: int) -> int:
        return (self.rank + self.rope_dim) * element_bytes


CacheSpec = LayerSpec | Latent
_KIND_NAMES: Mapping[type, str] = {
    Paged: "full",
    Windowed: "sliding",
    Newest: "newest",
    Recurrent: "recurrent",
    Latent: "latent",
    SharedWith: "shared",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a target or a drafter."""

    name: str
    hidden_size: int
    inner_size: int  # of the widest feed-forward part that a token passes
    vocab_size: int
    max_positions: int
    specs: tuple[CacheSpec, ...]
    rope_bytes: int  # of one position's cosines and sines, for elements of one byte
    num_experts: int = 0
    num_chosen: int = 0
    values: Values | None = None  # None: a family that we do not support
    num_taps: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.specs)

    @property
    def is_plain(self) -> bool:
        """Return whether the model has neither experts nor states: its layers need the fewest kernels."""
        return not self.num_experts and not any(isinstance(spec, Recurrent) for spec in self.specs)


@dataclass(frozen=True, slots=True)
class Kind:
    """The layers of one model that have the same kind of cache."""

    name: str  # "full", "sliding", "newest", "recurrent", "latent", "shared", or the format if compressed
    num_layers: int
    bytes_per_token: int  # of all these layers together
    bytes_per_row: int = 0  # a state and the tape of a block
    window: int | None = None


def kinds(
    specs: tuple[CacheSpec, ...],
    element_bytes: int,
    width: int,
    token_bytes: Sequence[int] | None = None,
) -> tuple[Kind, ...]:
    """Group the cache by kind of layer. `token_bytes`: a token's bytes by layer, if element sizes differ."""
    found = []
    sizes = token_bytes or [spec.bytes_per_token(element_bytes) for spec in specs]
    for spec in dict.fromkeys(specs):
        count = specs.count(spec)
        token = sum(size for other, size in zip(specs, sizes, strict=True) if other == spec)
        row = count * spec.bytes_per_row(element_bytes, width) if isinstance(spec, Recurrent) else 0
        window = spec.window if isinstance(spec, Windowed) else None
        name = spec.format if isinstance(spec, Compressed) else _KIND_NAMES[type(spec)]
        found.append(Kind(name, count, token, row, window))
    shared = [kind for kind in found if kind.name == "shared"]
    own = [kind for kind in found if kind.name != "shared"]
    return (*own, *([Kind("shared", sum(kind.num_layers for kind in shared), 0)] if shared else []))


def target_shape(config: ModelConfig) -> Shape:
    experts = [layer.moe for layer in config.layers if layer.moe is not None]
    dense = [layer.mlp.inner_size for layer in config.layers if layer.mlp is not None]
    chosen = [moe.num_chosen * moe.inner_size + (moe.shared_size or 0) for moe in experts]
    return Shape(
        name=config.name,
        hidden_size=config.hidden_size,
        inner_size=max(dense + chosen, default=config.hidden_size),
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        specs=config.layer_specs(),
        rope_bytes=_rope_bytes(config),
        num_experts=max((moe.num_experts for moe in experts), default=0),
        num_chosen=max((moe.num_chosen for moe in experts), default=0),
        values=target_values(config),
    )


def _rope_bytes(config: ModelConfig) -> int:
    """Return the elements of all ropes' tables for a position: a cosine and a sine per two rotated values."""
    mixers = [layer.mixer for layer in config.layers]
    ropes = {(mixer.rope, mixer.head_dim) for mixer in mixers if not isinstance(mixer, DeltaConfig)}
    return sum(
        head_dim if rope.kind == "proportional" else int(head_dim * rope.part) for rope, head_dim in ropes
    )


def draft_shape(config: DraftConfig, *, has_head: bool) -> Shape:
    return Shape(
        name=config.name,
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        vocab_size=config.draft_vocab_size,
        max_positions=0,
        specs=config.layer_specs(),
        rope_bytes=int(config.head_dim * config.rope.part),
        values=draft_values(config, has_head=has_head),
        num_taps=len(config.taps),
    )


def mtp_shape(config: MtpConfig) -> Shape:
    shape, layer = config.shape, config.shape.layers[config.layer_index]
    one = target_shape(replace(shape, layers=(layer,)))
    return replace(one, name=config.name, values=mtp_values(config), rope_bytes=0)  # the target's rope


def raw_shape(raw: Mapping[str, object], *, name: str) -> Shape:
    """Read the shape from any family's config.json, by the most common keys. Raise ModelError."""
    whole = Fields(raw, owner=name)
    nested = whole.section("text_config")
    nested = nested if nested.raw else whole.section("transformer_layer_config")
    fields = nested if nested.raw else whole
    hidden_size = fields.positive("hidden_size")
    num_layers = fields.positive("num_hidden_layers")
    experts = [key for key in ("num_experts", "n_routed_experts", "num_local_experts") if fields.raw.get(key)]
    num_experts = fields.positive(experts[0]) if experts else 0
    num_chosen = fields.positive("num_experts_per_tok", 1) if experts else 0
    inner = fields.positive("intermediate_size", 4 * hidden_size)
    if experts:
        inner = max(inner, num_chosen * fields.positive("moe_intermediate_size", inner))
    return Shape(
        name=name,
        hidden_size=hidden_size,
        inner_size=inner,
        vocab_size=fields.positive("vocab_size"),
        max_positions=fields.positive("max_position_embeddings", 8192),
        specs=_raw_specs(fields, hidden_size, num_layers),
        rope_bytes=0,
        num_experts=num_experts,
        num_chosen=num_chosen,
    )


def _raw_specs(fields: Fields, hidden_size: int, num_layers: int) -> tuple[CacheSpec, ...]:
    if fields.raw.get("kv_lora_rank"):
        latent = Latent(fields.positive("kv_lora_rank"), fields.positive("qk_rope_head_dim", 64))
        return (latent,) * num_layers
    _, num_kv_heads, head_dim = read_heads(fields, hidden_size)
    full = Paged(num_kv_heads=num_kv_heads, head_dim=head_dim)
    types = fields.items("layer_types", str)
    if types is None or len(types) != num_layers:
        return (full,) * num_layers
    window = fields.optional("sliding_window", int)
    sliding = full if window is None else Windowed(num_kv_heads, head_dim, window)
    state = _raw_state(fields) if "linear_attention" in types else full
    by_type: Mapping[str, CacheSpec] = {"sliding_attention": sliding, "linear_attention": state}
    return tuple(by_type.get(kind, full) for kind in types)


def _raw_state(fields: Fields) -> Recurrent:
    return Recurrent(
        num_key_heads=fields.positive("linear_num_key_heads"),
        num_heads=fields.positive("linear_num_value_heads"),
        key_dim=fields.positive("linear_key_head_dim"),
        value_dim=fields.positive("linear_value_head_dim"),
        conv_width=fields.positive("linear_conv_kernel_dim", 4),
    )
