"""The CPU's kernels, compiled, are kept on the disk; what was damaged there is compiled again."""

import ctypes

import pytest
import torch

from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.llvm import jit
from blockdraft.kernels.llvm.jit import Jit

pytestmark = pytest.mark.skipif(
    why_no_llvm(torch.float32, torch.device("cpu")) is not None, reason="the CPU kernels are not chosen"
)
SOURCE = """
define void @worker(ptr %job) {{
  %field = getelementptr i64, ptr %job, i64 1
  store i64 {value}, ptr %field
  ret void
}}
"""


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The sizes of what LLVM has compiled, and the folder that keeps it."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    found = []
    store = jit._Compiled.store

    def spy(self, module, code):
        found.append(len(code))
        store(self, module, code)

    monkeypatch.setattr(jit._Compiled, "store", spy)
    return found, tmp_path / "kernels"


def value_of(value):
    """What the kernel of `value` writes."""
    job = (ctypes.c_int64 * 2)()
    Jit(SOURCE.format(value=value))(job, is_small=True)
    return job[1]


def test_what_was_compiled_is_not_compiled_again(compiled):
    sizes, folder = compiled
    assert [value_of(7), value_of(7)] == [7, 7]
    assert len(sizes) == 1
    assert value_of(8) == 8, "another source is another file"
    assert len(sizes) == len(list(folder.iterdir())) == 2


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
