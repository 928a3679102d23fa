"""The check of experts reaches every size of tiles that a step can reach, and finds one that is wrong."""

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton, which other tests interpret
    os.environ.setdefault("TRITON_INTERPRET", "1")

from blockdraft.check import expert_tiles
from blockdraft.check.comparison import Numbers, measure
from blockdraft.check.operations import OPERATIONS
from blockdraft.engine.engine import Engine
from blockdraft.kernels.kernels import REFERENCE, kernels_for
from blockdraft.kernels.pick.mixtures import tile_counts
from blockdraft.models.config import MoEConfig
from blockdraft.models.moe import Experts
from tests.check.test_selfcheck import family_engine
from tests.kernels.implementations import DEVICE, HALF, quiet
from tests.matrix import slow_but

pytest.importorskip("triton")
from blockdraft.kernels.triton import moe

pytestmark = [
    quiet,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a card, tests/gpu run the whole check"),
]
CHUNK = 650  # tokens; of 20 experts, with 2 for each token, an expert then has 65 pairs


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    more = {"num_experts": 20, "moe_intermediate_size": 16}
    folder = tmp_path_factory.mktemp("model")
    found = family_engine("qwen3_moe-plain", folder, more, dtype="float16", max_prefill_tokens=CHUNK)
    kernels = kernels_for(HALF, DEVICE, is_interpreted=True)
    return Engine(found.models.with_kernels(kernels), found.plan)


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch):
    monkeypatch.setattr(expert_tiles, "NUM_TOKENS", 32)


def with_chunk(engine, chunk):
    return Engine(engine.models, replace(engine.plan, max_prefill_tokens=chunk))


def launched(engine, monkeypatch):
    """Return the heights of tiles that the check of experts launches."""
    found, right = set(), moe._launch

    def launch(*tensors, config, **more):
        found.add(config.block_m)
        right(*tensors, config=config, **more)

    monkeypatch.setattr(moe, "_launch", launch)
    assert failed(engine) == []
    return found


def failed(engine):
    found = OPERATIONS["experts"](engine, Numbers(engine))
    return [one.where for one in found if not measure("experts", one).is_passed]


def test_a_prompt_of_the_35b_mixture_reaches_the_highest_tiles():
    """The least tokens: of low tiles, of those sorted in one launch, in several, and of each height."""
    experts = Experts(32, MoEConfig(num_experts=256, num_chosen=8, inner_size=16)).to(DEVICE, HALF)
    at = kernels_for(HALF, DEVICE, is_interpreted=True).available
    assert tile_counts(at, experts.gate_up, experts.down, 8, 2048)[-5:] == (65, 129, 512, 1024, 2048)
    assert tile_counts(at, experts.gate_up, experts.down, 8, 2047)[-1] == 1024
    assert tile_counts(REFERENCE.available, experts.gate_up, experts.down, 8, 2048) == ()


def wrong_from(block_m, factor):
    """A launch whose tiles of this height compute otherwise."""
    right = moe._launch

    def launch(x, out, *tensors, config, **more):
        right(x, out, *tensors, config=config, **more)
        if config.block_m == block_m:
            out *= factor

    return launch


@pytest.mark.parametrize(
    ("chunk", "heights"),
    slow_but([(16, {16}), (300, {16, 32}), (CHUNK, {16, 32, 64, 128})], (16, {16})),
)
def test_every_height_of_tiles_that_a_chunk_reaches_is_run(engine, monkeypatch, chunk, heights):
    assert launched(with_chunk(engine, chunk), monkeypatch) == heights


@pytest.mark.parametrize(("block_m", "chunk"), slow_but([(32, 300), (64, CHUNK), (128, CHUNK)], (32, 300)))
def test_a_tile_that_computes_otherwise_is_found(engine, monkeypatch, block_m, chunk):
    monkeypatch.setattr(moe, "_launch", wrong_from(block_m, 1.1))
    found = failed(with_chunk(engine, chunk))
    assert found
    assert all("tokens" in where for where in found)


@pytest.mark.slow
def test_pairs_that_a_large_sort_mixes_up_are_found(engine, monkeypatch):
    right = moe.group

    def group(ids, num_experts, block_m):
        order, tiles = right(ids, num_experts, block_m)
        return (order.flip(0) if ids.numel() > 1024 else order), tiles

    monkeypatch.setattr(moe, "group", group)
    assert failed(engine)


def test_without_the_kernels_there_are_no_tiles_to_run(engine):
    plain = Engine(engine.models.with_kernels(engine.models.target.kernels.references()), engine.plan)
    counts = [one.where for one in OPERATIONS["experts"](plain, Numbers(plain))]
    assert counts
    assert not any("tokens" in where for where in counts)
