"""The width that a start chooses: what drafts commit against what steps cost."""

import json
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from blockdraft import LLM, SamplingParams
from blockdraft.checkpoints.fit_file import read_fit
from blockdraft.engine.describe import engine_info
from blockdraft.errors import ModelError
from blockdraft.phases import StartProgress
from blockdraft.server.page.metrics import render
from blockdraft.settings.settings import Settings, cache_dir
from blockdraft.start import block_width as width
from blockdraft.start import start_engine as start
from blockdraft.start.block_width import (
    BUSY_GUESS,
    TOO_BUSY,
    Costs,
    choose_width,
    choose_widths,
    committed,
    measure_costs,
    plan_with_width,
    speedups,
)
from blockdraft.start.start_engine import start_engine
from tests import stepping, tiny

# 1 + sum: 2.9 and 1.9 at width 4, 3.3 and 2.1 at width 8.
CODE = (0.8, 0.6, 0.5, 0.2, 0.1, 0.05, 0.05)
PROSE = (0.5, 0.3, 0.1, 0.1, 0.05, 0.03, 0.02)
BOTH = {"code": CODE, "prose": PROSE}
SMALL = {"device": "cpu", "dtype": "float64", "max_model_len": 128, "max_num_seqs": 2}


def costs(**by_width):
    """As multiples of a plain step of 10 ms: w4=1.5."""
    return Costs(0.010, {int(name[1:]): 0.010 * ratio for name, ratio in by_width.items()})


# ---- the choice


def test_the_best_mean_wins():
    found = choose_width(BOTH, costs(w2=1.2, w4=1.5, w8=2.0), caution=1.0)
    assert found.width == 4  # means: 1.38, 1.60, 1.35
    assert found.reason == "expected 1.6x (1.3x on prose)"


def test_a_width_that_slows_one_category_down_is_not_chosen():
    """Width 8 has the better mean, but prose would be slower than without drafts."""
    cheap = costs(w2=1.2, w8=2.0)
    assert choose_width({"code": CODE, "prose": PROSE}, costs(w8=2.0), caution=1.0).width == 8
    assert choose_width({"code": CODE, "prose": (0.5, 0.3)}, cheap, caution=1.0).width == 2
    gains = speedups({"code": CODE, "prose": (0.5, 0.3)}, cheap, 8)
    assert gains["prose"] < 1 < gains["code"]


def test_less_than_the_margin_is_not_enough():
    assert choose_width({"prose": (0.5,)}, costs(w2=1.5 / 1.029), caution=1.0).width == 1
    assert choose_width({"prose": (0.5,)}, costs(w2=1.5 / 1.031), caution=1.0).width == 2


def test_where_no_width_pays_decoding_is_plain():
    found = choose_width(BOTH, costs(w2=1.9, w4=2.5, w8=4.0), caution=1.0)
    assert found.width == 1
    assert "4 tokens tried per step would give 0.96x (0.76x on prose)" in found.reason


def test_of_widths_that_are_as_good_the_narrowest_is_taken():
    gains = {"x": (0.5, 0.5, 0.5)}
    assert choose_width(gains, costs(w2=1.0, w4=1.66), caution=1.0).width == 2  # 1.500 against 1.506
    assert choose_width(gains, costs(w2=1.0, w4=1.60), caution=1.0).width == 4


def test_prompts_may_be_harder_than_those_of_the_fit():
    """At three quarters of the acceptance width 4 no longer pays for prose, and width 2 does."""
    prices = costs(w2=1.3, w4=1.75)
    assert choose_width(BOTH, prices, caution=1.0).width == 4
    assert choose_width(BOTH, prices).width == 2
    assert 1 + 0.75 * 0.5 > 1.03 * 1.3
    assert 1 + 0.75 * 0.5 + 0.75**2 * 0.3 + 0.75**3 * 0.1 < 1.03 * 1.75


