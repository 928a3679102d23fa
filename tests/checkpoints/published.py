"""config.json of published checkpoints, and the name, shape and dtype of every tensor but the draft head's.

A model is built by transformers from the config, on the meta device: nothing gets memory. transformers' names
in memory are not always those in the files; where they differ, the rule and where it is known from stand
beside it. Values for which no published file, or quotation of one, was seen are marked "not verified".
"""

import copy
import functools

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

Stored = tuple[tuple[int, ...], torch.dtype]

_HYBRID_32 = (["linear_attention"] * 3 + ["full_attention"]) * 8
_QWEN3_5_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
_QWEN3_5_VISION = {
    "deepstack_visual_indexes": [],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "model_type": "qwen3_5",
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 5120,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3_5_TOKENS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}
_GEMMA4_ROPE = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
_GEMMA4_VISION = {
    "default_output_length": 280,
    "head_dim": 72,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "model_type": "gemma4_vision",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "standardize": True,
    "use_clipped_linears": False,
}
_GEMMA4_TEXT = {
    "attention_bias": False,
    "attention_k_eq_v": True,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_attention_heads": 32,
    "num_experts": None,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": _GEMMA4_ROPE,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",  # image tokens only
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
_NOT_UNIFIED = (  # keys that the unified model's configuration refuses
    *("enable_moe_block", "hidden_size_per_layer_input", "moe_intermediate_size", "num_experts"),
    *("top_k_experts", "vocab_size_per_layer_input"),
)
_QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,  # and no layer_types: not verified
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# text_config and vision_config as in Qwen3.6-27B's config.json; Qwen3.5-27B has the same shape.
_QWEN3_5_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    **_QWEN3_5_TOKENS,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": _HYBRID_32 * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": _QWEN3_5_ROPE,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "vision_config": _QWEN3_5_VISION,
}
_QWEN3_5_35B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    **_QWEN3_5_TOKENS,
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": _HYBRID_32 + _HYBRID_32[:8],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": _QWEN3_5_ROPE,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "vision_config": {**_QWEN3_5_VISION, "model_type": "qwen3_5_moe", "out_hidden_size": 2048},
}
# Keys and values as in the published config.json files of both sizes.
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def _qwen3_5_small(*, tie_word_embeddings: bool, **sizes: int) -> dict:
    text = {
        **_QWEN3_5_27B["text_config"],
        **sizes,
        "layer_types": _HYBRID_32,
        "linear_num_value_heads": 32,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "tie_word_embeddings": tie_word_embeddings,
    }
    return {**_QWEN3_5_27B, "text_config": text, "tie_word_embeddings": tie_word_embeddings}


_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
CONFIGS = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "Qwen/Qwen3-8B": _QWEN3,
    "Qwen/Qwen3-4B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": {
        **_QWEN3_30B,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000,
    },
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _QWEN3_NEXT,
    "Qwen/Qwen3-Coder-Next": {**_QWEN3_NEXT, "rope_theta": 5000000},  # theta: not verified
    # Of the 4B and the 9B the sizes are not verified; the 9B's are the defaults of transformers.
    "Qwen/Qwen3.5-4B": _qwen3_5_small(hidden_size=2560, intermediate_size=9216, tie_word_embeddings=True),
    "Qwen/Qwen3.5-9B": _qwen3_5_small(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
    "Qwen/Qwen3.5-27B": _QWEN3_5_27B,
    "Qwen/Qwen3.6-27B": {
        **_QWEN3_5_27B,
        "language_model_only": False,
        "text_config": {**_QWEN3_5_27B["text_config"], "output_gate_type": "swish"},
    },
    "Qwen/Qwen3.8-27B": {
        **_QWEN3_5_27B,
        "text_config": {**_QWEN3_5_27B["text_config"], "output_gate_type": "swish"},
    },
    "Qwen/Qwen3.5-35B-A3B": _QWEN3_5_35B,
    "Qwen/Qwen3.6-35B-A3B": {  # the gate: as in Qwen3.6-27B
        **_QWEN3_5_35B,
        "text_config": {**_QWEN3_5_35B["text_config"], "output_gate_type": "swish"},
    },
    # Sizes: not verified but by the number of parameters, which comes to the one in the name.
    "Qwen/Qwen3.5-122B-A10B": {
        **_QWEN3_5_35B,
        "text_config": {
            **_QWEN3_5_35B["text_config"],
            "hidden_size": 3072,
            "layer_types": _HYBRID_32 + _HYBRID_32[:16],
            "linear_num_value_heads": 64,
            "moe_intermediate_size": 1024,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
            "shared_expert_intermediate_size": 1024,
        },
    },
    "google/gemma-4-31B-it": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "dtype": "bfloat16",
        "model_type": "gemma4",
        "text_config": _GEMMA4_TEXT,
        "tie_word_embeddings": True,
        "vision_config": _GEMMA4_VISION,
    },
    "google/gemma-4-26B-A4B-it": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "dtype": "bfloat16",
        "model_type": "gemma4",
        "text_config": {
            **_GEMMA4_TEXT,
            "enable_moe_block": True,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
            "moe_intermediate_size": 704,
            "num_attention_heads": 16,
            "num_experts": 128,
            "num_global_key_value_heads": 2,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "top_k_experts": 8,
        },
        "tie_word_embeddings": True,
        "vision_config": _GEMMA4_VISION,
    },
    # No encoders: pictures and sound go through one linear layer each. enable_moe_block: not verified.
    "google/gemma-4-12B-it": {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "audio_config": {"model_type": "gemma4_unified_audio"},
        "dtype": "bfloat16",
        "model_type": "gemma4_unified",
        "text_config": {
            **{key: value for key, value in _GEMMA4_TEXT.items() if key not in _NOT_UNIFIED},
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
            "model_type": "gemma4_unified_text",
            "num_attention_heads": 16,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
        },
        "tie_word_embeddings": True,
        "vision_config": {
            "mm_embed_dim": 3840,
            "mm_posemb_size": 1120,
            "model_patch_size": 48,
            "model_type": "gemma4_unified_vision",
        },
    },
    # Per-layer embeddings, and last layers that share their keys and values.
    "google/gemma-4-E2B-it": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": {"hidden_size": 1024, "model_type": "gemma4_audio"},
        "dtype": "bfloat16",
        "model_type": "gemma4",
        "tie_word_embeddings": True,
        "vision_config": {**_GEMMA4_VISION, "hidden_size": 768},
        "text_config": {
            **_GEMMA4_TEXT,
            "attention_k_eq_v": False,
            "hidden_size": 1536,
            "hidden_size_per_layer_input": 256,
            "intermediate_size": 6144,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "num_global_key_value_heads": None,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "sliding_window": 512,
            "use_bidirectional_attention": None,
            "use_double_wide_mlp": True,
        },
    },
    "openai/gpt-oss-20b": _GPT_OSS,
    "openai/gpt-oss-120b": {
        **_GPT_OSS,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
    },
}

