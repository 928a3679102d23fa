"""Derives a config.json, Hugging Face's tensor names and sampling advice from a GGUF file, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from blockdraft.checkpoints.config_fields import Fields
from blockdraft.checkpoints.gguf_header import GgufHeader
from blockdraft.errors import ModelError

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE_NAMES = {
    **_ATTENTION_NAMES,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_MOE_NAMES = _ATTENTION_NAMES | {"ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"}
_GPT_OSS_NAMES = _ATTENTION_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
# Full names: Hugging Face's names have no .weight or .bias here.
_EXPERTS = {f"ffn_{part}_exps.weight": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")}
_EXPERT_BIASES = {f"ffn_{part}_exps.bias": f"mlp.experts.{part}_proj_bias" for part in ("gate", "up", "down")}
_GPT_OSS_EXTRAS = {**_EXPERTS, **_EXPERT_BIASES, "attn_sinks.weight": "self_attn.sinks"}


class _Architecture(NamedTuple):
    """Hugging Face's names for a model class and for its layers' tensors."""

    model_class: str
    model_type: str
    names: Mapping[str, str]  # without .weight and .bias
    full_names: Mapping[str, str] = {}


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", "llama", _DENSE_NAMES),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2", _DENSE_NAMES),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3", _DENSE_NAMES),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _QWEN3_MOE_NAMES, _EXPERTS),
    "gpt-oss": _Architecture("GptOssForCausalLM", "gpt_oss", _GPT_OSS_NAMES, _GPT_OSS_EXTRAS),
}
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)", re.ASCII)
_EMBEDDING = "token_embd.weight"
_ROPE_FACTORS = "rope_freqs.weight"  # llama3's scaling, one divisor per rotated pair

# llama.cpp's defaults (common/common.h). It filters unlikely tokens before it applies the temperature.
LLAMA_CPP_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_HUB_ADDRESS = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/?", re.ASCII)


def hugging_face_names(file: GgufHeader) -> dict[str, str]:
    """Return the stored names by Hugging Face's names. Raise ModelError for an unknown tensor."""
    architecture = _ARCHITECTURES[_architecture(file)]
    names: dict[str, str] = {}
    for stored in file.tensors:
        if stored == _ROPE_FACTORS:
            continue
        name = _hugging_face_name(stored, architecture)
        if name is None:
            raise ModelError(
                f"'{file.name}' holds the tensor {stored!r}, which no supported model of its architecture "
                "has. See docs/models.md."
            )
        names[name] = stored
    return names


def _hugging_face_name(stored: str, architecture: _Architecture) -> str | None:
    match = _TENSOR_NAME.fullmatch(stored)
    if match is None:
        return None
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{_TOP_NAMES[part]}.{kind}" if part in _TOP_NAMES else None
    name = architecture.full_names.get(f"{part}.{kind}")
    if name is None and part in architecture.names:
        name = f"{architecture.names[part]}.{kind}"
    return name and f"model.layers.{layer}.{name}"


def _architecture(file: GgufHeader) -> str:
    architecture = file.keys("general.").get("architecture", str)
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(
            f"'{file.name}' is a {architecture!r} model; supported are GGUF files of {known}. "
            "See docs/models.md."
        )
    return architecture


def permuted_heads(file: GgufHeader) -> dict[str, int]:
    """Return the number of heads of each projection whose rows are permuted."""
    if _architecture(file) != "llama":
        return {}
    keys = file.keys("llama.")
    num_heads = keys.positive("attention.head_count")
    return {"q_proj": num_heads, "k_proj": keys.positive("attention.head_count_kv", num_heads)}