@pytest.mark.parametrize(("at", "expected"), [(1, 1.0), (2, 1.8), (4, 2.9), (8, 3.3), (16, 3.3)])
def test_a_step_commits_its_accepted_drafts_and_one_more(at, expected):
    assert committed(CODE, at) == pytest.approx(expected)


# ---- fit.json


def test_the_sum_of_the_categories_is_none_of_them():
    raw = {name: {"accepted_by_position": [0.5, 0]} for name in ("code", "all")}
    assert read_fit(raw, name="x") == {"code": (0.5, 0.0)}
    assert read_fit({"all": raw["all"]}, name="x") == {"all": (0.5, 0.0)}
    assert read_fit({}, name="x") == {}


@pytest.mark.parametrize("shares", [None, [], 0.5, [0.5, 1.5], [True], ["0.5"], [-0.1]])
def test_a_file_that_says_nothing_of_use_is_refused(shares):
    with pytest.raises(ModelError, match=r"'x': fit.json: code has no accepted_by_position"):
        read_fit({"code": {"accepted_by_position": shares}}, name="x")


# ---- measuring


def scripted(monkeypatch, seconds):
    """`seconds(width, number)` is what a width's number-th step takes; returns the widths as they ran."""
    ran = []

    def step_s(engine, at, pages, clock):
        ran.append(at)
        return seconds(at, ran.count(at) - 1)

    monkeypatch.setattr(width, "_step_s", step_s)
    return ran


def test_widths_take_turns_and_the_fastest_counts(monkeypatch):
    ran = scripted(monkeypatch, lambda at, number: 0.01 + 0.001 * at + (0.5, 0.0, 0.001)[number])
    found = measure_costs(tiny.engine(), {"x": (1.0,) * 7})
    assert ran == [1, 2, 3, 4, 6, 8] * 3
    assert found.plain_s == pytest.approx(0.011)
    assert found.by_width == pytest.approx({at: 0.01 + 0.001 * at for at in (2, 3, 4, 6, 8)})


TRUTH = {1: 1.0, 2: 1.42, 3: 1.53, 4: 1.68, 6: 2.0, 8: 2.4}  # two cores and the default model
FALLING = {"code": (0.85, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3), "prose": (0.7, 0.5, 0.35, 0.25, 0.2, 0.15, 0.1)}


def noisy(monkeypatch, seed):
    """Spells of a busy machine, and steps that wait for a core; returns what is measured."""
    draw = np.random.default_rng(seed)
    spells = np.repeat(draw.choice([1.0, 1.0, 2.0, 5.0], 40), 10)
    factors = iter(spells * np.where(draw.random(400) < 0.3, draw.uniform(1, 4, 400), 1.0))
    scripted(monkeypatch, lambda at, number: TRUTH[at] * next(factors))
    return measure_costs(tiny.engine(), FALLING)


def test_noise_never_gives_a_speedup_beyond_the_tokens_of_a_step(monkeypatch):
    for seed in range(30):
        found = noisy(monkeypatch, seed)
        for at in found.by_width:
            for category, gain in speedups(FALLING, found, at).items():
                assert gain <= committed(FALLING[category], at) + 1e-9
        by_width = list(found.by_width.values())
        assert [found.plain_s, *by_width] == sorted([found.plain_s, *by_width])


def test_noise_hardly_changes_the_width(monkeypatch):
    wanted = choose_width(FALLING, Costs(1.0, {at: s for at, s in TRUTH.items() if at > 1})).width
    order = [1, 2, 3, 4, 6, 8]
    away = []
    for seed in range(30):
        found = noisy(monkeypatch, seed)
        chosen = choose_width(FALLING, found)
        away.append(abs(order.index(chosen.width) - order.index(wanted)))
        assert ("expected" in chosen.reason) <= found.is_steady, "what was disturbed is no expectation"
    assert np.mean(np.array(away) <= 1) >= 0.8, away


