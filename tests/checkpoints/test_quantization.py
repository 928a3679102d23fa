"""Detection: the configurations people publish, module by module, and what is refused by name."""

from __future__ import annotations

import re

import pytest
import torch

from blockdraft.checkpoints.quantization import read_quantization
from blockdraft.checkpoints.schemes import (
    COMPRESSED_MXFP4,
    COMPRESSED_NVFP4,
    FUSED_MXFP4,
    MODELOPT_NVFP4,
    MODELOPT_NVFP4_AWQ,
    AwqScheme,
    CompressedIntScheme,
    Fp4Scheme,
    GptqScheme,
    ScaledScheme,
)
from blockdraft.errors import ModelError

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.3.mlp.experts.7.up_proj"
GATE = "model.layers.3.mlp.gate"
HEAD = "lm_head"
FP8 = torch.float8_e4m3fn


def read(section, quant_file=None):
    return read_quantization({"quantization_config": section}, quant_file, name="some/model")


def schemes(quantization, *modules):
    """Of each module its scheme's class, or the scheme itself where there are several of one class."""
    found = [quantization.scheme(module) for module in modules]
    return [one if isinstance(one, Fp4Scheme) else type(one) for one in found]


PLAIN = type(None)

# Qwen/Qwen3-30B-A3B-FP8
QWEN_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": [
        "lm_head",
        *(f"model.layers.{layer}.input_layernorm" for layer in range(12)),
        *(f"model.layers.{layer}.mlp.gate" for layer in range(12)),
    ],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}

CHANNELS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "channel",
    "symmetric": True,
    "type": "float",
}

# RedHatAI/Qwen3-8B-FP8-dynamic
FP8_DYNAMIC = {
    "config_groups": {
        "group_0": {
            "input_activations": {**CHANNELS, "dynamic": True, "observer": None, "strategy": "token"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": CHANNELS,
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.46,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

GROUPS = {**CHANNELS, "actorder": "weight", "group_size": 128, "num_bits": 4, "strategy": "group"}

# RedHatAI/Qwen3-8B-quantized.w4a16
W4A16 = {
    **FP8_DYNAMIC,
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**GROUPS, "type": "int"}}},
    "format": "pack-quantized",
}

NVFP4_WEIGHTS = {
    "actorder": None,
    "dynamic": False,
    "group_size": 16,
    "num_bits": 4,
    "observer": "static_minmax",
    "strategy": "tensor_group",
    "symmetric": True,
    "type": "float",
}

# RedHatAI/Qwen3-30B-A3B-NVFP4
RED_HAT_NVFP4 = {
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "input_activations": {**NVFP4_WEIGHTS, "dynamic": "local"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": NVFP4_WEIGHTS,
        }
    },
    "format": "nvfp4-pack-quantized",
    "ignore": ["model.layers.3.mlp.gate", "re:.*shared_expert_gate$", "lm_head"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"},
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.3",
}

# nvidia/Qwen3-30B-A3B-FP4: hf_quant_config.json, its config.json saying nothing
NVIDIA_FILE = {
    "producer": {"name": "modelopt", "version": "0.31.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(48))],
    },
}

# The same in newer exports, inside config.json
NVIDIA_CONFIG = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "model.layers.1*", "*.mlp.gate", "model.visual*"],
    "quant_algo": "NVFP4",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quant_method": "modelopt",
}

# openai/gpt-oss-20b
GPT_OSS = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}

# Qwen/Qwen3-30B-A3B-GPTQ-Int4
GPTQ = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "desc_act": False,
    "group_size": 128,
    "model_file_base_name": None,
    "model_name_or_path": None,
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}

# Qwen/Qwen3-8B-AWQ
AWQ = {
    "backend": "autoawq",
    "bits": 4,
    "do_fuse": False,
    "exllama_config": None,
    "fuse_max_seq_len": None,
    "group_size": 128,
    "modules_to_fuse": None,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}

