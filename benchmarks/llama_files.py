"""The files that llama.cpp reads, made of those that we ship: the target in other formats, and the drafter.

The target ships as Q4_1, for which llama.cpp has no fast kernel on ARM: here it becomes Q8_0 and Q4_0, for
which it has one. Embedding (Q8_0) and norms stay as they are, and so does every key: the tokenizer, the chat
template, the rope. The drafter becomes a file of llama.cpp's own architecture "dflash", in Q8_0, with the
target's tokenizer and without embedding and head, for which llama.cpp takes the target's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, ReaderField, quants
from safetensors import safe_open

from blockdraft.checkpoints.fetch import default_gguf
from blockdraft.settings.settings import cache_dir
from blockdraft.settings.shipped import shipped_drafter

FORMATS = ("Q8_0", "Q4_0", "Q4_1")  # the last is the file that ships
DRAFTER = "dflash"
_FILE_TYPES = {"Q8_0": LlamaFileType.MOSTLY_Q8_0, "Q4_0": LlamaFileType.MOSTLY_Q4_0}
_WRITTEN_ANEW = ("general.architecture", "general.file_type")
_TENSORS = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_files() -> dict[str, Path]:
    """Return all files by format, in the cache folder; missing ones are made."""
    shipped = default_gguf()
    folder = cache_dir() / "llama.cpp"
    folder.mkdir(exist_ok=True)
    made = {name: folder / f"SmolLM2-135M-Instruct.{name}.gguf" for name in _FILE_TYPES}
    made[DRAFTER] = folder / "SmolLM2-135M-Instruct.DFlash.Q8_0.gguf"
    for name, path in made.items():
        if path.is_file() and (name != DRAFTER or path.stat().st_mtime > _drafter_time()):
            continue
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        if name == DRAFTER:
            _write_drafter(unfinished, GGUFReader(shipped))
        else:
            _write_target(unfinished, GGUFReader(shipped), name)
        unfinished.replace(path)
    return {**made, "Q4_1": shipped}


def _drafter_time() -> float:
    folder = shipped_drafter("default")
    assert folder is not None, "no drafter ships with this checkout"
    return max(path.stat().st_mtime for path in folder.iterdir())


def _write_target(path: Path, shipped: GGUFReader, name: str) -> None:
    kind = Kind[name]
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(_FILE_TYPES[name])
    _copy_fields(writer, shipped, "")
    for tensor in shipped.tensors:
        if tensor.tensor_type != Kind.Q4_1:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, quants.quantize(values, kind), raw_dtype=kind)
    _finish(writer)


def _write_drafter(path: Path, shipped: GGUFReader) -> None:
    folder = shipped_drafter("default")
    assert folder is not None, "no drafter ships with this checkout"
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, DRAFTER)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_causal_attention(config["is_causal"])
    writer.add_uint32("dflash.block_size", config["block_size"])
    # llama.cpp names the layer whose input it reads, we the layer whose output.
    writer.add_array("dflash.target_layers", [i + 1 for i in config["dflash_config"]["target_layer_ids"]])
    writer.add_mask_token_id(config["dflash_config"]["mask_token_id"])
    _copy_fields(writer, shipped, "tokenizer.")
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            values = file.get_tensor(name).float().numpy()
            kind = Kind.Q8_0 if values.ndim == 2 else Kind.F32
            writer.add_tensor(_tensor_name(name), quants.quantize(values, kind), raw_dtype=kind)
    _finish(writer)


def _tensor_name(name: str) -> str:
    """layers.3.mlp.up_proj.weight is blk.3.ffn_up.weight."""
    name = name.removesuffix(".weight")
    block = ""
    if name.startswith("layers."):
        _, number, name = name.split(".", 2)
        block = f"blk.{number}."
    return f"{block}{_TENSORS[name]}.weight"


def _copy_fields(writer: GGUFWriter, shipped: GGUFReader, prefix: str) -> None:
    for field in shipped.fields.values():
        is_ours = field.name.startswith("GGUF.") or field.name in _WRITTEN_ANEW
        if field.name.startswith(prefix) and not is_ours:
            writer.add_key_value(field.name, _value(field), field.types[0], _item_type(field))


def _value(field: ReaderField) -> object:
    value = field.contents()
    return value.tolist() if isinstance(value, np.ndarray) else value


def _item_type(field: ReaderField) -> GGUFValueType | None:
    return field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
