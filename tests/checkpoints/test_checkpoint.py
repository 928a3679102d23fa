"""Model folders and the choice between layouts: what is opened, and how a refusal is named."""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from blockdraft.checkpoints import fetch
from blockdraft.checkpoints.checkpoint import TensorInfo
from blockdraft.checkpoints.folder_checkpoint import FolderCheckpoint
from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.checkpoints.tokenizer_parts import refusing
from blockdraft.errors import BlockdraftError, FetchError, ModelError
from tests.memory import peak_growth_mb

A = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
B = torch.arange(4, dtype=torch.float32)
INDEX = "model.safetensors.index.json"
DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


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
    assert checkpoint.tensors() == {
        "a": TensorInfo((2, 3), torch.bfloat16),
        "b": TensorInfo((4,), torch.float32),
    }
    assert checkpoint.read("a").dtype == torch.bfloat16
    assert torch.equal(checkpoint.read("a"), A)
    assert torch.equal(checkpoint.read("b"), B)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_bit_for_bit(folder: Path, dtype: torch.dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes % 2 if dtype == torch.bool else codes
    save_file({"x": codes.view(dtype).view(4, -1), "y": B}, folder / "model.safetensors")
    checkpoint = open_folder(folder)
    assert checkpoint.tensors()["x"] == TensorInfo((4, 64 // dtype.itemsize), dtype)
    assert checkpoint.read("x").dtype == dtype
    assert torch.equal(checkpoint.read("x").view(torch.uint8).flatten(), codes)
    assert torch.equal(checkpoint.read("x", 1, 3).view(torch.uint8).flatten(), codes[64:192])


@pytest.mark.parametrize("shape", [(7,), (6, 3), (4, 2, 5), (5, 0), (0, 5)])
def test_any_slice_of_rows_is_that_slice_of_the_tensor(folder: Path, shape: tuple[int, ...]):
    stored = torch.randn(shape, dtype=torch.float64)
    save_file({"x": stored, "y": B}, folder / "model.safetensors")
    checkpoint = open_folder(folder)
    num_rows = shape[0]
    for begin in range(num_rows + 1):
        assert torch.equal(checkpoint.read("x", begin), stored[begin:])
        for end in range(begin, num_rows + 1):
            assert torch.equal(checkpoint.read("x", begin, end), stored[begin:end])
            assert checkpoint.read("x", begin, end).shape == (end - begin, *shape[1:])


def test_tensor_without_axes_is_read_whole(folder: Path):
    save_file({"b": B, "scale": torch.tensor(0.5, dtype=torch.bfloat16)}, folder / "model.safetensors")
    scale = open_folder(folder).read("scale")
    assert scale.shape == ()
    assert scale.item() == 0.5


def test_short_reads_are_continued(folder: Path, monkeypatch: pytest.MonkeyPatch):
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: whole(fd, [views[0][:3]], offset))
    assert torch.equal(open_folder(folder).read("b"), B)


def test_shard_cut_after_opening_is_named(folder: Path):
    checkpoint = open_folder(folder)
    shard = folder / "model.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(ModelError, match=r"'mine': model\.safetensors is truncated"):
        [checkpoint.read(name) for name in ("a", "b")]


def test_folders_have_no_packed_tensors(folder: Path):
    checkpoint = open_folder(folder)
    assert checkpoint.ggml_type("a") is None


@pytest.mark.slow
def test_loading_in_slices_keeps_the_file_out_of_memory(tmp_path: Path):
    num_rows, num_columns = 50_000, 1024
    write_json(tmp_path / "config.json", {})
    entry = {
        "dtype": "F32",
        "shape": [num_rows, num_columns],
        "data_offsets": [0, 4 * num_rows * num_columns],
    }
    shard = tmp_path / "model.safetensors"
    write_shard(shard, {"x": entry})
    os.truncate(shard, shard.stat().st_size + 4 * num_rows * num_columns)  # 205 MB of zeros
    growth_mb = peak_growth_mb(FolderCheckpoint, tmp_path, tensor="x")
    assert growth_mb < 40


def test_quantisation_file_is_parsed(folder: Path):
    assert open_folder(folder).quant_file is None
    write_json(folder / "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})
    assert open_folder(folder).quant_file == {"quantization": {"quant_algo": "FP8"}}


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_damaged_quantisation_file_is_named(folder: Path, text: str):
    (folder / "hf_quant_config.json").write_text(text)
    assert "hf_quant_config.json" in refusal(folder)


def write_shard(path: Path, header: object, *, num_bytes: int = 0) -> None:
    """A shard whose header says anything, with that many bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"\xff\xff",
        b"[" * 100_000,
        [],
        {"a": 7},
        {"a": entry(dtype="no type")},
        {"a": entry(shape=[-2])},
        {"a": entry(shape=[1 << 70])},
        {"a": entry(offsets=[8, 16])},
        {"a": entry(), "b": entry()},
        {},
        {"a": entry(shape=[3], offsets=[0, 12])},
    ],
)
def test_damaged_header_is_refused(folder: Path, header: object):
    write_shard(folder / "model.safetensors", header, num_bytes=8)
    assert "model.safetensors is damaged or truncated" in refusal(folder)


def test_a_type_that_torch_lacks_is_named(folder: Path):
    write_shard(folder / "model.safetensors", {"a": entry(dtype="F4", shape=(16,))}, num_bytes=8)
    assert "'a' is of type 'F4', which is not supported" in refusal(folder)


def test_header_longer_than_the_file_is_refused(folder: Path):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + bytes(100))
    assert "model.safetensors is damaged or truncated" in refusal(folder)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_flipped_header_byte_never_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    flipped = tmp_path_factory.getbasetemp() / "flipped"
    flipped.mkdir(exist_ok=True)
    write_json(flipped / "config.json", {})
    shard = flipped / "model.safetensors"
    save_file({"a": A, "b": B}, shard)
    content = bytearray(shard.read_bytes())
    data_start = 8 + struct.unpack_from("<Q", content)[0]
    content[data.draw(st.integers(0, data_start - 1))] ^= data.draw(st.integers(1, 255))
    shard.write_bytes(content)
    try:
        checkpoint = open_folder(flipped)
        for name, info in checkpoint.tensors().items():
            read = checkpoint.read(name)
            assert (tuple(read.shape), read.dtype) == info
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017 - some flips are harmless, and that is fine


def test_tensors_outlive_a_closed_checkpoint(folder: Path):
    checkpoint = open_folder(folder)
    tensor = checkpoint.read("b")
    checkpoint.close()
    assert torch.equal(tensor, B)


def test_a_single_file_of_any_name_is_enough(folder: Path):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert set(open_folder(folder).tensors()) == {"a", "b"}


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


def test_what_a_head_does_not_bring_is_in_the_folder_above(folder: Path):
    head = folder / "head"
    head.mkdir()
    write_json(head / "config.json", {})
    save_file({"head": B}, head / "head.safetensors")
    names = dict.fromkeys(open_folder(folder).tensors(), "../model.safetensors")
    write_json(head / INDEX, {"weight_map": {**names, "head": "head.safetensors"}})
    checkpoint = open_folder(head)
    assert checkpoint.tensors().keys() == {*names, "head"}
    for name in names:
        assert torch.equal(checkpoint.read(name), open_folder(folder).read(name))
    assert {path.resolve() for path in checkpoint.files} == {
        folder / "model.safetensors",
        head / "head.safetensors",
    }
    (folder / "model.safetensors").unlink()
    assert "lacks its shard ../model.safetensors" in refusal(head)


@pytest.mark.parametrize("shard", ["../s1.safetensors", "../../model.safetensors", "/etc/passwd", 7])
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


PANIC = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}}'


@pytest.mark.parametrize(("text", "why"), [("{", "EOF"), (PANIC, "out of range")])
def test_damaged_tokenizer_is_named(texts: Path, text: str, why: str):
    (texts / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=rf"tokenizer\.json cannot be read \(.*{why}.*Download it again"):
        open_folder(texts).tokenizer_parts()


def test_only_what_the_tokenizers_library_raises_is_a_damaged_tokenizer():
    with pytest.raises(KeyError), refusing("it is damaged", "Download it again."):
        raise KeyError("a bug of ours")


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
    assert set(checkpoint.tensors()) == {"a", "b"}


NO_SOURCES = ["/no/where", "./org/name", "../model", "~/model", "org/model.gguf", "a/b/c", "name"]
NO_SOURCES += ["", "org/na me", "a/b@", "~nobody-of-this-name/x", "x" * 300, "a\0b", Path("org/name")]


@pytest.mark.parametrize("source", NO_SOURCES)
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
        (hub_failure(errors.HfHubHTTPError.__bases__[0]), FetchError, "first line"),  # of its HTTP library
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