def test_a_wider_step_that_took_less_was_not_measured_right(monkeypatch):
    scripted(monkeypatch, lambda at, number: 3.0 if at == 1 else 1.0 + 0.1 * at)
    found = measure_costs(tiny.engine(), FALLING)
    assert not found.is_steady
    assert found.plain_s == found.by_width[2] == pytest.approx(1.2)
    warnings = []
    plan = plan_with_width(tiny.engine(), FALLING, warn=warnings.append)
    assert warnings == [TOO_BUSY]
    assert not plan.is_sure_of_costs
    assert plan.reasons["width"] == BUSY_GUESS


def test_what_cannot_be_the_best_is_not_run(monkeypatch):
    """Width 3 costs more than all drafts together could commit, so nothing wider has to be looked at."""
    ran = scripted(monkeypatch, lambda at, number: {1: 1.0, 2: 1.1}.get(at, 10.0))
    assert set(measure_costs(tiny.engine(), BOTH).by_width) == {2, 3}
    assert set(ran) == {1, 2, 3}


def test_times_of_which_no_two_are_alike_are_a_beginning_and_a_warning(monkeypatch):
    """Also where none of them pays: the steps that serve will tell, and nobody has to start again."""
    monkeypatch.setattr(width, "_store", lambda file, found: pytest.fail("stored"))
    for price, chosen in ((1.1, 2), (9.0, 1)):
        ran = scripted(monkeypatch, lambda at, number, price=price: 2.0**number * (1.0 if at == 1 else price))
        found = measure_costs(tiny.engine(), {"x": (0.9,)})
        assert not found.is_steady
        assert ran.count(1) == width.MAX_ROUNDS
        warnings = []
        plan = plan_with_width(tiny.engine(), {"x": (0.9,)}, warn=warnings.append)
        assert plan.width == chosen
        assert warnings == [TOO_BUSY]
        assert plan.step_costs.keys() >= {(1, 1), (1, 2)}
        assert plan.draft_chances


def test_a_busy_gpu_keeps_the_whole_block(monkeypatch):
    scripted(monkeypatch, lambda at, number: 2.0**number)
    engine = tiny.engine(width=8)
    engine.models = replace(engine.models, device=torch.device("cuda"))
    assert plan_with_width(engine, BOTH) == engine.plan
    assert engine.plan.width == 8


