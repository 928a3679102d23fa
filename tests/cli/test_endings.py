"""How commands end when something stands in their way: one line, an exit code, and nothing left behind."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from tests.tiny import TARGET

ROOT = Path(__file__).parents[2]
MODEL = [TARGET, "--device", "cpu", "--dtype", "float64"]
PROMPTS = '{"messages": [{"role": "user", "content": "t1 t2 t3"}], "category": "one"}\n' * 64


def start(*words, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    command = [sys.executable, "-m", "blockdraft", *words]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, env=environment, **options)


def run(*words, **options):
    process = start(*words, **options)
    out, error = process.communicate(timeout=120)
    assert "Traceback" not in error, error
    return process, out, error


def test_an_output_without_room_is_one_line():
    with open("/dev/full", "w") as full:
        process, _, error = run("settings", stdout=full)
    assert process.returncode == 2
    assert error.splitlines()[-1].startswith("blockdraft: error: cannot write the output (No space left")


@pytest.mark.slow
def test_a_disk_that_fills_up_in_training_is_one_line(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(PROMPTS)
    words = ["train", TARGET, "--device", "cpu", "--prompts", str(prompts), "--out", str(tmp_path / "run")]
    few = ["--steps", "1", "--length", "64", "--rows-per-step", "1", "--layers", "1"]
    process, _, error = run(
        *words, *few, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    )
    assert process.returncode == 2
    assert "File too large" in error.splitlines()[-1]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    out, prompts = str(tmp_path / "file" / "run"), str(tmp_path / "file")
    words = ["train", TARGET, "--prompts", prompts, "--out", out, "--minutes", "1"]
    process, _, error = run(*words)
    assert process.returncode == 2
    assert (
        error == f"blockdraft: error: --out {tmp_path}/file/run cannot be written (Not a directory): "
        "choose another folder.\n"
    )


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.4])
def test_ctrl_c_is_no_traceback_however_early_it_comes(delay_s):
    process = start("generate", "t1", "--model", *MODEL, "--ignore-eos", "--max-tokens", "400")
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    # Before the interpreter has read our first line, the traceback is Python's own and no code of ours runs.
    is_ours = "blockdraft" in error
    assert not is_ours or "Traceback" not in error, error
    assert process.returncode in (130, -signal.SIGINT, 1 if not is_ours else 130)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_drain_at_once():
    words = ["--port", "0", "--served-model-name", "tiny", "--drain-timeout", "60", "--max-num-seqs", "1"]
    process = start("serve", *MODEL, *words)
    try:
        address = process.stdout.readline().split(" at ")[1].split("/, API")[0]
        many = {"n": 64, "max_tokens": 400, "ignore_eos": True}  # one after the other: it takes long
        body = {"model": "tiny", "prompt": "t1", "stream": True, **many}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()  # dropping it would hang up
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGINT)
            time.sleep(2)
            process.send_signal(signal.SIGINT)
            began_s = time.monotonic()
            _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert time.monotonic() - began_s < 20
    assert "Traceback" not in error, error
    assert "ended at once: 1 answer was given up" in error


@pytest.mark.slow
def test_nothing_is_left_behind(tmp_path):
    for words in (["doctor", "--device", "cpu"], ["generate", "t1", "--model", *MODEL, "--max-tokens", "3"]):
        process, out, _ = run(*words, env={"TMPDIR": str(tmp_path)})
        assert out
        assert list(tmp_path.iterdir()) == []
        assert not Path(tempfile.gettempdir(), f"perf-{process.pid}.map").exists()