# Intel/Qwen3-30B-A3B-int4-AutoRound
AUTO_ROUND = {
    "autoround_version": "0.6.0",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "extra_config": {
        "model.layers.3.mlp.gate": {"bits": 16, "data_type": "float"},
        "model.layers.5.self_attn.o_proj": {"bits": 8, "group_size": 32},
        ".*shared_expert_gate.*": {"bits": 16, "data_type": "fp"},
    },
    "group_size": 128,
    "iters": 200,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}


def test_nothing_is_quantised_without_a_configuration():
    for config in ({}, {"quantization_config": None}, {"quantization_config": {}}, {"text_config": {}}):
        assert read_quantization(config, None, name="m") is None


def test_the_configuration_is_found_in_its_three_places():
    for config in (
        {"quantization_config": GPTQ},
        {"text_config": {"quantization_config": GPTQ}},
        {"compression_config": GPTQ},
    ):
        assert read_quantization(config, None, name="m").name == "gptq 4 bit"


def test_qwen_fp8_in_blocks():
    found = read(QWEN_FP8)
    assert found.name == "fp8"
    scheme = found.scheme(UP)
    assert (scheme.name, scheme.block, scheme.dtype) == ("fp8, 128x128 blocks", (128, 128), FP8)
    assert schemes(found, Q, GATE, "model.layers.1.mlp.gate_proj", HEAD) == [
        ScaledScheme,
        PLAIN,
        ScaledScheme,
        PLAIN,
    ]
    specs = scheme.tensors((200, 130))
    assert specs[".weight"].shape == (200, 130)
    assert specs[".weight_scale_inv"].shape == (2, 2)
    assert torch.bfloat16 in specs[".weight_scale_inv"].dtypes
    assert ".input_scale" in scheme.ignored


def test_fp8_leaves_modules_alone_as_transformers_does():
    found = read(
        {**QWEN_FP8, "modules_to_not_convert": ["model.layers.1", r"model.layers.*.self_attn", "o_proj"]}
    )
    plain = ["model.layers.1.mlp.up_proj", "model.layers.7.self_attn.q_proj", "x.o_proj"]
    assert schemes(found, *plain) == [PLAIN] * 3
    assert schemes(found, "model.layers.11.mlp.up_proj", HEAD) == [ScaledScheme] * 2
    listed = read({"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert schemes(listed, HEAD, Q, GATE) == [PLAIN, ScaledScheme, PLAIN]


@pytest.mark.parametrize(
    ("section", "suffix"),
    [
        (
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
            ".weight_scale",
        ),
        ({"quant_method": "fp8", "weight_block_size": None}, ".weight_scale_inv"),
    ],
)
def test_fp8_with_one_scale_per_tensor(section, suffix):
    specs = read(section).scheme(Q).tensors((8, 8))
    assert set(specs) == {".weight", suffix}
    assert specs[suffix].accepts(())
    assert specs[suffix].accepts((1,))
    assert not specs[suffix].accepts((8, 1))


def test_red_hat_fp8_dynamic():
    found = read(FP8_DYNAMIC)
    assert found.name == "compressed-tensors float-quantized"
    assert found.scheme(Q).block == (1, None)
    assert found.scheme(Q).tensors((24, 40))[".weight_scale"].shape == (24, 1)
    assert found.scheme(HEAD) is None


def test_red_hat_w4a16():
    scheme = read(W4A16).scheme(Q)
    assert isinstance(scheme, CompressedIntScheme)
    assert (scheme.bits, scheme.group_size, scheme.is_symmetric, scheme.has_group_index) == (
        4,
        128,
        True,
        False,
    )
    assert set(scheme.tensors((256, 256))) == {".weight_packed", ".weight_scale", ".weight_shape"}


def test_red_hat_nvfp4():
    found = read(RED_HAT_NVFP4)
    assert found.name == "compressed-tensors nvfp4-pack-quantized"
    modules = (Q, UP, GATE, "model.layers.4.mlp.shared_expert_gate", HEAD)
    assert schemes(found, *modules) == [COMPRESSED_NVFP4, COMPRESSED_NVFP4, PLAIN, PLAIN, PLAIN]
    assert ".input_global_scale" in found.scheme(Q).ignored


def test_compressed_tensors_groups_by_name_expression_and_class():
    fp8, int4 = FP8_DYNAMIC["config_groups"]["group_0"], W4A16["config_groups"]["group_0"]
    mxfp4 = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}
    section = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {**int4, "targets": ["Linear"], "format": "pack-quantized"},
            "group_1": {**fp8, "targets": [r"re:.*self_attn\..*"], "format": "float-quantized"},
            "group_2": {"weights": mxfp4, "targets": [Q], "format": "mxfp4-pack-quantized"},
            "group_3": {"weights": None, "targets": ["re:.*k_proj"]},
            "group_4": {"weights": mxfp4, "targets": [HEAD], "format": "dense"},
        },
    }
    found = read(section)
    assert schemes(found, Q, "model.layers.0.self_attn.o_proj", UP, HEAD) == [
        COMPRESSED_MXFP4,
        ScaledScheme,
        CompressedIntScheme,
        PLAIN,
    ]
    assert read({**section, "ignore": ["Linear"]}).scheme(UP) is None
    # Exact names only: a parent in the list does not cover its children.
    assert read({**section, "ignore": ["model.layers.3"]}).scheme(UP) is not None


