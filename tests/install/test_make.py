"""What `make` tells pip; nothing is downloaded."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    for name in (
        "MAKEFLAGS",
        "MFLAGS",
        "MAKELEVEL",
    ):  # set where `make test` runs us: that make would be its child
        monkeypatch.delenv(name, raising=False)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def told(folder, *words):
    done = subprocess.run(["make", "-n", *words], cwd=folder, capture_output=True, text=True)
    return done.returncode, [line for line in done.stdout.splitlines() if "pip install" in line], done.stderr


def test_the_default_asks_no_index_but_pips_own(clone):
    code, lines, _ = told(clone, "serve")
    assert code == 0
    assert [line.split()[-2:] for line in lines] == [["-e", "."]]
    assert not any("index" in line or "://" in line for line in lines)


def test_the_cpu_build_is_there_before_anything_could_ask_pypi_for_torch(clone):
    code, lines, _ = told(clone, "test", "TORCH=cpu")
    assert code == 0
    first, *others = lines
    assert CPU_INDEX in first
    assert "grep '^torch==' constraints.txt" in first
    assert others
    assert all("-e ." in line or "-e '.[dev]'" in line for line in others)
    assert all("-c constraints.txt" in line and "index" not in line for line in others)


def test_the_choice_is_kept(clone):
    (clone / ".venv/bin").mkdir(parents=True)
    for name in ("bin/python", "torch-cpu", "installed"):
        (clone / ".venv" / name).touch()
        os.utime(clone / ".venv" / name, (0, 0))  # older than constraints.txt: another torch may be in it
    _, lines, _ = told(clone, "serve")
    assert CPU_INDEX in lines[0]


def test_cuda_that_is_there_is_not_left_beside_the_cpu_build(clone):
    (clone / ".venv/bin").mkdir(parents=True)
    for name in ("bin/python", "installed"):
        (clone / ".venv" / name).touch()
    done = subprocess.run(["make", "serve", "TORCH=cpu"], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 2
    assert "make clean" in done.stderr


def test_another_word_is_refused(clone):
    code, lines, error = told(clone, "serve", "TORCH=gpu")
    assert code == 2
    assert not lines
    assert "TORCH=gpu is unknown" in error


def test_the_containerfile_takes_the_same_index():
    index = CPU_INDEX.removeprefix("--index-url ")
    assert f"ARG TORCH_INDEX={index}\n" in (ROOT / "container/Containerfile").read_text()


@pytest.fixture
def stubbed(clone):
    """A clone whose Python and blockdraft only say how they were called."""
    folder = clone / ".venv/bin"
    folder.mkdir(parents=True)
    for name in ("python", "blockdraft"):
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $@" "$PIP_PROGRESS_BAR"\n')
        (folder / name).chmod(0o755)
    return clone


def made(folder, *words):
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def made_on_a_terminal(folder, *words):
    ours, theirs = os.openpty()
    with subprocess.Popen(["make", *words], cwd=folder, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # Linux's end of a terminal
            while piece := os.read(ours, 65536):
                written += piece
    os.close(ours)
    assert process.returncode == 0
    return written.decode()


def calls_of_pip(text):
    return [line for line in text.splitlines() if line.startswith("python -m pip install")]


def test_pip_shows_its_progress_and_draws_bars_on_a_terminal_alone(stubbed):
    (piped,) = calls_of_pip(made(stubbed, "serve"))
    assert "--quiet" not in piped
    assert piped.endswith("-e . off")
    (stubbed / ".venv/installed").unlink()
    (drawn,) = calls_of_pip(made_on_a_terminal(stubbed, "serve"))
    assert drawn.endswith("-e . ")  # pip draws them unless told not to


@pytest.mark.parametrize(
    ("words", "size"),
    [((), "about 3 GB" if sys.platform == "linux" else "about 0.2 GB"), (("TORCH=cpu",), "about 0.3 GB")],
)
def test_the_first_run_says_how_much_comes_and_a_later_one_nothing(stubbed, words, size):
    first = made(stubbed, "serve", *words)
    assert first.count("To download") == 1
    assert size in first.partition("python -m pip")[0]
    assert made(stubbed, "serve").splitlines() == [
        ".venv/bin/blockdraft serve --port 8000 ",
        "blockdraft serve --port 8000 ",
    ]
    os.utime(stubbed / ".venv/installed", (0, 0))  # pyproject.toml has changed since: little comes
    later = made(stubbed, "serve")
    assert calls_of_pip(later)
    assert "To download" not in later
