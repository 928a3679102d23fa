"""The config.json (in z-lab's layout) and the initial weights of a new drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.checkpoints.read_draft_config import (
    SKIPS_FIRST,
    default_taps,
    draft_block,
    draft_kind,
    read_draft_config,
)
from blockdraft.checkpoints.weights import load_checkpoint
from blockdraft.errors import ModelError, SettingsError
from blockdraft.models.config import AttentionConfig, ModelConfig
from blockdraft.models.decoder import Decoder
from blockdraft.models.dflash import BlockConv, DFlash, DFlash2, DFlashLayer, body_type
from blockdraft.models.draft_config import KIND_NAMES, DraftConfig, DraftKind
from blockdraft.models.layers import Attention, DecoderLayer, GatedMLP, Linear, RMSNorm
from blockdraft.training.job import TRAINED, DrafterShape

CONV_TAPS, CONV_GROUP = 2, 16  # as in the published DFlash2 drafters
INITIAL = 0.01  # standard deviation of the Markov head's `before` table, as in DeepSpec
NO_CONFIDENCE = {"enable_confidence_head": False, "confidence_head_with_markov": False}


def draft_json(
    shape: DrafterShape, target: ModelConfig, raw: Mapping[str, object], mask_id: int
) -> dict[str, object]:
    """Return config.json of a new drafter for `target`; `raw` is the target's own config.json."""
    attention = next((one.mixer for one in target.layers if isinstance(one.mixer, AttentionConfig)), None)
    inner = next((one.mlp.inner_size for one in target.layers if one.mlp is not None), None)
    if attention is None:
        raise ModelError(f"'{target.name}' has no attention layer, which gives a drafter its head sizes.")
    taps = shape.taps
    if taps is None:  # a shallow target has fewer layers than taps
        taps = tuple(dict.fromkeys(default_taps(target.num_layers, shape.num_taps)))
    if min(taps) < 0 or max(taps) >= target.num_layers or len(set(taps)) != len(taps):
        raise SettingsError(
            f"taps {list(taps)} are not layers 0 to {target.num_layers - 1} of '{target.name}'."
        )
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": shape.inner_size or inner or 3 * target.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads or attention.num_heads,
        "num_key_value_heads": shape.num_kv_heads or attention.num_kv_heads,
        "head_dim": shape.head_dim or attention.head_dim,
        "rms_norm_eps": float(f"{target.norm_eps:.6g}"),  # a GGUF file has it in float32
        "rope_theta": attention.rope.theta if attention.rope.kind == "default" else 10000.0,
        "max_position_embeddings": target.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "layer_types": ["full_attention"] * shape.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.num_layers,
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_id": raw.get("eos_token_id"),
        "pad_token_id": raw.get("pad_token_id"),
        "block_size": shape.block,
        "num_target_layers": target.num_layers,
        "is_causal": shape.is_causal,
        "dflash_config": {"mask_token_id": mask_id, "target_layer_ids": list(taps), **_scales(target)},
    }


def _scales(target: ModelConfig) -> dict[str, float]:
    """Return what a drafter that is trained here shares with its target, and engines do not assume."""
    scale, cap = target.embedding_scale, target.logit_softcap
    scales = {} if scale == 1 else {"input_embedding_scale": scale}
    return scales if cap is None else {**scales, "final_logit_softcapping": cap}


def as_kind(
    raw: Mapping[str, object], kind: DraftKind | None, shape: DrafterShape, *, name: str, scale: float = 1.0
) -> Mapping[str, object]:
    """Return the drafter's config.json `raw`, converted to `kind`; None keeps the drafter's own kind.

    `scale` is the target's embedding scale, which DFlash drafters may leave out and the others may not.
    """
    config = read_draft_config(raw, name=name)
    if config.kind not in TRAINED:
        raise SettingsError(
            f"'{name}' is of kind {KIND_NAMES[config.kind]}, which can be served, but not trained."
        )
    if kind in (None, config.kind):
        return without_confidence(raw) if draft_kind(raw) == "dspark" else raw
    if config.kind != "dflash":
        raise SettingsError(
            f"'{name}' is a {KIND_NAMES[config.kind]} drafter: leave --kind out to train it further."
        )
    if config.embedding_scale is None and scale != 1:
        said = raw.get("dflash_config")
        section = dict(said) if isinstance(said, Mapping) else {}
        raw = {**raw, "dflash_config": {**section, "input_embedding_scale": scale}}
    return dflash2_json(raw, shape) if kind == "dflash2" else spark_json(raw, shape.rank)


