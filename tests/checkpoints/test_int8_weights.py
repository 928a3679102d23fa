"""Weights in whole numbers that are kept on the disk are those that were packed, or are packed again."""

import os

import pytest
import torch

from blockdraft.checkpoints import int8_weights
from blockdraft.checkpoints.int8_weights import Int8Cache
from blockdraft.models.packed_int8 import Int8Matrix

PARTS = ("packed", "sums", "scale", "factors")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(int8_weights, "_PIECE", 1000)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def matrices():
    generator = torch.Generator().manual_seed(3)
    shapes = {"layers.0.mlp": (20, 48), "embedding": (33, 16)}
    return {
        path: Int8Matrix.of([torch.randn(shape, generator=generator)], shape)
        for path, shape in shapes.items()
    }


def test_what_is_read_is_what_was_packed(source):
    made = matrices()
    Int8Cache([source], {}).write(made)
    found = Int8Cache([source], {}).read()
    assert found.keys() == made.keys()
    for path, matrix in made.items():
        assert found[path].shape == matrix.shape
        assert all(torch.equal(getattr(found[path], part), getattr(matrix, part)) for part in PARTS)


@pytest.mark.parametrize("position", [0, 999, 1000, -1])
def test_a_damaged_file_is_not_read(source, folder, position):
    Int8Cache([source], {}).write(matrices())
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)
    assert Int8Cache([source], {}).read() == {}


@pytest.mark.parametrize("suffix", ["safetensors", "sha256"])
def test_a_file_that_is_empty_or_gone_is_not_read(source, folder, suffix):
    Int8Cache([source], {}).write(matrices())
    (file,) = folder.glob(f"*.{suffix}")
    file.write_bytes(b"")
    assert Int8Cache([source], {}).read() == {}
    file.unlink()
    assert Int8Cache([source], {}).read() == {}


def test_a_file_replaced_by_one_of_its_size_and_time_is_packed_anew(source):
    """As `cp -p`, `rsync -t` and images of reproducible builds do."""
    before = source.stat()
    Int8Cache([source], {}).write(matrices())
    source.write_bytes(b"WEIGHTS")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = source.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )
    assert Int8Cache([source], {}).read() == {}


def test_the_same_weights_elsewhere_need_no_packing(source, tmp_path):
    Int8Cache([source], {}).write(matrices())
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(source.read_bytes())
    assert Int8Cache([copy], {}).read().keys() == matrices().keys()


def test_weights_in_other_files_are_others(tmp_path):
    """The same bytes, divided in another way or in another order."""
    for name, content in {"a": b"ab", "b": b"c", "c": b"a", "d": b"bc"}.items():
        (tmp_path / name).write_bytes(content)
    Int8Cache([tmp_path / "a", tmp_path / "b"], {}).write(matrices())
    for names in ("cd", "ba", "a"):
        assert Int8Cache([tmp_path / name for name in names], {}).read() == {}


def test_other_weights_or_factors_are_packed_anew(source):
    Int8Cache([source], {}).write(matrices())
    assert Int8Cache([source], {"embedding": torch.ones(16)}).read() == {}
    source.write_bytes(b"others")
    assert Int8Cache([source], {}).read() == {}
