"""Reads the config.json of a target as a ModelConfig, with one reader per family, without torch.

Each reader refuses options that blockdraft/models does not implement for the family. A multimodal
checkpoint nests its text part in `text_config`; only that part is read, and `ModelConfig.left_out` names the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from blockdraft.checkpoints.config_fields import (
    Fields,
    check_layer_types,
    read_heads,
    read_rope,
    read_softcap,
    read_windows,
    rope_of,
    windows_of,
)
from blockdraft.errors import ModelError
from blockdraft.models.config import (
    AttentionConfig,
    DeltaConfig,
    Family,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Rope,
)

Mixer: TypeAlias = AttentionConfig | DeltaConfig
Layers: TypeAlias = tuple[LayerConfig, ...]

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "GptOssForCausalLM": "gpt_oss",
}
_OTHER_PARTS = {"vision_config": "vision", "audio_config": "audio"}
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"

# Options with which related models compute something else from the same tensors, after the values that change
# nothing. Options that add tensors need no entry, because weights.py refuses unknown tensors.
_VARIANTS: tuple[tuple[tuple[object, ...], tuple[str, ...]], ...] = (
    (
        (),
        (
            *("attn_logit_softcapping", "attention_multiplier", "attention_chunk_size", "clip_qkv"),
            *("query_pre_attn_scalar", "dual_chunk_attention_config", "no_rope_layers"),
            *("no_rope_layer_interval", "scale_depth", "dim_model_base", "linear_attn_config"),
        ),
    ),
    (
        (False,),
        (
            *("attn_temperature_tuning", "rope_interleave", "alibi", "use_gemma_norm"),
            *("use_parallel_residual", "allow_neg_eigval"),
        ),
    ),
    ((True,), ("is_causal", "rope_is_neox_style")),
    ((1,), ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb")),
    ((1,), ("routed_scaling_factor",)),
    ((0, 1), ("n_group", "topk_group")),
    (("softmax",), ("scoring_func",)),
    (("greedy",), ("topk_method",)),
)
_VARIANT_PREFIXES = ("mamba_", "mup_")
_HARMLESS = {"mamba_ssm_dtype"}  # the dtype of the state; ours is never narrower than float32


def read_target(raw: Mapping[str, object], tensors: Collection[str] | None, *, name: str) -> ModelConfig:
    """Read a target's config.json. `tensors` has the tensor names in its files; None: not known."""
    config = read_model_config(raw, name=name)
    if tensors is not None and config.num_layers > len(tensors):
        raise ModelError(
            f"'{name}': config.json says {config.num_layers} layers, but the files hold {len(tensors)} "
            "tensors. Fetch the checkpoint again."
        )
    return config


def read_model_config(raw: Mapping[str, object], *, name: str) -> ModelConfig:
    """Return a target's configuration from its config.json. Raise ModelError for unsupported options."""
    whole = Fields(raw, owner=name)
    family = _family(whole)
    if "text_config" not in raw:
        return _read(family, whole)
    left_out = tuple(part for key, part in _OTHER_PARTS.items() if raw.get(key) is not None)
    text = whole.section("text_config")
    if "tie_word_embeddings" in raw:  # the outer value counts: the head belongs to the whole model
        text = replace(text, raw={**text.raw, "tie_word_embeddings": raw["tie_word_embeddings"]})
    return replace(_read(family, text), left_out=left_out)


def _family(fields: Fields) -> Family:
    architectures = fields.items("architectures", str) or ()
    for architecture in architectures:
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    raise ModelError(
        f"'{fields.owner}': architecture {', '.join(architectures) or 'missing'} is not supported; "
        f"supported: {', '.join(FAMILIES)}. See docs/models.md."
    )


def _read(family: Family, fields: Fields) -> ModelConfig:
    for neutral, keys in _VARIANTS:
        for key in keys:
            fields.refuse(key, *neutral)
    for key in fields.raw:
        if key.startswith(_VARIANT_PREFIXES) and key not in _HARMLESS:
            fields.refuse(key)
    if family != "gemma4":
        fields.refuse("hidden_act", "silu", "swish")
        fields.refuse("hidden_activation", "silu", "swish")
        fields.refuse("final_logit_softcapping")
        fields.refuse("per_layer_config")
    layers = _LAYERS[family](fields)
    is_gemma, is_gpt_oss = family == "gemma4", family == "gpt_oss"
    hidden_size = fields.positive("hidden_size")
    return ModelConfig(
        name=fields.owner,
        family=family,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        norm_eps=fields.above_zero("rms_norm_eps", 1e-5 if is_gpt_oss else 1e-6),
        max_positions=fields.positive("max_position_embeddings", 131072 if is_gemma else 2048),
        ties_embeddings=fields.get("tie_word_embeddings", bool, is_gemma),
        layers=layers,
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        logit_softcap=read_softcap(fields),
        swiglu_limit=fields.above_zero("swiglu_limit", 7.0) if is_gpt_oss else None,
    )


