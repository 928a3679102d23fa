"""`blockdraft serve --engine vllm` from its start to its end, over a stand-in for vLLM."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from blockdraft.fp4_kernels import FALLBACK
from blockdraft.launch.installed import Installed
from blockdraft.launch.preflight import as_installed
from blockdraft.settings.settings import Settings
from tests.server.proxied import CHAT, HELLO, KEY, MODEL, STREAM, events, running, serve, texts
from tests.server.stub_install import install_stub, is_alive
from tests.server.test_life import PAIR, ROOT, alive, wait_for
from tests.test_fp4_kernels import MARLIN

# ---- the start


def test_before_it_is_ready_requests_are_told_to_come_back(tmp_path):
    with running(tmp_path, mode="hang") as server:
        url = server.early_url()
        wait_for(lambda: alive(url) == 200, "nobody listens")
        wait_for(lambda: "load" in str(httpx.get(f"{url}/ready").json()["phases"]), "no phases")
        wait_for(lambda: (tmp_path / "pids").exists(), "no engine")
        refused = httpx.post(url + CHAT, json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert "retry-after" in refused.headers
        assert (alive(url), httpx.get(f"{url}/ready").json()["state"]) == (200, "starting")
        assert "blockdraft:ready" in httpx.get(f"{url}/metrics").text
        assert server.end(signal.SIGTERM) == 0
        server.assert_nothing_is_left()


def test_an_engine_that_dies_in_its_start_ends_us_with_code_2_and_its_last_words(tmp_path):
    with running(tmp_path, mode="die") as server:
        assert server.end() == 2
    assert "vLLM ended with code 1 before it was ready" in server.error
    assert "80 GiB are too few" in server.error
    assert server.process.output == []


@pytest.mark.slow
def test_an_engine_that_never_becomes_ready_is_given_up(tmp_path):
    with running(tmp_path, "--start-timeout", "1.5", mode="hang") as server:
        assert server.end() == 2
        server.assert_nothing_is_left()
    assert "was not ready within 1.5 s" in server.error
    assert "Starting to load model" in server.error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "complaint"),
    [
        ("other", "serves 'another' (HTTP 200), but was asked for"),
        ("mute", "does not answer: HTTP 500"),
        ("empty", "its first answer is empty"),
    ],
)
def test_an_engine_that_fails_its_check_is_not_served(tmp_path, mode, complaint):
    with running(tmp_path, mode=mode) as server:
        assert server.end() == 2
    assert complaint in server.error


@pytest.mark.slow
def test_an_unused_drafter_and_a_fallback_of_fp4_kernels_are_warned_of(tmp_path):
    says = f"Using MarlinNvFp4LinearKernel for NVFP4 GEMM\n{MARLIN}\n{MARLIN}\n"
    flags = ("--draft", str(PAIR / "draft"))
    with running(tmp_path, *flags, mode="plain", environment={"STUB_SAYS": says}) as server:
        ready = httpx.get(f"{server.url()}/ready").json()
        assert FALLBACK in ready["warnings"]
        assert "counts no drafts" in "".join(ready["warnings"])
        assert len(ready["warnings"]) == 2
        kernel = "linear: Marlin (MarlinNvFp4LinearKernel)"
        assert f"FP4 kernels, {kernel}" in ready["phases"][-1]["detail"]
        assert any(kernel in line for line in server.process.errors)  # what the terminal shows
        assert server.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_machine_that_is_not_the_head_runs_its_part_and_has_no_api(tmp_path):
    flags = ("--num-nodes", "2", "--node-rank", "1", "--head-address", "10.0.0.1")
    with running(tmp_path, *flags, mode="hang") as server:
        url = server.url()
        assert httpx.get(f"{url}/ready").status_code == 200
        refused = httpx.post(url + CHAT, json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_here")
        wait_for(lambda: (tmp_path / "pids").exists(), "no engine")
        os.kill(server.pids[0], signal.SIGKILL)
        assert server.end() == 1
    assert "vLLM was ended by SIGKILL" in server.error


# ---- the end


def test_sigterm_lets_a_stream_end_and_then_ends_the_engine(tmp_path):
    with running(tmp_path) as server:
        url = server.url()
        with httpx.stream("POST", url + CHAT, json=STREAM, timeout=30) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.process.process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/ready").json()["state"] == "draining", "it does not drain")
            refused = httpx.post(url + CHAT, json=HELLO)
            assert (refused.status_code, alive(url)) == (503, 200)
            assert is_alive(server.pids[0])
            # Not through us any more: as any other client of the engine's own port would.
            release_directly(server.pids[0])
            found = events([first, *lines])
        assert found[-1] == "[DONE]"
        assert server.end() == 0
        server.assert_nothing_is_left()


def release_directly(pid):
    """Ask the engine itself, whose port and key are in its process."""
    words, variables = (
        Path(f"/proc/{pid}/{file}").read_text().split("\0") for file in ("cmdline", "environ")
    )
    key = next(text.partition("=")[2] for text in variables if text.startswith("VLLM_API_KEY="))
    port = words[words.index("--port") + 1]
    assert key not in words
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.post(f"http://127.0.0.1:{port}/v1/release", headers=headers).status_code == 200


def test_a_crash_turns_health_red_breaks_streams_aloud_and_ends_us_with_code_1(tmp_path):
    with running(tmp_path) as server:
        url = server.url()
        with httpx.stream("POST", url + CHAT, json=STREAM, timeout=30) as response:
            lines = response.iter_lines()
            first = next(lines)
            with contextlib.suppress(httpx.TransportError):
                assert httpx.post(f"{url}/v1/crash", timeout=30).status_code == 502
            found = events([first, *lines])
        assert texts(found[:1]) == ["One"]
        assert (json.loads(found[-2])["error"]["code"], found[-1]) == ("engine_lost", "[DONE]")
        wait_for(lambda: alive(url) == 503, "health stays green")
        red = httpx.get(f"{url}/health").json()
        assert "an illegal memory access" in red["log"][-1]
        assert httpx.post(url + CHAT, json=HELLO).status_code == 503
        assert server.end() == 1
        server.assert_nothing_is_left()
    assert "vLLM was ended by SIGKILL" in server.error
    assert any("illegal memory access" in line and "warning" in line for line in server.process.errors)


def test_a_late_first_event_is_a_504_and_nothing_is_left_when_we_are_killed(tmp_path):
    """The engine sends the head of a stream at once: that is no answer yet."""
    with running(tmp_path, "--request-timeout", "1", environment={"OMP_NUM_THREADS": "1"}) as server:
        answer = httpx.post(server.url() + CHAT, json={**STREAM, "slow": True}, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert all(map(is_alive, server.pids))
        server.end(signal.SIGKILL)
        server.assert_nothing_is_left()


# ---- before anything is started


DRAFT = ("--draft", PAIR / "draft")
VLLM = ("--engine", "vllm", "--port", 0)
ISSUE = "https://github.com/vllm-project/vllm/issues/"


@pytest.mark.parametrize(
    ("version", "flags", "part"),
    [
        (None, (MODEL, *VLLM, *DRAFT, "--kv-dtype", "turboquant_4bit_nc"), ISSUE.removesuffix("issues/")),
        # Known of 0.23.0, which is installed, and not of 0.24.0, whatever is asked for.
        (
            "0.23.0",
            (MODEL, *VLLM, *DRAFT, "--engine-version", "0.32.0", "--draft-attention-backend", "triton"),
            f"{ISSUE}42068",
        ),
        (None, (MODEL, "--engine", "sglang"), "SGLang is not installed for {python}: run '{python} -m pip"),
        (None, ("/mistyped/mount/path", *VLLM), "does not exist"),
    ],
    ids=["combination", "version", "other engine", "model"],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(tmp_path, version, flags, part):
    python = install_stub(tmp_path / "engine", version=version or "0.32.0")
    code, output, errors = serve(*flags, "--engine-python", python)
    assert (code, output) == (2, "")
    assert part.format(python=python) in errors
    assert not (tmp_path / "pids").exists()


def test_a_python_that_is_none_and_a_port_in_use_start_no_engine(tmp_path):
    code, _, errors = serve(MODEL, *VLLM, "--engine-python", tmp_path / "nothing")
    assert (code, "is no program" in errors) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ("--engine-python", install_stub(tmp_path / "engine"), "--port", taken.getsockname()[1])
        code, _, errors = serve(MODEL, "--engine", "vllm", *flags)
    assert (code, "cannot listen on" in errors) == (2, True)


@pytest.mark.parametrize(
    ("asked", "installed", "written"),
    [
        (None, "0.30.1+cu130", "0.30.1+cu130"),
        ("0.32.0", "0.30.1+cu130", "0.30.1+cu130"),
        ("0.32.0+pr41703", "0.32.0+cpu", "0.32.0+pr41703"),
        ("0.32.0+pr41703", "0.32.1", "0.32.1"),
        ("0.32.0", "0.1.dev1+g123", "0.32.0"),  # built from a clone without tags
        ("0.32.0", None, "0.32.0"),
        (None, None, None),
    ],
)
def test_a_name_of_another_release_than_the_installed_one_is_not_believed(asked, installed, written):
    settings = Settings(engine="vllm", model=MODEL, engine_version=asked)
    found, warnings = as_installed(settings, Installed("vllm", Path("python"), installed))
    assert found.engine_version == written
    assert [asked in warning and installed in warning for warning in warnings] == (
        [True] if asked not in (None, written) else []
    )


@pytest.mark.parametrize("form", ["docker", "compose"])
def test_no_image_is_named_that_does_not_hold_what_is_asked_for(form):
    code, output, errors = serve(MODEL, "--engine", "vllm", "--device", "cpu", "--dry-run", form)
    assert (code, output) == (2, "")
    assert "no image of vLLM 0.33.0 for a CPU: use --dry-run shell" in errors
    flags = ("--card", "h200", "--engine-version", "0.20.1.dev3+pr39930")  # a nightly: no tag to build from
    code, output, errors = serve(MODEL, "--engine", "vllm", *flags, "--dry-run", form)
    assert (code, output) == (2, "")
    assert "no image of vLLM 0.20.1.dev3+pr39930" in errors


@pytest.mark.parametrize(
    ("form", "beginning"), [("shell", "VLLM"), ("docker", "docker run"), ("compose", "services:")]
)
def test_a_dry_run_prints_the_command_and_starts_nothing(form, beginning):
    flags = ("--engine", "vllm", "--api-key", KEY, "--card", "h200", "--host", "::1", "--dry-run", form)
    code, output, errors = serve(MODEL, *flags)
    assert (code, errors) == (0, "")
    assert output.startswith(beginning)
    assert MODEL in output
    assert "::1" in output
    assert KEY not in output


def test_flags_of_other_engines_are_refused_for_our_own():
    code, _, errors = serve(MODEL, "--dry-run")
    assert code == 2
    assert "--dry-run needs another engine" in errors


def test_torch_is_not_loaded():
    program = (
        "import sys\nimport blockdraft.cli.serve_engine, blockdraft.server.proxy.proxy\n"
        "import blockdraft.server.http.logs\n"
        "import blockdraft.server.http.lifetime\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False).returncode == 0
