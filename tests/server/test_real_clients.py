"""Clients that nobody here wrote, each in an environment of its own, against the default model.

$BLOCKDRAFT_TEST_CLIENTS says whether and where: "1" makes the environments in our cache folder (pip and npm,
minutes) and keeps them there, a path is a folder that has some. Without the variable, or without an
environment in that folder, a test is skipped.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.settings.settings import cache_dir
from tests.bench.vllm_venv import python_of
from tests.server.test_life import Process

VARIABLE = "BLOCKDRAFT_TEST_CLIENTS"
GIVEN = os.environ.get(VARIABLE, "")
SCRIPTS = Path(__file__).parent / "clients"
PACKAGES = {
    "openai": ["openai"],
    "agents": ["openai-agents"],
    "anthropic": ["anthropic"],
    "pydantic_ai": ["pydantic-ai-slim[openai,anthropic]"],
    "langchain": ["langchain-openai"],
    "litellm": ["litellm", "mcp"],
}
NODE_PACKAGES = ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"]
PATIENCE_S = 600
QUESTION = "What is the capital of France?"

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
        address = process.address(process.errors, "listening on")
        end_s = time.monotonic() + PATIENCE_S
        while not process.output and process.process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.5)
        assert process.output, process.errors
        yield address
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


def node_folder(name, packages):
    """A folder with packages of npm."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("wants npm")
    folder = cache_dir() / f"client-{name}" if GIVEN == "1" else Path(GIVEN) / name
    if GIVEN == "1" and not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([npm, "install", "--silent", "--prefix", folder, *packages], check=True)
    if not (folder / "node_modules").exists():
        pytest.skip(f"wants {folder}")
    return folder


def run(command, folder, **more):
    """Return its output. Our own package is not in its environment."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**variables, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PACKAGES)
def test_a_client_of_python(url, name, tmp_path):
    run([python_with(name), SCRIPTS / f"use_{name}.py", url, "default"], tmp_path)


def test_the_vercel_ai_sdk(url):
    folder = node_folder("vercel", NODE_PACKAGES)
    script = folder / "use_vercel.mjs"  # modules are looked for beside the script
    script.write_text((SCRIPTS / "use_vercel.mjs").read_text())
    run([shutil.which("node"), script, url, "default"], folder)


def test_claude_code(url, tmp_path):
    """With one of its tools and a prompt of ours: all of them are more than the default model can read."""
    folder = node_folder("claude-code", ["@anthropic-ai/claude-code"])
    command = [folder / "node_modules/.bin/claude", "-p", "--tools", "Read", "--system-prompt", "Be helpful."]
    answer = run(
        [*command, QUESTION],
        tmp_path,
        HOME=str(tmp_path),
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="default",
        ANTHROPIC_SMALL_FAST_MODEL="default",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="64",
    )
    assert "Paris" in answer


CODEX = """
model = "default"
model_provider = "blockdraft"
model_context_window = 8192
web_search = "disabled"

[features]
multi_agent = false
goals = false

[model_providers.blockdraft]
name = "blockdraft"
base_url = "{url}/v1"
wire_api = "responses"
"""


def test_codex(url, tmp_path):
    """With some of its tools, for the same reason."""
    folder = node_folder("codex", ["@openai/codex"])
    (tmp_path / "config.toml").write_text(CODEX.format(url=url))
    command = [folder / "node_modules/.bin/codex", "exec", "--skip-git-repo-check", QUESTION]
    assert "Paris" in run(command, tmp_path, CODEX_HOME=str(tmp_path))


def test_every_client_has_its_script():
    found = {path.stem.removeprefix("use_") for path in SCRIPTS.glob("use_*")}
    assert found == {*PACKAGES, "vercel"}
