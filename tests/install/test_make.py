"""`make` calls pip with the right arguments; nothing is downloaded."""

import contextlib
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts import choose_torch

ROOT = Path(__file__).parents[2]
CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # `make test` sets them, and made a child of this one
        monkeypatch.delenv(name, raising=False)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "scripts").mkdir()
    return tmp_path


def told(folder, *words):
    done = subprocess.run(["make", "-n", *words], cwd=folder, capture_output=True, text=True)
    return done.returncode, [line for line in done.stdout.splitlines() if "pip install" in line], done.stderr


def built(folder, build):
    """Make the folder look as if `make` had installed that build of PyTorch long ago."""
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    for name in ("bin/python", "torch", "installed"):
        (folder / ".venv" / name).touch()
        os.utime(folder / ".venv" / name, (0, 0))
    (folder / ".venv/torch").write_text(f"{build}\n")


@pytest.mark.parametrize("words", [(), ("TORCH=cpu",), ("TORCH=cuda",)])
def test_pytorch_alone_comes_from_its_index_and_before_all_else(clone, words):
    code, (first, *others), _ = told(clone, "test", *words)
    assert code == 0
    assert CPU_INDEX in first
    assert "--no-deps" in first
    assert "grep '^torch==' constraints.txt" in first
    assert others
    assert all("-e ." in line or "-e '.[dev]'" in line for line in others)
    assert all("-c constraints.txt" in line and "index" not in line for line in others)


def test_another_build_is_refused_where_one_is_there(clone):
    built(clone, "cuda")
    assert told(clone, "serve")[0] == told(clone, "serve", "TORCH=cuda")[0] == 0
    code, lines, error = told(clone, "serve", "TORCH=cpu")
    assert code == 2
    assert not lines
    assert "'make clean' first" in error


@pytest.mark.parametrize(
    ("platform", "asked", "has_card", "answers", "build", "said"),
    [
        ("linux", "", True, True, "cuda", "about 3 GB, most of it for NVIDIA cards."),
        ("linux", "", False, True, "cpu", "about 0.3 GB: no NVIDIA card was found"),
        (
            "linux",
            "",
            False,
            False,
            "cuda",
            "about 3 GB, most of it for NVIDIA cards. No card was found, but",
        ),
        ("linux", "cpu", True, True, "cpu", "about 0.3 GB"),
        ("linux", "cuda", False, False, "cuda", "about 3 GB"),
        ("linux", "cpu", False, False, None, "does not answer (no route). Leave out TORCH=cpu"),
        ("linux", "gpu", True, True, None, "TORCH=gpu is unknown: use TORCH=cpu or TORCH=cuda"),
        ("darwin", "", False, False, "cpu", "about 0.2 GB"),
        ("darwin", "cuda", False, True, None, "no CUDA build of PyTorch for this system"),
    ],
)
def test_the_build_follows_from_the_machine(monkeypatch, platform, asked, has_card, answers, build, said):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(choose_torch, "has_card", lambda: has_card)
    monkeypatch.setattr(choose_torch, "why_no_index", lambda index: None if answers else "no route")
    if build is None:
        with pytest.raises(SystemExit, match=re.escape(said)):
            choose_torch.choose("https://index", asked)
    else:
        found = choose_torch.choose("https://index", asked)
        assert found[0] == build
        assert said in found[1]


def test_an_index_that_cannot_be_reached_is_told_from_one_that_answers(tmp_path):
    (tmp_path / "torch").mkdir()
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}"
        assert choose_torch.why_no_index(index) is None
        assert choose_torch.why_no_index(f"{index}/none") == "File not found"
        server.shutdown()
    assert "refused" in choose_torch.why_no_index(index)


def test_the_containerfile_takes_the_same_index():
    index = CPU_INDEX.removeprefix("--index-url ")
    assert f"ARG TORCH_INDEX={index}\n" in (ROOT / "container/Containerfile").read_text()


