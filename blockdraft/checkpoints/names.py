"""Maps our parameters to the names in published checkpoints.

Keys are paths inside a layer. Values are the Hugging Face modules whose weights are stacked along the rows at
that path. A parameter outside a linear module (a sink, a scale) maps to the full name of a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from blockdraft.models.config import AttentionConfig, DeltaConfig, ModelConfig
from blockdraft.models.draft_config import DraftConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of experts, stored one by one (`base.7.part.weight`) or fused into a 3-D tensor."""

    base: str
    parts: tuple[str, ...]
    fused: str
    is_transposed: bool = False  # the fused tensor is transposed, unless it is quantised
    is_interleaved: bool = False  # rows of the fused tensor alternate between the two parts


Names = Mapping[str, tuple[str, ...] | ExpertNames]

_LAYER: Names = {  # for most families; a layer uses the names of the parts that it has
    "mixer_norm": ("input_layernorm",),
    "mixer.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mixer.out": ("self_attn.o_proj",),
    "mixer.q_norm": ("self_attn.q_norm",),
    "mixer.k_norm": ("self_attn.k_norm",),
    "mixer.sinks": ("self_attn.sinks",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "mlp.router": ("mlp.gate",),
    "mlp.experts.gate_up": ExpertNames("mlp.experts", ("gate_proj", "up_proj"), "gate_up_proj"),
    "mlp.experts.down": ExpertNames("mlp.experts", ("down_proj",), "down_proj"),
}
_DELTA: Names = {  # instead of attention
    "mixer.inputs.qkvz": ("linear_attn.in_proj_qkvz",),
    "mixer.inputs.ba": ("linear_attn.in_proj_ba",),
    "mixer.inputs.all": tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
    "mixer.conv": ("linear_attn.conv1d.weight",),
    "mixer.decay_log": ("linear_attn.A_log",),
    "mixer.gate_bias": ("linear_attn.dt_bias",),
    "mixer.norm": ("linear_attn.norm",),
    "mixer.out": ("linear_attn.out_proj",),
}
_SHARED: Names = {  # with a shared expert
    "mlp.router": ("mlp.gate", "mlp.shared_expert_gate"),
    "mlp.shared.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared.down": ("mlp.shared_expert.down_proj",),
}
_GPT_OSS: Names = {
    **_LAYER,
    "mlp.router": ("mlp.router.weight",),
    "mlp.router_bias": ("mlp.router.bias",),
    "mlp.experts.gate_up": ExpertNames(
        "mlp.experts", ("gate_proj", "up_proj"), "gate_up_proj", is_transposed=True, is_interleaved=True
    ),
    "mlp.experts.down": ExpertNames("mlp.experts", ("down_proj",), "down_proj", is_transposed=True),
}
_GEMMA: Names = {
    **_LAYER,
    "mixer_after": ("post_attention_layernorm",),
    "mlp.before": ("pre_feedforward_layernorm",),
    "mlp.dense.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.dense.down": ("mlp.down_proj",),
    "mlp.after": ("post_feedforward_layernorm",),
    "mlp.dense_after": ("post_feedforward_layernorm_1",),
    "mlp.router.scale": ("router.scale",),
    "mlp.router.weight": ("router.proj.weight",),
    "mlp.router.expert_scale": ("router.per_expert_scale",),
    "mlp.experts_before": ("pre_feedforward_layernorm_2",),
    "mlp.experts.gate_up": ExpertNames("experts", ("gate_proj", "up_proj"), "gate_up_proj"),
    "mlp.experts.down": ExpertNames("experts", ("down_proj",), "down_proj"),
    "mlp.experts_after": ("post_feedforward_layernorm_2",),
    "scale": ("layer_scalar",),
}
DRAFT_LAYER: Names = {
    **_LAYER,
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    **{  # DFlash2 only
        name: (name,)
        for conv in ("attention_conv", "mlp_conv")
        for name in (conv, f"{conv}.kernel_projection")
    },
}

_DRAFT_HEADS: Mapping[str, tuple[str, ...]] = {
    "markov.before": ("markov_head.markov_w1",),
    "markov.after": ("markov_head.markov_w2",),
    "refiner.before": ("xpress_head.w1",),
    "refiner.own": ("xpress_head.down_h",),
    "refiner.mean": ("xpress_head.down_g",),
    "refiner.inputs": ("xpress_head.in_proj",),
    "refiner.mixer": ("xpress_head.mix.L",),
    "refiner.mlp.gate_up": ("xpress_head.mlp.gate_proj", "xpress_head.mlp.up_proj"),
    "refiner.mlp.down": ("xpress_head.mlp.down_proj",),
    "refiner.after": ("xpress_head.w2",),
    "prefix.inputs.weight": ("prefix_gru.weight_ih_l0",),
    "prefix.recurrent.weight": ("prefix_gru.weight_hh_l0",),
    "prefix.joined": ("embed_proj.0",),
    "prefix.after": ("embed_proj.2",),
}
_OLD_HEADS = "logit_head."  # before names of heads in SpecForge's early files
_SPECULATORS_HEADS: Names = {
    **_DRAFT_HEADS,
    "refiner.before": ("refiner_head.token_embed",),
    "refiner.own": ("refiner_head.down_h",),
    "refiner.mean": ("refiner_head.down_g",),
    "refiner.inputs": ("refiner_head.in_proj",),
    "refiner.mixer": ("refiner_head.mix_l",),
    "refiner.mlp.gate_up": ("refiner_head.mlp_gate", "refiner_head.mlp_up"),
    "refiner.mlp.down": ("refiner_head.mlp_down",),
    "refiner.after": ("refiner_head.readout",),
}

MTP_PREFIXES = ("mtp.", "model.mtp.")  # of the head for multi-token prediction
MTP_TENSORS = r"(model\.)?mtp\."
# Prefixes of a decoder's tensors: of a text model, and of the text part of a multimodal model.
PREFIXES = ("model.", "model.language_model.", "language_model.model.")


def draft_head_names(tensors: Collection[str]) -> Names:
    """Return the names of a drafter's heads by their full paths, for a file that has these `tensors`."""
    if any(name.startswith("refiner_head.") for name in tensors):
        return _SPECULATORS_HEADS
    if any(name.startswith(_OLD_HEADS) for name in tensors):
        return {path: (_OLD_HEADS + name,) for path, (name, *_) in _DRAFT_HEADS.items()}
    return _DRAFT_HEADS


def layer_names(config: ModelConfig, index: int) -> Names:
    layer = config.layers[index]
    if config.family == "gpt_oss":
        return _GPT_OSS
    if config.family == "gemma4":
        assert isinstance(layer.mixer, AttentionConfig)
        num_projections = 1 if layer.mixer.shared_with is not None else 3 if layer.mixer.has_values else 2
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")[:num_projections]
        return {**_GEMMA, "mixer.qkv": qkv}
    names = {**_LAYER, **_DELTA} if isinstance(layer.mixer, DeltaConfig) else _LAYER
    has_shared = layer.moe is not None and layer.moe.shared_size is not None
    return {**names, **_SHARED} if has_shared else names


def skipped(config: ModelConfig) -> list[str]:
    """Return regular expressions for the tensors of a target that are not loaded."""
    patterns = [
        r".*rotary_emb\.inv_freq",  # derived from config.json
        r".*\.(k_scale|v_scale|q_scale)",  # our cache is not quantised
        rf"{MTP_TENSORS}.*",  # the head for multi-token prediction is a drafter
    ]
    if config.ties_embeddings:
        patterns.append(r"(language_model\.)?lm_head\.weight")
    if "vision" in config.left_out:
        patterns.append(
            r"(model\.)?(visual|vision_tower|vision_embedder|embed_vision|multi_modal_projector)\..*"
        )
    if "audio" in config.left_out:
        patterns.append(r"(model\.)?(audio_tower|embed_audio)\..*")
    for index, layer in enumerate(config.layers):
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.shared_with is not None:
            patterns.append(rf".*\.layers\.{index}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*")
    return patterns


def draft_skipped(config: DraftConfig) -> list[str]:
    """Return regular expressions for the tensors of a drafter that are not loaded."""
    patterns = [
        r".*rotary_emb\.inv_freq",  # derived from config.json
        r"embed_tokens\.weight|verifier_.*",  # the target's weights are used
        r"d2t|t2d",  # read with the drafter's vocabulary
        r"confidence_head\..*",  # widths are chosen by committed drafts
    ]
    return [*patterns, r"lm_head\.weight"] if config.copies_head else patterns


def mtp_skipped() -> list[str]:
    """Return regular expressions for the tensors of a checkpoint that are not its MTP head's, or not read."""
    return [rf"(?!{MTP_TENSORS}).*", r".*\.(k_scale|v_scale|q_scale)"]


def mtp_prefix(tensors: Iterable[str]) -> str | None:
    """Return the prefix of the tensors of a checkpoint's MTP head, or None if it has no head."""
    names = list(tensors)
    return next((one for one in MTP_PREFIXES if any(name.startswith(one) for name in names)), None)


def mtp_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of a checkpoint's MTP head, by their names inside the head."""
    prefix = mtp_prefix(tensors)
    if prefix is None:
        return {}
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}


def copied_rows(config: DraftConfig) -> dict[str, int]:
    """Return the number of rows of the frozen target embedding and head that a drafter's file may hold."""
    return {"embed_tokens.weight": config.vocab_size, "lm_head.weight": config.draft_vocab_size}
