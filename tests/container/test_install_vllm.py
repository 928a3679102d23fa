"""container/install-vllm with a git repository of our own, and a pip that notes what it is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "container" / "install-vllm"
PIP = """#!{python}
import json, os, sys
from pathlib import Path
source = Path(os.environ["TMPDIR"], "vllm-source")
words = [word for word in sys.argv[1:] if word != "--no-cache-dir"]
built = (source / "file").read_text() if str(source) in words else None
with open({log!r}, "a") as log:
    print(json.dumps([words, built, os.environ.get("VLLM_USE_PRECOMPILED")]), file=log)
"""


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def change(folder, text, *, branch=None):
    if branch is not None:
        git(folder, "checkout", "-q", "-b", branch, "v0.33.0")
    (folder / "file").write_text(text)
    git(folder, "commit", "-qam", text.strip()[:20])


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A release; pull request 7, which changes the first line, 8 the last, and 9 the first again."""
    folder = tmp_path_factory.mktemp("vllm")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "uploadpack.allowFilter", "true")
    (folder / "file").write_text("one\n\n\n\ntwo\n")
    git(folder, "add", "file")
    git(folder, "commit", "-qm", "release")
    git(folder, "tag", "v0.33.0")
    for number, text in ((7, "seven\n\n\n\ntwo\n"), (8, "one\n\n\n\neight\n"), (9, "nine\n\n\n\ntwo\n")):
        change(folder, text, branch=f"branch{number}")
        git(folder, "update-ref", f"refs/pull/{number}/head", "HEAD")
    git(folder, "checkout", "-q", "main")
    change(folder, "main\n\n\n\ntwo\n")
    return folder


@pytest.fixture
def install(repository, tmp_path):
    log = tmp_path / "log"
    (tmp_path / "bin").mkdir()
    pip = tmp_path / "bin" / "pip"
    pip.write_text(PIP.format(python=sys.executable, log=str(log)))
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho 0.33.0.dev1\n")
    for program in (pip, python):
        program.chmod(0o755)

    def run(version, **variables):
        environment = {**os.environ, "TMPDIR": str(tmp_path), "VLLM_REPOSITORY": f"file://{repository}"}
        done = subprocess.run(
            ["sh", str(SCRIPT), str(tmp_path), version],
            env=environment | variables,
            capture_output=True,
            text=True,
        )
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        noted = tmp_path / "engine-version"
        return done, calls, noted.read_text().strip() if noted.exists() else None

    return run


def test_a_release_is_a_wheel(install):
    done, calls, noted = install("0.33.0")
    assert done.returncode == 0, done.stderr
    assert calls == [[["install", "vllm==0.33.0"], None, None]]
    assert noted == "0.33.0"


def test_a_nightly_is_their_index_and_says_its_own_version(install):
    _, calls, noted = install("nightly")
    assert calls[0][0][:3] == ["install", "--pre", "vllm"]
    assert noted == "0.33.0.dev1"


@pytest.mark.parametrize(
    ("version", "built", "noted"),
    [
        ("0.33.0+pr7.pr8", "seven\n\n\n\neight\n", "0.33.0+pr7.pr8"),
        ("main", "main\n\n\n\ntwo\n", "0.33.0.dev1"),
        ("refs/pull/9/head", "nine\n\n\n\ntwo\n", "0.33.0.dev1"),
    ],
)
def test_what_git_names_is_built_with_published_kernels(install, tmp_path, version, built, noted):
    done, calls, said = install(version)
    assert done.returncode == 0, done.stderr
    assert [call[1:] for call in calls] == [[built, "1"]]
    assert said == noted
    assert not (tmp_path / "vllm-source").exists()


@pytest.mark.parametrize(
    ("version", "built", "noted"),
    [
        ("0.33.0", "one\n\n\n\ntwo\n", "0.33.0+pr38484"),
        ("0.33.0+pr38484", "one\n\n\n\ntwo\n", "0.33.0+pr38484"),  # says what is built, and is not merged
        ("0.33.0+pr7", "seven\n\n\n\ntwo\n", "0.33.0+pr7.pr38484"),
        ("main", "main\n\n\n\ntwo\n", "0.33.0.dev1+pr38484"),
    ],
)
def test_kernels_for_a_spark_are_built_and_noted(install, version, built, noted):
    done, calls, said = install(version, KERNELS="own", TORCH_CUDA_ARCH_LIST="12.1a")
    assert done.returncode == 0, done.stderr
    assert [call[1:] for call in calls] == [[built, None]]
    assert said == noted
    assert install("0.33.0", KERNELS="own", TORCH_CUDA_ARCH_LIST="9.0")[2] == "0.33.0"


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("no-such-branch", "'no-such-branch' is no release, and git knows no such ref"),
        ("0.99.0+pr7", "'refs/tags/v0.99.0' is no release"),
        ("0.33.0+pr77", "there is no pull request 77"),
        ("0.33.0+pr7.pr9", "pull request 9 cannot be merged into 0.33.0"),
        ("0.33.0+pr38484", "pr38484 means kernels for capability 12.1: build --target spark"),
        ("0.33.0+pr7.head", "'head' in 0.33.0+pr7.head is no pull request"),
    ],
)
def test_what_cannot_be_had_ends_in_one_line_and_installs_nothing(install, version, told):
    done, calls, noted = install(version)
    assert done.returncode == 2
    assert told in done.stderr.splitlines()[-1]
    assert calls == []
    assert noted is None
