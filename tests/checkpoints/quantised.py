"""Tiny checkpoints in every quantised format, each beside a dense one of the same weights.

The dense twin is written from what the reference packers say the weights are, so that loading it takes no
code of a format.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import gguf_files, packers
from tests.checkpoints.packers import FLOAT4, FLOAT8, INT4, Type
from tests.models.checkpoints import write_target
from tests.models.families import BASE, CONFIGS, GPT_OSS, HYBRID, MOE, SHARED_EXPERT

PROJECTION = r".*\.((q|k|v|o|gate|up|down|out)_proj|in_proj_(qkv|z))"
WITH_HEAD = rf"{PROJECTION}|lm_head"
EXPERTS = r".*\.experts\.(gate_up_proj|down_proj)"
WIDE = {"head_dim": 16}
WIDE_MOE = {**MOE, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Format:
    """A way to quantise a family, written by `pack(weight, seed)`."""

    family: str
    overrides: Mapping[str, object]
    pack: Callable
    section: Mapping[str, object] | None = None  # of config.json
    quant_file: Mapping[str, object] | None = None  # hf_quant_config.json
    modules: str = PROJECTION  # the names that are quantised
    # Resident bytes of a tensor of this suffix per stored byte, where it is not 1.
    resident: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)  # per module, knowingly not used


def compressed(layout, weights, ignore=("lm_head",)):
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def compress(layout, weights):
    return lambda weight, seed: packers.compress(layout, weights, weight)


def blockwise(weight, seed):
    return packers.blockwise(*weight.shape, seed=seed, side=24, size=weight.shape[1] ** -0.5)


def nvfp4(weight, seed):
    return packers.modelopt_nvfp4(*weight.shape, seed=seed, second=0.3 * weight.shape[1] ** -0.5)


def nvfp4_awq(weight, seed):
    return packers.modelopt_nvfp4_awq(*weight.shape, seed=seed, second=0.3 * weight.shape[1] ** -0.5)


def gptq(weight, seed, *, is_shuffled=False, middle=False, offset=1):
    rows, columns = weight.shape
    index = torch.arange(columns) // 16
    if is_shuffled:
        index = index[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    sizes = {"rows": rows, "columns": columns, "groups": columns // 16, "size": 0.15 * columns**-0.5}
    return packers.gptq_case(4, index, **sizes, offset=offset, middle=middle, seed=seed)


def awq(weight, seed):
    rows, columns = weight.shape
    return packers.awq_case(rows, columns, group=16, seed=seed, size=0.15 * columns**-0.5)


def fused_mxfp4(weight, seed):
    return packers.fused_mxfp4(weight.shape[0], weight.shape[2], weight.shape[1], seed=seed)


FP8_SECTION = {
    "quant_method": "fp8",
    "weight_block_size": [24, 24],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
}
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*.gate"]},
}
MODELOPT_AWQ = {
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quantization": {
        "quant_algo": "NVFP4_AWQ",
        "group_size": 16,
        "has_zero_point": False,
        "pre_quant_scale": True,
        "exclude_modules": ["lm_head", "*.gate"],
    },
}
W4 = {**INT4, "strategy": "group", "group_size": 16}
W4_ASYMMETRIC = {**W4, "symmetric": False}
NVFP4 = {**FLOAT4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
FP8_CHANNEL = {**FLOAT8, "strategy": "channel"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
INPUT_SCALE = {".input_scale": torch.tensor(0.5)}

# Middle zero points and runs of columns are not kept at all.
MIDDLE_ZEROS = {".qzeros": 0, ".g_idx": 0}
NO_SHAPE = {".weight_shape": 0}

FORMATS = {
    "fp8-block": Format("qwen3", WIDE, blockwise, FP8_SECTION),
    "fp8-block-hybrid-moe": Format(
        "qwen3_5_moe",
        {**HYBRID, **MOE, **SHARED_EXPERT},
        blockwise,
        {**FP8_SECTION, "modules_to_not_convert": ["lm_head", r".*in_proj_a", r".*in_proj_b"]},
    ),
    "fp8-tensor": Format(
        "llama",
        {},
        lambda weight, seed: packers.per_tensor(weight),
        {"quant_method": "fp8", "activation_scheme": "static"},
        extra=INPUT_SCALE,
    ),
    "fp8-channel-and-head": Format(
        "llama",
        {},
        compress("float-quantized", FP8_CHANNEL),
        compressed("float-quantized", FP8_CHANNEL, ignore=()),
        modules=WITH_HEAD,
    ),
    "nvfp4-modelopt": Format("qwen3", WIDE, nvfp4, quant_file=MODELOPT, extra=INPUT_SCALE),
    "nvfp4-modelopt-moe": Format("qwen3_moe", WIDE_MOE, nvfp4, quant_file=MODELOPT),
    "nvfp4-awq-moe": Format("qwen3_moe", WIDE_MOE, nvfp4_awq, quant_file=MODELOPT_AWQ),
    "nvfp4-compressed-moe": Format(
        "qwen3_moe",
        WIDE_MOE,
        compress("nvfp4-pack-quantized", NVFP4),
        compressed("nvfp4-pack-quantized", NVFP4, ignore=("lm_head", r"re:.*mlp\.gate$")),
    ),
    "mxfp4-gpt-oss": Format(
        "gpt_oss",
        {**GPT_OSS, "intermediate_size": 64},
        fused_mxfp4,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        modules=EXPERTS,
    ),
    "gptq-reordered": Format(
        "llama",
        {"attention_bias": True},
        lambda weight, seed: gptq(weight, seed, is_shuffled=True),
        {**GPTQ, "desc_act": True, "sym": False},
        resident={".qzeros": 2},
    ),
    "gptq-symmetric": Format(
        "qwen3",
        WIDE,
        lambda weight, seed: gptq(weight, seed, middle=True),
        {**GPTQ, "desc_act": False, "sym": True},
        resident=MIDDLE_ZEROS,
    ),
    "awq-biases": Format(
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
        resident={".qzeros": 2},
    ),
    "auto-round-unnamed": Format(  # the older layout, told by its zero points
        "qwen3",
        WIDE,
        lambda weight, seed: gptq(weight, seed, middle=True, offset=0),
        {"quant_method": "auto-round", "bits": 4, "group_size": 16, "sym": True},
        resident=MIDDLE_ZEROS,
    ),
    "int4-moe": Format(
        "qwen3_moe",
        WIDE_MOE,
        compress("pack-quantized", W4),
        compressed("pack-quantized", W4, ignore=("lm_head", r"re:.*mlp\.gate$")),
        resident=NO_SHAPE,
    ),
    "int4-asymmetric": Format(
        "qwen3",
        WIDE,
        compress("pack-quantized", W4_ASYMMETRIC),
        compressed("pack-quantized", W4_ASYMMETRIC),
        resident={**NO_SHAPE, ".weight_zero_point": 2},
    ),
}


class Pair:
    """The same weights twice: packed, in two shards, and dense."""

    def __init__(self, folder, form):
        self.format = form
        self.packed, self.dense = folder / "packed", folder / "dense"
        write_target(self.dense, CONFIGS[form.family](**BASE | form.overrides), seed=3)
        shutil.copytree(self.dense, self.packed)
        plain = load_file(self.dense / "model.safetensors")
        self.quantised = {}  # module -> its tensors by suffix
        tensors = {}
        for seed, (name, weight) in enumerate(plain.items()):
            module = name.removesuffix(".weight")
            if not re.fullmatch(form.modules, module):
                tensors[name] = weight
                continue
            stored, expected = form.pack(weight, 10 * seed)
            assert expected.shape == weight.shape
            self.quantised[module] = stored
            plain[name] = expected.contiguous()
            tensors |= {module + suffix: tensor.contiguous() for suffix, tensor in stored.items()}
            tensors |= {module + suffix: tensor.clone() for suffix, tensor in form.extra.items()}
        self.num_dense_values = {
            module: plain[module if module in plain else f"{module}.weight"].numel()
            for module in self.quantised
        }
        save_file(plain, self.dense / "model.safetensors")
        (self.packed / "model.safetensors").unlink()
        self.write(tensors)
        config = json.loads((self.packed / "config.json").read_text())
        if form.section is not None:
            config["quantization_config"] = form.section
        (self.packed / "config.json").write_text(json.dumps(config))
        if form.quant_file is not None:
            (self.packed / "hf_quant_config.json").write_text(json.dumps(form.quant_file))

    def write(self, tensors):
        write_shards(self.packed, tensors)
        self.tensors = tensors

    def packed_bytes(self):
        """What the quantised modules may take in memory."""
        return sum(
            tensor.nbytes * self.format.resident.get(suffix, 1)
            for stored in self.quantised.values()
            for suffix, tensor in stored.items()
        )


def write_shards(folder, tensors):
    """Two shards, cut so that the tensors of a module are in both."""
    names = sorted(tensors)
    shards = {"model-1-of-2.safetensors": names[0::2], "model-2-of-2.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# GGUF

EPSILON = 2.0**-17  # exact in the float32 of a GGUF file
GGUF_BASE = {
    **BASE,
    "vocab_size": len(gguf_files.BPE_TOKENS),
    "num_hidden_layers": 2,
    "num_attention_heads": gguf_files.HEADS,
    "num_key_value_heads": gguf_files.KV_HEADS,
    "rms_norm_eps": EPSILON,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
    "mlp.gate": "ffn_gate_inp",
}
GPT_OSS_NAMES = {
    **GGUF_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
}


@dataclass(frozen=True)
class GgufFormat:
    """A GGUF file of an architecture, with the ggml types of the tensors whose names end so."""

    architecture: str
    family: str
    overrides: Mapping[str, object]
    kinds: Mapping[str, Type]
    metadata: Mapping[str, object] = field(default_factory=dict)


GGUF_FORMATS = {
    "gguf-llama-k": GgufFormat(
        "llama",
        "llama",
        {"hidden_size": 256, "intermediate_size": 512},
        {
            "token_embd": Type.Q4_K,
            "output": Type.Q6_K,
            "attn_q": Type.Q4_K,
            "attn_k": Type.Q6_K,
            "attn_v": Type.Q6_K,
            "attn_output": Type.Q4_K,
            "ffn_gate": Type.Q5_K,
            "ffn_up": Type.Q4_K,
            "ffn_down": Type.Q6_K,
        },
    ),
    "gguf-llama-tied": GgufFormat(
        "llama",
        "llama",
        {"hidden_size": 64, "tie_word_embeddings": True},
        {
            "token_embd": Type.Q8_0,
            "attn_q": Type.Q4_0,
            "attn_k": Type.Q8_0,
            "attn_v": Type.F16,  # beside the packed ones
            "ffn_gate": Type.Q4_0,
            "ffn_up": Type.Q4_0,
        },
    ),
    "gguf-qwen3moe": GgufFormat(
        "qwen3moe",
        "qwen3_moe",
        {**MOE, "hidden_size": 64, "moe_intermediate_size": 32, "norm_topk_prob": True},
        {
            "token_embd": Type.Q8_0,
            "attn_q": Type.Q8_0,
            "ffn_gate_exps": Type.Q4_0,
            "ffn_up_exps": Type.Q8_0,
            "ffn_down_exps": Type.Q4_0,
        },
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
        },
    ),
    "gguf-gpt-oss": GgufFormat(
        "gpt-oss",
        "gpt_oss",
        # Square experts: only the layout says that they are not transposed.
        {**GPT_OSS, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
        {
            "attn_q": Type.Q8_0,
            "attn_output": Type.Q8_0,
            "ffn_gate_exps": Type.MXFP4,
            "ffn_up_exps": Type.MXFP4,
            "ffn_down_exps": Type.MXFP4,
        },
        {
            "attention.key_length": 8,
            "attention.value_length": 8,
            "attention.sliding_window": 6,
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 64,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
}


class GgufPair:
    """The same weights twice: a GGUF file, and a dense folder."""

    def __init__(self, folder, form):
        self.packed, self.dense = folder / "packed.gguf", folder / "dense"
        write_target(self.dense, CONFIGS[form.family](**GGUF_BASE | form.overrides), seed=4)
        plain = load_file(self.dense / "model.safetensors")
        stored, kinds, self.num_dense_values = {}, {}, {}
        for seed, (name, weight) in enumerate(gguf_tensors(plain, form).items()):
            kind = form.kinds.get(re.sub(r"blk\.\d+\.|\.weight$", "", name), Type.F32)
            raw, expected = packers.gguf_blocks(weight.contiguous(), kind, seed)
            weight.copy_(expected)  # a view of a tensor of `plain`
            stored[name], kinds[name] = raw, kind
            if raw.dtype == np.uint8:
                self.num_dense_values[name] = weight.numel()
        self._packed_bytes = sum(stored[name].nbytes for name in self.num_dense_values)
        save_file(
            {name: tensor.contiguous() for name, tensor in plain.items()}, self.dense / "model.safetensors"
        )
        sizes = GGUF_BASE | form.overrides
        metadata = {
            "block_count": sizes["num_hidden_layers"],
            "context_length": sizes["max_position_embeddings"],
            "embedding_length": sizes["hidden_size"],
            "feed_forward_length": sizes["intermediate_size"],
            "attention.layer_norm_rms_epsilon": EPSILON,
            "rope.freq_base": 10000.0,
            **form.metadata,
        }
        gguf_files.write(
            self.packed,
            architecture=form.architecture,
            tensors=stored,
            kinds=kinds,
            metadata={f"{form.architecture}.{key}": value for key, value in metadata.items()},
        )

    def packed_bytes(self):
        return self._packed_bytes


def gguf_tensors(plain, form):
    """GGUF's name -> a view of a tensor in `plain`, which is changed to have such views."""
    names = GPT_OSS_NAMES if form.family == "gpt_oss" else GGUF_NAMES
    found = {}
    experts = {}
    for name, weight in list(plain.items()):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        block = f"blk.{layer[1]}." if layer else ""
        inside = name[layer.end() :] if layer else name
        if one := re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", inside):
            experts.setdefault(f"{block}ffn_{one[2]}_exps.weight", {})[int(one[1])] = name
        elif fused := re.fullmatch(r"mlp\.experts\.(gate_up|down)_proj(_bias)?", inside):
            found |= gpt_oss_experts(block, fused[1], weight, is_bias=fused[2] is not None)
        elif inside == "self_attn.sinks":
            found[f"{block}attn_sinks.weight"] = weight
        else:
            module, _, kind = inside.rpartition(".")
            found[f"{block}{names[module]}.{kind}"] = weight
    for name, members in experts.items():
        together = torch.stack([plain[members[index]] for index in range(len(members))])
        plain |= {members[index]: together[index] for index in range(len(members))}
        found[name] = together
    return found


def gpt_oss_experts(block, projection, weight, *, is_bias):
    """Columns [..., 0::2] of the fused projection are the gate; ours has outputs in rows."""
    parts = (
        {"gate": weight[..., 0::2], "up": weight[..., 1::2]} if projection == "gate_up" else {"down": weight}
    )
    kind = "bias" if is_bias else "weight"
    return {
        f"{block}ffn_{part}_exps.{kind}": values if is_bias else values.transpose(1, 2)
        for part, values in parts.items()
    }


def write_pair(folder, name):
    return Pair(folder, FORMATS[name]) if name in FORMATS else GgufPair(folder, GGUF_FORMATS[name])