def test_compressed_tensors_agrees_with_its_library_on_who_is_ignored():
    from compressed_tensors.utils.match import match_name

    patterns = ["re:.*mlp.gate$", "re:model.layers.1", "lm_head", "model.layers.2"]
    found = read({**FP8_DYNAMIC, "ignore": patterns})
    for module in (
        Q,
        UP,
        GATE,
        HEAD,
        "model.layers.1.x",
        "model.layers.11.x",
        "model.layers.2.x",
        "x.lm_head",
    ):
        ignored = any(match_name(module, pattern) for pattern in patterns)
        assert (found.scheme(module) is None) == ignored, module


@pytest.mark.parametrize("targets", [["Linear"], ["re:.*proj"], [Q, "re:.*"], ["re:.*q_proj", "re:.*self.*"]])
def test_compressed_tensors_agrees_with_its_library_on_which_target_wins(targets):
    from compressed_tensors.utils.match import match_targets

    weights = FP8_DYNAMIC["config_groups"]["group_0"]["weights"]
    groups = {
        f"group_{index}": {
            "targets": [target],
            "weights": {**weights, "strategy": "block", "block_structure": [index + 1, 1]},
        }
        for index, target in enumerate(targets)
    }
    winner = match_targets(Q, torch.nn.Linear(1, 1), targets)[0]
    assert read({**FP8_DYNAMIC, "config_groups": groups}).scheme(Q).block[0] == targets.index(winner) + 1


def test_nvidia_nvfp4_in_its_own_file():
    found = read_quantization({"model_type": "qwen3_moe"}, NVIDIA_FILE, name="m")
    assert found.name == "modelopt NVFP4"
    assert schemes(found, Q, UP, GATE, HEAD) == [MODELOPT_NVFP4, MODELOPT_NVFP4, PLAIN, PLAIN]
    # "model.layers.3.mlp.gate" must not cover gate_proj.
    assert found.scheme("model.layers.3.mlp.gate_proj") is not None


@pytest.mark.parametrize(
    "said",
    [
        {"quant_algo": "NVFP4_AWQ", "has_zero_point": False, "pre_quant_scale": True},
        {"quant_algo": "NVFP4_AWQ"},
        {"quant_algo": "NVFP4", "pre_quant_scale": True},
    ],
)
def test_nvfp4_whose_inputs_are_multiplied_first(said):
    section = {"group_size": 16, "exclude_modules": ["lm_head"], **said}
    for found in (
        read_quantization({}, {"quantization": section}, name="m"),
        read({**NVIDIA_CONFIG, **said, "ignore": ["lm_head"]}),
    ):
        assert schemes(found, Q, HEAD) == [MODELOPT_NVFP4_AWQ, PLAIN]


