"""A run says what it left out, with one process and with several."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

def test_that_runs(): pass

@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_that_is_slow(number): pass

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_on_a_card(): pass

@pytest.mark.skipif(True, reason="for another reason")
def test_that_is_skipped(): pass
"""


def run(*words):
    """pytest with our hooks, without the plugins that happen to be installed: some take seconds to load."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.not_run", *map(str, words)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


@pytest.mark.parametrize("processes", [[], ["-p", "xdist", "-n", "2"]], ids=["one", "two"])
def test_the_last_lines_say_what_was_left_out(tmp_path, processes):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  slow\n")
    (tmp_path / "test_parts.py").write_text(TESTS)
    (tmp_path / "test_browser.py").write_text("import pytest\npytest.importorskip('no_playwright')\n")
    said = run("-m", "not slow", *processes, tmp_path)
    (line,) = [line for line in said if line.startswith("Not run:")]
    assert line.startswith("Not run: 1 for a GPU, those for a browser, 3 slow.")
    assert said.index(line) >= len(said) - 2
    assert any("2 workers" in text for text in said) == bool(processes)


def test_a_run_that_left_nothing_out_says_nothing(tmp_path):
    (tmp_path / "test_parts.py").write_text("def test_that_runs(): pass\n")
    assert not any("Not run" in line for line in run("--rootdir", tmp_path, tmp_path))
