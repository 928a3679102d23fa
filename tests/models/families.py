"""Tiny configurations of every family, by hand and drawn, for the oracle and for losslessness."""

import importlib

import torch
from transformers import (
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5": Qwen3_5TextConfig,
    "qwen3_5_moe": Qwen3_5MoeTextConfig,
    "gemma4": Gemma4TextConfig,
    "gpt_oss": GptOssConfig,
}
BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16}
HYBRID = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 28}
GEMMA = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 6,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
GEMMA_UNIFIED = {key: value for key, value in GEMMA.items() if key != "hidden_size_per_layer_input"}
GEMMA_MOE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12}
GPT_OSS = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
# At head_dim 16 the wavelengths 6, 20, 63, 199, … fall in all three bands of 16 and 64.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
SLIDING, FULL, DELTA = "sliding_attention", "full_attention", "linear_attention"

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")

# name -> family and what differs from BASE; None: drawn anew in every run
CASES = {
    "llama-tied": ("llama", {"tie_word_embeddings": True, "head_dim": 8}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"head_dim": 16, "rope_parameters": LLAMA3, "num_key_value_heads": 1}),
    "qwen2-full": ("qwen2", {"num_key_value_heads": 4, "rope_parameters": DEFAULT}),
    "qwen2-last-layers-slide": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": [SLIDING, FULL, SLIDING],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 16, "rope_parameters": YARN}),
    "qwen3-tied-bias": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-slides": (
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "qwen3_moe-plain": ("qwen3_moe", MOE),
    "qwen3_moe-normalised": (
        "qwen3_moe",
        {**MOE, "norm_topk_prob": True, "num_experts_per_tok": 4, "tie_word_embeddings": True},
    ),
    "qwen3_moe-some-dense": (
        "qwen3_moe",
        {**MOE, "num_hidden_layers": 5, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    ),
    "qwen3_next-whole": ("qwen3_next", {**HYBRID, **MOE, **SHARED_EXPERT, "rope_parameters": PARTIAL}),
    "qwen3_next-unnormalised": (
        "qwen3_next",
        {
            **HYBRID,
            **MOE,
            **SHARED_EXPERT,
            "norm_topk_prob": False,
            "layer_types": [FULL, DELTA, DELTA, FULL],
            "linear_num_value_heads": 2,
            "mlp_only_layers": [2],
            "attention_bias": True,
        },
    ),
    "qwen3_next-all-delta-but-one": (
        "qwen3_next",
        {
            **HYBRID,
            **MOE,
            **SHARED_EXPERT,
            "linear_conv_kernel_dim": 2,
            "layer_types": [DELTA, DELTA, FULL, DELTA],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "rope_parameters": {**PARTIAL, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5-whole": (  # Qwen3.6 and Qwen3.8 name the gate's activation
        "qwen3_5",
        {
            **HYBRID,
            "rope_parameters": PARTIAL,
            "tie_word_embeddings": True,
            "output_gate_type": "swish",
        },
    ),
    "qwen3_5-one-head-each": (
        "qwen3_5",
        {**HYBRID, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3},
    ),
    "qwen3_5-mrope": (
        "qwen3_5",
        {
            **HYBRID,
            "layer_types": [FULL, DELTA, FULL, DELTA],
            "rope_parameters": {**PARTIAL, "mrope_section": [1, 1, 0], "mrope_interleaved": True},
        },
    ),
    "qwen3_5_moe-whole": ("qwen3_5_moe", {**HYBRID, **MOE, **SHARED_EXPERT}),
    "qwen3_5_moe-tied": (
        "qwen3_5_moe",
        {**HYBRID, **MOE, **SHARED_EXPERT, "tie_word_embeddings": True, "layer_types": [DELTA] * 3 + [FULL]},
    ),
    "gemma4-dense": ("gemma4", GEMMA),
    "gemma4-keys-are-values": (
        "gemma4",
        {**GEMMA, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_key_value_heads": 4},
    ),
    "gemma4-mixture": ("gemma4", {**GEMMA, **GEMMA_MOE, "final_logit_softcapping": None}),
    "gemma4-shared": (
        "gemma4",
        {
            **GEMMA,
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-unified": (
        "gemma4",
        {**GEMMA_UNIFIED, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "head_dim": 12},
    ),
    "gpt_oss-whole": ("gpt_oss", GPT_OSS),
    "gpt_oss-default-rope": ("gpt_oss", {**GPT_OSS, "rope_parameters": DEFAULT, "num_experts_per_tok": 1}),
    "gpt_oss-tight-clamp": (
        "gpt_oss",
        {**GPT_OSS, "swiglu_limit": 0.5, "layer_types": [FULL, SLIDING, SLIDING, FULL]},
    ),
    **{f"{family}-random": (family, None) for family in CONFIGS},
}


def config_of(name, overrides):
    """The configuration of a case, as transformers has it."""
    family, _ = CASES[name]
    kind = Gemma4UnifiedTextConfig if name == "gemma4-unified" else CONFIGS[family]
    return kind(**BASE | overrides)


def widen(monkeypatch):
    """Let transformers keep a float64 model in float64 where its own code rounds to float32."""
    narrow = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x))
    for family in HYBRIDS:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            monkeypatch.setattr(module, name, _widened(getattr(module, name)))


def _widened(narrow):
    def rule(query, key, value, g, beta, initial_state=None, **options):
        if query.dtype != torch.float64:
            return narrow(query, key, value, g=g, beta=beta, initial_state=initial_state, **options)
        heads_per_key = value.shape[2] // key.shape[2]  # above 1 from transformers 5.23 on
        query, key = (x.repeat_interleave(heads_per_key, dim=2) for x in (query, key))
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        state = initial_state
        if state is None:
            state = query.new_zeros(value.shape[0], value.shape[2], key.shape[3], value.shape[3])
        state, reads = state.double(), []
        for t in range(query.shape[1]):
            state = state * g[:, t, :, None, None].double().exp()
            wrong = value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], wrong * beta[:, t, :, None])
            reads.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t] * key.shape[3] ** -0.5))
        return torch.stack(reads, dim=1), state

    return rule


