"""The server as a process: its start, its signals, its keys, and how it ends."""

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "tests/fixtures/pair"
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "t1 t2 t3"}], "temperature": 0, "max_tokens": 5}
LONG = {**HELLO, "max_tokens": 100, "ignore_eos": True, "stream": True, "speculative": False}
MODEL = (str(PAIR / "target"), "--device", "cpu", "--dtype", "float64")
MODEL += ("--max-model-len", "256", "--max-num-seqs", "2")
PATIENCE_S = 60
# Starts without warming up; what a test puts in front of it changes the engine's behaviour.
RUNNER = """
import sys, time, threading
from blockdraft.start import start_engine as start
from blockdraft.engine.engine import Engine
start.warm = lambda *_, **__: None
{patch}
from blockdraft.server.http import lifetime as running
running.UNHEALTHY_GRACE_S = 1.0
from blockdraft.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
SLOW_STEPS = """
step = Engine.step
def slow(self):
    time.sleep(0.02)
    return step(self)
Engine.step = slow
"""


class Process:
    """A server with its output, read as it comes."""

    def __init__(self, command, environment):
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.output, self.errors, self._arrived = [], [], queue.SimpleQueue()
        pipes = ((self.process.stdout, self.output), (self.process.stderr, self.errors))
        self._readers = [threading.Thread(target=self._read, args=pipe) for pipe in pipes]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe, lines):
        for line in pipe:
            lines.append(line.rstrip("\n"))
            self._arrived.put(None)
        self._arrived.put(None)

    def address(self, lines, before):
        """The address in the first of `lines` that holds `before`."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            for line in list(lines):
                found = re.search(rf"{before}.*?(http://[0-9.]+:\d+)", line)
                if found:
                    return found[1]
            assert self.process.poll() is None, self.errors
            with contextlib.suppress(queue.Empty):
                self._arrived.get(timeout=0.5)
        raise AssertionError(self.errors)

    def ready(self):
        return self.address(self.output, "ready:")

    def end(self, sig=None):
        """The exit code, after `sig` if there is one."""
        if sig is not None:
            self.process.send_signal(sig)
        code = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join()
        return code

    @property
    def text(self):
        return "\n".join([*self.output, *self.errors])


@contextlib.contextmanager
def running(*flags, patch=None, environment=None):
    start = ["-m", "blockdraft"] if patch is None else ["-c", RUNNER.format(patch=patch)]
    process = Process([sys.executable, *start, "serve", *flags, "--port", "0"], environment or {})
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
        process.end()


def wait_for(condition, what):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


def alive(url):
    """The status, or None when nobody answers any more."""
    try:
        return httpx.get(f"{url}/live", timeout=10).status_code
    except httpx.TransportError:
        return None


# ---- the start