def test_a_gpu_chooses_widths_by_steps_of_one_row_and_of_all(monkeypatch, tmp_path):
    """Also where no draft pays for the fit's prompts: a text on which they do may come."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    engine = stepping.pin(tiny.engine(width=8, max_num_seqs=6), is_captured=False, sizes=[1, 2, 4, 6])
    engine.graphs.capture([1, 2, 4, 6], [1, 8])
    engine.models = replace(engine.models, device=torch.device("cuda"))
    monkeypatch.setattr(engine, "wait", lambda: None)
    any_time_will_do(monkeypatch)
    for prices, chosen in ((costs(w8=1.5), 8), (costs(w8=9.0), 1)):
        measured(monkeypatch, prices)
        plan = plan_with_width(engine, BOTH, stores=False)
        assert plan.width == chosen
        assert plan.step_costs.keys() == {(1, 1), (1, 8), (6, 1), (6, 8)}
        assert plan.draft_chances


def test_captured_steps_are_measured_for_as_many_rows_as_a_graph_runs():
    engine = stepping.pin(tiny.engine(width=8, max_num_seqs=6), is_captured=False, sizes=[1, 2, 4, 6])
    engine.graphs.capture([1, 2, 4, 6], [1, 8])
    assert width.measure_several(engine, 8, most=6).keys() == {(6, 1), (6, 8)}
    assert width.measure_several(engine, 8, most=5).keys() == {(4, 1), (4, 8)}


def test_a_step_that_is_timed_fills_its_graph():
    engine = stepping.pin(tiny.engine(width=8, max_num_seqs=6), is_captured=False, sizes=[1, 4])
    engine.graphs.capture([1, 4], [1, 8])
    width._step_s(engine, 8, list(range(2, 5)), time.perf_counter, num_rows=3)
    assert engine.rows.active.tolist() == [0, 1, 2, engine.rows.max_rows]


def test_rates_by_which_drafts_are_accepted_are_the_chances(monkeypatch):
    rates = (0.8, 0.4, 0.2, 0.1, 0.1, 0.0, 0.0)
    engine = tiny.engine()
    engine.models = replace(engine.models, rates=rates)
    seen = measured(monkeypatch, costs(w2=1.2, w3=1.3, w8=2.0))
    choose_widths(engine)
    plan = engine.plan
    assert seen == [{"the synthetic acceptance": rates}]
    assert plan.width == 3  # (1 + 0.8 + 0.4) / 1.3: exactly so often, not more carefully
    assert plan.draft_chances == pytest.approx((0.8, 0.5, 0.5, 0.5, 1.0, 0.0, 0.0))


def test_a_captured_step_is_measured_as_it_is_captured(monkeypatch):
    """Others would run kernel by kernel, which says nothing of a graph."""
    ran = scripted(monkeypatch, lambda at, number: 1.0 + at)
    engine = tiny.engine(width=6)
    engine.graphs = object()
    engine.models = replace(engine.models, device=torch.device("cuda"))  # where each width is a graph more
    assert measure_costs(engine, BOTH) == Costs(2.0, {6: 7.0})
    assert set(ran) == {1, 6}


def test_time_is_short(monkeypatch):
    ran = scripted(monkeypatch, lambda at, number: 2.0**number)
    moments = iter(range(100))
    assert not measure_costs(tiny.engine(), BOTH, clock=lambda: next(moments)).is_steady
    assert ran.count(1) == width.MIN_ROUNDS


def any_time_will_do(monkeypatch):
    for name in ("STEADY", "SLACK", "FIRST_SLACK"):
        monkeypatch.setattr(width, name, 1e9)


def test_the_real_pair_is_measured_and_left_as_it_was(monkeypatch):
    any_time_will_do(monkeypatch)
    engine = tiny.engine()
    free = engine.scheduler.pages.num_free
    expected = tiny.run(tiny.engine(), [([3, 5, 7], SamplingParams(temperature=0.0, max_tokens=20))])
    found = measure_costs(engine, {"x": (1.0,) * 7})
    assert found.plain_s > 0
    assert set(found.by_width) == {2, 3, 4, 6, 8}
    assert engine.scheduler.pages.num_free == free
    assert not engine.has_work
    assert tiny.run(engine, [([3, 5, 7], SamplingParams(temperature=0.0, max_tokens=20))]) == expected


def test_the_plain_step_has_no_drafter(monkeypatch):
    any_time_will_do(monkeypatch)
    engine, seen = tiny.engine(), []
    absorb, draft = engine.models.drafter.absorb, engine.models.drafter.draft
    drafter = type("Watched", (), {})()
    drafter.block = tiny.BLOCK
    drafter.absorb = lambda features, view: seen.append(len(view.positions)) or absorb(features, view)
    drafter.draft, drafter.follow = draft, engine.models.drafter.follow
    engine.models = replace(engine.models, drafter=drafter)
    measure_costs(engine, {"x": (1.0,) * 7})
    assert set(seen) == {2, 3, 4, 6, 8}


# ---- a start


@pytest.fixture
def fitted(tmp_path, monkeypatch):
    """The pair's drafter with a fit.json, and a folder for what is measured."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(tiny.DRAFT, tmp_path / "draft")
    fit = {name: {"accepted_by_position": list(shares)} for name, shares in BOTH.items()}
    (tmp_path / "draft/fit.json").write_text(json.dumps(fit))
    return str(tmp_path / "draft")


def measured(monkeypatch, found):
    calls = []
    monkeypatch.setattr(width, "measure_costs", lambda engine, acceptance: calls.append(acceptance) or found)
    return calls


