"""The estimate against what was measured on an H200: every recorded step of the two shapes within 15 %."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blockdraft.machine.cards import card_by_key
from blockdraft.planner.estimate import committed, estimate_step, experts_touched, tokens_per_s
from blockdraft.planner.memory_fit import fit_native
from tests.planner.shapes import on, opened

CARD = card_by_key("h200")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu-h200.json"
TOLERANCE = 0.15


def shape_of(run):
    words = run["command"].split()
    return words[words.index("--shape") + 1] if "--shape" in words else "qwen3-8b"


def runs():
    for run in json.loads(RESULTS.read_text())["runs"]:
        if "steps" in run and shape_of(run) in ("qwen3-8b", "smollm2-135m"):
            yield run


def planned(run):
    settings = run.get("settings") or {}
    is_plain = "plain" in run.get("run", "")
    wanted, pair = opened(
        shape_of(run),
        has_draft=not is_plain,
        quantization=settings.get("quantization", "none"),
        draft_quantization=settings.get("draft_quantization", "none"),
    )
    return fit_native(wanted, on("h200"), pair), pair


STEPS = [(run, step) for run in runs() for step in run["steps"]]
SERVED = [(run, one) for run in runs() for one in run["engine"]]


def name(value):
    if "command" in value:
        return shape_of(value)
    return f"{value['rows']}x{value['width']}-{value['context']}"


def test_both_shapes_were_measured():
    assert {shape_of(run) for run, _ in STEPS} == {"qwen3-8b", "smollm2-135m"}
    assert len(STEPS) > 10
    assert SERVED


@pytest.mark.parametrize(("run", "step"), STEPS, ids=name)
def test_a_step_takes_as_long_as_was_measured(run, step):
    fit, pair = planned(run)
    found = estimate_step(fit, pair, CARD, rows=step["rows"], context=step["context"], width=step["width"])
    assert found.seconds * 1e3 == pytest.approx(step["ms"], rel=TOLERANCE)
    assert found.weight_bytes + found.cache_bytes == step["bytes"]


@pytest.mark.parametrize(("run", "one"), SERVED, ids=name)
def test_tokens_per_second_are_those_of_the_engine(run, one):
    fit, pair = planned(run)
    step = estimate_step(fit, pair, CARD, rows=one["rows"], context=one["context"], width=one["width"])
    found = tokens_per_s(step, one["committed_per_step"])
    assert found == pytest.approx(one["tokens_per_s"], rel=TOLERANCE)


def test_a_narrower_verify_commits_less_and_one_token_at_the_least():
    rates = [committed(6.5, width=width, block=16) for width in (1, 2, 4, 8, 16)]
    assert rates == sorted(rates)
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(6.5)


def test_the_more_tokens_the_more_experts_are_read():
    _, pair = opened("qwen3.5-35b-a3b")
    shape = pair.target.shape
    assert experts_touched(shape, 1) == pytest.approx(8 / 256)
    assert experts_touched(shape, 16) == pytest.approx(0.398, abs=0.005)
    assert experts_touched(shape, 10_000) == pytest.approx(1.0)
    assert experts_touched(replace(shape, num_experts=0), 16) == 0.0


def test_a_sliding_layer_reads_its_window():
    settings, pair = opened("gpt-oss-20b", has_draft=False)
    fit = fit_native(settings, on("h200"), pair)
    step = estimate_step(fit, pair, CARD, rows=3, context=32768, width=1)
    assert step.cache_bytes == 3 * (12 * 128 + 12 * 32768) * 2 * 8 * 64 * 2
