"""benchmarks/gpu_step.py without a card: widths that are chosen step by step."""

import gc
import json
import sys
import weakref
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_prompts, gpu_step, on_card
from benchmarks.shapes import SHAPES, write_shape
from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.settings.acceptance_profile import acceptance_rates
from tests import tiny


def test_governed_requests_are_timed_with_drafts_kept_by_rates(monkeypatch):
    monkeypatch.setattr(gpu_step, "SETTLING", 2)
    monkeypatch.setattr(gpu_step, "CHOSEN", 8)
    monkeypatch.setattr("blockdraft.start.block_width._is_steady", lambda times: True)  # however busy we are
    engine = tiny.engine(max_num_seqs=2, width=8)
    models = replace(engine.models, rates=acceptance_rates("mean:4", width=8, block=8))
    found = gpu_step.time_chosen_widths((models, engine.plan), num_rows=2, context=16)
    assert 1 <= found["committed_per_step"] <= found["mean_width"] <= 8
    assert found["tokens_per_s"] > 0
    assert "on the synthetic acceptance" in found["reason"]


@pytest.mark.parametrize("max_model_len", [2048, 500_000])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_shape_can_be_given_more_positions(shape, max_model_len, tmp_path):
    file = write_shape(shape, tmp_path)[0] / "config.json"
    before = read_model_config(json.loads(file.read_text()), name=shape)
    on_card.stretch(file, max_model_len)
    after = read_model_config(json.loads(file.read_text()), name=shape)
    assert after.max_positions == max(before.max_positions, max_model_len)
    assert replace(after, max_positions=0) == replace(before, max_positions=0)


def test_a_prompt_is_timed_again_and_again_from_its_beginning():
    engine = tiny.engine(max_num_seqs=1, max_prefill_tokens=8)
    found = gpu_prompts.time_prefill((engine.models, engine.plan), num_tokens=20)
    assert found["tokens"] == 20
    assert found["by_kernels_ms"] > 0
    prompt = gpu_prompts.Prompt(engine, 20)
    for _ in range(2):
        prompt.by_kernels()
        assert engine.rows.length.tolist() == [20, 0]


class FakeEngine:
    """Held by a circle, as an engine may be: only a collection frees it."""

    def __init__(self):
        self.me = self


def test_each_engine_is_gone_before_the_next_one_is_made(monkeypatch):
    """A cache of 128 rows takes 40 GB; what is freed but cached cannot be given back during a capture."""
    engines, events = [], []

    def timed(models, *, num_rows, **more):
        events.append("begin")
        assert not any(engine() for engine in engines)
        engines.append(weakref.ref(FakeEngine()))
        return {"rows": num_rows}

    for name in ("time_step", "time_engine", "time_chosen_widths"):
        monkeypatch.setattr(gpu_step, name, timed)
    monkeypatch.setattr(gpu_step, "copy_ceiling", lambda: 1e12)
    loaded = tiny.load("float64"), tiny.plan("float64")
    monkeypatch.setattr(gpu_step, "load", lambda *args, **settings: loaded)
    monkeypatch.setattr(gpu_step, "_print", lambda *args: None)
    monkeypatch.setattr(gpu_step, "_print_served", lambda *args: None)
    monkeypatch.setattr(gpu_step.record, "save", lambda path, result: events.append(result))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("release"))
    flags = ["--rows", "128", "--width", "1", "8", "--engine", "--chosen-widths", "--committed", "4"]
    monkeypatch.setattr(sys, "argv", ["gpu_step", *flags])
    gc.disable()
    try:
        gpu_step.main()
    finally:
        gc.enable()
    assert events[:-1] == ["release", *["begin", "release"] * 4]
    assert [len(events[-1][name]) for name in ("steps", "engine", "chosen_widths")] == [2, 1, 1]
