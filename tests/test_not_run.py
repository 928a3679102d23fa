"""A run says what it left out, with one process and with several."""

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


@pytest.mark.parametrize("processes", [[], ["-n", "2"]], ids=["one", "two"])
def test_the_last_lines_say_what_was_left_out(tmp_path, processes):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  slow\n")
    (tmp_path / "test_parts.py").write_text(TESTS)
    (tmp_path / "test_browser.py").write_text("import pytest\npytest.importorskip('no_playwright')\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.not_run",
        "-m",
        "not slow",
        *processes,
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Not run:")]
    assert line.startswith("Not run: 1 for a GPU, those for a browser, 3 slow.")
    assert done.stdout.splitlines().index(line) >= len(done.stdout.splitlines()) - 2


def test_a_run_that_left_nothing_out_says_nothing(tmp_path):
    (tmp_path / "test_parts.py").write_text("def test_that_runs(): pass\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.not_run",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert "Not run" not in done.stdout
