"""blockdraft models: what is on the disk, what is fetched, and what alone may be removed."""

import io
import json
import re
import sys

import pytest

from blockdraft.cli.main import main
from blockdraft.cli.models import shown_bytes
from tests.cli.conftest import Terminal
from tests.tiny import TARGET


@pytest.fixture(autouse=True)
def caches(monkeypatch, tmp_path):
    """A hub's cache with a model and a config, and ours with the default model."""
    ours, hub = tmp_path / "ours", tmp_path / "hub"
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(ours))
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    (ours / "kernels").mkdir(parents=True)
    (ours / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(bytes(4_000_000))
    (ours / "SmolLM2-135M-Instruct.Q4_1.gguf.sha256").write_text("")
    (ours / "kernels/some.o").write_bytes(bytes(3_000_000))
    for name, file, size in (
        ("models--org--one", "model.safetensors", 2_500_000),
        ("models--org--two", "config.json", 1_000),
        ("datasets--org--three", "data.parquet", 1_000),
    ):
        blob, snapshot = hub / name / "blobs/b", hub / name / "snapshots/s"
        blob.parent.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        blob.write_bytes(bytes(size))
        (snapshot / file).symlink_to("../../blobs/b")
    return ours, hub


def test_the_disk_comes_first_and_the_known_ones_when_asked_for(capsys, caches):
    assert main(["models"]) == 0
    disk, hint = capsys.readouterr().out.split("\n\n")
    assert re.fullmatch(
        r"\d+ model families and \d+ target/drafter pairs are known: `blockdraft models --known` lists them, "
        r"`blockdraft models NAME` finds one\n",
        hint,
    )
    assert main(["models", "--known"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(disk)
    disk, known, *_ = shown.split("\n\n")
    assert [" ".join(line.split()) for line in disk.splitlines()[1:]] == [
        "default 4 MB HuggingFaceTB/SmolLM2-135M-Instruct; its drafter came with blockdraft",
        "org/one 2 MB",
        "org/two 1 kB no weights",
        "3 MB more in our cache: kernels and packed weights, rebuilt when needed",
    ]
    assert known.startswith("Known families\n")
    assert all(str(folder) in disk.splitlines()[0] for folder in caches)


def test_a_query_narrows_the_disk_too_and_json_has_both(capsys, caches):
    assert main(["models", "ORG/T"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  org/two      1 kB  no weights"]
    assert main(["models", "org/one", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    path = str(caches[1] / "models--org--one")
    assert answer["on_disk"] == [{"name": "org/one", "bytes": 2_500_000, "has_weights": True, "path": path}]
    assert answer["pairs"] == []


def test_an_empty_disk_says_how_to_fetch(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no hub"))
    assert main(["models"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "  no model: `blockdraft models fetch NAME`"


@pytest.mark.parametrize("words", [["fetch"], ["models", "fetch"]])
def test_fetch_checks_a_model_and_says_so(capsys, tmp_path, words):
    assert main([*words, TARGET]) == 0
    assert capsys.readouterr().out == f"'{TARGET}' is ready\n"
    assert main([*words, str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["models", "fetch"]) == 2
    assert "needs a name" in capsys.readouterr().err


def test_rm_removes_what_it_names_and_nothing_else(capsys, caches):
    ours, hub = caches
    assert main(["models", "rm", "org/one", "default", "--yes"]) == 0
    assert capsys.readouterr().out == "removed 'org/one': 2 MB freed\nremoved 'default': 4 MB freed\n"
    assert sorted(path.name for path in hub.iterdir()) == ["datasets--org--three", "models--org--two"]
    assert [path.name for path in ours.iterdir()] == ["kernels"]


def test_rm_without_anybody_to_ask_removes_nothing(capsys, caches, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["models", "rm", "org/one"]) == 2
    assert "add --yes" in capsys.readouterr().err
    assert (caches[1] / "models--org--one").exists()


@pytest.mark.parametrize(("typed", "is_removed"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_rm_asks_first(capsys, caches, monkeypatch, typed, is_removed):
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    assert main(["models", "rm", "org/one"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("remove 'org/one', 2 MB, ")
    assert (captured.out.startswith("removed ")) == is_removed
    assert (caches[1] / "models--org--one").exists() != is_removed


def test_rm_never_leaves_the_caches(capsys, caches, tmp_path):
    """Paths, ids that climb, and links that lead elsewhere."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model.safetensors").write_text("mine")
    (caches[1] / "models--org--link").symlink_to(mine)
    (caches[1] / "models--org--one/snapshots/s/more").symlink_to(mine)
    for name in (str(mine), "../mine", "org/../../mine", "org/link", "org/three", "org/none"):
        assert main(["models", "rm", "org/two", name, "--yes"]) == 2, name
        assert main(["models", "rm", name, "--yes"]) == 2, name
    assert "did you mean org/one?" in capsys.readouterr().err
    assert (caches[1] / "models--org--two").exists(), "some were removed before all were found"
    assert main(["models", "rm", "org/one", "--yes"]) == 0
    assert (mine / "model.safetensors").read_text() == "mine"


def test_sizes_are_in_the_units_of_disks():
    sizes = {999: "1 kB", 1_234_567: "1 MB", 98_362_432: "98 MB", 8_050_000_000: "8.1 GB"}
    assert {size: shown_bytes(size) for size in sizes} == sizes
