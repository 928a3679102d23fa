"""The product runs without what macOS and Windows lack; both are simulated on Linux."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from blockdraft.kernels import cpu
from tests.install.simulated import SYSTEMS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def simulated(system, *commands):
    """Run commands as on another system; Python warns where an encoding would depend on the system."""
    return subprocess.run(
        [
            *(sys.executable, "-X", "warn_default_encoding", "-W", "ignore::EncodingWarning"),
            *("-m", "tests.install.simulated", system, *commands),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_can_be_imported(system):
    done = simulated(system, "import")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("system", [pytest.param("macos", marks=pytest.mark.slow), "windows"])
def test_commands_that_compute_nothing_run(system):
    done = simulated(system, "--help", "plan", "settings", "fetch --help", "--version")
    assert done.returncode == 0, done.stderr
    for text in ("COMMAND", "users", "max_num_seqs", "download", "blockdraft 0."):
        assert text in done.stdout, text


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_doctor_finds_what_can_be_found(system):
    done = simulated(system, "doctor --quick --json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_default_model_answers(system):
    done = simulated(system, "generate --temperature 0 --max-tokens 4 --width 1 Hi")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Hello! How can\n"


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_server_answers_with_an_engine_that_was_not_forked(system):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.install.simulated", system, "serve --port 0 --width 1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert "is ready" in line, process.stderr.read()
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode in (0, -15)


# ---- kernels of a CPU


@pytest.fixture
def on(monkeypatch, tmp_path):
    """Make kernels/cpu.py see another system."""

    def be(name):
        monkeypatch.setattr(sys, "platform", SYSTEMS[name].platform)
        monkeypatch.setattr(cpu.platform, "machine", lambda: SYSTEMS[name].machine)
        monkeypatch.setattr(cpu.platform, "system", lambda: name)

    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    for function in (cpu.why_not_here, cpu._features, cpu._why_not_tried):
        function.cache_clear()
    yield be
    for function in (cpu.why_not_here, cpu._features, cpu._why_not_tried):
        function.cache_clear()


def test_windows_computes_with_pytorch(on):
    on("windows")
    assert "never tested on windows" in cpu.why_not_here()


def test_a_mac_has_the_kernels_of_arm(on):
    on("macos")
    assert cpu.why_not_here() is None
    assert cpu.product_paths() == ["sdot", "generic"]
    assert cpu.extra_features() == ("+dotprod",)


def test_a_kernel_that_crashes_on_a_mac_crashes_alone(on, monkeypatch):
    on("macos")
    monkeypatch.setattr(cpu, "_TRIAL", "import os; os.abort()")
    assert "do not run on this macos" in cpu._why_not_tried()


def test_a_kernel_that_runs_on_a_mac_is_tried_once(on, monkeypatch):
    on("macos")
    monkeypatch.setattr(cpu, "_TRIAL", "pass")
    assert cpu._why_not_tried() is None
    cpu._why_not_tried.cache_clear()
    monkeypatch.setattr(cpu, "_TRIAL", "import os; os.abort()")
    assert cpu._why_not_tried() is None


@pytest.mark.slow
@pytest.mark.skipif(cpu.why_not_here() is not None, reason=f"{cpu.why_not_here()}")
def test_the_trial_is_a_kernel_that_is_right():
    subprocess.run([sys.executable, "-c", cpu._TRIAL], cwd=ROOT, check=True)


# ---- what is said of systems


def test_no_marker_leaves_a_mac_out():
    for line in PROJECT["dependencies"]:
        assert "platform_machine" not in line, line


def test_the_systems_that_are_claimed_were_run_and_the_others_are_said_to_be_checked():
    named = {name.rpartition(" :: ")[2] for name in PROJECT["classifiers"] if "Operating System" in name}
    assert named == {"Linux"}
    install = (ROOT / "docs/install.md").read_text()
    assert re.search(r"\| Linux.*\| tested", install)
    for name in ("macOS", "Windows"):
        assert re.search(rf"\| {name}.*\| checked", install), name