def read_config(file: GgufHeader) -> dict[str, object]:
    architecture = _architecture(file)
    keys = file.keys(f"{architecture}.")
    _refuse_variants(file, architecture, keys)
    if _EMBEDDING not in file.tensors:
        raise ModelError(f"'{file.name}' has no '{_EMBEDDING}': it is incomplete. Download it again.")
    num_heads = keys.positive("attention.head_count")
    return {
        "architectures": [_ARCHITECTURES[architecture].model_class],
        "model_type": _ARCHITECTURES[architecture].model_type,
        "hidden_act": "silu",
        "hidden_size": keys.positive("embedding_length"),
        "intermediate_size": keys.positive("feed_forward_length"),
        "num_hidden_layers": keys.positive("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.positive("attention.head_count_kv", num_heads),
        "head_dim": _head_dim(keys),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", float),
        "rope_theta": keys.get("rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(file, architecture, keys),
        "max_position_embeddings": keys.positive("context_length"),
        "vocab_size": file.tensors[_EMBEDDING].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        **_expert_config(architecture, keys),
    }


def _expert_config(architecture: str, keys: Fields) -> dict[str, object]:
    if architecture == "qwen3moe":
        return {
            "num_experts": keys.positive("expert_count"),
            "num_experts_per_tok": keys.positive("expert_used_count"),
            "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
            # llama.cpp always normalises for this architecture; few files have the key.
            "norm_topk_prob": keys.get("expert_weights_norm", bool, True),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if architecture == "gpt-oss":
        layers = range(keys.positive("block_count"))
        return {
            "num_local_experts": keys.positive("expert_count"),
            "num_experts_per_tok": keys.positive("expert_used_count"),
            "intermediate_size": keys.positive("expert_feed_forward_length"),
            "sliding_window": keys.positive("attention.sliding_window"),
            "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in layers],
            "swiglu_limit": 7.0,  # constant in this architecture; files have no key for it
        }
    return {}


def _refuse_variants(file: GgufHeader, architecture: str, keys: Fields) -> None:
    if file.keys("split.").get("count", int, 0) > 1:
        raise ModelError(
            f"'{file.name}' is one part of a split file: join the parts with llama-gguf-split --merge."
        )
    num_layers = keys.positive("block_count")
    if num_layers > len(file.tensors):
        raise ModelError(
            f"'{file.name}' has block_count = {num_layers} layers, but only {len(file.tensors)} tensors. "
            "Download it again."
        )
    num_experts = keys.get("expert_count", int, 0)
    if num_experts and not _ARCHITECTURES[architecture].full_names:
        raise ModelError(
            f"'{file.name}' is a mixture of {num_experts} experts, which is not supported for "
            f"{architecture!r} models. See docs/models.md."
        )
    keys.refuse("expert_weights_scale", 0.0, 1.0)  # in llama.cpp, 0 means no scale
    if architecture == "gpt-oss":
        keys.refuse("attention.sliding_window_pattern", 2)
        keys.refuse("rope.freq_base_swa", keys.get("rope.freq_base", float))


def _head_dim(keys: Fields) -> int:
    even_share = keys.positive("embedding_length") // keys.positive("attention.head_count")
    head_dim = keys.positive("attention.key_length", even_share)
    for key in ("attention.value_length", "rope.dimension_count"):
        value = keys.positive(key, head_dim)
        if value != head_dim:
            raise keys.wrong(key, value, f"but heads have {head_dim} values: this variant is not supported")
    return head_dim


def _rope_scaling(file: GgufHeader, architecture: str, keys: Fields) -> dict[str, object] | None:
    kind = keys.get("rope.scaling.type", str, "none")
    has_factors = _ROPE_FACTORS in file.tensors
    if kind == "none":
        return {"rope_type": "factors", "factors": file.floats(_ROPE_FACTORS)} if has_factors else None
    if kind == "linear" and not has_factors:
        return {"rope_type": "linear", "factor": keys.get("rope.scaling.factor", float)}
    if kind == "yarn" and not has_factors and architecture == "gpt-oss":
        return _gpt_oss_yarn(keys)
    raise ModelError(
        f"'{file.name}' has the rope scaling {kind!r}{' and rope factors' if has_factors else ''}, "
        "which is not supported. See docs/models.md."
    )


def _gpt_oss_yarn(keys: Fields) -> dict[str, object]:
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        keys.refuse(f"rope.scaling.{key}", 1.0)
    return {
        "rope_type": "yarn",
        "factor": keys.get("rope.scaling.factor", float),
        "original_max_position_embeddings": keys.positive("rope.scaling.original_context_length"),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast", float, 32.0),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow", float, 1.0),
        "truncate": False,  # as in the published models; files have no key for it
    }


# ---- general metadata


def own_sampling(file: GgufHeader) -> dict[str, float]:
    """Return the file's sampling recommendations (`general.sampling.*`), by the names of SamplingParams."""
    found: dict[str, float] = {}
    for name, key in _SAMPLING_KEYS.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = round(value, 6)  # stored as float32: 0.95 reads as 0.949999988
    if "temperature" in found:
        found["temperature"] = max(found["temperature"], 0.0)  # in llama.cpp, below 0 means greedy
    return found


def published_names(file: GgufHeader) -> tuple[str, ...]:
    """Return the names of the model and its base model in the metadata, the likeliest first."""
    keys = ["general.source.huggingface.repository", "general.source.repo_url", "general.repo_url"]
    keys += ["general.name", "general.base_model.0.repo_url", "general.base_model.0.name"]
    texts = [file.metadata.get(key) for key in keys]
    parts = [file.metadata.get(f"general.{part}") for part in ("basename", "size_label", "finetune")]
    texts.insert(4, "-".join(part for part in parts if isinstance(part, str) and part))
    found = [_HUB_ADDRESS.sub(r"\1", text.strip()) for text in texts if isinstance(text, str) and text]
    return tuple(dict.fromkeys(found))