# Their experts are fused in the files as in memory, though transformers 5 splits Qwen3.5's when it saves:
# the index of gemma-4-26B-A4B-it lists model.language_model.layers.0.experts.gate_up_proj, that of
# Qwen3.5-35B-A3B model.language_model.layers.0.mlp.experts.gate_up_proj, of [256, 1024, 2048].
_FUSED_IN_FILES = {"qwen3_5", "qwen3_5_moe", "gemma4"}
_MXFP4_BLOCK = 32  # weights per scale, two to a byte


def published_config(name: str) -> dict:
    """config.json, as far as it says something about the computation."""
    return copy.deepcopy(CONFIGS[name])


def published_tensors(name: str) -> dict[str, Stored]:
    """Shape and dtype of each tensor in the safetensors files, by name."""
    return dict(_published_tensors(name))


def resaved_tensors(name: str) -> dict[str, Stored]:
    """What transformers would write after loading `name` unquantised: no mtp.*, one tensor per expert."""
    model = _on_meta(name)
    return _stored(revert_weight_conversion(model, _state(model)))


def resaved_config(name: str) -> dict:
    config = published_config(name)
    config.pop("quantization_config", None)
    return config


@functools.cache
def _published_tensors(name: str) -> dict[str, Stored]:
    config = CONFIGS[name]
    model = _on_meta(name)
    state = _state(model)
    if config["model_type"] not in _FUSED_IN_FILES:
        state = revert_weight_conversion(model, state)
    tensors = _stored(state)
    if "quantization_config" in config:
        tensors = _packed_mxfp4(tensors)
    return tensors


def _on_meta(name: str) -> transformers.PreTrainedModel:
    values = published_config(name)
    values.pop("quantization_config", None)  # the classes would ask for the quantiser's kernels
    (architecture,) = values.pop("architectures")
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        return getattr(transformers, architecture)._from_config(config, dtype=torch.bfloat16)


def _state(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]  # written once, as the embedding
    return state


def _stored(state: dict[str, torch.Tensor]) -> dict[str, Stored]:
    assert all(tensor.is_meta for tensor in state.values())
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def _packed_mxfp4(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """gpt-oss: experts [E, in, out] in memory, `_blocks` [E, out, in / 32, 16] and `_scales` in the files.

    So read by vLLM's and TensorRT-LLM's loaders and by transformers' integrations/mxfp4.py; biases stay
    bfloat16.
    """
    packed = {}
    for name, (shape, dtype) in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = (shape, dtype)
            continue
        experts, rows_in, rows_out = shape
        scales = (experts, rows_out, rows_in // _MXFP4_BLOCK)
        packed[f"{name}_blocks"] = ((*scales, _MXFP4_BLOCK // 2), torch.uint8)
        packed[f"{name}_scales"] = (scales, torch.uint8)
    return packed
