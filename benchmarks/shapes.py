"""Published shapes: the config.json of targets and of their DFlash drafters, for timing without weights.

Drafters that were not published for a target are of z-lab's pattern: a few layers as wide as the target's.
"""

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]


def drafter(target: Config, **own: object) -> Config:
    """A drafter for `target`, in z-lab's layout."""
    text = target.get("text_config", target)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "num_hidden_layers": 5,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "block_size": 16,
        "num_target_layers": text["num_hidden_layers"],
        "max_position_embeddings": text["max_position_embeddings"],
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    return config | own


QWEN3_8B: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
SMOLLM2_135M: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
QWEN3_5_35B: Config = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
}
GPT_OSS_20B: Config = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}

# So small that a CPU serves hundreds of requests a second.
TINY: Config = QWEN3_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}

# Target and drafter. Taps and masks of the two Qwens as published by z-lab; the others' are made up.
SHAPES: dict[str, tuple[Config, Config]] = {
    "qwen3-8b": (
        QWEN3_8B,
        drafter(
            QWEN3_8B,
            intermediate_size=12288,
            num_attention_heads=32,
            num_key_value_heads=8,
            dflash_config={"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        ),
    ),
    "smollm2-135m": (
        SMOLLM2_135M,
        drafter(
            SMOLLM2_135M,
            intermediate_size=1536,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            dflash_config={"mask_token_id": 49151, "target_layer_ids": [1, 8, 14, 20, 27]},
        ),
    ),
    "tiny": (
        TINY,
        drafter(
            TINY,
            num_hidden_layers=1,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            dflash_config={"mask_token_id": 511, "target_layer_ids": [0, 2]},
        ),
    ),
    "qwen3.5-35b-a3b": (
        QWEN3_5_35B,
        drafter(
            QWEN3_5_35B,
            num_hidden_layers=8,
            intermediate_size=6144,
            num_attention_heads=32,
            num_key_value_heads=4,
            rope_theta=1e7,
            dflash_config={"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
        ),
    ),
    "gpt-oss-20b": (
        GPT_OSS_20B,
        drafter(
            GPT_OSS_20B,
            intermediate_size=7680,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            dflash_config={"mask_token_id": 201000, "target_layer_ids": [1, 6, 11, 16, 21]},
        ),
    ),
}


def write_shape(shape: str, folder: Path) -> tuple[Path, Path]:
    """Folders of target and drafter with a config.json each: enough for `--load-format dummy`."""
    target, draft = folder / "target", folder / "draft"
    for path, config in zip((target, draft), SHAPES[shape], strict=True):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
    return target, draft
