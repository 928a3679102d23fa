"""What `make` tells pip; nothing is downloaded."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"


@pytest.fixture
def clone(tmp_path):
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
