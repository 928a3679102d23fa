"""Model folders and the choice between layouts: what is opened, and how a refusal is named."""

from __future__ import annotations

import errno
import json
import pickle
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from blockdraft.errors import BlockdraftError, FetchError, ModelError
from blockdraft.models import fetch
from blockdraft.models.checkpoint import open_checkpoint
from blockdraft.models.folder import FolderCheckpoint

A = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
B = torch.arange(4, dtype=torch.float32)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in one file, without a tokenizer, as drafters are."""
    write_json(tmp_path / "config.json", {"model_type": "llama", "eos_token_id": 2})
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", {})
    save_file({"a": A}, tmp_path / "s1.safetensors")
    save_file({"b": B}, tmp_path / "s2.safetensors")
    write_json(tmp_path / INDEX, {"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}})
    return tmp_path


@pytest.fixture
def texts(folder: Path) -> Path:
    """The folder with a tokenizer of four words."""
    words = {"<unk>": 0, "hello": 1, "</s>": 2, "<end>": 3}
    Tokenizer(WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def open_folder(folder: Path) -> FolderCheckpoint:
    return FolderCheckpoint(folder, name="mine")


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_folder(folder)
    assert "\n" not in str(caught.value)
    assert "mine" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", ["folder", "sharded"])
def test_tensors_are_read_in_their_stored_dtype(layout: str, request: pytest.FixtureRequest):
    checkpoint = open_folder(request.getfixturevalue(layout))
    assert checkpoint.shapes() == {"a": (2, 3), "b": (4,)}
    assert checkpoint.read("a").dtype == torch.bfloat16
    assert torch.equal(checkpoint.read("a"), A)
    assert torch.equal(checkpoint.read("b"), B)


def test_tensors_outlive_a_closed_checkpoint(folder: Path):
    checkpoint = open_folder(folder)
    tensor = checkpoint.read("b")
    checkpoint.close()
    assert torch.equal(tensor, B)


def test_a_single_file_of_any_name_is_enough(folder: Path):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert set(open_folder(folder).shapes()) == {"a", "b"}


def test_several_files_without_an_index_are_refused(sharded: Path):
    (sharded / INDEX).unlink()
    assert INDEX in refusal(sharded)


def test_missing_shard_is_named(sharded: Path):
    (sharded / "s2.safetensors").unlink()
    assert "s2.safetensors" in refusal(sharded)


@pytest.mark.parametrize("keep", [0, 4, 8, 30, -1])
def test_truncated_shard_is_named_at_open(sharded: Path, keep: int):
    shard = sharded / "s2.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    assert "s2.safetensors" in refusal(sharded)


def test_tensor_the_index_promises_in_vain_is_named(sharded: Path):
    shards = {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s2.safetensors"}
    write_json(sharded / INDEX, {"weight_map": shards})
    assert "'c'" in refusal(sharded)


def test_tensor_in_two_shards_is_named(sharded: Path):
    save_file({"a": A, "b": B}, sharded / "s2.safetensors")
    assert "'a'" in refusal(sharded)


@pytest.mark.parametrize("shard", ["../s1.safetensors", "/etc/passwd", 7])
def test_index_cannot_point_outside_the_folder(sharded: Path, shard: object):
    write_json(sharded / INDEX, {"weight_map": {"a": shard}})
    assert "not a file of this folder" in refusal(sharded)


def test_absent_tensor_is_named(folder: Path):
    with pytest.raises(ModelError, match="'nothing'"):
        open_folder(folder).read("nothing")


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle was opened",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused_unopened(tmp_path: Path, name: str):
    write_json(tmp_path / "config.json", {})
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    assert name in refusal(tmp_path)


def test_folder_without_weights_is_refused(folder: Path):
    (folder / "model.safetensors").unlink()
    assert "no .safetensors file" in refusal(folder)


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "[" * 100_000, "\udcff"])
def test_config_must_be_a_json_object(folder: Path, text: str | None):
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "config.json" in refusal(folder)


# The text side.


def test_folder_without_tokenizer_opens_but_has_no_text(folder: Path):
    checkpoint = open_folder(folder)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        checkpoint.tokenizer_parts()


def test_damaged_tokenizer_is_named(texts: Path):
    (texts / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        open_folder(texts).tokenizer_parts()


def test_eos_ids_are_the_union_in_order(texts: Path):
    write_json(texts / "generation_config.json", {"eos_token_id": [9, 2]})
    write_json(texts / "tokenizer_config.json", {"eos_token": {"content": "<end>"}})
    parts = open_folder(texts).tokenizer_parts()
    assert parts.eos_ids == (9, 2, 3)
    assert parts.eos_token == "<end>"
    assert parts.tokenizer.encode("hello").ids == [1]


def test_special_tokens_fall_back_to_their_map(texts: Path):
    write_json(texts / "tokenizer_config.json", {"bos_token": None, "eos_token": "</s>"})
    write_json(texts / "special_tokens_map.json", {"bos_token": "hello", "eos_token": "<end>"})
    parts = open_folder(texts).tokenizer_parts()
    assert (parts.bos_token, parts.eos_token) == ("hello", "</s>")


def test_chat_template_sources_in_order_of_preference(texts: Path):
    def template() -> str | None:
        return open_folder(texts).tokenizer_parts().chat_template

    assert template() is None
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "list"}]
    write_json(texts / "tokenizer_config.json", {"chat_template": named})
    assert template() == "list"
    write_json(texts / "tokenizer_config.json", {"chat_template": "string"})
    assert template() == "string"
    write_json(texts / "chat_template.json", {"chat_template": "json"})
    assert template() == "json"
    (texts / "chat_template.jinja").write_text("jinja")
    assert template() == "jinja"


# Which layout a name stands for.


def test_existing_folder_is_opened_under_the_name_the_user_wrote(folder: Path):
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.name == str(folder)
    assert set(checkpoint.shapes()) == {"a", "b"}


@pytest.mark.parametrize(
    "source",
    [
        "/no/where",
        "./org/name",
        "./model",
        "../model",
        Path("org/name"),
        "~/model",
        "org/model.gguf",
        "a/b/c",
        "name",
        "org/na me",
        "",
        "a/b@",
        "~nobody-of-this-name/x",
        "x" * 300,
        "a\0b",
    ],
)
def test_what_cannot_be_a_hub_id_is_not_asked_of_the_hub(source: str | Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ModelError, match="does not exist"):
        open_checkpoint(source)


def test_file_that_is_not_gguf_is_refused(folder: Path):
    with pytest.raises(ModelError, match=r"not a \.gguf"):
        open_checkpoint(folder / "model.safetensors")


def test_default_stands_for_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "embedded.gguf"
    path.write_bytes(b"not a model")
    monkeypatch.setattr(fetch, "default_gguf", lambda report: path)
    with pytest.raises(ModelError, match="'default' cannot be read as GGUF"):
        open_checkpoint("default")


def test_hub_id_and_revision_reach_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, str | None]] = []

    def download(repo: str, *, revision: str | None, **_: object) -> str:
        calls.append((repo, revision))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/na-me.1").name == "org/na-me.1"
    open_checkpoint("org/name@refs/pr/1")
    assert calls == [("org/na-me.1", None), ("org/name", "refs/pr/1")]


def hub_failure(error_type: type[Exception]) -> Exception:
    """An error of the hub's client, whose constructors want a live response."""
    error = error_type.__new__(error_type)
    error.args = ("first line\nsecond line",)
    return error


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (hub_failure(errors.GatedRepoError), ModelError, "gated"),
        (hub_failure(errors.RepositoryNotFoundError), ModelError, "neither"),
        (hub_failure(errors.RevisionNotFoundError), ModelError, "'v9'"),
        (hub_failure(errors.HFValidationError), ModelError, "valid hub id"),
        (hub_failure(errors.LocalEntryNotFoundError), FetchError, "HF_HUB_OFFLINE"),
        (OSError(errno.ENOSPC, "No space left on device"), FetchError, "full"),
        (ConnectionError("reset by peer\nlong story"), FetchError, "reset by peer"),
        (RuntimeError(""), FetchError, "RuntimeError"),
    ],
)
def test_hub_failures_become_one_line(
    error: Exception,
    expected: type[BlockdraftError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
):
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(expected, match=words) as caught:
        open_checkpoint("org/name@v9")
    assert "\n" not in str(caught.value)
    assert "org/name" in str(caught.value)


def test_real_hub_client_offline_names_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FetchError, match="'blockdraft-tests/absent'"):
        open_checkpoint("blockdraft-tests/absent")
