"""`blockdraft serve --engine vllm` over the real thing: vLLM's CPU build, from its start to a crash.

Optional: tests/bench/vllm_venv.py says how it is asked for.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time

import httpx
import pytest

from blockdraft.bench.endpoint import probe
from tests.bench.vllm_models import write_default_model, write_wide_pair
from tests.bench.vllm_venv import VARIABLE, VERSION, is_wanted, vllm_python, vllm_variables
from tests.server.stub_install import is_alive
from tests.server.test_life import Process, alive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_wanted(), reason=f"wants vLLM: set {VARIABLE}=1, or to a Python that has it"),
]
START_S = 600
SHAPE = [
    "--dtype",
    "float32",
    "--no-graphs",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "4",
]  # no compilation
HELLO = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}


@contextlib.contextmanager
def running(folder, model, *flags):
    """The server's process, and its address once it is ready."""
    command = [sys.executable, "-m", "blockdraft", "serve", str(model), "--engine", "vllm", "--port", "0"]
    command += ["--engine-python", str(vllm_python()), "--engine-log", str(folder / "log"), *SHAPE, *flags]
    process = Process(command, {**vllm_variables(), "OMP_NUM_THREADS": str(os.cpu_count())})
    try:
        url = process.address(process.errors, "listening on")
        end_s = time.monotonic() + START_S
        while process.process.poll() is None and not process.output and time.monotonic() < end_s:
            time.sleep(0.5)
        assert process.output, process.errors
        yield process, url
    finally:
        if process.process.poll() is None:
            process.process.terminate()
        process.end()


def engine_pids(folder):
    """Return the ids of the processes that vLLM has named in its log."""
    return {int(pid) for pid in re.findall(r"\(\w+ pid=(\d+)\)", (folder / "log").read_text())}


def assert_nothing_is_left(folder):
    pids = engine_pids(folder)
    assert pids
    assert not any(map(is_alive, pids))


def test_vllm_serves_the_default_model_behind_our_server(tmp_path):
    model = write_default_model(tmp_path / "model")
    with running(tmp_path, model, "--served-model-name", "smollm2") as (process, url):
        ready = httpx.get(f"{url}/ready").json()
        phases = {phase["name"]: phase for phase in ready["phases"]}
        sys.stdout.write(f"{json.dumps(ready, indent=1)}\n")
        assert [phases[name]["state"] for name in ("launch", "load", "warm", "verify")] == ["done"] * 4
        assert phases["capture"]["state"] == "skipped"
        assert ready["warnings"] == []
        assert httpx.get(f"{url}/version").json()["version"].startswith(VERSION)

        answer = httpx.post(f"{url}/v1/chat/completions", json=HELLO, timeout=120).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert answer["model"] == "smollm2"
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json={**HELLO, "stream": True}, timeout=120
        ) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events[-1] == "[DONE]"
        pieces = [json.loads(text)["choices"][0]["delta"].get("content") or "" for text in events[:-1]]
        assert len(pieces) > 5
        assert "".join(pieces) == answer["choices"][0]["message"]["content"]
        wrong = httpx.post(f"{url}/v1/chat/completions", json={**HELLO, "model": "other"}, timeout=120)
        assert wrong.status_code == 404
        assert "does not exist" in wrong.json()["error"]["message"]
        assert httpx.post(f"{url}/tokenize", json={"prompt": "Paris"}, timeout=60).json()["count"] >= 1

        metrics = httpx.get(f"{url}/metrics", timeout=60).text
        assert re.search(r'vllm:generation_tokens_total\{.*model_name="smollm2"\} [1-9]', metrics)
        assert 'blockdraft:ready{model_name="smollm2"} 1.0' in metrics
        assert process.end(signal.SIGTERM) == 0
    assert_nothing_is_left(tmp_path)


def test_vllm_drafts_is_measured_and_its_crash_is_ours(tmp_path):
    target, draft = write_wide_pair(tmp_path)
    with running(tmp_path, target, "--draft", str(draft), "--served-model-name", "pair") as (process, url):
        ready = httpx.get(f"{url}/ready").json()
        assert not [text for text in ready["warnings"] if "a drafter" in text]  # that it does not draft
        assert ready["phases"][-1]["detail"].endswith("with drafts")
        found = asyncio.run(probe(url))
        assert (found.kind, found.model, found.is_speculative, found.is_metered) == (
            "vllm",
            "pair",
            True,
            True,
        )

        core = int(re.search(r"\(EngineCore pid=(\d+)\)", (tmp_path / "log").read_text())[1])
        os.kill(core, signal.SIGKILL)
        seen = set()
        while process.process.poll() is None:
            seen.add(alive(url))
        assert 503 in seen
        assert process.end() == 1
    assert any(line.startswith("blockdraft: error: vLLM") for line in process.errors), process.errors
    assert_nothing_is_left(tmp_path)
