"""Two reports side by side."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from blockdraft.bench.compare import compare, terminal, to_json
from blockdraft.bench.report import build
from blockdraft.errors import BenchError
from tests.bench.answers import HOSTILE, answer, arms, facts, group, prompts


def shown(comparison, width=200):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(terminal(comparison))
    return out.getvalue()


def report(*groups, **more):
    return build(list(groups) or arms(8), **facts(**more))


def timed(factor, **of_group):
    """Eight prompts that take between 2 and 2.7 s, times a factor."""
    answers = [
        answer(one, ttft_s=0.5 * factor, latency_s=factor * (2.0 + number / 10))
        for number, one in enumerate(prompts(8))
    ]
    return group(answers, busy_s=sum(one.latency_s for one in answers), **of_group)


def changes(comparison, place=0):
    return {change.figure: change for change in comparison.matches[place].changes}


def test_a_report_equals_itself():
    comparison = compare(report(), report())
    assert (comparison.warnings, comparison.differences) == ((), ())
    assert (comparison.only_a, comparison.only_b) == ((), ())
    assert [match.arm for match in comparison.matches] == ["speculative", "plain"]
    found = changes(comparison)
    assert all(change.ratio == 1.0 and change.overlaps for change in found.values())
    assert {change.outcome for change in found.values()} == {"within noise"}
    assert changes(comparison, place=1)["speedup"].ratio is None


def test_twice_as_fast_is_better_in_every_figure():
    found = changes(compare(report(timed(2.0)), report(timed(1.0))))
    assert found["tokens_per_s"].ratio == pytest.approx(2.0)
    assert found["ttft_ms"].ratio == pytest.approx(0.5)
    for figure in ("tokens_per_s", "request_tokens_per_s", "ttft_ms", "tpot_ms"):
        assert (found[figure].overlaps, found[figure].outcome) == (False, "better"), figure
    assert found["committed_per_step"].outcome == "within noise"
    back = changes(compare(report(timed(1.0)), report(timed(2.0))))
    assert {back[figure].outcome for figure in ("tokens_per_s", "ttft_ms", "tpot_ms")} == {"worse"}


def test_a_little_faster_is_within_noise():
    change = changes(compare(report(timed(1.02)), report(timed(1.0))))["tokens_per_s"]
    assert change.ratio == pytest.approx(1.02)
    assert (change.overlaps, change.outcome) == (True, "within noise")


def test_without_intervals_nothing_is_claimed():
    one, two = (timed(factor) for factor in (2.0, 1.0))
    few = [
        replace(of, answers=of.answers[:2], busy_s=sum(x.latency_s for x in of.answers[:2]))
        for of in (one, two)
    ]
    change = changes(compare(report(few[0]), report(few[1])))["tokens_per_s"]
    assert (change.overlaps, change.outcome) == (None, "unknown")
    assert change.ratio == pytest.approx(2.0)


def test_the_speedup_is_compared_in_the_speculative_cell():
    change = changes(compare(report(*arms(8, gain=2.0)), report(*arms(8, gain=4.0))))["speedup"]
    assert change.outcome == "better"
    assert change.ratio > 1.5


def test_cells_of_one_report_only_are_listed():
    comparison = compare(
        report(timed(1.0), timed(1.0, concurrency=8)), report(timed(1.0), timed(1.0, depth=4096))
    )
    assert len(comparison.matches) == 1
    assert comparison.only_a == ("code at 8, T 0, speculative",)
    assert comparison.only_b == ("code at 1, depth 4096, T 0, speculative",)
    assert "Only in A: code at 8" in shown(comparison)


def test_runs_of_other_loads_are_refused_by_name():
    with pytest.raises(BenchError) as caught:
        compare(report(timed(1.0)), report(timed(1.0, workload="prose")), ("a.json", "b.json"))
    expected = "a.json has code at 1, T 0, speculative, b.json has prose at 1, T 0, speculative."
    assert str(caught.value) == f"the reports have no load in common: {expected}"


def with_max_tokens(count):
    of = timed(1.0)
    for one in of.answers:
        one.ask = replace(one.ask, max_tokens=count)
    return of


def test_cells_that_differ_in_temperature_alone_are_matched_with_a_warning():
    comparison = compare(report(timed(1.0)), report(timed(1.0, temperature=0.7)))
    assert len(comparison.matches) == 1
    assert comparison.warnings[0].startswith("temperature: 0.0 in A, 0.7 in B.")
    both = report(timed(1.0), timed(1.0, temperature=0.7))
    exact = compare(both, both)
    assert (len(exact.matches), exact.warnings) == (2, ())


def test_a_temperature_that_could_be_either_is_not_guessed():
    both = timed(1.0, temperature=0.5), timed(1.0, temperature=0.7)
    comparison = compare(
        report(*both, timed(1.0, concurrency=8)), report(timed(1.0), timed(1.0, concurrency=8))
    )
    assert len(comparison.matches) == 1
    assert (len(comparison.only_a), len(comparison.only_b)) == (2, 1)


@pytest.mark.parametrize(
    ("a", "b", "warning"),
    [
        (
            {},
            {"machine": {"cpu": "another", "num_cpus": 2, "gpus": []}},
            "machine (cpu): a CPU in A, another in B",
        ),
        ({}, {"machine": {"cpu": "a CPU", "num_cpus": 2, "gpus": [{"name": "H200"}]}}, "machine (gpus)"),
    ],
)
def test_runs_that_cannot_be_compared_say_so_loudly(a, b, warning):
    comparison = compare(report(timed(1.0), **a), report(timed(1.0), **b))
    assert [warning in line for line in comparison.warnings] == [True]
    assert f"NOT COMPARABLE: {warning}" in shown(comparison)


def test_other_prompts_and_lengths_forbid_comparing():
    other = timed(1.0)
    other.answers[0].ask = replace(
        other.answers[0].ask, prompt=replace(other.answers[0].ask.prompt, turns=("other",))
    )
    assert compare(report(timed(1.0)), report(other)).warnings[0].startswith("prompts_hash: ")
    assert compare(report(timed(1.0)), report(with_max_tokens(128))).warnings == (
        "max_tokens: 64 in A, 128 in B. Cells: code at 1, T 0, speculative.",
    )


def test_salts_of_two_runs_forbid_nothing():
    def run(salt):
        of = timed(1.0)
        for one in of.answers:
            words = one.ask.prompt
            one.ask = replace(
                one.ask, prompt=replace(words, turns=(f"[run {salt}]\n{words.turns[0]}",)), original=words
            )
        return report(of)

    assert compare(run("a1"), run("b2")).warnings == ()
    assert compare(run("a1"), report(timed(1.0))).warnings == ()


def test_another_drafter_or_engine_is_what_one_compares():
    endpoint = facts()["endpoint"] | {
        "kind": "vllm",
        "version": "0.32",
        "drafter_hash": "ffff",
        "kv_dtype": "tq4",
    }
    comparison = compare(report(timed(1.0)), report(timed(1.0), endpoint=endpoint))
    assert comparison.warnings == ()
    assert [line.split(":")[0] for line in comparison.differences] == [
        *("kind", "version", "drafter_hash", "kv_dtype")
    ]


def test_the_comparison_is_rendered_two_ways():
    comparison = compare(report(timed(2.0)), report(timed(1.0)))
    assert "2.00x*" in shown(comparison)
    found = json.loads(to_json(comparison))
    assert found["matches"][0]["changes"][0]["figure"] == "tokens_per_s"


def test_eighty_columns_hold_every_name_and_figure():
    def at(factor):
        setting = {"workload": "spec_bench", "category": "translation", "concurrency": 32}
        return report(timed(factor, depth=32768, temperature=0.7, **setting), timed(factor, **setting))

    text = shown(compare(at(200.0), at(100.0)), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    words = " ".join(text.split())
    for name in ("spec_bench / translation at 32,", "depth 32768,", "T 0.7,", "T 0,", "speculative"):
        assert name in words
    for line in (r"TTFT p50 ms +100,000 +50,000 +0\.50x\*", r"tok/s a request +0\.02 +0\.05 +2\.00x\*"):
        assert len(re.findall(line, text)) == 2, line


def test_hostile_names_stay_text():
    hostile = report(
        timed(1.0, workload=HOSTILE), timed(1.0), endpoint=facts()["endpoint"] | {"kind": HOSTILE}
    )
    comparison = compare(hostile, report(timed(1.0)))
    assert "\x1b" not in shown(comparison) + to_json(comparison)
    assert "alert(1)" in shown(comparison)