def dflash2_json(raw: Mapping[str, object], shape: DrafterShape) -> dict[str, object]:
    """Return config.json of a DFlash2 drafter that extends the DFlash drafter `raw`."""
    if "speculators_model_type" in raw:
        raise SettingsError("--kind dflash2 needs a drafter in z-lab's layout, but --from has speculators'.")
    if read_draft_config(raw, name="the drafter").drafts_from_anchor:
        raise SettingsError("--kind dflash2 cannot extend a drafter that drafts from the anchor.")
    own = {
        "conv_kernel_size": CONV_TAPS,
        "conv_group_size": CONV_GROUP,
        "selector_rank": shape.rank,
        "selector_top_k": shape.num_candidates,
        SKIPS_FIRST: True,
    }
    kept = {key: value for key, value in raw.items() if key != "auto_map"}  # code for the other kind
    dflash = raw.get("dflash_config")
    dflash = {**(dflash if isinstance(dflash, Mapping) else {}), **own}
    return {**kept, "architectures": ["DFlash2DraftModel"], "dflash_config": dflash}


def spark_json(raw: Mapping[str, object], rank: int) -> dict[str, object]:
    """Return config.json of the DFlash drafter `raw` with a Markov head added.

    A speculators file keeps its layout; any other gets DeepSpec's layout.
    """
    heads = {
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        **NO_CONFIDENCE,
        "block_size": draft_block(raw) - 1,
    }
    if "speculators_model_type" in raw:
        return {**raw, **heads, "speculators_model_type": "dspark", "sample_from_anchor": True}
    config = read_draft_config(raw, name="the drafter")
    section = raw.get("dflash_config")
    other = {*heads, "sample_from_anchor", "dspark_bonus_anchor", "shift_label"}  # replaced or dropped
    said = section if isinstance(section, Mapping) else {}
    own = {key: value for key, value in said.items() if key not in other}
    rest = {key: value for key, value in raw.items() if key not in {*other, "auto_map"}}
    places = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.taps)}
    return {
        **rest,
        **places,
        **heads,
        "architectures": ["Qwen3DSparkModel"],
        "num_anchors": 512,  # DeepSpec's reader requires a value
        "dflash_config": {**own, **places},
    }


def without_confidence(raw: Mapping[str, object]) -> dict[str, object]:
    """Return the config.json `raw` of a DSpark drafter without the confidence head, which training drops."""
    kept = {key: value for key, value in raw.items() if not key.startswith("confidence_head")}
    section = raw.get("dflash_config")
    if isinstance(section, Mapping):
        inner = {key: value for key, value in section.items() if not key.startswith("confidence_head")}
        kept["dflash_config"] = {**inner, **NO_CONFIDENCE}
    return {**kept, **NO_CONFIDENCE}


