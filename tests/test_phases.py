"""StartProgress: what each phase leaves behind, for readers on other threads."""

import json
import threading

import pytest

from blockdraft.phases import PHASES, StartProgress


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def startup(clock, lines):
    return StartProgress(lines.append, clock)


def phase_of(startup, name):
    (found,) = [phase for phase in startup.snapshot()["phases"] if phase["name"] == name]
    return found


def test_at_first_every_phase_waits_in_order(startup, clock):
    clock.now_s += 2.5
    snapshot = startup.snapshot()
    assert snapshot["state"] == startup.state == "starting"
    assert (snapshot["seconds"], snapshot["warnings"], snapshot["error"]) == (2.5, [], None)
    assert [phase["name"] for phase in snapshot["phases"]] == list(PHASES)
    waiting = {"state": "waiting", "seconds": None, "detail": None, "progress": None}
    assert all(phase == {"name": phase["name"], **waiting} for phase in snapshot["phases"])


def test_a_phase_tells_its_time_detail_and_progress_while_it_runs_and_its_time_afterwards(
    startup, clock, lines
):
    with startup.phase("load"):
        startup.note("file 1 of 4")
        startup.progress(1, 4)
        clock.now_s += 3
        running = {"state": "running", "seconds": 3.0, "detail": "file 1 of 4", "progress": 0.25}
        assert phase_of(startup, "load") == {"name": "load", **running}
        clock.now_s += 1
    clock.now_s += 50
    done = {"state": "done", "seconds": 4.0, "detail": "file 1 of 4", "progress": None}
    assert phase_of(startup, "load") == {"name": "load", **done}
    assert lines == ["load done in 4.0 s: file 1 of 4"]
    assert phase_of(startup, "warm")["state"] == "waiting"


def test_notes_outside_a_phase_belong_to_none_and_a_skipped_one_says_why(startup):
    startup.note("lost")
    startup.progress(1, 2)
    with startup.phase("fetch"):
        startup.progress(0, 0)  # the total is not known yet
    assert all(phase["detail"] is None for phase in startup.snapshot()["phases"])
    assert all(phase["progress"] is None for phase in startup.snapshot()["phases"])
    startup.skip("capture", "no CUDA device")
    phase = phase_of(startup, "capture")
    assert (phase["state"], phase["detail"], phase["seconds"]) == ("skipped", "no CUDA device", None)


def test_an_error_marks_its_phase_and_goes_on(startup, clock, lines):
    def fail():
        clock.now_s += 1
        raise KeyError("wrong")

    with pytest.raises(KeyError), startup.phase("verify"):
        fail()
    assert (phase_of(startup, "verify")["state"], phase_of(startup, "verify")["seconds"]) == ("failed", 1.0)
    startup.fail("the kernel is wrong.")
    assert (startup.state, startup.snapshot()["error"]) == ("failed", "the kernel is wrong.")
    assert lines == ["verify failed in 1.0 s"]


def test_warnings_are_kept_and_reported(startup, lines):
    startup.warn("the drafter is not used.")
    startup.warn("second")
    assert startup.snapshot()["warnings"] == ["the drafter is not used.", "second"]
    assert lines[0] == "warning: the drafter is not used."
    startup.snapshot()["warnings"].append("a copy")
    assert len(startup.snapshot()["warnings"]) == 2


def test_the_time_of_a_start_stops_when_it_is_ready(startup, clock):
    clock.now_s += 7
    startup.ready()
    clock.now_s += 100
    assert (startup.state, startup.snapshot()["seconds"]) == ("ready", 7.0)


def test_draining_follows_ready_and_a_failure_is_final(startup):
    startup.drain()
    startup.ready()  # of a start that ends late
    assert startup.state == "draining"
    startup.fail("no memory.")
    startup.drain()
    startup.ready()
    assert (startup.state, startup.snapshot()["error"]) == ("failed", "no memory.")


def test_a_snapshot_is_json_at_any_moment_of_another_threads_start(startup):
    stop, texts = threading.Event(), []

    def look():
        while not stop.is_set():
            texts.append(json.dumps(startup.snapshot()))

    thread = threading.Thread(target=look)
    thread.start()
    for round_number in range(20):
        for name in PHASES:
            with startup.phase(name):
                startup.note(f"round {round_number}")
                startup.progress(round_number, 20)
        startup.warn("again")
    startup.ready()
    stop.set()
    thread.join()
    assert texts
    numbers = [len(json.loads(text)["warnings"]) for text in texts]
    assert numbers == sorted(numbers)
    for text in texts:
        for phase in json.loads(text)["phases"]:
            assert (phase["seconds"] is None) == (phase["state"] == "waiting")
            assert phase["progress"] is None or phase["state"] == "running"