def test_nvidia_nvfp4_in_config_json():
    for quant_file in (None, NVIDIA_FILE):
        found = read(NVIDIA_CONFIG, quant_file)
        modules = (Q, "model.layers.10.mlp.up_proj", "model.layers.1.mlp.up_proj", GATE, HEAD)
        expected = [MODELOPT_NVFP4, MODELOPT_NVFP4, PLAIN, PLAIN, PLAIN]
        assert schemes(found, *modules) == expected
    assert read({"quant_method": "modelopt"}, NVIDIA_FILE).name == "modelopt NVFP4"
    assert read({"quant_method": "modelopt_fp4", "quantization": NVIDIA_FILE["quantization"]}).scheme(Q)


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [("FP8", (1, 1)), ("FP8_PER_CHANNEL_PER_TOKEN", (256, 1)), ("fp8_pb_wo", (2, 3))],
)
def test_modelopt_fp8(algorithm, shape):
    found = read_quantization({}, {"quantization": {"quant_algo": algorithm}}, name="m")
    assert found.scheme(Q).tensors((256, 300))[".weight_scale"].shape == shape


def test_modelopt_with_several_algorithms():
    layers = {Q: {"quant_algo": "FP8"}, UP: {"quant_algo": "NVFP4", "group_size": 16}}
    section = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": []}
    found = read_quantization({}, {"quantization": section}, name="m")
    assert schemes(found, Q, UP, HEAD) == [ScaledScheme, MODELOPT_NVFP4, PLAIN]


def test_modelopt_globs():
    for pattern, modules in {
        "*": [Q, UP, HEAD],
        "model.layers.0.*": [Q],
        "*.experts.*": [UP],
        "model.layers.3*": [UP],
        "model.layers.?.self_attn.q_proj": [Q],
        "q_proj": [],
    }.items():
        section = {"quant_algo": "NVFP4", "exclude_modules": [pattern]}
        found = read_quantization({}, {"quantization": section}, name="m")
        assert [module for module in (Q, UP, HEAD) if found.scheme(module) is None] == modules, pattern


def test_a_quantised_cache_alone_is_no_quantisation():
    section = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert read_quantization({}, {"quantization": section}, name="m") is None


