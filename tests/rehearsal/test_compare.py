"""A whole rehearsal with made-up results: which changes count as worse, and which steps are left out."""

import json
from dataclasses import replace

import pytest

from benchmarks.rehearsal import __main__ as rehearsal
from benchmarks.rehearsal import compare, serving, whole
from benchmarks.rehearsal.children import Children
from benchmarks.rehearsal.compare import Change, Last, Measured, changes, last_result, verdict
from benchmarks.rehearsal.serving import Server
from benchmarks.rehearsal.sheet import Failure, Step, run_steps
from benchmarks.rehearsal.steps import Stage, sizes_of

BEFORE = Measured(
    starts_s={"default, cold": 40.0, "default, warm": 5.0},
    steps_ms={"qwen3-8b, width 1": 4.4},
    graphs={"default, warm": 20},
    equal={"default, alone, width 4, greedy": [64, 64], "default, alone, width 4, sampled": [60, 64]},
)
LAST = Last("rehearsal-h200.json", "2026-11-16 02:44 UTC", "968785c", BEFORE)


def worse_than_before(**now):
    return [change.what for change in changes(BEFORE, replace(BEFORE, **now)) if change.is_worse]


# ---- before and now


@pytest.mark.parametrize(
    ("now", "worse"),
    [
        ({}, []),
        ({"starts_s": {"default, cold": 43.9, "default, warm": 4.0}}, []),
        ({"starts_s": {"default, cold": 44.1, "default, warm": 5.0}}, ["start: default, cold"]),
        ({"steps_ms": {"qwen3-8b, width 1": 4.9}}, ["step: qwen3-8b, width 1"]),
        ({"graphs": {"default, warm": 22}}, []),
        ({"graphs": {"default, warm": 23}}, ["graphs: default, warm"]),
        ({"graphs": {"default, warm": 2}}, []),
        (
            {"equal": {"default, alone, width 4, greedy": [63, 64]}},
            ["equal: default, alone, width 4, greedy"],
        ),
        ({"equal": {"default, alone, width 4, sampled": [60, 64]}}, []),
        ({"equal": {"default, alone, width 4, greedy": [16, 16]}}, []),  # of fewer prompts, all
        (
            {"equal": {"default, alone, width 4, greedy": [15, 16]}},
            ["equal: default, alone, width 4, greedy"],
        ),
        ({"starts_s": {}, "graphs": {"qwen3-8b, cold": 99}}, []),  # not measured twice
    ],
)
def test_more_than_a_tenth_worse_and_every_lost_equality_count(now, worse):
    assert worse_than_before(**now) == worse


def test_what_got_worse_is_named_with_its_numbers():
    found = list(
        changes(BEFORE, replace(BEFORE, starts_s={"default, cold": 50.0}, graphs={"default, warm": 30}))
    )
    with pytest.raises(Failure) as failure:
        verdict(LAST, found, len(BEFORE))
    said = "start: default, cold: 40.00 s -> 50.00 s; graphs: default, warm: 20 -> 30"
    assert str(failure.value) == f"worse than at 968785c (2026-11-16 02:44 UTC): {said}"
    assert len(failure.value.values["changes"]) == len(found)


def test_what_did_not_get_worse_is_counted():
    found = list(changes(BEFORE, BEFORE))
    said = "6 numbers, none worse than at 968785c (2026-11-16 02:44 UTC)"
    assert verdict(LAST, found, len(BEFORE)).says == said
    assert verdict(LAST, found, len(BEFORE) + 2).says == f"{said}; 2 others were not measured then"


def test_without_a_result_there_is_nothing_to_compare_with():
    assert "nothing to compare with" in verdict(None, [], 6).says
    assert compare.lines([]) == []


def test_the_lines_show_every_number_and_equality_only_where_an_answer_differs():
    found = [
        Change("start: default, cold", "40.00 s", "50.00 s", is_worse=True),
        Change("equal: a", "64 of 64", "64 of 64", is_worse=False),
        Change("equal: b", "64 of 64", "63 of 64", is_worse=True),
        Change("equal: c", "60 of 64", "64 of 64", is_worse=False),
    ]
    head, *shown = compare.lines(found)
    assert head.split() == ["against", "the", "last", "result", "before", "now"]
    assert [line.split("  ")[0] for line in shown] == ["start: default, cold", "equal: b", "equal: c"]
    assert shown[0].split()[3:] == ["40.00", "s", "50.00", "s", "WORSE"]
    assert shown[2].endswith("64 of 64")


