"""The memory plan against a real start: random weights of Qwen3-8B with a drafter on this card.

What was planned without torch, weights, cache and all, must be within 3 % of what the start has taken.
The card must be free: `pytest -n 0`.
"""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.shapes import SHAPES
from blockdraft.machine.machine import read_machine
from blockdraft.phases import StartProgress
from blockdraft.planner.memory_fit import fit_native
from blockdraft.planner.pair import Case, open_pair
from blockdraft.settings.settings import Settings
from blockdraft.start.memory import release
from blockdraft.start.start_engine import start_engine


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The plan, the engine, and the bytes that its start took from the driver."""
    folder = tmp_path_factory.mktemp("qwen3-8b")
    for name, config in zip(("target", "draft"), SHAPES["qwen3-8b"], strict=True):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    settings = Settings(
        model=str(folder / "target"),
        draft=str(folder / "draft"),
        load_format="dummy",
        device="cuda",
        verify="off",  # random drafts fit nothing
    )
    release()
    free, total = torch.cuda.mem_get_info()
    machine = replace(read_machine(), gpu_bytes=total, gpu_free_bytes=free)
    fit = fit_native(Case(settings, machine, open_pair(settings)))
    if fit.problem is not None:
        pytest.skip(f"this card is too small: {fit.problem}")
    engine = start_engine(settings, StartProgress())
    torch.cuda.synchronize()
    yield fit, engine, free - torch.cuda.mem_get_info()[0]
    del engine
    release()


def test_a_start_takes_what_was_planned(started):
    fit, _, taken = started
    # The context was there before: this process has asked the device for its memory.
    planned = fit.num_bytes - sum(item.num_bytes for item in fit.items if item.name == "driver")
    assert planned == pytest.approx(taken, rel=0.03)


def test_the_pages_are_those_of_the_plan(started):
    fit, engine, _ = started
    assert engine.plan.num_pages == pytest.approx(fit.plan.num_pages, rel=0.03)
    assert engine.plan.max_model_len == fit.plan.max_model_len
    assert engine.plan.max_num_seqs == fit.plan.max_num_seqs


def test_weights_and_cache_are_exact(started):
    fit, engine, _ = started
    sizes = {item.name: item.num_bytes for item in fit.items}
    target = engine.models.target
    weights = sum(parameter.nbytes for parameter in target.parameters())
    assert sizes["target weights"] == weights
    tables = [buffer for name, buffer in target.named_buffers() if "cos" in name or "sin" in name]
    drafter = engine.models.drafter.model
    tables += [buffer for name, buffer in drafter.named_buffers() if "cos" in name or "sin" in name]
    assert sizes["position tables"] == sum(table.nbytes for table in tables)
    assert sizes["drafter weights"] == sum(parameter.nbytes for parameter in drafter.parameters())
    per_page = fit.footprint.per_token * fit.plan.page_size
    assert engine.cache.num_bytes == (engine.plan.num_pages + 2) * per_page