def test_gpt_oss():
    found = read(GPT_OSS)
    assert found.name == "mxfp4"
    experts = "model.layers.0.mlp.experts"
    modules = (f"{experts}.gate_up_proj", f"{experts}.down_proj", Q, "model.layers.0.mlp.router", HEAD)
    assert schemes(found, *modules) == [FUSED_MXFP4, FUSED_MXFP4, PLAIN, PLAIN, PLAIN]
    specs = found.scheme(modules[0]).tensors((32, 5760, 2880))
    assert {suffix: spec.shape for suffix, spec in specs.items()} == {
        "_blocks": (32, 5760, 90, 16),
        "_scales": (32, 5760, 90),
    }
    listed = read({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.mlp.experts"]})
    assert listed.scheme(modules[0]) is None


def test_qwen_gptq():
    found = read(GPTQ)
    assert found.name == "gptq 4 bit"
    assert schemes(found, Q, UP, GATE, HEAD) == [GptqScheme, GptqScheme, PLAIN, PLAIN]
    scheme = found.scheme(Q)
    assert (scheme.group_size, scheme.zero_offset, scheme.is_symmetric) == (128, 1, True)
    specs = scheme.tensors((64, 256))
    assert specs[".qweight"].shape == (32, 64)
    assert specs[".qzeros"].shape == (2, 8)
    assert specs[".g_idx"].is_optional
    assert read({**GPTQ, "lm_head": True}).scheme(HEAD) is not None


def test_gptq_variants():
    assert read({**GPTQ, "checkpoint_format": "gptq_v2"}).scheme(Q).zero_offset == 0
    assert read({**GPTQ, "group_size": -1}).scheme(Q).group_size is None
    assert read({**GPTQ, "bits": 8}).scheme(Q).tensors((64, 256))[".qweight"].shape == (64, 64)
    ordered = read({**GPTQ, "desc_act": True}).scheme(Q)
    assert not ordered.tensors((64, 256))[".g_idx"].is_optional
    inside = read({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]})
    assert schemes(inside, Q, "model.layers.0.self_attn.k_proj") == [GptqScheme, PLAIN]
    rules = {r"-:model\.layers\.0\.": {}, r"+:.*down_proj": {"bits": 8, "group_size": 32}}
    dynamic = read({**GPTQ, "dynamic": rules})
    assert dynamic.scheme(Q) is None
    assert dynamic.scheme("model.layers.1.mlp.down_proj").bits == 8
    assert dynamic.scheme("model.layers.1.mlp.down_proj").group_size == 32
    assert dynamic.scheme("model.layers.1.mlp.up_proj").bits == 4


def test_qwen_awq():
    found = read(AWQ)
    assert found.name == "awq 4 bit"
    assert schemes(found, Q, HEAD, GATE) == [AwqScheme, PLAIN, PLAIN]
    assert found.scheme(Q).tensors((64, 256))[".qweight"].shape == (256, 8)
    listed = read({**AWQ, "modules_to_not_convert": ["visual", "layers.0.self_attn"]})
    assert schemes(listed, Q, UP) == [PLAIN, AwqScheme]


def test_auto_round():
    found = read(AUTO_ROUND)
    assert found.name == "auto-round 4 bit"
    modules = (Q, UP, GATE, "model.layers.3.mlp.shared_expert_gate", HEAD)
    assert schemes(found, *modules) == [GptqScheme, GptqScheme, PLAIN, PLAIN, PLAIN]
    assert found.scheme(Q).zero_offset == 1
    changed = found.scheme("model.layers.5.self_attn.o_proj")
    assert (changed.bits, changed.group_size, changed.is_symmetric) == (8, 32, True)


def test_auto_round_variants():
    awq = read({**AUTO_ROUND, "packing_format": "auto_round:auto_awq", "extra_config": None})
    assert schemes(awq, Q, HEAD) == [AwqScheme, PLAIN]
    assert awq.scheme(Q).group_size == 128
    assert read({**AUTO_ROUND, "packing_format": "auto_round"}).scheme(Q).zero_offset is None
    everywhere = read({**AUTO_ROUND, "block_name_to_quantize": None})
    assert schemes(everywhere, Q, HEAD) == [GptqScheme, PLAIN]
    head = read({**AUTO_ROUND, "extra_config": {"lm_head": {"bits": 4}}})
    assert schemes(head, HEAD) == [GptqScheme]


def compressed(**changes):
    weights = {**W4A16["config_groups"]["group_0"]["weights"], **changes.pop("weights", {})}
    return {**W4A16, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, **changes}


REFUSED = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method = 'bitsandbytes'"),
    "old bitsandbytes": ({"load_in_8bit": True}, "quant_method = 'bitsandbytes'"),
    "no method": ({"bits": 4}, "quantization_config without a quant_method"),
    "fp8 format": ({**QWEN_FP8, "fmt": "e5m2"}, "fmt = 'e5m2'"),
    "fp8 experts": ({**QWEN_FP8, "expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
    "fp8 blocks": ({**QWEN_FP8, "weight_block_size": [128]}, "weight_block_size = [128]"),
    "fp8 list": ({**QWEN_FP8, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head'"),
    "fp8 regex": ({**QWEN_FP8, "modules_to_not_convert": ["a(b"]}, "not a regular expression"),
    "gptq bits": ({**GPTQ, "bits": 3}, "bits = 3"),
    "gptq dynamic bits": ({**GPTQ, "dynamic": {"+:.*": {"bits": 2}}}, "bits = 2"),
    "gptq format": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
    "gptq rotation": ({**GPTQ, "rotation": "hadamard"}, "rotation = 'hadamard'"),
    "compressed regex": ({**W4A16, "ignore": ["re:a(b"]}, "'a(b' in quantization_config.ignore"),
    "gptq group": ({**GPTQ, "group_size": 0}, "group_size = 0"),
    "awq version": ({**AWQ, "version": "gemv"}, "version = 'gemv'"),
    "awq bits": ({**AWQ, "bits": 8}, "bits = 8"),
    "auto-round packing": (
        {**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"},
        "packing_format = 'auto_round:llm_compressor'",
    ),
    "auto-round type": ({**AUTO_ROUND, "data_type": "mx_fp"}, "data_type = 'mx_fp'"),
    "auto-round zero points": ({**AUTO_ROUND, "packing_format": "auto_round", "sym": False}, "sym = false"),
    "auto-round awq bits": (
        {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"},
        "extra_config.model.layers.5.self_attn.o_proj.bits = 8",
    ),
    "sparsity": (
        compressed(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config.format = 'sparse-24-bitmask'",
    ),
    "rotations": (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config ="),
    "compressed format": (compressed(format="marlin-24"), "format = 'marlin-24'"),
    "compressed mixture": (compressed(format="mixed-precision"), "format = 'mixed-precision'"),
    "compressed bits": (compressed(weights={"num_bits": 3}), "num_bits = 3"),
    "compressed strategy": (compressed(weights={"strategy": "token"}), "strategy = 'token'"),
    "compressed dynamic": (compressed(weights={"dynamic": True}), "dynamic = True"),
    "compressed order": (compressed(weights={"actorder": "odd"}), "actorder = 'odd'"),
    "compressed groups": ({**W4A16, "config_groups": {}}, "no quantization_config.config_groups"),
    "compressed preset": ({**W4A16, "config_groups": {"W4A16": ["Linear"]}}, "preset"),
    "compressed nvfp4": (
        compressed(format="nvfp4-pack-quantized", weights={**NVFP4_WEIGHTS, "group_size": 32}),
        "group_size = 32",
    ),
    "modelopt": ({**NVIDIA_CONFIG, "quant_algo": "W4A16_AWQ"}, "quant_algo = 'W4A16_AWQ'"),
    "modelopt zero points": (
        {**NVIDIA_CONFIG, "quant_algo": "NVFP4_AWQ", "has_zero_point": True},
        "has_zero_point = True",
    ),
    "modelopt factors for fp8": (
        {**NVIDIA_CONFIG, "quant_algo": "FP8", "pre_quant_scale": True},
        "pre_quant_scale = True",
    ),
    "modelopt group": ({**NVIDIA_CONFIG, "group_size": 32}, "group_size = 32"),
    "modelopt mixture": (
        {**NVIDIA_CONFIG, "quant_algo": "MIXED_PRECISION"},
        "quant_algo = 'MIXED_PRECISION'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(case):
    section, message = REFUSED[case]
    with pytest.raises(ModelError, match=re.escape(message)) as refusal:
        read(section)
    assert str(refusal.value).startswith("'some/model': config.json ")


def test_an_unsupported_algorithm_is_blamed_on_the_right_file():
    with pytest.raises(ModelError, match=r"hf_quant_config.json says quantization.quant_algo = 'W4A8_AWQ'"):
        read_quantization({}, {"quantization": {"quant_algo": "W4A8_AWQ"}}, name="m")
    with pytest.raises(ModelError, match="quantization = None, expected an object"):
        read_quantization({}, {"producer": {}}, name="m")


def test_two_files_that_disagree_are_refused():
    with pytest.raises(ModelError, match=r"quant_method = 'fp8', but hf_quant_config.json"):
        read(QWEN_FP8, NVIDIA_FILE)
    with pytest.raises(ModelError, match=r"quant_algo = 'FP8', but hf_quant_config.json says 'NVFP4'"):
        read({**NVIDIA_CONFIG, "quant_algo": "FP8"}, NVIDIA_FILE)
