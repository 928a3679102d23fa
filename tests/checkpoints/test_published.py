"""Every tensor of the published checkpoints is consumed by our loader, or skipped for a stated reason."""

import math
from types import SimpleNamespace

import pytest
import torch

from blockdraft.checkpoints import checkpoint, weights
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.errors import ModelError
from blockdraft.models.registry import build_decoder
from blockdraft.planner.known_pairs import find_models
from tests.checkpoints.published import (
    CONFIGS,
    published_config,
    published_tensors,
    resaved_config,
    resaved_tensors,
)
from tests.matrix import slow_but

REFUSED = {"google/gemma-4-E2B-it", "google/gemma-4-E4B-it"}  # per-layer embeddings
LOADED = sorted(CONFIGS.keys() - REFUSED)
FAST = (  # a model of every family
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3.5-27B",
    "google/gemma-4-31B-it",
    "openai/gpt-oss-20b",
)


def infos(tensors):
    return {name: checkpoint.TensorInfo(shape, dtype) for name, (shape, dtype) in tensors.items()}


def account_of(config, tensors, name):
    """What loading would do with `tensors`."""
    with torch.device("meta"):
        config_read = read_model_config(config, name=name)
        model = build_decoder(config_read, taps=(), max_positions=1, device=torch.device("cpu"))
    described = SimpleNamespace(name=name, config=config, quant_file=None)
    return weights.match_tensors(model, described, tensors)[1]


def account(name):
    return account_of(published_config(name), infos(published_tensors(name)), name)


def num_parameters(tensors):
    """Logical weights: two per byte of MXFP4 blocks, none for their scales."""
    factors = {"blocks": 2, "scales": 0}
    return sum(math.prod(shape) * factors.get(name.split("_")[-1], 1) for name, (shape, _) in tensors.items())


def num_bytes(tensors):
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values())


def is_aside(name):
    """Parts that text generation does not need: vision, the checkpoint's own draft head."""
    return name.startswith(("mtp.", "model.visual.", "model.vision_tower.", "model.embed_vision."))


# ---- published.py itself


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # From the model cards and, rounded as there, the hub's pages.
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03),
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
        ("Qwen/Qwen3-8B", 8.19),
        ("Qwen/Qwen3-30B-A3B", 30.53),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 81.3),  # with mtp
        ("Qwen/Qwen3-Coder-Next", 79.67),
        ("Qwen/Qwen3.5-27B", 27.8),  # with vision and mtp: "28B"
        ("Qwen/Qwen3.6-27B", 27.8),
        ("Qwen/Qwen3.5-35B-A3B", 36.0),  # with vision and mtp: "36B"
        ("google/gemma-4-31B-it", 31.3),
        ("google/gemma-4-26B-A4B-it", 25.8),
        ("google/gemma-4-E2B-it", 5.1),
        ("google/gemma-4-E4B-it", 8.0),
        ("openai/gpt-oss-20b", 20.91),
        ("openai/gpt-oss-120b", 116.83),
    ],
)
def test_the_number_of_parameters_is_the_published_one(name, billions):
    digits = len(str(billions).split(".")[1])
    assert round(num_parameters(published_tensors(name)) / 1e9, digits) == billions


