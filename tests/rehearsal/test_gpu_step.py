"""What benchmarks/gpu_step.py can do without a card: serve with widths that are chosen step by step."""

from dataclasses import replace

from benchmarks import gpu_step
from blockdraft.settings.acceptance_profile import acceptance_rates
from tests import tiny


def test_governed_requests_are_timed_with_drafts_kept_by_rates(monkeypatch):
    monkeypatch.setattr(gpu_step, "SETTLING", 2)
    monkeypatch.setattr(gpu_step, "GOVERNED", 8)
    monkeypatch.setattr("blockdraft.start.block_width.STEADY", 1e9)  # whatever the machine does meanwhile
    models = tiny.engine(max_rows=2, width=8).models
    models = replace(models, rates=acceptance_rates("mean:4", width=8, block=8))
    found = gpu_step.time_governed(models, num_rows=2, context=16)
    assert 1 <= found["committed_per_step"] <= found["mean_width"] <= 8
    assert found["tokens_per_s"] > 0
    assert "on the synthetic acceptance" in found["reason"]