def test_the_python_api_measures_once_per_machine(fitted, monkeypatch):
    calls = measured(monkeypatch, costs(w2=1.2, w3=1.3, w8=2.0))
    for _ in range(2):
        plan = LLM(tiny.TARGET, fitted, **SMALL).engine.plan
        assert plan.width == 3
        assert plan.reasons["width"].startswith("expected 1.")
    assert calls == [BOTH]
    LLM(tiny.TARGET, fitted, **SMALL | {"dtype": "float32"})
    assert calls == [BOTH, BOTH], "another dtype is another measurement"


def test_the_python_api_keeps_to_the_longest_stall(monkeypatch):
    monkeypatch.setattr("blockdraft.start.measure._prefill_ms", lambda engine, chunk: float(chunk))
    plan = LLM(tiny.TARGET, None, max_prefill_tokens=64, max_stall_ms=20, **SMALL).engine.plan
    assert plan.max_prefill_tokens == 16


@pytest.mark.parametrize(
    "text", ["", "[]", '{"plain_s": 0, "by_width": {"2": 1}}', '{"plain_s": 1, "by_width": {}}']
)
def test_what_was_stored_wrongly_is_measured_again(fitted, monkeypatch, tmp_path, text):
    calls = measured(monkeypatch, costs(w2=1.2))
    LLM(tiny.TARGET, fitted, **SMALL)
    (file,) = (tmp_path / "cache/widths").iterdir()
    file.write_text(text)
    assert LLM(tiny.TARGET, fitted, **SMALL).engine.plan.width == 2
    assert len(calls) == 2


def test_a_folder_that_cannot_be_written_costs_nothing_else(fitted, monkeypatch, tmp_path):
    measured(monkeypatch, costs(w2=1.2))
    (tmp_path / "cache").write_text("a file")
    assert LLM(tiny.TARGET, fitted, **SMALL).engine.plan.width == 2


def test_where_drafts_lose_requests_may_still_ask_for_them(fitted, monkeypatch):
    measured(monkeypatch, costs(w2=5.0, w8=9.0))
    llm = LLM(tiny.TARGET, fitted, **SMALL)
    plain = llm.generate([[3, 5, 7]], SamplingParams(temperature=0.0, max_tokens=12))[0]
    asked = llm.generate([[3, 5, 7]], SamplingParams(temperature=0.0, max_tokens=12, width=8))[0]
    assert llm.engine.plan.width == 1
    assert llm.engine.plan.step_costs == {}
    assert plain.metrics.drafted == 0
    assert sum(asked.metrics.accepted) > 0
    assert asked.token_ids == plain.token_ids


@pytest.mark.parametrize(
    "changes", [{"width": 4}, {"width": 4, "synthetic_acceptance": "mean:2"}, {"load_format": "dummy"}]
)
def test_nothing_is_measured_where_there_is_nothing_to_choose(fitted, monkeypatch, changes):
    calls = measured(monkeypatch, costs(w2=1.2))
    plan = LLM(tiny.TARGET, fitted, **SMALL | changes).engine.plan
    assert plan.width == changes.get("width", 8)
    assert plan.step_costs == {}
    assert calls == []


def served(draft, **changes):
    startup = StartProgress()
    engine = start_engine(Settings(model=tiny.TARGET, draft=draft, **SMALL | changes), startup)
    return engine, {phase.name: phase.detail for phase in startup.phases()}, startup