@pytest.mark.slow
def test_from_the_first_connection_to_the_end_with_json_logs():
    """Nothing is patched: /ready tells the phases, and all of them have been gone through at the end."""
    with running(*MODEL, "--draft", str(PAIR / "draft"), "--json") as process:
        url = process.address(process.errors, "listening on")
        wait_for(lambda: alive(url) == 200, "no answer during the start")
        early = httpx.get(f"{url}/ready")
        assert early.json()["state"] == "starting", early.text
        assert early.status_code == httpx.get(f"{url}/health").status_code == 503
        assert "retry-after" in early.headers
        assert {phase["state"] for phase in early.json()["phases"]} & {"running", "waiting"}
        assert httpx.post(url + CHAT, json=HELLO).status_code == 503
        assert process.ready() == url
        ready = httpx.get(f"{url}/ready")
        assert (ready.status_code, ready.json()["state"]) == (200, "ready")
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        states = {phase["name"]: phase["state"] for phase in ready.json()["phases"]}
        assert states.pop("capture") in ("done", "skipped")
        assert states == dict.fromkeys(("fetch", "load", "allocate", "warm", "verify"), "done")
        seconds = [phase["seconds"] for phase in ready.json()["phases"] if phase["state"] == "done"]
        assert 0 < sum(seconds) <= ready.json()["seconds"] + 0.01
        assert ready.json()["warnings"] == []
        assert ready.json()["speculation"].startswith("speculation: on, ")  # no answer has told yet
        answer = httpx.post(url + CHAT, json=HELLO, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == " t4 t5 t6 t7 t8"
        assert process.end(signal.SIGTERM) == 0
    records = [json.loads(line) for line in process.errors]
    assert all({"time", "level", "logger", "message"} <= record.keys() for record in records)
    assert not any(record["logger"] == "blockdraft.access" for record in records)
    assert any("verify done" in record["message"] for record in records)


def test_a_model_that_is_not_there_ends_with_one_line_and_code_2(tmp_path):
    with running(str(tmp_path / "nothing")) as process:
        assert process.end() == 2
    assert process.output == []
    complaints = [line for line in process.errors if line.startswith("blockdraft: error:")]
    assert len(complaints) == 1
    assert "nothing" in complaints[0]
    assert "Traceback" not in process.text


@pytest.mark.slow
def test_a_start_that_fails_is_not_told_as_an_end_that_somebody_asked_for(tmp_path):
    target = shutil.copytree(PAIR / "target", tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    bad = {name: torch.full_like(one, torch.nan) for name, one in weights.items()}
    save_file(bad, target / "model.safetensors")
    with running(str(target), *MODEL[1:]) as process:
        assert process.end() == 2
    assert "; not ready yet, /ready shows the progress" in process.text
    assert "infinite or undefined" in process.text
    assert "ending:" not in process.text


@pytest.mark.slow
def test_a_drafter_that_knows_nothing_is_dropped_aloud_and_the_server_serves_plainly(tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(PAIR / "draft", draft)
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.3
        for name, tensor in load_file(draft / "model.safetensors").items()
    }
    save_file(weights, draft / "model.safetensors")
    with running(*MODEL, "--draft", str(draft), patch="") as process:
        url = process.ready()
        (warning,) = httpx.get(f"{url}/ready").json()["warnings"]
        assert "drafter is not used" in warning
        answer = httpx.post(url + CHAT, json=HELLO, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == " t4 t5 t6 t7 t8"
        assert answer["metrics"]["speculative_decoding"] is None
        assert process.end(signal.SIGTERM) == 0
    assert any("drafter is not used" in line for line in process.errors)


@pytest.mark.slow
def test_a_server_for_timing_only_says_so_wherever_it_is_looked_at(tmp_path):
    for part in ("target", "draft"):
        (tmp_path / part).mkdir()
        shutil.copy(PAIR / part / "config.json", tmp_path / part)
    flags = ("--draft", str(tmp_path / "draft"), "--load-format", "dummy", "--synthetic-acceptance", "mean:3")
    with running(
        str(tmp_path / "target"), *MODEL[1:], *flags, "--served-model-name", "m", patch=""
    ) as process:
        url, name = process.ready(), "m+dummy+synthetic"
        warnings = httpx.get(f"{url}/ready").json()["warnings"]
        assert [warning.split(":")[0] for warning in warnings] == [
            "weights are random",
            "there is no tokenizer",
            "acceptance is synthetic (mean",
        ]
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == name
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 30}, timeout=60)
        assert answer.json()["model"] == name
        assert answer.json()["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 5
        gauge = next(line for line in httpx.get(f"{url}/metrics").text.splitlines() if "timing_only{" in line)
        assert f'model_name="{name}"' in gauge
        assert 'acceptance="mean:3"' in gauge
        assert 'weights="dummy"' in gauge
        assert process.end(signal.SIGTERM) == 0
    assert any("every answer is nonsense" in line for line in process.errors)
    assert any(f"'{name}' is ready" in line for line in process.output)


@pytest.mark.slow
def test_sigterm_during_the_start_ends_at_once():
    patch = "start.open_models = lambda *_: time.sleep(100)"
    with running(*MODEL, patch=patch) as process:
        url = process.address(process.errors, "listening on")
        wait_for(lambda: alive(url) == 200, "no answer during the start")
        assert process.end(signal.SIGTERM) == 0
    assert process.output == []


# ---- the end


@pytest.mark.slow
def test_a_stream_longer_than_the_drain_ends_with_an_error_it_understands():
    with running(*MODEL, "--no-verify", "--drain-timeout", "0.3", patch=SLOW_STEPS) as process:
        url = process.ready()
        with httpx.stream("POST", url + CHAT, json=LONG, timeout=60) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            process.process.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["type"] == "server_error"
        assert process.end() == 0


@pytest.mark.slow
def test_an_open_live_page_does_not_hold_up_the_end():
    with running(*MODEL, "--no-verify", patch="") as process:
        url = process.ready()
        with httpx.stream("GET", f"{url}/events", timeout=60) as response:
            lines = response.iter_lines()  # kept: without it the connection would be closed
            assert next(lines).startswith("data: ")
            start_s = time.monotonic()
            assert process.end(signal.SIGTERM) == 0
    assert time.monotonic() - start_s < 4


@pytest.mark.slow
def test_an_engine_that_fails_three_times_turns_health_red_and_ends_with_code_1():
    patch = "from blockdraft.engine.scheduler import Scheduler\nScheduler.commit = lambda *_: 1 / 0"
    with running(*MODEL, "--no-verify", patch=patch) as process:
        url = process.ready()
        for _ in range(3):
            assert alive(url) == 200
            assert httpx.post(url + CHAT, json=HELLO, timeout=60).status_code == 503
        assert alive(url) == 503
        assert process.end() == 1
    assert "blockdraft: error: ZeroDivisionError: division by zero" in process.errors


@pytest.mark.slow
def test_a_step_that_hangs_turns_health_red_logs_stacks_and_ends_with_code_75():
    patch = "def hang_here(self):\n    threading.Event().wait()\nEngine.step = hang_here"
    with running(*MODEL, "--no-verify", "--step-timeout", "0.5", patch=patch) as process:
        url = process.ready()
        asking = threading.Thread(target=_ask_in_vain, args=(url,))
        asking.start()
        seen = set()
        wait_for(lambda: seen.add(alive(url)) or 503 in seen, "health stays green")
        assert process.end() == 75
        asking.join()
    assert any("hang_here" in line and "thread engine" in line for line in process.errors)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="C's sleep")
def test_an_interpreter_that_is_stuck_ends_the_server_with_code_75():
    """A watchdog in the engine's own process would be stuck, too."""
    patch = (
        "import ctypes\nfrom blockdraft.server.engine_link import remote_engine\n"
        "remote_engine.MIN_SILENCE_S = 0.6\n"
        "Engine.step = lambda self: ctypes.PyDLL(None).sleep(60)"
    )
    with running(*MODEL, "--no-verify", "--step-timeout", "0.6", patch=patch) as process:
        url = process.ready()
        asking = threading.Thread(target=_ask_in_vain, args=(url,))
        asking.start()
        seen = set()
        wait_for(lambda: seen.add(alive(url)) or 503 in seen, "health stays green")
        assert process.end() == 75
        asking.join()
    assert any("interpreter is stuck" in line for line in process.errors)


# ---- replicas


def sampled(url, seed, seen):
    """The text of a long answer; adds a number to `seen` with every event."""
    body = {**LONG, "temperature": 1.0, "seed": seed}
    with httpx.stream("POST", url + CHAT, json=body, timeout=60) as response:
        assert response.status_code == 200
        text = ""
        for line in filter(None, response.iter_lines()):
            seen.append(seed)
            if line != "data: [DONE]":
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["delta"].get("content", "")
        assert line == "data: [DONE]"
    return text


def together(url, kill=lambda: None):
    """Twelve answers at once; `kill` is called when all have begun."""
    seen = []
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(sampled, url, seed, seen) for seed in range(12)]
        wait_for(lambda: len(set(seen)) == 12, "not all answers begin")
        kill()
        return [one.result() for one in asked]


