"""The planner's count of values against the models that are really built, for every published shape."""

import pytest
import torch

from benchmarks.shapes import SHAPES
from blockdraft.checkpoints.read_draft_config import read_draft_config
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.models.dflash import DFlash, DFlash2, body_type
from blockdraft.models.registry import build_decoder
from blockdraft.planner.values import draft_values, target_values
from tests.checkpoints.published import CONFIGS
from tests.fixtures import make_pair

CPU = torch.device("cpu")


def built(make):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return make()
    finally:
        torch.set_default_dtype(before)


# Gemma 4 E2B and E4B have embeddings per layer, which no file here computes.
TARGETS = {name: config for name, config in CONFIGS.items() if "-E" not in name}
TARGETS |= {name: pair[0] for name, pair in SHAPES.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_as_many_values_as_are_built(name):
    config = read_model_config(TARGETS[name], name=name)
    model = built(lambda: build_decoder(config, taps=(), max_positions=1, device=CPU))
    found = target_values(config)
    assert found.total == sum(parameter.numel() for parameter in model.parameters())
    wide = sum(parameter.numel() for parameter in model.parameters() if parameter.dtype == torch.float32)
    assert found.wide == wide
    experts = [module for path, module in model.named_modules() if path.endswith("experts")]
    num_routed = sum(part.weight.numel() for one in experts for part in (one.gate_up, one.down))
    assert found.experts == num_routed


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_drafter_has_as_many_values_as_are_built(name, has_head, has_bias):
    config = read_draft_config(SHAPES[name][1] | {"attention_bias": has_bias}, name=name)
    model = built(lambda: DFlash(config, first_layer=0, max_positions=1, has_head=has_head, device=CPU))
    found = draft_values(config, has_head=has_head)
    assert found.total == sum(parameter.numel() for parameter in model.parameters())


def test_what_dflash2_adds_is_counted_and_never_quantised():
    """Codebooks of the whole vocabulary among it: a published one has 127 million values there."""
    raw = SHAPES["qwen3-8b"][1]
    plain = read_draft_config(raw, name="plain")
    config = read_draft_config(raw | {"architectures": ["DFlash2DraftModel"]}, name="dflash2")
    model = built(lambda: DFlash2(config, first_layer=0, max_positions=1, has_head=False, device=CPU))
    found, without = draft_values(config, has_head=False), draft_values(plain, has_head=False)
    assert found.total == sum(parameter.numel() for parameter in model.parameters())
    assert found.projections == without.projections
    assert found.plain - without.plain > 2 * 256 * config.vocab_size


@pytest.mark.parametrize(
    "own", [{}, {"lilicorr_hidden_size": 0}, {"conv_kernel_size": 2, "conv_group_size": 16}], ids=str
)
def test_what_lilicorr_adds_is_counted_and_never_quantised(own):
    raw = SHAPES["qwen3-8b"][1]
    sizes = {f"lilicorr_{key}": value for key, value in make_pair.LILICORR.items()} | {
        "lilicorr_num_heads": 4
    }
    whole = raw | {
        "architectures": ["LiLiCorrDraftModel"],
        "dflash_config": raw["dflash_config"] | sizes | own,
    }
    config, plain = (read_draft_config(one, name="head") for one in (whole, raw))
    body = body_type(config)
    model = built(lambda: body(config, first_layer=0, max_positions=1, has_head=False, device=CPU))
    found, without = (draft_values(one, has_head=False) for one in (config, plain))
    assert found.total == sum(parameter.numel() for parameter in model.parameters())
    assert found.projections == without.projections
    assert found.tables == 0


@pytest.mark.parametrize(
    "head",
    [
        {"architectures": ["Qwen3DSparkModel"], "markov_rank": 256},
        {"architectures": ["Qwen3XPressModel"]},
        {"architectures": ["DominoDraftModel"], "emb_dim": 512},
    ],
    ids=["DSpark", "XPress", "Domino"],
)
def test_what_a_head_adds_is_counted_and_its_tables_never_quantised(head):
    raw = SHAPES["qwen3-8b"][1]
    sizes = {"gru_hidden_dim": 1024} if "emb_dim" in head else {}
    whole = raw | head | {"dflash_config": raw["dflash_config"] | sizes}
    config = read_draft_config(whole, name="head")
    model = built(lambda: DFlash(config, first_layer=0, max_positions=1, has_head=False, device=CPU))
    found = draft_values(config, has_head=False)
    assert found.total == sum(parameter.numel() for parameter in model.parameters())
    mlp = 0 if model.refiner is None else sum(one.numel() for one in model.refiner.mlp.parameters())
    without = draft_values(read_draft_config(raw, name="plain"), has_head=False)
    assert found.projections - without.projections == mlp
    assert found.tables == 2 * 256 * config.vocab_size
