"""The CPU's kernels, compiled, are kept on the disk; what was damaged there is compiled again."""

from __future__ import annotations

import pytest
import torch

from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.llvm import jit
from blockdraft.kernels.llvm.compiler import kernel
from blockdraft.kernels.llvm.jit import Jit
from blockdraft.kernels.llvm.language import Longs

pytestmark = pytest.mark.skipif(
    why_no_llvm(torch.float32, torch.device("cpu")) is not None, reason="the CPU kernels are not chosen"
)


@kernel
def write(out: Longs, *, value: int) -> None:
    out[0] = value


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Return the sizes of code as LLVM compiles it, and the folder that keeps it."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    found = []
    store = jit._Compiled.store

    def spy(self, code):
        found.append(len(code))
        store(self, code)

    monkeypatch.setattr(jit._Compiled, "store", spy)
    return found, tmp_path / "kernels"


def value_of(value):
    """Return the number that the kernel of `value` writes."""
    out = torch.zeros(1, dtype=torch.int64)
    Jit(write, value=value)(out, is_small=True)
    return out.item()


def test_what_was_compiled_is_not_compiled_again(compiled):
    sizes, folder = compiled
    assert [value_of(7), value_of(7)] == [7, 7]
    assert len(sizes) == 1
    assert value_of(8) == 8, "other known values are another file"
    assert len(sizes) == len(list(folder.iterdir())) == 2


def test_kernels_whose_text_changed_are_compiled_again(compiled, monkeypatch):
    sizes, folder = compiled
    value_of(7)
    compiler = jit._compiler()
    monkeypatch.setattr(compiler, "_facts", ("another digest of the sources", *compiler._facts[1:]))
    assert value_of(7) == 7
    assert len(sizes) == len(list(folder.iterdir())) == 2


def test_the_digest_is_of_every_kernel_and_of_what_compiles_them(tmp_path, monkeypatch):
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    digests = set()
    for name, text in [("jit.py", "a"), ("linear.py", "b"), ("linear.py", "c"), ("jit.py", "b")]:
        (tmp_path / name).write_text(text)
        digests.add(jit._sources.__wrapped__())
    assert len(digests) == 4


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: b"", lambda raw: bytes(len(raw))])
def test_damaged_code_never_runs(compiled, damage):
    sizes, folder = compiled
    value_of(7)
    (file,) = folder.iterdir()
    sound = file.read_bytes()
    file.write_bytes(damage(sound))
    assert value_of(7) == 7
    assert len(sizes) == 2
    assert file.read_bytes() == sound


def test_where_nothing_can_be_kept_each_start_compiles(compiled, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "file"))
    assert [value_of(7), value_of(7)] == [7, 7]
    assert len(compiled[0]) == 2