def replicas_of(url):
    return httpx.get(f"{url}/ready").json()["replicas"]


def all_ready(url):
    return all(one["state"] == "ready" for one in replicas_of(url))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="it has no SIGKILL")
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_that_are_killed_break_no_stream_change_no_answer_and_come_back(num_replicas):
    flags = ("--replicas", str(num_replicas), "--max-num-seqs", "12", "--no-verify")
    with running(*MODEL, *flags, patch=SLOW_STEPS) as process:
        url = process.ready()
        wait_for(lambda: all_ready(url), "not all replicas are ready")
        expected = together(url)
        first, *_ = replicas_of(url)
        assert together(url, lambda: os.kill(first["pid"], signal.SIGKILL)) == expected
        assert alive(url) == httpx.get(f"{url}/health").status_code == 200
        wait_for(lambda: all_ready(url), "the replica does not come back")
        after = replicas_of(url)
        assert [one["restarts"] for one in after] == [1, *[0] * (num_replicas - 1)]
        assert together(url, lambda: [os.kill(one["pid"], signal.SIGKILL) for one in after]) == expected
        wait_for(lambda: all_ready(url), "the replicas do not come back")
        pids = [one["pid"] for one in replicas_of(url)]
        assert process.end(signal.SIGTERM) == 0
    assert len(set(expected)) == 12
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "Traceback" not in process.text


