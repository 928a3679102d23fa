"""The rehearsal: its table, exit code and file with steps that are not real; and, slowly, the real one."""

import json
import mmap
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.rehearsal import __main__ as rehearsal
from benchmarks.rehearsal import children as children_module
from benchmarks.rehearsal import memory, steps
from benchmarks.rehearsal.children import ROOT, Children
from benchmarks.rehearsal.serving import Server, complaints
from benchmarks.rehearsal.sheet import Failure, Found, Step, as_json, exit_code, lines, run_steps
from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.settings.settings import cache_dir
from blockdraft.training import run_messages

needs_model = pytest.mark.skipif(
    not (cache_dir() / SMOLLM2.gguf).exists(), reason="default model not fetched: blockdraft fetch"
)


def failing(error):
    def run():
        raise error

    return run


def good(name, says="fine", needs=(), **values):
    return Step(name, lambda: Found(says, values), needs)


def ran(*steps):
    return list(run_steps(steps))


# ---- the sheet


def test_when_all_goes_well_the_exit_code_is_0():
    outcomes = ran(good("one"), good("two", needs=("one",)))
    assert [one.state for one in outcomes] == ["ok", "ok"]
    assert exit_code(outcomes) == 0
    assert list(lines(outcomes))[-1].startswith("all 2 steps went well")


def test_a_failed_step_stops_only_those_that_need_it():
    outcomes = ran(
        good("doctor"),
        Step("serve", failing(Failure("it did not start"))),
        good("client", needs=("serve",)),
        good("bench", needs=("client",)),
        good("fit"),
    )
    assert [one.state for one in outcomes] == ["ok", "FAILED", "skipped", "skipped", "ok"]
    assert exit_code(outcomes) == 1
    assert outcomes[2].says == "it needs 'serve', which did not go well"


def test_what_nobody_foresaw_is_a_failure_too():
    (outcome,) = ran(Step("plan", failing(KeyError("memory"))))
    assert (outcome.state, outcome.says) == ("FAILED", "KeyError: 'memory'")


def test_the_table_has_a_line_per_step_with_its_time_and_finding():
    outcomes = ran(good("one", "all\nis well"), Step("two", failing(Failure("first\n  second"))))
    head, first, second, last = lines(outcomes)
    assert head.split() == ["step", "s", "what", "was", "found"]
    assert first.startswith("one   ok      0.0  all")
    assert second == "two   FAILED  0.0  first second"
    assert last.startswith("NOT READY: 1 of 2 steps did not go well (two)")


def test_the_file_has_each_step_with_its_commands():
    commands = iter((["blockdraft doctor"], []))
    steps = (good("one", number=7), Step("two", failing(Failure("no"))))
    found = as_json(list(run_steps(steps, take_commands=lambda: next(commands))))
    assert found["went_well"] is False
    first, second = json.loads(json.dumps(found))["steps"]
    assert (first["commands"], first["values"]) == (["blockdraft doctor"], {"number": 7})
    assert (second["name"], second["state"], second["says"]) == ("two", "FAILED", "no")


# ---- the command


def test_the_command_writes_what_it_prints_and_ends_with_its_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        rehearsal, "steps_of", lambda _: (good("one"), Step("two", failing(Failure("broken"))))
    )
    monkeypatch.setattr(rehearsal, "check_model", lambda: None)
    file = tmp_path / "rehearsal.json"
    assert rehearsal.main(["--quick", "--device", "cpu", "--out", str(file)]) == 1
    assert "two   FAILED  0.0  broken" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert {"machine", "commit", "date", "device", "settings"} <= set(written)
    assert [one["state"] for one in written["steps"]] == ["ok", "FAILED"]