def test_a_server_says_which_width_it_serves_and_why(fitted, monkeypatch):
    warmed = []
    monkeypatch.setattr(start, "warm", lambda engine, note, choose: warmed.append(engine.plan.width))
    measured(monkeypatch, costs(w2=1.2, w3=1.3, w8=2.0))
    engine, details, startup = served(fitted)
    plan = engine.plan
    reason = plan.reasons["width"]
    assert details["warm"] == f"speculation: on, 3 tokens tried per step to begin with; {reason}"
    alone = {(1, 1): 0.010, (1, 2): 0.010 * 1.2, (1, 3): 0.010 * 1.3, (1, 8): 0.010 * 2.0}
    assert plan.step_costs.items() >= alone.items()
    assert {place for place in plan.step_costs if place[0] > 1} == {(2, 1), (2, 3)}, (
        "as many rows as there are"
    )
    assert len(plan.draft_chances) == 7
    assert details["verify"].endswith(f"; speculation: on, 3 tokens tried per step to begin with; {reason}")
    assert startup.warnings == ()
    assert warmed == [3], "what is served is what was warmed"
    info = engine_info(engine)
    assert (info.width, info.width_reason, info.block) == (3, reason, 8)
    assert b"blockdraft:width{" in render([engine.snapshot()], info, "x")[0]
    assert b"blockdraft:speculation_speedup{" not in render([engine.snapshot()], info, "x")[0], (
        "none is known yet"
    )
    assert b'model_name="x"} 3.0' in render([engine.snapshot()], info, "x")[0]


def test_a_start_that_measures_another_width_or_chunk_finds_all_verified(fitted, monkeypatch):
    monkeypatch.setattr(start, "warm", lambda engine, note, choose: None)
    chunks = iter([64, 32])
    monkeypatch.setattr(
        start, "measure_chunk", lambda engine, note: replace(engine.plan, max_prefill_tokens=next(chunks))
    )
    for found, expected in ((costs(w2=1.2, w3=1.3, w8=2.0), (3, 64)), (costs(w2=1.2, w8=9.0), (2, 32))):
        measured(monkeypatch, found)
        shutil.rmtree(cache_dir() / "widths", ignore_errors=True)
        engine, details, _ = served(fitted, max_stall_ms=50)
        assert (engine.plan.width, engine.plan.max_prefill_tokens) == expected
    assert details["verify"].startswith("verified on 20")


def test_without_a_fit_the_built_in_prompts_have_to_say(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    calls = measured(monkeypatch, costs(w2=1.1, w8=9.0))
    engine, details, _ = served(tiny.DRAFT)
    (acceptance,) = calls
    assert list(acceptance) == ["the built-in prompts"]
    assert sum(acceptance["the built-in prompts"]) > 1, "the pair's drafter fits"
    assert engine.plan.width == 2
    assert "x on the built-in prompts)" in details["verify"]
    assert served(tiny.DRAFT, verify="off")[0].plan.width == 8
    assert len(calls) == 1
    assert not (tmp_path / "widths").exists(), "nobody would look it up"


def test_a_drafter_that_is_dropped_is_not_measured(fitted, monkeypatch):
    calls = measured(monkeypatch, costs(w2=1.1))
    monkeypatch.setattr(start, "verify_changes", lambda engine, note, is_full: start_verification())
    engine, _, startup = served(fitted)
    assert engine.models.draft_config is None
    assert (engine.plan.width, len(calls)) == (1, 1)
    assert startup.warnings == ("the drafter is not used: no",)


def start_verification():
    from blockdraft.check.selfcheck import Verification

    return Verification((), 1.0, keeps_drafter=False, reason="no", accepted=(0.0,) * 7)


def test_chances_of_places_come_from_the_mean_of_all_categories():
    found = width.chances_of({"one": (0.8, 0.4), "other": (0.4, 0.2)}, block=5)
    assert found == pytest.approx((0.6 * 0.75, 0.5 * 0.75, 0.5 * 0.75, 0.5 * 0.75))


def test_several_rows_are_measured_where_there_is_room():
    engine = tiny.engine(max_num_seqs=4)
    free = engine.scheduler.pages.num_free
    found = width.measure_several(engine, 3, most=4)
    assert found.keys() == {(4, 1), (4, 3)}
    assert min(found.values()) > 0
    assert engine.scheduler.pages.num_free == free
    assert width.measure_several(tiny.engine(max_num_seqs=1), 3, most=4) == {}