# ---- dense


def _llama(fields: Fields) -> Layers:
    fields.refuse("pretraining_tp", 1)
    return _dense(fields, _attention(fields), has_mlp_bias=fields.get("mlp_bias", bool, False))


def _qwen2(fields: Fields) -> Layers:
    fields.refuse("attention_bias", True)
    return _dense(fields, replace(_attention(fields), has_bias=True, has_out_bias=False))


def _attention(
    fields: Fields, *, has_bias: bool = False, theta: float = 10000.0, part: float | None = None
) -> AttentionConfig:
    """Return the attention of most families, with defaults for the family."""
    num_heads, num_kv_heads, head_dim = read_heads(fields, fields.positive("hidden_size"))
    has_bias = fields.get("attention_bias", bool, has_bias)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=read_rope(fields, head_dim=head_dim, theta=theta, part=part),
        has_bias=has_bias,
        has_out_bias=has_bias,
    )


def _dense(fields: Fields, attention: AttentionConfig, *, has_mlp_bias: bool = False) -> Layers:
    mlp = MLPConfig(fields.positive("intermediate_size"), has_bias=has_mlp_bias)
    windows = read_windows(fields, fields.positive("num_hidden_layers"))
    return tuple(LayerConfig(replace(attention, window=window), mlp=mlp) for window in windows)


# ---- Qwen3 mixtures and hybrids


def _qwen3_moe(fields: Fields) -> Layers:
    attention = _attention(fields)
    num_layers = fields.positive("num_hidden_layers")
    # Unlike in Qwen3, the switch is for all layers, and layer_types is ignored.
    kinds = (_SLIDING if fields.get("use_sliding_window", bool, False) else _FULL,) * num_layers
    fields.refuse("layer_types", list(kinds))
    moe = _moe(fields, is_normalised=fields.get("norm_topk_prob", bool, False))
    mixers = [replace(attention, window=window) for window in windows_of(fields, kinds, num_layers)]
    return _sparse_layers(fields, mixers, moe)


def _qwen3_next(fields: Fields) -> Layers:
    is_normalised = fields.get("norm_topk_prob", bool, True)
    moe = _moe(fields, is_normalised=is_normalised, has_shared=True)
    return _sparse_layers(fields, _hybrid_mixers(fields), moe)


def _qwen3_5(fields: Fields) -> Layers:
    mlp = MLPConfig(fields.positive("intermediate_size"))
    return tuple(LayerConfig(mixer, mlp=mlp) for mixer in _hybrid_mixers(fields))


def _qwen3_5_moe(fields: Fields) -> Layers:
    fields.refuse("norm_topk_prob", True)
    fields.refuse("decoder_sparse_step", 1)
    fields.refuse("mlp_only_layers", [])
    return _sparse_layers(fields, _hybrid_mixers(fields), _moe(fields, has_shared=True))


def _moe(fields: Fields, *, is_normalised: bool = True, has_shared: bool = False) -> MoEConfig:
    key = "num_experts" if "num_experts" in fields.raw else "num_local_experts"
    num_experts, num_chosen = _experts(fields, key, "num_experts_per_tok")
    return MoEConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        inner_size=fields.positive("moe_intermediate_size"),
        is_normalised=is_normalised,
        shared_size=fields.positive("shared_expert_intermediate_size") if has_shared else None,
    )


def _experts(fields: Fields, key: str, chosen_key: str) -> tuple[int, int]:
    """Return the number of experts, and the number of experts that run for a token."""
    num_experts, num_chosen = fields.positive(key), fields.positive(chosen_key)
    if num_chosen > num_experts:
        raise fields.error(f"says {chosen_key} = {num_chosen}, but {key} = {num_experts}")
    return num_experts, num_chosen


def _sparse_layers(fields: Fields, mixers: Iterable[Mixer], moe: MoEConfig) -> Layers:
    """Return layers with experts; layers in `mlp_only_layers` and between the sparse steps are dense."""
    step = fields.positive("decoder_sparse_step", 1)
    dense = set(fields.items("mlp_only_layers", int) or ())
    layers = []
    for index, mixer in enumerate(mixers):
        if index in dense or (index + 1) % step:
            layers.append(LayerConfig(mixer, mlp=MLPConfig(fields.positive("intermediate_size"))))
        else:
            layers.append(LayerConfig(mixer, moe=moe))
    return tuple(layers)


