"""Clients that nobody here wrote, each in an environment of its own, against the default model.

$BLOCKDRAFT_TEST_CLIENTS says whether and where: "1" makes the environments in our cache folder (pip and npm,
minutes) and keeps them there, a path is a folder that has some. Without the variable, or without an
environment in that folder, a test is skipped.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.settings.settings import cache_dir
from tests.bench.vllm_venv import python_of
from tests.server.test_life import ROOT, Process

VARIABLE = "BLOCKDRAFT_TEST_CLIENTS"
GIVEN = os.environ.get(VARIABLE, "")
SCRIPTS = Path(__file__).parent / "clients"
PACKAGES = {
    "openai": ["openai"],
    "agents": ["openai-agents"],
    "anthropic": ["anthropic"],
    "pydantic_ai": ["pydantic-ai-slim[openai,anthropic]"],
    "langchain": ["langchain-openai"],
    "litellm": ["litellm"],
}
NODE_PACKAGES = ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"]
PATIENCE_S = 600

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GIVEN in ("", "0"), reason=f"wants clients: set {VARIABLE}=1, or to a folder"),
    pytest.mark.skipif(
        not (cache_dir() / SMOLLM2.gguf).exists(), reason="default model not fetched: blockdraft fetch"
    ),
]


@pytest.fixture(scope="module")
def url():
    command = [sys.executable, "-m", "blockdraft", "serve", "default", "--device", "cpu", "--port", "0"]
    process = Process(command, {"OMP_NUM_THREADS": str(os.cpu_count())})
    try:
        yield process.ready()
    finally:
        process.process.terminate()
        process.end()


def python_with(name):
    """The Python of a client's environment."""

    def install(python):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[name]], check=True)

    if GIVEN == "1":
        return python_of("1", f"client-{name}", install)
    python = Path(GIVEN) / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"wants {python}")
    return python


def run(command, folder):
    """Without our own package, and without a way out of this machine but to the server."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_a_client_of_python(url, name, tmp_path):
    run([python_with(name), SCRIPTS / f"use_{name}.py", url, "default"], tmp_path)


def test_the_vercel_ai_sdk(url):
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm")
    folder = cache_dir() / "client-vercel" if GIVEN == "1" else Path(GIVEN) / "vercel"
    if GIVEN == "1" and not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([npm, "install", "--silent", "--prefix", folder, *NODE_PACKAGES], check=True)
    if not (folder / "node_modules").exists():
        pytest.skip(f"wants {folder}")
    script = folder / "use_vercel.mjs"  # modules are looked for beside the script
    script.write_text((SCRIPTS / "use_vercel.mjs").read_text())
    run([shutil.which("node"), script, url, "default"], folder)


def test_every_client_has_its_script():
    found = {path.stem.removeprefix("use_") for path in SCRIPTS.glob("use_*")}
    assert found == {*PACKAGES, "vercel"}
    assert ROOT in SCRIPTS.parents
