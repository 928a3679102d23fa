"""A plain run and a speculative one, joined: what comes out is what one run of both arms would have said."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from blockdraft.bench.compare import refuse_other_models
from blockdraft.bench.join import is_joinable, join
from blockdraft.bench.layout import terminal
from blockdraft.bench.report import NO_BASELINE, build, load_report, to_json
from blockdraft.errors import BenchError
from tests.bench.answers import HOSTILE, arms, facts, workloads


def shown(report):
    out = io.StringIO()
    Console(file=out, width=160, color_system=None).print(terminal(report))
    return " ".join(out.getvalue().split())


def two_runs(groups, tmp_path=None, **more):
    """The groups of both arms as two reports, plain and speculative, read from files."""
    found = []
    for arm in ("plain", "speculative"):
        report = build([one for one in groups if one.arm == arm], **facts(**more))
        found.append(json.loads(to_json(report)))
    return found


def test_two_runs_say_what_one_run_of_both_arms_says():
    groups = workloads(gain=3.0)
    groups[0].answers[1].text = "something else"
    whole = build(groups, **facts(baseline=facts()["endpoint"]))
    plain, speculative = two_runs(groups)
    assert (plain["pairs"], speculative["pairs"]) == ([], [])
    joined = join(plain, speculative)
    for mine, theirs in zip(joined["pairs"], whole["pairs"], strict=True):
        assert mine["verdict"] == theirs["verdict"]
        assert mine["agreement"]["first_turns"] == theirs["agreement"]["first_turns"]
        for name in ("tokens_per_s", "tpot"):
            assert mine["speedup"][name]["value"] == pytest.approx(theirs["speedup"][name]["value"])
            assert mine["speedup"][name]["interval"] == pytest.approx(theirs["speedup"][name]["interval"])
    assert joined["baseline"] == plain["endpoint"]
    assert joined["warnings"][-1].startswith("code at 1: with and without speculation, 1 of 6 greedy answers")
    assert "two runs, A (2026-11-15T12:00:00Z) and B" in joined["notes"][0]
    assert "Speculation pays: code at 1, 8; prose at 1, 8." in shown(joined)


def test_the_order_of_the_files_does_not_matter():
    plain, speculative = two_runs(arms(8), notes=["a note", NO_BASELINE])
    assert is_joinable(plain, speculative)
    assert is_joinable(speculative, plain)
    there, back = join(plain, speculative), join(speculative, plain, ("B", "A"))
    assert there == back
    assert there["notes"][1:] == ["a note"]  # each once, and there is a baseline now
    assert not is_joinable(plain, plain)
    assert not is_joinable(speculative, build(arms(8), **facts()))  # which has its own baseline


def test_a_joined_report_is_a_report(tmp_path):
    path = tmp_path / "joined.json"
    path.write_text(to_json(join(*two_runs(arms(8)))))
    assert len(load_report(path)["pairs"]) == 1


def test_reports_that_kept_no_answers_give_ratios_without_a_verdict():
    plain, speculative = two_runs(arms(8, gain=2.0))
    for report in (plain, speculative):
        del report["cells"][0]["answers"]
    (pair,) = join(plain, speculative)["pairs"]
    assert pair["speedup"]["tpot"] == {"value": pytest.approx(2.0), "interval": None}
    assert (pair["verdict"], pair["agreement"]) == ("too little", None)


def with_max_tokens(groups, count):
    for one in groups:
        for given in one.answers:
            given.ask = replace(given.ask, max_tokens=count)
    return groups


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            arms(8, concurrency=8),
            "p.json measured code at 1, d.json did not: join two runs of the same loads.",
        ),
        (arms(8, workload="prose"), "p.json measured code at 1, d.json did not"),
        (arms(8) + arms(8, concurrency=4), "d.json measured code at 4, p.json did not"),
        (
            with_max_tokens(arms(8), 128),
            "code at 1: p.json asked with max_tokens 64, d.json with 128: join two",
        ),
        (arms(7), "code at 1: p.json asked with prompts_hash"),
    ],
)
def test_runs_of_other_loads_or_questions_are_refused_by_name(groups, message):
    plain, _ = two_runs(arms(8))
    _, speculative = two_runs(groups)
    with pytest.raises(BenchError) as caught:
        join(plain, speculative, ("p.json", "d.json"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_runs_of_two_models_are_refused_by_name():
    plain, _ = two_runs(arms(8))
    _, other = two_runs(arms(8), endpoint=facts()["endpoint"] | {"model": HOSTILE})
    with pytest.raises(BenchError, match=r"p.json is of 'a/model', d.json is of '.*': two models") as caught:
        refuse_other_models(plain, other, ("p.json", "d.json"))
    assert "\x1b" not in str(caught.value)


def test_another_machine_or_engine_is_said_loudly():
    plain, _ = two_runs(arms(8))
    _, other = two_runs(
        arms(8),
        machine={"cpu": "another", "num_cpus": 2, "gpus": []},
        endpoint=facts()["endpoint"] | {"kind": "sglang"},
    )
    joined = join(plain, other, ("p.json", "d.json"))
    assert joined["warnings"] == [
        "NOT COMPARABLE: machine (cpu): a CPU in p.json, another in d.json.",
        "NOT COMPARABLE: server (kind): blockdraft in p.json, sglang in d.json.",
    ]


def test_damaged_answers_are_refused():
    plain, speculative = two_runs(arms(8))
    plain["cells"][0]["answers"]["tokens"].pop()
    with pytest.raises(BenchError, match="the columns of 'answers' differ in length"):
        join(plain, speculative)