# ---- which result is the last


def write(folder, name, date, device="cuda (NVIDIA H200)", machine="Xeon", **more):
    one = {"date": date, "commit": name, "device": device, "machine": machine}
    (folder / f"rehearsal-{name}.json").write_text(json.dumps(one | {"measured": BEFORE.as_json()} | more))


def test_the_last_result_is_the_newest_of_the_same_card(tmp_path):
    write(tmp_path, "old", "2026-11-16 02:44 UTC")
    write(tmp_path, "new", "2026-11-17 02:44 UTC", device="cuda:1 (NVIDIA H200)", machine="another host")
    write(tmp_path, "other", "2026-11-18 02:44 UTC", device="cuda (NVIDIA L4)")
    write(tmp_path, "cpu", "2026-11-18 02:44 UTC", device="cpu")
    found = last_result({"device": "cuda (NVIDIA H200)", "machine": "Xeon"}, tmp_path)
    assert (found.commit, found.measured) == ("new", BEFORE)
    assert last_result({"device": "cpu", "machine": "Xeon"}, tmp_path).commit == "cpu"
    assert last_result({"device": "cpu", "machine": "Neoverse"}, tmp_path) is None


def test_a_result_without_numbers_is_none(tmp_path):
    (tmp_path / "rehearsal-h200.json").write_text(json.dumps({"device": "cpu", "machine": "Xeon"}))
    assert last_result({"device": "cpu", "machine": "Xeon"}, tmp_path) is None


@pytest.mark.parametrize("name", ["h200", "neoverse-n1"])
def test_the_committed_results_can_be_compared_with(name):
    result = json.loads((compare.RESULTS / f"rehearsal-{name}.json").read_text())
    assert last_result(result).measured.starts_s.keys() >= {"default, cold", "default, warm"}


# ---- the steps


@pytest.fixture
def stage(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    return Stage(Children(), tmp_path / "stage", "cuda", sizes_of("cuda", is_quick=False), LAST)


def test_on_a_card_the_whole_rehearsal_adds_steps_and_on_a_cpu_it_says_what_it_leaves_out(stage):
    names = [one.name for one in whole.steps_of(stage)]
    added = ["qwen3-8b, cold", "qwen3-8b, warm", "steps", "steps, deep", "steps, qwen3.5-35b-a3b"]
    pairs = ["default", "qwen3-8b", "qwen3.5-35b-a3b"]
    assert names.index("bench") + 1 == names.index("many streams") == names.index("end of server") - 1
    equality = [f"equality, {pair}" for pair in pairs]
    assert names[-10:] == ["first seconds", *added, *equality, "the last result"]
    assert whole.left_out("cuda:0") == []
    stage.device = "cpu"
    assert [one.name for one in whole.steps_of(stage)][-3:] == [
        "first seconds",
        "equality, default",
        "the last result",
    ]
    assert "64 and 256 streams" in whole.left_out("cpu")[0]
    assert "qwen3-8b" in whole.left_out("cpu")[1]
    assert "qwen3.5-35b-a3b, the times of steps of both" in whole.left_out("cpu")[1]


class Fake(Children):
    """Writes a result instead of measuring one."""

    def __init__(self, result):
        super().__init__()
        self.result = result

    def benchmark(self, name, *words, **_):
        self.words = words
        flag = "--json" if name == "gpu_step" else "--out"
        with open(words[words.index(flag) + 1], "w") as file:
            json.dump(self.result, file)


def counted(num_equal, untested=None):
    cell = {"equal": num_equal, "of": 16, "prompt_and_token": []}
    line = {"way": "alone, width 4", "greedy": cell | {"equal": 16}, "sampled": cell, "untested": untested}
    return {"lines": [line], "left_out": ["with a prefix hit: it has none"], "verdict": "some of all equal"}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (counted(16), None),
        (counted(15), "some of all equal: alone, width 4, sampled: 15 of 16"),
        (counted(16, "nothing was preempted"), "some of all equal: alone, width 4: nothing was preempted"),
    ],
)
def test_an_answer_that_differs_or_was_not_tested_fails_the_step_and_is_kept(stage, result, said):
    stage.children = Fake(result)
    (outcome,) = run_steps([Step("equality", lambda: whole.count_equal("qwen3-8b", stage))])
    assert outcome.state == ("ok" if said is None else "FAILED")
    assert outcome.says == (said or "some of all equal in 1 ways; left out with a prefix hit: it has none")
    assert outcome.values == result
    assert stage.measured.equal["qwen3-8b, alone, width 4, greedy"] == [16, 16]


