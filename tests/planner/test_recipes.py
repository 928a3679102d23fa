"""Every recipe plans on every card that it names; the published configurations stand in for the hub."""

import re

import pytest

from benchmarks.shapes import SMOLLM2_135M, drafter
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.machine.cards import card_by_key
from blockdraft.machine.machine import Machine
from blockdraft.planner import pair as pairs
from blockdraft.planner.memory_fit import machine_of
from blockdraft.planner.pair import Case
from blockdraft.planner.report import make_report
from blockdraft.planner.stored import Size, Stored
from blockdraft.planner.values import target_values
from blockdraft.settings.merge import merge_settings
from blockdraft.settings.recipe import load_recipe, recipe_names
from tests.checkpoints.published import CONFIGS


def _raw(hidden_size, num_layers, num_heads, num_kv_heads, vocab_size, max_positions, *, head_dim=128):
    return {
        "architectures": ["NotOurs"],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
    }


def _laguna(num_layers):
    return {
        **_raw(2048, num_layers, 48, 8, 100352, 262144),
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * (num_layers // 4),
        "sliding_window": 512,
    }


BASES = {  # what the packed checkpoints were made of
    "saricles/Qwen3-Coder-Next-NVFP4-GB10": "Qwen/Qwen3-Coder-Next",
    "rdtand/Qwen3.5-27B-NVFP4-DeltaNet-Included": "Qwen/Qwen3.5-27B",
    "Intel/Qwen3.5-35B-A3B-int4-AutoRound": "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3.5-122B-A10B-FP8": "Qwen/Qwen3.5-122B-A10B",
    "sakamakismile/Qwen3.6-27B-NVFP4": "Qwen/Qwen3.6-27B",
    "unsloth/Qwen3.6-35B-A3B-NVFP4": "Qwen/Qwen3.6-35B-A3B",
    "Qwen/Qwen3.8-27B-FP8": "Qwen/Qwen3.8-27B",
    "RadixArk/Qwen3.8-27B-NVFP4": "Qwen/Qwen3.8-27B",
    "RadixArk/Qwen3.8-27B-NVFP4-BF16-LMHead": "Qwen/Qwen3.8-27B",
}
PACKED_BYTES = 0.5625  # a value: four bits and its share of a scale
# Of families that our engine does not have: what the planner reads of config.json, and the files' bytes.
# Sizes are the defaults of transformers, but Nemotron's and the small LFM2's, which are not verified.
OTHERS = {
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": (
        {**_raw(2688, 52, 32, 2, 131072, 262144), "n_routed_experts": 128, "num_experts_per_tok": 6},
        18e9,
    ),
    "poolside/Laguna-XS-2.1": (_laguna(40), 67e9),
    "poolside/Laguna-S-2.1-FP8": (_laguna(48), 121e9),
    "LiquidAI/LFM2.5-1.2B-Instruct": (_raw(2048, 16, 32, 8, 65536, 128000, head_dim=64), 2.4e9),
    "LiquidAI/LFM2.5-8B-A1B": (_raw(2048, 24, 32, 8, 65536, 128000, head_dim=64), 17e9),
    "zai-org/GLM-5.3-Flash": ({**_raw(4096, 45, 64, 64, 154880, 1048576), "kv_lora_rank": 512}, 329e9),
    "meta-models/Muse-Glimmer-30B": (
        {
            **_raw(6656, 52, 32, 2, 202048, 131072),
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 13,
            "sliding_window": 2048,
        },
        60e9,
    ),
}


def target_of(name):
    if name in OTHERS:
        return OTHERS[name][0]
    if name == "HuggingFaceTB/SmolLM2-135M-Instruct":
        return SMOLLM2_135M
    return CONFIGS[BASES.get(name, name)]


def stored(name, config):
    """The headers of such a checkpoint, in a few tensors."""
    if name in OTHERS:
        size = int(OTHERS[name][1])
        tensors = {"model.layers.0.all.weight": Size(size // 2, size, False)}
        return Stored(name, "headers on the hub", config, None, tensors, ())
    values = target_values(read_model_config(config, name=name))
    is_packed = name in BASES or "gpt-oss" in name
    rest = values.total - values.embedding - values.head
    size = int(rest * (1 if name.endswith("-FP8") else PACKED_BYTES if is_packed else 2))
    packed = {"quantization_config": {"quant_method": "compressed-tensors"}} if name in BASES else {}
    tensors = {
        "model.embed_tokens.weight": Size(values.embedding, 2 * values.embedding, False),
        "lm_head.weight": Size(values.head, 2 * values.head, False),
        "model.layers.0.all.weight": Size(rest, size, is_packed),
    }
    tensors |= {f"model.norm.{index}": Size(0, 0, False) for index in range(100)}
    return Stored(name, "headers on the hub", config | packed, None, tensors, ())


@pytest.fixture(autouse=True)
def _hub(monkeypatch):
    """Targets by name; a drafter is of z-lab's pattern for the target that was opened before it."""
    opened = []

    def open_stored(source, *, needs_weights, what="model"):
        if source in CONFIGS | BASES | OTHERS or "SmolLM2" in source:
            opened.append(target_of(source))
            return stored(source, opened[-1])
        config = drafter(opened[-1], **DRAFT_HEADS, intermediate_size=8192)
        return Stored(source, "headers on the hub", config, None, None, ())

    monkeypatch.setattr(pairs, "open_stored", open_stored)


DRAFT_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "mask_token_id": 0}
CASES = [(name, card) for name in recipe_names() for card in load_recipe(name).cards or (None,)]


@pytest.mark.parametrize(("name", "card"), CASES)
def test_a_recipe_fits_on_its_cards(name, card):
    settings = merge_settings({"recipe": name}).settings
    found = None if card is None else card_by_key(card)
    machine = Machine(memory_bytes=16 << 30) if found is None else machine_of(found)
    pair = pairs.open_pair(settings)
    report = make_report(Case(settings, machine, pair, found))
    assert report.verdict != "does not fit", report.sentence
    assert settings.max_model_len in ("auto", report.fit.max_model_len)


@pytest.mark.parametrize(
    ("name", "changes", "card"),
    [
        ("qwen3.5-27b-nvfp4-5090", {}, "rtx-5090"),
        ("qwen3.5-27b-nvfp4", {"model": "Qwen/Qwen3.5-27B"}, "h100"),
    ],
)
def test_a_team_is_never_given_contexts_of_no_length(name, changes, card):
    """Each row of a hybrid has states for its whole block, which take more than such a card has left."""
    settings = merge_settings({"recipe": name, **changes}).settings
    found = card_by_key(card)
    report = make_report(Case(settings, machine_of(found), pairs.open_pair(settings), found))
    (team,) = [one for one in report.advice if one.who == "4-16 users"]
    longest = re.search(r"at ([\d,]+) tokens each|of ([\d,]+) tokens", team.result)
    assert int((longest[1] or longest[2]).replace(",", "")) >= 4096, team


def test_a_recipe_on_a_card_that_is_too_small_is_told_what_to_change():
    settings = merge_settings({"recipe": "qwen3-8b"}).settings
    card = card_by_key("rtx-4090")
    report = make_report(Case(settings, machine_of(card), pairs.open_pair(settings), card))
    assert report.verdict == "does not fit"
    assert "--quantization fp8" in [fix.flags for fix in report.fixes]
