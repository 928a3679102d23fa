"""Weights in whole numbers that are kept on the disk are those that were packed, or are packed again."""

import pytest
import torch

from blockdraft.checkpoints import kept_int8
from blockdraft.checkpoints.kept_int8 import KeptInt8
from blockdraft.models.packed_int8 import Int8Matrix

PARTS = ("packed", "sums", "scale", "factors")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_int8, "_PIECE", 1000)
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
    KeptInt8([source], {}).write(made)
    found = KeptInt8([source], {}).read()
    assert found.keys() == made.keys()
    for path, matrix in made.items():
        assert found[path].shape == matrix.shape
        assert all(torch.equal(getattr(found[path], part), getattr(matrix, part)) for part in PARTS)


@pytest.mark.parametrize("position", [0, 999, 1000, -1])
def test_a_damaged_file_is_not_read(source, folder, position):
    KeptInt8([source], {}).write(matrices())
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)
    assert KeptInt8([source], {}).read() == {}


@pytest.mark.parametrize("suffix", ["safetensors", "sha256"])
def test_a_file_that_is_empty_or_gone_is_not_read(source, folder, suffix):
    KeptInt8([source], {}).write(matrices())
    (file,) = folder.glob(f"*.{suffix}")
    file.write_bytes(b"")
    assert KeptInt8([source], {}).read() == {}
    file.unlink()
    assert KeptInt8([source], {}).read() == {}


def test_other_weights_or_factors_are_packed_anew(source):
    KeptInt8([source], {}).write(matrices())
    assert KeptInt8([source], {"embedding": torch.ones(16)}).read() == {}
    source.write_bytes(b"others")
    assert KeptInt8([source], {}).read() == {}
