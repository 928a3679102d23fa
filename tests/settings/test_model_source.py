"""Where a model is and what it is known by."""

import hashlib
import os

import pytest

from blockdraft.settings import model_source
from blockdraft.settings.model_source import DEFAULT_ID, find_source, known_name, public_id


def test_a_model_is_known_by_its_hub_id_or_by_its_path_as_given():
    names = {"default": DEFAULT_ID, "org/name": "org/name", "org/name@main": "org/name"}
    names |= {path: path for path in ("./folder", "/mnt/models/name", "name.gguf")}
    assert {given: public_id(given) for given in names} == names


@pytest.fixture
def default_file(tmp_path, monkeypatch):
    """A file that stands for the default model's, elsewhere and under another name."""
    content = b"GGUF of the default model"
    monkeypatch.setattr(model_source, "DEFAULT_BYTES", len(content))
    monkeypatch.setattr(model_source, "DEFAULT_SHA256", hashlib.sha256(content).hexdigest())
    path = tmp_path / "mine.gguf"
    path.write_bytes(content)
    return path


def test_the_default_models_file_is_known_wherever_it_lies(default_file, monkeypatch):
    assert known_name(str(default_file)) == known_name("default") == "default"
    found = find_source(str(default_file))
    assert (found.kind, found.name, found.path) == ("default", str(default_file), default_file)
    monkeypatch.setenv("HOME", str(default_file.parent))
    assert known_name("~/mine.gguf") == "default"


def test_a_file_of_its_size_or_its_name_alone_is_another_model(default_file, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(default_file.read_bytes()[::-1])
    assert known_name(str(other)) == str(other)
    assert find_source(str(other)).kind == "gguf"
    (tmp_path / "default").mkdir()
    assert known_name(str(tmp_path / "default")) == str(tmp_path / "default")
    for name in ("org/name", "no\0path", str(tmp_path / "gone.gguf")):
        assert known_name(name) == name


def test_a_file_that_was_replaced_is_looked_at_again(default_file):
    state = default_file.stat()
    assert known_name(str(default_file)) == "default"
    default_file.write_bytes(default_file.read_bytes()[::-1])
    os.utime(default_file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert known_name(str(default_file)) == str(default_file)
