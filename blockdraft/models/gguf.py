"""GGUF files seen as Hugging Face checkpoints: their keys, their tensor names, their weight layout.

llama.cpp rotates neighbouring values of a head where Hugging Face rotates its two halves, so the
converter reorders the rows of q_proj and k_proj of `llama` models; reading one puts them back. Qwen
models are stored as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from blockdraft.errors import ModelError
from blockdraft.models.checkpoint import TokenizerParts
from blockdraft.models.gguf_file import GgufFile
from blockdraft.models.gguf_tokenizer import tokenizer_parts

_MODEL_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)", re.ASCII)
_EMBEDDING = "token_embd.weight"
_ROPE_FACTORS = "rope_freqs.weight"  # llama3's scaling, one divisor per rotated pair


class GgufCheckpoint:
    """One GGUF file of a supported architecture."""

    def __init__(self, path: Path, *, name: str) -> None:
        self.name = name
        self._file = GgufFile(path, name=name)
        try:
            self.config: Mapping[str, object] = _config(self._file)
            self._stored_names = _hugging_face_names(self._file)
            self._permuted_heads = _permuted_heads(self._file)
        except ModelError:
            self.close()
            raise

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._file.tensors[stored].shape for name, stored in self._stored_names.items()}

    def read(self, name: str) -> torch.Tensor:
        stored = self._stored_names.get(name)
        if stored is None:
            raise ModelError(f"'{self.name}' has no tensor for '{name}': the file is not a complete model.")
        tensor = self._file.read(stored)
        num_heads = self._permuted_heads.get(name.split(".")[-2])
        return tensor if num_heads is None else self._unpermute(tensor, name, num_heads=num_heads)

    def tokenizer_parts(self) -> TokenizerParts:
        return tokenizer_parts(self._file)

    def close(self) -> None:
        self._file.close()

    def _unpermute(self, tensor: torch.Tensor, name: str, *, num_heads: int) -> torch.Tensor:
        """Rows of each head from (pair, half) order back to (half, pair)."""
        num_rows = tensor.shape[0]
        if num_rows % (2 * num_heads):
            raise ModelError(
                f"'{self.name}': '{name}' has {num_rows} rows, which {num_heads} heads cannot share."
            )
        pairs = tensor.view(num_heads, num_rows // num_heads // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(tensor.shape)


def _hugging_face_names(file: GgufFile) -> dict[str, str]:
    """Hugging Face's name -> the stored one. An unknown tensor means an unknown model."""
    names: dict[str, str] = {}
    for stored in file.tensors:
        if stored == _ROPE_FACTORS:
            continue
        match = _TENSOR_NAME.fullmatch(stored)
        layer = match and match["layer"]
        part = match and (_TOP_NAMES if layer is None else _LAYER_NAMES).get(match["part"])
        if match is None or part is None:
            raise ModelError(
                f"'{file.name}' holds the tensor {stored!r}, which no supported model has. See "
                "docs/models.md."
            )
        prefix = "" if layer is None else f"model.layers.{layer}."
        names[f"{prefix}{part}.{match['kind']}"] = stored
    return names


def _architecture(file: GgufFile) -> str:
    architecture = file.text("general.architecture")
    if architecture not in _MODEL_CLASSES:
        known = ", ".join(_MODEL_CLASSES)
        raise ModelError(
            f"'{file.name}' is a {architecture!r} model, and GGUF files of {known} are "
            "supported. See docs/models.md."
        )
    return architecture


def _permuted_heads(file: GgufFile) -> dict[str, int]:
    """Which projections have their rows permuted, and over how many heads."""
    if _architecture(file) != "llama":
        return {}
    num_heads = file.size("llama.attention.head_count")
    return {"q_proj": num_heads, "k_proj": file.size("llama.attention.head_count_kv", num_heads)}


def _config(file: GgufFile) -> dict[str, object]:
    architecture = _architecture(file)
    _refuse_variants(file, architecture)
    if _EMBEDDING not in file.tensors:
        raise ModelError(f"'{file.name}' has no '{_EMBEDDING}': it is not a whole model. Download it again.")
    num_heads = file.size(f"{architecture}.attention.head_count")
    return {
        "architectures": [_MODEL_CLASSES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": file.size(f"{architecture}.embedding_length"),
        "intermediate_size": file.size(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": file.size(f"{architecture}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.size(f"{architecture}.attention.head_count_kv", num_heads),
        "head_dim": _head_dim(file, architecture),
        "rms_norm_eps": file.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number(f"{architecture}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, architecture),
        "max_position_embeddings": file.size(f"{architecture}.context_length"),
        "vocab_size": file.tensors[_EMBEDDING].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _refuse_variants(file: GgufFile, architecture: str) -> None:
    if file.integer("split.count", 0) > 1:
        raise ModelError(
            f"'{file.name}' is one part of a split file: join the parts with llama-gguf-split --merge."
        )
    if num_experts := file.integer(f"{architecture}.expert_count", 0):
        raise ModelError(
            f"'{file.name}' is a mixture of {num_experts} experts, which is not supported. See "
            "docs/models.md."
        )


def _head_dim(file: GgufFile, architecture: str) -> int:
    num_heads = file.size(f"{architecture}.attention.head_count")
    even_share = file.size(f"{architecture}.embedding_length") // num_heads
    head_dim = file.size(f"{architecture}.attention.key_length", even_share)
    for key in ("attention.value_length", "rope.dimension_count"):
        value = file.size(f"{architecture}.{key}", head_dim)
        if value != head_dim:
            raise ModelError(
                f"'{file.name}': {key} is {value} but heads have {head_dim} values: this variant "
                "is not supported."
            )
    return head_dim


def _rope_scaling(file: GgufFile, architecture: str) -> dict[str, object] | None:
    kind = file.text(f"{architecture}.rope.scaling.type", "none")
    has_factors = _ROPE_FACTORS in file.tensors
    if kind == "none":
        return {"rope_type": "factors", "factors": file.read(_ROPE_FACTORS).tolist()} if has_factors else None
    if kind == "linear" and not has_factors:
        return {"rope_type": "linear", "factor": file.number(f"{architecture}.rope.scaling.factor")}
    raise ModelError(
        f"'{file.name}' scales its rope by {kind!r}{' and by factors' if has_factors else ''}, "
        "which is not supported."
    )