@pytest.fixture
def stubbed(clone):
    """A clone whose Python and blockdraft only print their arguments; PyTorch's build is the CPU's."""
    (clone / "scripts/choose_torch.py").write_text("print('cpu')")
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
    torch, ours = calls_of_pip(made(stubbed, "serve"))
    assert "--quiet" not in torch + ours
    assert CPU_INDEX in torch
    assert torch.endswith(" off")
    assert ours.endswith("-e . off")
    (stubbed / ".venv/installed").unlink()
    (drawn,) = calls_of_pip(made_on_a_terminal(stubbed, "serve"))
    assert drawn.endswith("-e . ")  # pip draws them unless told not to


def test_a_later_run_installs_nothing(stubbed):
    assert calls_of_pip(made(stubbed, "serve"))
    assert made(stubbed, "serve").splitlines() == [
        ".venv/bin/blockdraft serve --port 8000 ",
        "blockdraft serve --port 8000 ",
    ]


@pytest.mark.parametrize("is_installed", [False, True])
def test_what_comes_is_said_before_it_comes_and_only_the_first_time(tmp_path, is_installed):
    if is_installed:
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv/installed").touch()
    script = [sys.executable, choose_torch.__file__, "https://index", "cuda"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
    if sys.platform == "linux":
        assert done.stdout == "cuda\n"
        assert ("To download: about 3 GB" in done.stderr) != is_installed


def test_every_dependency_has_the_version_that_the_tests_run_with():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    pinned = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert {re.match(r"[\w-]+", one)[0] for one in asked} == pinned


def test_make_test_all_installs_the_packages_that_skipped_tests_ask_for(clone):
    reference, heads = (
        (ROOT / name).read_text()
        for name in ("tests/lossless/test_reference_package.py", "tests/models/test_draft_heads.py")
    )
    asked = re.findall(r'^INSTALL = "pip install --no-deps (\S+)"', reference, re.M)
    asked += [f"{name}=={version}" for name, version in re.findall(r'needs\("(\w+)", "([\d.]+)"\)', heads)]
    assert len(asked) >= 3
    words = [line.split() for line in told(clone, "test-all")[1] if "--no-deps" in line]
    assert any(set(asked) <= set(line) for line in words)
    assert any("'.[dev,browser,deploy]'" in line for line in told(clone, "test-all")[1])
    assert not any("dflash" in line for line in told(clone, "test")[1])


@pytest.mark.parametrize("failing", [None, "types"])
def test_the_ci_script_says_which_steps_ran_and_ends_where_one_fails(tmp_path, failing):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    targets = re.findall(r"^step \S+ (\S+)$", (ROOT / ".ci/run").read_text(), re.M)
    assert targets == ["setup", "lint", "format", "types", "weights", "suite"]
    lines = [f"{name}:\n\t{'false' if name == failing else 'true'}\n" for name in targets]
    (tmp_path / "Makefile").write_text("".join(lines))
    done = subprocess.run(
        [tmp_path / ".ci/run"], capture_output=True, text=True, env={**os.environ, "MAKEFLAGS": ""}
    )
    steps = [line.split()[0] for line in done.stdout.partition("== Steps\n")[2].splitlines()]
    assert (done.returncode == 0) == (failing is None)
    assert steps == ["set-up", *targets[1:5], "tests"][: 4 if failing else 6]
    assert done.stdout.endswith("s  ok\n" if failing is None else "s  FAILED (2)\n")


def test_make_test_does_the_steps_of_the_ci_script(stubbed):
    (stubbed / ".venv/bin/ruff").write_text('#!/bin/sh\necho "ruff $1"\n')
    (stubbed / ".venv/bin/mypy").write_text("#!/bin/sh\necho mypy\n")
    for name in ("ruff", "mypy"):
        (stubbed / ".venv/bin" / name).chmod(0o755)
    ran = [
        line for line in made(stubbed, "test").splitlines() if not line.startswith((".venv", "python -m pip"))
    ]
    order = ["ruff check", "ruff format", "mypy", "blockdraft fetch", "python -m pytest"]
    assert [name for line in ran for name in order if line.startswith(name)] == order
