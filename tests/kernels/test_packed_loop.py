"""Hopper's loop for a few tokens: its PTX run on a CPU, and compiled for a card that is not here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from blockdraft.kernels.triton import packed_few
from blockdraft.kernels.triton.packed_loop import SHARED, THREADS, assembly
from blockdraft.models.packed_words import pack_for_kernel
from tests.kernels import ptx
from tests.kernels.ptx_machine import Machine
from tests.kernels.test_triton_packed import KINDS
from tests.matrix import slow_but

ROWS = 128


def sums_of(loop, x, weight, strip, *, is_early):
    """Return what the loop adds up for a strip: tokens [N, 64]. Copies may end early or late."""
    machine = Machine(assembly(loop)[0], is_early=is_early)
    pieces = torch.zeros(4) if weight.pieces is None else weight.pieces
    places = [machine.place(one) for one in (x, weight.words, weight.scales, pieces)]
    numbers = [len(x), weight.shape[1] // 64, x.stride(0), 4 * strip, 0]
    values = ptx._f32(torch.stack(machine.run(loop.num_sums, [*places, *numbers])))
    out = torch.zeros(loop.tokens, 64)
    thread = torch.arange(THREADS)
    warp, g, t = thread // 32, thread % 32 // 4, thread % 4
    for i, value in enumerate(values):
        out[i // 4 * 8 + 2 * t + i % 2, warp * 16 + g + 8 * (i % 4 // 2)] = value
    return out


CASES = [
    "int4 128:8:3", "int4 128:16:13", "int4 64:16:2", "int4 32:8:8", "int4 16:16:16", "int4 float16:16:9",
    "nvfp4 multiplied:8:1", "nvfp4 divided:16:16", "mxfp4:16:9",
]  # fmt: skip


@pytest.mark.parametrize("case", slow_but(CASES, CASES[1], CASES[6]))
@pytest.mark.parametrize("columns", [128, 64 * 18])
def test_the_loop_adds_all_columns_of_its_rows(case, columns):
    """Sums are exact, as x are small integers, but for those of NVFP4, which are nearly so."""
    kind, *numbers = case.split(":")
    tokens, count = map(int, numbers)
    weight = KINDS[kind](ROWS, columns).cpu()
    words = pack_for_kernel(weight).weight
    wide = torch.randint(-3, 4, (count, columns + 64), generator=torch.Generator().manual_seed(1)).bfloat16()
    loop = packed_few.loop_of(words, packed_few.Division(tokens), has_pdl=True)
    assert loop.is_possible
    assert loop.places[2] <= SHARED
    expected = torch.zeros(tokens, ROWS, dtype=torch.float64)  # tokens that are not there are zeros
    expected[:count] = wide[:tokens, :columns].double() @ weight.dequantise(torch.bfloat16).double().T
    for strip, is_early in ((0, False), (1, True)):
        wanted = expected[:, 64 * strip : 64 * strip + 64]
        found = sums_of(loop, wide[:tokens], words, strip, is_early=is_early)
        error = (found - wanted).abs().max() / expected.abs().max()
        assert error < (1e-6 if "fp4" in kind else 1e-7)


def test_what_the_loop_cannot_read_is_not_taken(monkeypatch):
    monkeypatch.setattr(packed_few, "_is_hopper", lambda device: True)
    words = pack_for_kernel(KINDS["int4 64"](128, 512).cpu()).weight
    x = torch.zeros(4, 1024).bfloat16()
    whole = packed_few.Division(8)
    assert packed_few.takes(x[:, :512], words, "none", whole)
    assert not packed_few.takes(x[:, :512].half(), words, "none", whole)
    assert not packed_few.takes(x[:, :512], words, "silu", whole)
    assert not packed_few.takes(x[:, 1:513], words, "none", whole), "not aligned"
    assert not packed_few.takes(torch.zeros(4, 513).bfloat16()[:, :512], words, "none", whole), "not aligned"
    assert not packed_few.takes(x[:, :512], words.rows(0, 96), "none", whole), "no whole strips"
    few_columns = pack_for_kernel(KINDS["int4 64"](128, 192).cpu()).weight
    assert not packed_few.takes(x[:, :192], few_columns, "none", whole), "no whole stages"
    wide = pack_for_kernel(KINDS["int4 of a row"](128, 512).cpu()).weight
    assert not packed_few.takes(x[:, :512], wide, "none", whole)


# ---- compiled for a card that is not here


def disassembled(cubin, folder):
    import triton.backends.nvidia as nvidia

    path = Path(folder) / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(nvidia.__file__).parent / "bin/nvdisasm"
    return subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout


def compile_for_a_card(kind, tokens, folder):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    words = pack_for_kernel(KINDS[kind](ROWS, 512).cpu()).weight
    asm, constraints = assembly(packed_few.loop_of(words, packed_few.Division(tokens), has_pdl=True))
    kinds = {
        "*bf16": "x bias onto out", "*i32": "words scales pieces",
        "i32": "num_tokens num_outputs num_chunks stride_x",
    }  # fmt: skip
    signature = {name: kind for kind, names in kinds.items() for name in names.split()}
    constants = {
        "TOKENS": tokens, "ASM": asm, "CONSTRAINTS": constraints, "THREADS": THREADS, "PDL": True,
    }  # fmt: skip
    names = packed_few._few.arg_names
    source = ASTSource(
        packed_few._few,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in signature if name != "num_tokens"},
    )
    options = {"num_warps": THREADS // 32, "launch_pdl": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    layouts = set(re.findall(r"#ttg.blocked<.*?>", made.asm["ttgir"]))
    assert len(layouts) == 1, "a value for each thread"
    assert "sizePerThread = [1]" in layouts.pop()
    assert made.asm["ptx"].count("columns:") == 1
    assert made.metadata.shared == 0, "all shared memory is the ring's"
    sass = disassembled(made.asm["cubin"], folder)
    assert "HMMA" in sass
    assert not re.search(r"\b(STL|LDL)\b", sass), "nothing is spilled"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["int4 128:8", "int4 float16:16", "nvfp4 multiplied:8", "mxfp4:16"])
def test_the_loop_is_compiled_without_layouts_or_spills(case, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.test_packed_loop", case, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    kind, tokens = sys.argv[1].split(":")
    compile_for_a_card(kind, int(tokens), sys.argv[2])
