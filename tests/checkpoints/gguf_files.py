"""GGUF files of tiny models, written with gguf-py."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

Type = gguf.GGMLQuantizationType
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 16, 64, 96
EXPERTS, EXPERT_FFN = 3, 32
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

BPE_TOKENS = ["<eos>", "<bos>", "<think>", "<eot>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
BPE_MERGES = ["a b", "Ġ Ġ", "1 2", "ab 1", "Ġ ab"]
BPE_TOKENS += [merge.replace(" ", "") for merge in BPE_MERGES]
BPE_TOKENS += ["cd"]  # which no merge makes
BPE_TYPES = [CONTROL, CONTROL, USER_DEFINED, CONTROL] + [NORMAL] * (len(BPE_TOKENS) - 4)

SPM_PIECES = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "▁ab"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *SPM_PIECES]
SPM_TYPES = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(SPM_PIECES)
# "bc" is worth more than "ab", so "abc" is built as a + bc.
SPM_SCORES = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -3.0, -1.0, -4.0, -5.0, -2.0]


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to q_proj and k_proj."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def weights(architecture: str = "llama") -> dict[str, np.ndarray]:
    """Hugging Face-ordered weights under GGUF names, one layer."""
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (48, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
    }
    if architecture == "qwen2":
        shapes["blk.0.attn_q.bias"] = (HEADS * HEAD_DIM,)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def expert_weights(architecture: str) -> dict[str, np.ndarray]:
    """One layer of a mixture of experts, under GGUF names."""
    rng = np.random.default_rng(1)
    shapes = {
        "blk.0.ffn_gate_inp.weight": (EXPERTS, HIDDEN),
        "blk.0.ffn_gate_exps.weight": (EXPERTS, EXPERT_FFN, HIDDEN),
        "blk.0.ffn_up_exps.weight": (EXPERTS, EXPERT_FFN, HIDDEN),
        "blk.0.ffn_down_exps.weight": (EXPERTS, HIDDEN, EXPERT_FFN),
    }
    if architecture == "gpt-oss":
        shapes |= {
            "blk.0.post_attention_norm.weight": (HIDDEN,),
            "blk.0.attn_sinks.weight": (HEADS,),
            "blk.0.ffn_gate_inp.bias": (EXPERTS,),
            "blk.0.ffn_gate_exps.bias": (EXPERTS, EXPERT_FFN),
            "blk.0.ffn_up_exps.bias": (EXPERTS, EXPERT_FFN),
            "blk.0.ffn_down_exps.bias": (EXPERTS, HIDDEN),
        }
    dense = {name: values for name, values in weights().items() if "ffn_" not in name}
    if architecture == "qwen3moe":
        dense["blk.0.ffn_norm.weight"] = np.ones(HIDDEN, np.float32)
    return dense | {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def expert_metadata(architecture: str) -> dict[str, str | float | bool]:
    keys = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT_FFN}
    if architecture == "gpt-oss":
        keys |= {
            "attention.sliding_window": 128,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        }
    return {f"{architecture}.{key}": value for key, value in keys.items()}


QUANTISED = {
    "token_embd.weight": Type.Q8_0,
    "blk.0.ffn_gate.weight": Type.Q4_1,
    "blk.0.ffn_down.weight": Type.Q4_0,
    "blk.0.ffn_up.weight": Type.F16,
}


def write(
    path: Path,
    *,
    architecture: str = "llama",
    tokenizer: str | None = "gpt2",
    metadata: dict[str, str | float | bool] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    kinds: dict[str, Type] | None = None,
) -> Path:
    """One file. `tensors` are in Hugging Face's order: values, or uint8 blocks of their kind."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    if tokenizer == "gpt2":
        add_bpe(writer)
    elif tokenizer == "llama":
        add_sentencepiece(writer)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            bool: writer.add_bool,
        }
        add[type(value)](key, value)
    for name, values in (weights(architecture) if tensors is None else tensors).items():
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            values = permute(values, HEADS if "attn_q." in name else KV_HEADS)
        kind = (QUANTISED if kinds is None else kinds).get(name, Type.F32)
        is_raw = values.dtype == np.uint8
        writer.add_tensor(name, values if is_raw else gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_bpe(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(BPE_TOKENS)
    writer.add_token_types(BPE_TYPES)
    writer.add_token_merges(BPE_MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(3)
    writer.add_chat_template("{{ messages }}")


def add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SPM_TOKENS)
    writer.add_token_types(SPM_TYPES)
    writer.add_token_scores(SPM_SCORES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
