"""Small models with real shapes where kernels care: heads, groups, windows, states, experts, formats.

Random weights are enough to compare a kernel with its reference, so a config.json each is all that is needed.
Two layers, a small vocabulary: seconds on a CPU, and on a GPU mostly the time that compiling takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ProbeShape:
    """One model to build: config.json of target and drafter, and how their weights are kept."""

    name: str
    covers: str
    target: Config
    draft: Config | None = None
    quantization: str = "none"


_SIZES: Config = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_EXPERTS: Config = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}

DENSE: Config = {**_SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
DRAFT: Config = {
    **_SIZES,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "block_size": 16,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": 1023, "target_layer_ids": [0, 1]},
}
HYBRID: Config = {
    **_SIZES,
    **_EXPERTS,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "head_dim": 256,
    "num_attention_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
}
SINKS: Config = {
    **_SIZES,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 64,
    "intermediate_size": 512,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
WIDE_HEADS: Config = {
    **_SIZES,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 512,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
}

SHAPES = (
    ProbeShape("dense pair", "Qwen3 and Llama with a DFlash drafter: heads of 128", DENSE, draft=DRAFT),
    ProbeShape("wide heads", "Gemma 4: heads of 256 and 512, windows", WIDE_HEADS),
    ProbeShape("hybrid", "Qwen3-Next and Qwen3.5: gated delta layers, experts and a shared one", HYBRID),
    ProbeShape("sinks", "gpt-oss: sinks, windows, experts with biases", SINKS),
    ProbeShape("fp8", "the hybrid's weights in fp8", HYBRID, quantization="fp8"),
    ProbeShape("int8", "the pair's weights in int8", DENSE, draft=DRAFT, quantization="int8"),
)
SHAPE_NAMES = tuple(shape.name for shape in SHAPES)