def _hybrid_mixers(fields: Fields) -> tuple[Mixer, ...]:
    """Return the mixer of each layer: gated attention every few layers, gated delta rules in between."""
    fields.refuse("output_gate_type", "silu", "swish")
    fields.refuse("attn_output_gate", True)
    fields.refuse("use_sliding_window", False)
    num_layers = fields.positive("num_hidden_layers")
    attention, delta = _attention(fields, part=0.25), _delta(fields)
    kinds = fields.items("layer_types", str)
    if kinds is None:
        interval = fields.positive("full_attention_interval", 4)
        kinds = tuple(_LINEAR if (index + 1) % interval else _FULL for index in range(num_layers))
    check_layer_types(fields, kinds, num_layers, {_LINEAR, _FULL})
    return tuple(delta if kind == _LINEAR else attention for kind in kinds)


def _delta(fields: Fields) -> DeltaConfig:
    num_key_heads = fields.positive("linear_num_key_heads")
    num_value_heads = fields.positive("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise fields.error(f"has {num_value_heads} linear value heads for {num_key_heads} key heads")
    conv_width = fields.positive("linear_conv_kernel_dim", 4)
    if conv_width < 2:
        raise fields.wrong("linear_conv_kernel_dim", 1, "but a convolution spans at least two tokens")
    return DeltaConfig(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.positive("linear_key_head_dim"),
        value_dim=fields.positive("linear_value_head_dim"),
        conv_width=conv_width,
    )


# ---- Gemma 4


def _gemma4(fields: Fields) -> Layers:
    _refuse_gemma_variants(fields)
    num_layers = fields.positive("num_hidden_layers")
    kinds = fields.items("layer_types", str)
    if kinds is None:
        kinds = tuple(_FULL if (index + 1) % 6 == 0 else _SLIDING for index in range(num_layers))
    kinds = (*kinds[:-1], _FULL)  # as in transformers: the last layer has full attention
    windows = windows_of(fields, kinds, num_layers)
    num_shared = fields.get("num_kv_shared_layers", int, 0)
    if not 0 <= num_shared < num_layers:
        raise fields.error(f"says num_kv_shared_layers = {num_shared}, but has {num_layers} layers")
    num_own = num_layers - num_shared
    layers: list[LayerConfig] = []
    for index, kind in enumerate(kinds):
        shared_with = None if index < num_own else _last_of_kind(fields, kinds[:num_own], kind)
        mixer = replace(_gemma_attention(fields, kind, index), window=windows[index], shared_with=shared_with)
        _check_shared(fields, mixer, layers)
        is_wide = shared_with is not None and fields.get("use_double_wide_mlp", bool, False)
        inner_size = fields.positive("intermediate_size") * (2 if is_wide else 1)
        layers.append(LayerConfig(mixer, mlp=MLPConfig(inner_size), moe=_gemma_moe(fields)))
    return tuple(layers)


def _refuse_gemma_variants(fields: Fields) -> None:
    fields.refuse("hidden_activation", "gelu_pytorch_tanh")
    fields.refuse("hidden_act", "gelu_pytorch_tanh")
    fields.refuse("attention_bias", False)
    fields.refuse("norm_topk_prob", True)
    fields.refuse("sliding_window_pattern", 6)  # layer_types or this default is used
    fields.refuse("rope_scaling")  # rope_parameters has the values for each kind of layer
    fields.refuse("partial_rotary_factor")
    fields.refuse("use_bidirectional_attention", "vision")  # between the tokens of an image only
    # If the key is absent, transformers builds embeddings with a width of 256; a unified model has none.
    is_unified = str(fields.raw.get("model_type")).startswith("gemma4_unified")
    width = fields.get("hidden_size_per_layer_input", int, 0 if is_unified else 256)
    if width:
        raise fields.error(
            f"asks for hidden_size_per_layer_input = {width}: per-layer embeddings (Gemma 4 E2B and E4B) "
            "are not implemented"
        )


def _last_of_kind(fields: Fields, kinds: tuple[str, ...], kind: str) -> int:
    if kind not in kinds:
        raise fields.error(f"has {kind} layers that share keys and values, but none that stores them")
    return len(kinds) - 1 - kinds[::-1].index(kind)


def _check_shared(fields: Fields, mixer: AttentionConfig, layers: list[LayerConfig]) -> None:
    if mixer.shared_with is None:
        return
    source = layers[mixer.shared_with].mixer
    assert isinstance(source, AttentionConfig)
    if (source.num_kv_heads, source.head_dim) != (mixer.num_kv_heads, mixer.head_dim):
        raise fields.error(
            f"shares keys and values of layer {mixer.shared_with} with a layer whose heads differ in shape"
        )


def _gemma_attention(fields: Fields, kind: str, index: int) -> AttentionConfig:
    """Return one layer's attention; global layers have fewer, wider heads and may use keys as values."""
    num_heads, num_kv_heads, head_dim = read_heads(fields, fields.positive("hidden_size"))
    has_values = kind != _FULL or not fields.get("attention_k_eq_v", bool, False)
    if "per_layer_config" in fields.raw:  # as transformers 5.22 writes it
        own = _own_config(fields, index)
        head_dim = own.positive("head_dim", head_dim)
        num_kv_heads = own.positive("num_key_value_heads", num_kv_heads)
    elif kind == _FULL:
        head_dim = fields.positive("global_head_dim", 512)
        if not has_values:
            num_kv_heads = fields.positive("num_global_key_value_heads", num_kv_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        shape = f"{num_heads} query and {num_kv_heads} key heads of {head_dim}"
        raise fields.error(f"has {shape} in layer {index}")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=_gemma_rope(fields, kind, head_dim),
        has_values=has_values,
    )


def _own_config(fields: Fields, index: int) -> Fields:
    """Return one layer's section of `per_layer_config`, whose keys are layer indices padded with zeros."""
    layers = fields.section("per_layer_config")
    for key in layers.raw:
        if not key.isdecimal() or int(key) >= fields.positive("num_hidden_layers"):
            raise layers.error(f"has no layer for '{layers.prefix}{key}'")
    own = layers.section(next((key for key in layers.raw if int(key) == index), str(index)))
    for key in sorted(own.raw.keys() - {"head_dim", "num_key_value_heads"}):
        own.refuse(key)
    return own


def _gemma_rope(fields: Fields, kind: str, head_dim: int) -> Rope:
    ropes = fields.section("rope_parameters")
    if not ropes.raw:
        if kind == _SLIDING:
            return Rope(theta=10000.0)
        return Rope(theta=1e6, kind="proportional", part=0.25)
    section = ropes.section(kind)
    if not section.raw:
        raise fields.error(f"has no 'rope_parameters.{kind}'")
    if section.raw.get("rope_type") != "proportional":
        section.refuse("partial_rotary_factor", 1)
    part = section.get("partial_rotary_factor", float, 1.0)
    return rope_of(section, fields, head_dim=head_dim, theta=section.above_zero("rope_theta"), part=part)


def _gemma_moe(fields: Fields) -> MoEConfig | None:
    if not fields.get("enable_moe_block", bool, False):
        return None
    num_experts, num_chosen = _experts(fields, "num_experts", "top_k_experts")
    return MoEConfig(num_experts, num_chosen, inner_size=fields.positive("moe_intermediate_size"))


# ---- gpt-oss


def _gpt_oss(fields: Fields) -> Layers:
    fields.refuse("swiglu_alpha", 1.702)
    fields.refuse("norm_topk_prob", True)
    num_layers = fields.positive("num_hidden_layers")
    attention = _attention(fields, has_bias=True, theta=150000.0)
    if not fields.section("rope_parameters").raw and not fields.section("rope_scaling").raw:
        raise fields.error("has neither 'rope_scaling' nor 'rope_parameters'")
    kinds = fields.items("layer_types", str)
    if kinds is None:
        kinds = tuple(_FULL if index % 2 else _SLIDING for index in range(num_layers))
    chosen_key = "num_experts_per_tok" if "num_experts_per_tok" in fields.raw else "experts_per_token"
    num_experts, num_chosen = _experts(fields, "num_local_experts", chosen_key)
    moe = MoEConfig(num_experts, num_chosen, inner_size=fields.positive("intermediate_size"))
    windows = windows_of(fields, kinds, num_layers)
    return tuple(LayerConfig(replace(attention, window=window), moe=moe) for window in windows)


_LAYERS: Mapping[Family, Callable[[Fields], Layers]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": lambda fields: _dense(fields, _attention(fields)),
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "gemma4": _gemma4,
    "gpt_oss": _gpt_oss,
}