def test_ctrl_c_ends_what_runs_and_keeps_what_was_found(tmp_path, monkeypatch):
    running = []

    def steps_of(stage):
        def interrupted():
            running.append(stage.children.start("serve", env={}, out=None, err=None))
            raise KeyboardInterrupt

        return good("one"), Step("two", interrupted), good("three")

    monkeypatch.setattr(children_module, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(rehearsal, "steps_of", steps_of)
    monkeypatch.setattr(rehearsal, "check_model", lambda: None)
    file = tmp_path / "rehearsal.json"
    assert rehearsal.main(["--quick", "--device", "cpu", "--out", str(file)]) == 130
    assert running[0].poll() is not None
    written = json.loads(file.read_text())
    assert ([one["name"] for one in written["steps"]], written["went_well"]) == (["one"], False)


def test_a_command_that_takes_too_long_ends_with_its_children(tmp_path, monkeypatch):
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    monkeypatch.setattr(children_module, "COMMAND", (sys.executable, "-c", code))
    with pytest.raises(Failure, match="`blockdraft fit` did not end within 1 s"):
        Children().blockdraft("fit", env={}, timeout_s=1)
    end_s = time.monotonic() + 5
    while _is_alive(file.read_text()) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not _is_alive(file.read_text())


def _is_alive(pid):
    """A zombie is not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


def test_a_command_that_fails_is_told_by_its_last_line():
    with pytest.raises(Failure, match=r"`blockdraft train` ended with 2: .*required"):
        Children().blockdraft("train", env={}, timeout_s=60)


def test_weights_count_where_their_file_is_mapped(tmp_path):
    sizes = {"weights.safetensors": 1 << 20, "other.bin": 2 << 20}
    before, maps = memory.mapped_weights("self"), []
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
        with (tmp_path / name).open("r+b") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        sum(maps[-1][::4096])  # now it is resident
    assert memory.mapped_weights("self") - before == 1 << 20
    maps[0][0] = 1  # a page of its own from now on, which is counted as such
    assert memory.mapped_weights("self") - before == (1 << 20) - mmap.PAGESIZE


# ---- what steps object to


@pytest.mark.parametrize(
    ("draft", "warnings", "log", "found"),
    [
        ("shipped", [], "info ready in 15.6 s", []),
        (None, [], "info ready in 15.6 s", ["the drafter was dropped"]),
        ("shipped", ["it is slow"], "info warning: it is slow", ["it is slow"]),
        ("shipped", [], "x.py:1: UserWarning: odd\nready", ["x.py:1: UserWarning: odd"]),
        ("shipped", [], "2026-11-16T00:59:00Z warning odd\nready", ["2026-11-16T00:59:00Z warning odd"]),
    ],
)
def test_a_start_that_dropped_its_drafter_or_warned_is_no_good_one(tmp_path, draft, warnings, log, found):
    (tmp_path / "log").write_text(log)
    server = Server("", None, tmp_path / "log", {"warnings": warnings}, {"draft": draft})
    assert complaints(server) == found


def bench_report(**changes):
    lost = {"num_failed": 0, "num_not_sent": 0, "num_not_ended": 0, "errors": [], "num_requests": 4}
    keys = [{"workload": "qa", "concurrency": number} for number in (1, 16)]
    cells = [lost | {"key": key, "arm": arm} for key in keys for arm in ("speculative", "plain")]
    cells[-1] |= changes
    pairs = [
        {"key": key, "speedup": {"tokens_per_s": {"value": value}}}
        for key, value in zip(keys, (1.5, 0.9), strict=True)
    ]
    return {"cells": cells, "pairs": pairs}


def test_a_slower_arm_is_said_and_a_lost_request_is_a_failure():
    said = steps._benched(bench_report()).says
    assert said == "16 requests, none failed; qa at 1: 1.50x, qa at 16: 0.90x (slower than plain)"
    for name in ("num_failed", "num_not_sent", "num_not_ended"):
        with pytest.raises(Failure, match=name):
            steps._benched(bench_report(**{name: 1}))
    with pytest.raises(Failure, match="nothing was measured"):
        steps._benched(bench_report(arm="speculative"))


@pytest.mark.parametrize(("taken", "is_well"), [(1000, True), (1090, True), (1110, False), (890, False)])
def test_memory_beyond_the_plan_is_a_failure(monkeypatch, taken, is_well):
    items = [{"name": "target weights", "num_bytes": 600}, {"name": "target cache", "num_bytes": 400}]
    plan = {"memory": {"items": items}, "cache": {"bytes_per_token": 2}, "plan": {"num_pages": 8}}
    engine = {"device": "cuda:0", "num_pages": 8, "page_size": 16, "num_cache_bytes": 10 * 16 * 2}
    monkeypatch.setattr(memory, "free_bytes", lambda device: 5000 - taken)
    if is_well:
        assert memory.compare(plan, engine, pid=0, free_before=5000).values["taken_bytes"] == taken
    else:
        with pytest.raises(Failure, match="allowed"):
            memory.compare(plan, engine, pid=0, free_before=5000)
    with pytest.raises(Failure, match="the cache has 8 pages, 9 were planned"):
        memory.compare(plan | {"plan": {"num_pages": 9}}, engine, pid=0, free_before=5000)


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_exact_windows_are_part_of_the_cache_and_resident_on_a_card_alone(monkeypatch, device):
    sizes = {"target weights": 600, "target cache": 320, memory.WINDOWS: 100}
    items = [{"name": name, "num_bytes": size} for name, size in sizes.items()]
    plan = {"memory": {"items": items}, "cache": {"bytes_per_token": 2}, "plan": {"num_pages": 8}}
    engine = {"device": device, "num_pages": 8, "page_size": 16, "num_cache_bytes": 10 * 16 * 2 + 100}
    planned = 1020 if device != "cpu" else 600
    monkeypatch.setattr(memory, "_taken", lambda *_: planned)
    assert memory.compare(plan, engine, pid=0, free_before=None).values["planned_bytes"] == planned
    with pytest.raises(Failure, match="8 pages take 320 bytes, the plan's arithmetic says 420"):
        memory.compare(plan, engine | {"num_cache_bytes": 320}, pid=0, free_before=None)


# ---- the real one


@pytest.mark.slow
@needs_model
def test_the_shipped_pair_goes_through_every_command_on_a_cpu(tmp_path):
    pytest.importorskip("openai")
    file = tmp_path / "rehearsal.json"
    command = [sys.executable, "-m", "benchmarks.rehearsal", "--quick", "--device", "cpu", "--out", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {one["state"] for one in json.loads(file.read_text())["steps"]} == {"ok"}


def test_a_result_names_no_folder_of_the_machine_that_made_it(tmp_path):
    root, out = Path(record.__file__).parents[1], str(tmp_path / "found.json")
    words = ["--out /scratch/y/run", "/scratch/y"]
    result = {"out": out, "draft": f"{root}/blockdraft/drafters/x", "words": words}
    record.save(out, result, scratch="/scratch/y")
    kept = json.loads(Path(out).read_text())
    assert kept == {"out": "found.json", "draft": "blockdraft/drafters/x", "words": ["--out run", "."]}


def test_no_committed_result_names_one_either():
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        found = re.findall(r"(?<![\w.])/(?:tmp|home|root|work|Users)/[^\s\"']*", path.read_text())
        assert not found, path.name


def test_of_a_short_training_the_expected_warning_is_allowed_and_no_other():
    assert steps.NO_BETTER == run_messages.NO_BETTER
    weak, other = (
        children_module.Done(0, "", f"1.0 s  warning: {text}") for text in (steps.NO_BETTER, "else")
    )
    steps._refuse_warnings(weak, but=steps.NO_BETTER)
    for done, but in ((weak, None), (other, steps.NO_BETTER)):
        with pytest.raises(Failure, match="it printed a warning"):
            steps._refuse_warnings(done, but=but)
