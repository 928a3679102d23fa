"""Every tensor of the published checkpoints is loaded, or left aside on purpose."""

import math
from types import SimpleNamespace

import pytest
import torch

from blockdraft.checkpoints import checkpoint, weights
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.checkpoints.read_mtp_config import read_mtp_config
from blockdraft.models.mtp import MtpHead
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

LOADED = sorted(CONFIGS.keys() - {"google/gemma-4-E2B-it"})  # refused: per-layer embeddings
FAST = (  # a model of every layout
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3.5-35B-A3B",
    "google/gemma-4-26B-A4B-it",
    "google/gemma-4-12B-it",
    "openai/gpt-oss-20b",
)


def loaded_names(config, tensors, name):
    """The names of the tensors that loading a file with `tensors` would read."""
    with torch.device("meta"):
        config_read = read_model_config(config, name=name)
        model = build_decoder(config_read, taps=(), max_positions=1, device=torch.device("cpu"))
    described = SimpleNamespace(name=name, config=config, quant_file=None)
    infos = {tensor: checkpoint.TensorInfo(*stored) for tensor, stored in tensors.items()}
    slots = weights.match_tensors(model, described, infos)
    return {tensor for slot in slots for piece in slot.pieces for tensor in piece.stored()}


def num_parameters(tensors):
    """Logical weights: two per byte of MXFP4 blocks, none for their scales."""
    factors = {"blocks": 2, "scales": 0}
    return sum(math.prod(shape) * factors.get(name.split("_")[-1], 1) for name, (shape, _) in tensors.items())


def is_aside(name):
    """Parts that text generation does not need."""
    parts = ("visual", "vision_tower", "vision_embedder", "embed_vision", "embed_audio")
    return name.startswith(tuple(f"model.{part}." for part in parts))


@pytest.mark.slow
def test_the_list_of_known_pairs_has_the_same_sizes():
    compared = 0
    for pair in find_models().pairs:
        if pair.target in CONFIGS and pair.target_billions is not None:
            tensors = published_tensors(pair.target).items()
            text = num_parameters({name: stored for name, stored in tensors if not is_aside(name)})
            assert round(text / 1e9, 1) == pair.target_billions, pair.target
            compared += 1
    assert compared >= 10


@pytest.mark.parametrize("name", slow_but(LOADED, *FAST))
def test_every_published_tensor_is_loaded_but_for_vision(name):
    tensors = published_tensors(name)
    expected = {tensor for tensor in tensors if not is_aside(tensor)}
    assert loaded_names(published_config(name), tensors, name) == expected


FUSED = {f"mtp.layers.0.mlp.experts.{part}": None for part in ("gate_up_proj", "down_proj")}


@pytest.mark.parametrize(
    ("name", "stored", "count"),
    [("Qwen/Qwen3.5-27B", {}, 15), ("Qwen/Qwen3.5-35B-A3B", {}, 785), ("Qwen/Qwen3.5-35B-A3B", FUSED, 19)],
    ids=["dense", "experts one by one", "experts fused"],
)
def test_an_mtp_head_has_the_published_number_of_tensors(name, stored, count):
    config = published_config(name)
    with torch.device("meta"):
        head = MtpHead(read_mtp_config(config, read_model_config(config, name=name), None))
    slots = weights.slots_of(head, stored)
    names = {tensor for slot in slots for piece in slot.pieces for tensor in piece.stored()}
    assert len(names) == count
    assert all(one.startswith("mtp.") for one in names)
    assert head.fc.weight.shape == (head.config.hidden_size, 2 * head.config.hidden_size)


@pytest.mark.parametrize("name", slow_but(FAST[1:], "google/gemma-4-26B-A4B-it"))
def test_every_tensor_that_transformers_saves_is_loaded_too(name):
    tensors = resaved_tensors(name)
    expected = {tensor for tensor in tensors if not is_aside(tensor)}
    assert loaded_names(resaved_config(name), tensors, name) == expected