@pytest.mark.parametrize(
    ("name", "shape", "rows"),
    [
        ("steps", "qwen3-8b", "1 4 8 32"),
        ("steps, deep", "qwen3-8b", "1"),
        ("steps, qwen3.5-35b-a3b", "qwen3.5-35b-a3b", "1 8 32"),
    ],
)
def test_of_the_steps_those_of_one_row_are_compared(stage, name, shape, rows):
    table = [
        {"rows": rows, "width": width, "context": 1024, "ms": rows + width / 4, "kernels": []}
        for rows in (1, 8)
        for width in (1, 16)
    ]
    stage.children = Fake({"steps": table})
    found = next(step for step in whole.steps_of(stage) if step.name == name).run()
    flags = " ".join(stage.children.words)
    assert f"--shape {shape} " in flags
    assert f"--rows {rows} --width 1 16 " in flags
    assert found.says == (
        "rows x ms at width, behind 1,024 tokens: 1 x 1.25 at 1, 5.00 at 16; 8 x 8.25 at 1, 12.00 at 16"
    )
    assert stage.measured.steps_ms == {
        f"{shape}, width {width}, 1,024 tokens of context": ms for width, ms in ((1, 1.25), (16, 5.0))
    }


def server(**capture):
    capture = {
        "name": "capture",
        "state": "done",
        "seconds": 1.5,
        "detail": "18 of at most 64 kinds of decoding steps captured; others when they are first needed",
        **capture,
    }
    startup = {"seconds": 12.5, "warnings": [], "phases": [capture]}
    return Server("", None, None, startup, {"draft": "d", "width": 16, "dtype": "bfloat16"})


def test_a_start_is_kept_with_its_graphs(stage, monkeypatch):
    monkeypatch.setattr(serving, "start", lambda *words, **more: server())
    monkeypatch.setattr(serving, "end", lambda *words: 0)
    found = whole.start_large("cold", stage)
    assert found.says == "ready in 12.5 s (capture 1.5), 18 graphs, width 16, bfloat16"
    assert stage.measured.starts_s == {"qwen3-8b, cold": 12.5}
    assert stage.measured.graphs == {"qwen3-8b, cold": 18}
    assert server(state="skipped", detail="there is no GPU").num_graphs == 0
    with pytest.raises(Failure, match="how many graphs"):
        _ = server(detail="done").num_graphs


def test_a_whole_rehearsal_that_got_worse_ends_with_1_and_names_the_lines(tmp_path, monkeypatch, capsys):
    def steps_of(stage):
        stage.measured.starts_s["default, cold"] = 50.0
        return (Step("the last result", lambda: whole.compare_with_last(stage)),)

    monkeypatch.setattr(whole, "steps_of", steps_of)
    monkeypatch.setattr(rehearsal, "last_result", lambda result: LAST)
    monkeypatch.setattr(rehearsal, "check_model", lambda: None)
    file = tmp_path / "rehearsal.json"
    assert rehearsal.main(["--device", "cpu", "--out", str(file)]) == 1
    said = capsys.readouterr().out
    assert "FAILED" in said
    assert "start: default, cold     40.00 s  50.00 s  WORSE" in said
    assert "left out: 64 and 256 streams" in said
    assert json.loads(file.read_text())["measured"]["starts_s"] == {"default, cold": 50.0}