def test_replicas_that_cannot_be_are_refused_in_one_line_with_code_2():
    with running(*MODEL, "--device", "cpu,cuda:0") as process:
        assert process.end() == 2
    assert process.output == []
    (line,) = process.errors
    assert line.endswith("replicas run on cards or on the CPU, not on both.")


def _ask_in_vain(url):
    with contextlib.suppress(httpx.TransportError):
        httpx.post(url + CHAT, json=HELLO, timeout=60)


@pytest.mark.slow
def test_the_first_answer_after_a_restart_finds_what_the_server_before_has_written(tmp_path):
    """Nothing is patched, and each of two replicas has a folder of its own."""
    flags = ("--draft", str(PAIR / "draft"), "--replicas", "2", "--prefix-disk", str(tmp_path / "kept"))
    words = [" ".join(f"t{start + number % 40}" for number in range(100)) for start in (3, 9)]
    asked = [{**HELLO, "messages": [{"role": "user", "content": one}]} for one in words]
    answers = []
    for turn in (asked, asked[::-1]):  # each replica has one of them; it is the one that is asked again
        with running(*MODEL, *flags) as process:
            url = process.ready()
            wait_for(lambda url=url: _num_ready(url) == 2, "the second replica is not ready")
            answers.append([httpx.post(url + CHAT, json=one, timeout=60).json() for one in turn])
            assert process.end(signal.SIGTERM) == 0, process.text
        assert sum("prefixes are kept in" in line for line in process.errors) == 2, process.text
    texts = [[one["choices"][0]["message"]["content"] for one in turn] for turn in answers]
    assert texts[0] == texts[1][::-1]
    cached = [[one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in turn] for turn in answers]
    assert cached == [[0, 0], [96, 96]]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["0", "1"]


def _num_ready(url):
    return sum(one["state"] == "ready" for one in httpx.get(f"{url}/ready").json()["replicas"])


# ---- keys, and an end that lets answers end


def test_keys_are_shown_nowhere_and_sigterm_lets_a_stream_end_and_tells_newcomers(tmp_path):
    keys = [f"sk-never-to-be-seen-{source}" for source in ("flag", "file", "environment")]
    file = tmp_path / "keys"
    file.write_text(f"# keys\n{keys[1]}\n")
    file.chmod(0o600)
    flags = ["--no-verify", "--access-log", "--api-key", keys[0], "--api-key-file", str(file)]
    with running(*MODEL, *flags, patch=SLOW_STEPS, environment={"BLOCKDRAFT_API_KEY": keys[2]}) as process:
        url = process.ready()
        check_keys(url, keys, Path(f"/proc/{process.process.pid}/cmdline"))
        headers = {"authorization": f"Bearer {keys[0]}"}
        with httpx.stream("POST", url + CHAT, json=LONG, headers=headers, timeout=60) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            process.process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/ready").json()["state"] == "draining", "it does not drain")
            refused = httpx.post(url + CHAT, json=HELLO, headers=headers)
            assert (refused.status_code, alive(url)) == (503, 200)
            assert "draining" in refused.json()["error"]["message"]
            assert refused.headers["connection"] == "close"  # the next attempt reaches another server
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert process.end() == 0
    told = "ending: 1 under way, which may take 30 s more (--drain-timeout); a second Ctrl-C ends at once"
    assert any(told in line for line in process.errors)
    assert "never-to-be-seen" not in process.text
    assert any(f"POST {CHAT} 200" in line for line in process.errors)  # the access log was asked for


def check_keys(url, keys, command_line):
    if command_line.exists():
        assert keys[0].encode() not in command_line.read_bytes()
    answers = [httpx.post(url + CHAT, json=HELLO)]
    for key in keys:
        for credentials in (f"Bearer {key}x", f"Basic {key}"):
            headers = {"authorization": credentials}
            answers.append(httpx.post(f"{url}{CHAT}?key={key}", json=HELLO, headers=headers))
    assert {answer.status_code for answer in answers} == {401}
    for key in keys:
        headers = {"authorization": f"Bearer {key}"}
        answers.append(httpx.post(url + CHAT, json={**HELLO, "n": -1}, headers=headers))
        assert answers[-1].status_code == 400
        assert httpx.post(url + CHAT, json=HELLO, headers=headers, timeout=60).status_code == 200
    answers += [httpx.get(f"{url}{path}") for path in ("/ready", "/metrics", "/version")]
    assert not any("never-to-be-seen" in answer.text for answer in answers)