def new_drafter(
    config: DraftConfig, target: Decoder, *, max_positions: int, device: torch.device, init: str, seed: int
) -> DFlash:
    """Return a float32 drafter with random weights, or with the target's last layers if `init` is "target".

    Key norms stay at one and are not trained: query norms can learn the same scale, and vLLM's CPU build uses
    the first layer's key norm in all layers.
    """
    with torch.device(device):
        model = body_type(config)(
            config, first_layer=0, max_positions=max_positions, has_head=False, device=device
        )
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Linear):
            weight = _plain(module)
            noise = torch.randn(weight.shape, generator=generator)
            weight.data.copy_(noise * weight.shape[1] ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if model.markov is not None:  # initially the head adds nothing
        nn.init.zeros_(model.markov.after.weight)
        before = model.markov.before.weight
        before.data.copy_(torch.randn(before.shape, generator=generator) * INITIAL)
    for layer in model.layers:
        assert isinstance(layer, DFlashLayer)
        nn.init.zeros_(_plain(layer.out))
        nn.init.zeros_(_plain(layer.mlp.down))
        layer.k_norm.weight.requires_grad_(False)
    if isinstance(model, DFlash2):
        _make_identity(model, generator)
    if init == "target":
        _copy_layers(model, target)
    return model


def _make_identity(model: DFlash2, generator: torch.Generator) -> None:
    """Initialise the parts that DFlash2 adds so that the model computes exactly what DFlash computes."""
    for module in model.modules():
        if isinstance(module, BlockConv):
            nn.init.zeros_(module.base_kernel)
            nn.init.ones_(module.base_kernel[:, 0])
            nn.init.zeros_(_plain(module.kernel_projection))
    selector = model.candidate_selector
    nn.init.zeros_(selector.successor_codebook)
    first = selector.predecessor_codebook
    first.data.copy_(torch.randn(first.shape, generator=generator) * first.shape[1] ** -0.5)


def train_only(model: DFlash, part: Literal["all", "added", "selector"]) -> None:
    """Freeze every parameter of a DFlash2 drafter outside `part`."""
    if part == "all":
        return
    if not isinstance(model, DFlash2):
        raise SettingsError(f"--train {part} is for DFlash2 drafters: add --kind dflash2.")
    convs = [one for one in model.modules() if isinstance(one, BlockConv)]
    kept = [model.candidate_selector, *(convs if part == "added" else [])]
    moved = {id(one) for module in kept for one in module.parameters()}
    for one in model.parameters():
        one.requires_grad_(id(one) in moved)


def load_weights(model: DFlash, source: str, device: torch.device) -> None:
    """Load a drafter of the same shape as trainable float32; keep parameters that `source` lacks."""
    checkpoint = open_checkpoint(source)
    config = read_draft_config(checkpoint.config, name=source)
    with torch.device(device):
        stored = body_type(config)(config, first_layer=0, max_positions=1, has_head=False, device=device)
    load_checkpoint(stored, checkpoint, storage="none", device=device)
    model.load_state_dict({**model.state_dict(), **stored.state_dict()})


def _plain(linear: Linear) -> nn.Parameter:
    assert isinstance(linear.weight, nn.Parameter)
    return linear.weight


def _copy_layers(model: DFlash, target: Decoder) -> None:
    """Copy the target's last layers, which must have the same shape, into the drafter."""
    last = list(target.layers)[-len(model.layers) :]
    if len(last) < len(model.layers):
        raise SettingsError(
            f"--init target: the target has {len(last)} layers, the drafter {len(model.layers)}. "
            "Use fewer, or --init random."
        )
    for layer, source in zip(model.layers, last, strict=True):
        assert isinstance(layer, DFlashLayer)
        if not isinstance(source, DecoderLayer) or not isinstance(source.mixer, Attention):
            raise SettingsError("--init target: the target's last layers are not plain attention layers.")
        if not isinstance(source.mlp, GatedMLP):
            raise SettingsError("--init target: the target's last layers have experts.")
        pairs = (
            (layer.qkv, source.mixer.qkv),
            (layer.out, source.mixer.out),
            (layer.mlp.gate_up, source.mlp.gate_up),
            (layer.mlp.down, source.mlp.down),
            (layer.attention_norm, source.mixer_norm),
            (layer.mlp_norm, source.mlp_norm),
        )
        for mine, theirs in pairs:
            assert isinstance(mine.weight, nn.Parameter)
            if not isinstance(theirs.weight, nn.Parameter) or mine.weight.shape != theirs.weight.shape:
                raise SettingsError(
                    "--init target: drafter and target layers differ in shape, or are packed."
                )
            mine.weight.data.copy_(theirs.weight.data)
