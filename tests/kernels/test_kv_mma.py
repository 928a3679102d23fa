"""The Gluon kernel for 4-bit keys, as far as it can be judged without a card; see benchmarks/kv_step.py."""

import os
import random
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from blockdraft.kernels import kv_codec
from blockdraft.kernels.attention import Mask
from blockdraft.kernels.triton import kv_mma
from blockdraft.kernels.triton.kv_codes import WORD_BY_TABLE
from tests.kernels import compressed_case

SHAPE = {"num_groups": 8, "shared": 4}


def run_ptx(code, inputs):
    """Run integer instructions of PTX; return all registers by name."""
    found = dict(inputs)
    value = lambda name: found[name] if name in found else int(name, 0)  # noqa: E731
    for name, rest in re.findall(r"(mov|prmt|lop3|shr|shl|sub)\.\w+ ([^;]+);", code):
        target, *operands = [one.strip() for one in rest.split(",")]
        a, *others = [value(one) for one in operands]
        if name == "mov":
            result = a
        elif name == "prmt":
            pool = a.to_bytes(4, "little") + others[0].to_bytes(4, "little")
            picked = [others[1] >> 4 * i & 15 for i in range(4)]
            taken = [pool[i & 7] if i < 8 else 255 * (pool[i & 7] >> 7) for i in picked]
            result = int.from_bytes(bytes(taken), "little")
        elif name == "lop3":
            b, c, table = others
            bits = [table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1 for i in range(32)]
            result = sum(bit << i for i, bit in enumerate(bits))
        else:
            result = {"shr": a >> others[0], "shl": a << others[0], "sub": a - others[0]}[name]
        found[target] = result & 0xFFFFFFFF
    return found


def test_words_become_levels_by_tables():
    choice, sizes = random.Random(0), kv_codec.LEVELS[4]
    levels = [*(-size for size in reversed(sizes)), *sizes]
    for word in [0x76543210, 0xFEDCBA98, *(choice.getrandbits(32) for _ in range(15))]:
        found = run_ptx(WORD_BY_TABLE.value, {"$4": word})
        pairs = torch.tensor([found[f"${i}"] for i in range(4)]).to(torch.int32).view(torch.bfloat16)
        codes = [word >> 4 * i & 15 for i in (0, 2, 4, 6, 1, 3, 5, 7)]  # low nibbles, then high ones
        assert pairs.tolist() == [levels[code] for code in codes]


FEW = [(1, 1, 8, 1, 0), (1, 4, 16, 1, 0), (8, 1, 8, 1, 1)]
MANY = [(1, 16, 64, 4, 1), (64, 16, 64, 4, 2), (2, 2048, 64, 4, 2)]


@pytest.mark.parametrize("has_wgmma", [False, True])
@pytest.mark.parametrize(("rows", "width", "columns", "warps", "level"), [*FEW, *MANY])
def test_the_work_is_cut_by_the_number_of_queries(rows, width, columns, warps, level, has_wgmma):
    config = kv_mma.choose(num_rows=rows, max_count=width, has_wgmma=has_wgmma, **SHAPE)
    assert (config.columns, config.warps, config.level) == (columns, warps, level)
    assert config.is_wide == (has_wgmma and columns == 64)
    assert config.tokens * SHAPE["shared"] <= columns


def test_only_a_card_has_it():
    case = compressed_case.make(dim=64, dtype=torch.bfloat16)
    assert not kv_mma.serves(case.q, case.pages, case.blocks, Mask(scale=1.0))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["128 8 1 0", "64 16 1 1", "128 64 4 1", "64 64 4 2", "128 wide 4 2"])
def test_it_compiles_for_a_card_that_is_not_there(shape):
    """If a lane loads other values than it gives to the tensor cores, it does not compile."""
    run_compiled("compiles", *shape.split())


@pytest.mark.slow
@pytest.mark.parametrize("dim", ["64", "128"])
def test_wide_tiles_have_the_bits_of_single_warps(dim):
    """Compiled for a card, and interpreted; benchmarks/kv_step.py asks a card."""
    run_compiled("agrees", dim)


def run_compiled(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled_kv", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
