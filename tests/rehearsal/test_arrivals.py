"""The benchmark of arriving requests, on a shape that takes no time."""

from argparse import Namespace
from dataclasses import replace

import pytest

from benchmarks.arrivals import measure
from benchmarks.on_card import load


@pytest.mark.slow  # the whole of a benchmark
def test_every_request_that_arrives_is_measured():
    models, plan = load("tiny", has_drafter=True, max_num_seqs=2, max_model_len=80, device="cpu")
    models = replace(models, rates=(0.5,) * (plan.block - 1))
    args = Namespace(turns=False, prompt=40, answer=20, rate=30.0, seconds=0.4, capacity_seconds=0.1)
    found = measure(models, plan, args)
    assert 2 < found["num_requests"] < 50
    assert found["capacity_tokens_per_s"] > found["capacity_requests_per_s"] > 0
    assert found["tpot_ratio"] >= 1
    assert found["ttft_p99_ms"] >= found["ttft_p50_ms"] > 0