@pytest.mark.parametrize(
    ("name", "gibibytes"),
    [
        ("google/gemma-4-26B-A4B-it", 48.07),
        ("openai/gpt-oss-20b", 12.8),
        ("openai/gpt-oss-120b", 60.8),
    ],
)
def test_the_size_of_the_files_is_the_published_one(name, gibibytes):
    digits = len(str(gibibytes).split(".")[1])
    assert round(num_bytes(published_tensors(name)) / 2**30, digits) == gibibytes


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "dtype"),
    [
        (
            "Qwen/Qwen3-30B-A3B",
            "model.layers.47.mlp.experts.127.gate_proj.weight",
            (768, 2048),
            torch.bfloat16,
        ),
        ("Qwen/Qwen3-30B-A3B", "model.layers.0.mlp.gate.weight", (128, 2048), torch.bfloat16),
        (
            "Qwen/Qwen3-Coder-Next",
            "model.layers.0.linear_attn.in_proj_qkvz.weight",
            (12288, 2048),
            torch.bfloat16,
        ),
        (
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            "mtp.layers.0.mlp.experts.0.up_proj.weight",
            (512, 2048),
            torch.bfloat16,
        ),
        (
            "Qwen/Qwen3.5-27B",
            "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
            (10240, 5120),
            torch.bfloat16,
        ),
        ("Qwen/Qwen3.5-27B", "model.language_model.layers.0.linear_attn.A_log", (48,), torch.float32),
        ("Qwen/Qwen3.6-27B", "model.language_model.layers.0.linear_attn.A_log", (48,), torch.bfloat16),
        ("Qwen/Qwen3.5-27B", "mtp.layers.0.self_attn.q_proj.weight", (12288, 5120), torch.bfloat16),
        (
            "Qwen/Qwen3.5-35B-A3B",
            "model.language_model.layers.0.mlp.experts.gate_up_proj",
            (256, 1024, 2048),
            torch.bfloat16,
        ),
        (
            "Qwen/Qwen3.5-35B-A3B",
            "mtp.layers.0.mlp.experts.255.down_proj.weight",
            (2048, 512),
            torch.bfloat16,
        ),
        (
            "google/gemma-4-26B-A4B-it",
            "model.language_model.layers.0.experts.down_proj",
            (128, 2816, 704),
            torch.bfloat16,
        ),
        (
            "google/gemma-4-31B-it",
            "model.language_model.layers.5.self_attn.k_proj.weight",
            (2048, 5376),
            torch.bfloat16,
        ),
        (
            "openai/gpt-oss-20b",
            "model.layers.0.mlp.experts.gate_up_proj_blocks",
            (32, 5760, 90, 16),
            torch.uint8,
        ),
        ("openai/gpt-oss-20b", "model.layers.0.mlp.experts.down_proj_scales", (32, 2880, 90), torch.uint8),
        ("openai/gpt-oss-20b", "model.layers.0.mlp.experts.gate_up_proj_bias", (32, 5760), torch.bfloat16),
        ("openai/gpt-oss-120b", "model.layers.35.self_attn.sinks", (64,), torch.bfloat16),
    ],
)
def test_tensors_have_the_names_of_the_files(name, tensor, shape, dtype):
    assert published_tensors(name)[tensor] == (shape, dtype)


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("Qwen/Qwen3-30B-A3B", "model.layers.0.mlp.experts.gate_up_proj"),
        ("Qwen/Qwen3-Coder-Next", "mtp.fc.weight"),
        ("Qwen/Qwen3.5-35B-A3B", "model.language_model.layers.0.mlp.experts.0.gate_proj.weight"),
        ("google/gemma-4-31B-it", "lm_head.weight"),  # tied
        ("google/gemma-4-31B-it", "model.language_model.layers.5.self_attn.v_proj.weight"),  # keys are values
        ("openai/gpt-oss-20b", "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_names_of_other_layouts_are_absent(name, absent):
    assert absent not in published_tensors(name)


def test_what_transformers_saves_has_one_tensor_per_expert_and_no_draft_head():
    tensors = resaved_tensors("Qwen/Qwen3.5-35B-A3B")
    assert tensors["model.language_model.layers.0.mlp.experts.255.gate_proj.weight"][0] == (512, 2048)
    assert not any(name.startswith("mtp.") for name in tensors)
    unpacked = resaved_tensors("openai/gpt-oss-20b")
    assert unpacked["model.layers.0.mlp.experts.gate_up_proj"][0] == (32, 2880, 5760)


def test_the_list_of_known_pairs_has_the_same_sizes():
    compared = 0
    for pair in find_models().pairs:
        if pair.target in CONFIGS and pair.target_billions is not None:
            tensors = published_tensors(pair.target).items()
            text = num_parameters({name: stored for name, stored in tensors if not is_aside(name)})
            assert round(text / 1e9, 1) == pair.target_billions, pair.target
            compared += 1
    assert compared >= 10


# ---- our loader


@pytest.mark.parametrize("name", LOADED)
def test_every_published_tensor_is_consumed_or_skipped_for_a_reason(name):
    tensors = published_tensors(name)
    result = account(name)
    assert set(result.skipped) == {tensor for tensor in tensors if is_aside(tensor)}
    assert result.consumed == tensors.keys() - result.skipped.keys()
    assert all(result.skipped.values())


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3-30B-A3B", "google/gemma-4-26B-A4B-it", "openai/gpt-oss-20b"]
)
def test_what_transformers_saves_is_accounted_for_too(name):
    tensors = resaved_tensors(name)
    result = account_of(resaved_config(name), infos(tensors), name)
    assert result.consumed | result.skipped.keys() == tensors.keys()


@pytest.mark.parametrize("name", slow_but(LOADED, *FAST))
def test_a_missing_tensor_is_an_error_that_names_it(name):
    tensors = infos(published_tensors(name))
    missing = next(tensor for tensor in reversed(tensors) if "layers.3." in tensor and not is_aside(tensor))
    del tensors[missing]
    with pytest.raises(ModelError, match=missing.replace(".", r"\.")):
        account_of(published_config(name), tensors, name)


@pytest.mark.parametrize("name", slow_but(LOADED, *FAST))
def test_a_tensor_of_another_shape_is_an_error_that_names_it(name):
    tensors = infos(published_tensors(name))
    wrong = next(
        tensor for tensor in tensors if "layers.3.self_attn.o_proj" in tensor and not is_aside(tensor)
    )
    tensors[wrong] = checkpoint.TensorInfo((7, 7), torch.bfloat16)
    with pytest.raises(ModelError, match=wrong.replace(".", r"\.")):
        account_of(published_config(name), tensors, name)


@pytest.mark.parametrize("name", slow_but(LOADED, *FAST))
def test_an_unknown_tensor_is_an_error_that_names_it(name):
    tensors = infos(published_tensors(name))
    tensors["model.layers.0.mlp.surprise.weight"] = checkpoint.TensorInfo((1,), torch.bfloat16)
    with pytest.raises(ModelError, match="surprise"):
        account_of(published_config(name), tensors, name)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_per_layer_embeddings_are_refused_by_name(name):
    with pytest.raises(ModelError, match="hidden_size_per_layer_input"):
        account(name)