def draw(family, rng):
    """Any configuration of `family` that the engine claims to run."""
    num_kv_heads = rng.choice([1, 2, 3])
    num_layers = rng.randint(1, 4)
    rope = rng.choice([DEFAULT, LINEAR, LLAMA3, YARN]) | {"rope_theta": rng.choice([500.0, 10000.0, 1e6])}
    drawn = {
        "vocab_size": rng.randint(50, 130),
        "intermediate_size": rng.randint(1, 60),
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_kv_heads * rng.choice([1, 2, 3]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-2]),
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": rope,
    }
    # Narrower streams make RMS norms ill-conditioned: rounding alone would show.
    head_dim = rng.choice([dim for dim in (4, 6, 16, 24, 32) if dim * drawn["num_attention_heads"] >= 24])
    drawn["hidden_size"] = drawn["num_attention_heads"] * head_dim
    return drawn | _DRAWERS[family](rng, num_layers)


def _draw_llama(rng, num_layers):
    return {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}


def _draw_windows(rng, num_layers):
    if rng.random() < 0.5:
        return {}
    kinds = [rng.choice([FULL, SLIDING]) for _ in range(num_layers)]
    # From 2 on: a window of 1 makes transformers' own cache keep everything ([-1 + 1:]).
    return {"use_sliding_window": True, "sliding_window": rng.randint(2, 50), "layer_types": kinds}


def _draw_qwen3(rng, num_layers):
    drawn = {"attention_bias": rng.random() < 0.5, "head_dim": rng.choice([2, 8, 12])}
    return drawn | _draw_windows(rng, num_layers)


def _draw_moe(rng, num_layers):
    num_experts = rng.randint(2, 9)
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, num_experts),
        "moe_intermediate_size": rng.randint(2, 30),  # of 1, transformers saves vectors
        "norm_topk_prob": rng.random() < 0.5,
        "mlp_only_layers": [index for index in range(num_layers) if rng.random() < 0.2],
        "decoder_sparse_step": rng.choice([1, 1, 2]),
        "head_dim": rng.choice([4, 8, 12]),
        "attention_bias": rng.random() < 0.5,
    }


def _draw_hybrid(rng, num_layers):
    num_key_heads = rng.randint(1, 3)
    # One layer that attends: without it transformers' own cache does not know its length.
    kinds = [rng.choice([FULL, DELTA, DELTA]) for _ in range(num_layers - 1)] + [FULL]
    rng.shuffle(kinds)
    return {
        "head_dim": rng.choice([8, 16]),
        "rope_parameters": PARTIAL | {"partial_rotary_factor": rng.choice([0.25, 0.5, 1.0])},
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * rng.randint(1, 3),
        "linear_key_head_dim": rng.choice([4, 8, 10]),
        "linear_value_head_dim": rng.choice([4, 6, 16]),
        "linear_conv_kernel_dim": rng.randint(2, 5),
        "layer_types": kinds,
        "attention_bias": rng.random() < 0.5,
    }


def _draw_hybrid_moe(rng, num_layers):
    moe = {key: value for key, value in _draw_moe(rng, num_layers).items() if key != "head_dim"}
    return moe | _draw_hybrid(rng, num_layers) | {"shared_expert_intermediate_size": rng.randint(1, 40)}


def _draw_qwen3_5_moe(rng, num_layers):
    left_out = ("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step")
    return {k: v for k, v in _draw_hybrid_moe(rng, num_layers).items() if k not in left_out}


def _draw_gemma4(rng, num_layers):
    num_layers = rng.randint(2, 6)
    kinds = [rng.choice([SLIDING, FULL]) for _ in range(num_layers - 1)] + [FULL]
    drawn = GEMMA | {
        "num_hidden_layers": num_layers,
        "layer_types": kinds,
        "head_dim": rng.choice([4, 8]),
        "global_head_dim": rng.choice([8, 16, 24]),
        "sliding_window": rng.randint(2, 30),
        "attention_k_eq_v": rng.random() < 0.5,
        "final_logit_softcapping": rng.choice([None, 5.0]),
        "rope_parameters": {
            SLIDING: DEFAULT,
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    }
    if SLIDING in kinds[:2] and FULL in kinds[:2] and num_layers > 3:
        drawn |= {"num_kv_shared_layers": rng.randint(0, num_layers - 2)}
    return drawn | (GEMMA_MOE if rng.random() < 0.5 else {})


def _draw_gpt_oss(rng, num_layers):
    num_experts = rng.randint(1, 7)
    return GPT_OSS | {
        "num_hidden_layers": num_layers,
        "layer_types": [rng.choice([SLIDING, FULL]) for _ in range(num_layers)],
        "num_local_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, num_experts),
        "swiglu_limit": rng.choice([7.0, 0.7]),
        "sliding_window": rng.randint(2, 30),
        "head_dim": rng.choice([4, 8, 16]),
    }


_DRAWERS = {
    "llama": _draw_llama,
    "qwen2": _draw_windows,
    "qwen3": _draw_qwen3,
    "qwen3_moe": _draw_moe,
    "qwen3_next": _draw_hybrid_moe,
    "qwen3_5": _draw_hybrid,
    "qwen3_5_moe": _draw_qwen3_5_moe,
    "gemma4": _draw_gemma4,
    "gpt_oss": _draw_gpt_oss,
}
