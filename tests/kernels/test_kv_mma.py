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


@pytest.mark.parametrize(("rows", "width", "columns", "warps", "level"), [*FEW, *MANY])
def test_the_work_is_cut_by_the_number_of_queries(rows, width, columns, warps, level):
    config = kv_mma.choose(num_rows=rows, max_count=width, **SHAPE)
    assert (config.columns, config.warps, config.level) == (columns, warps, level)
    assert config.tokens * SHAPE["shared"] <= columns


def test_only_a_card_has_it():
    case = compressed_case.make(dim=64, dtype=torch.bfloat16)
    assert not kv_mma.serves(case.q, case.pages, case.blocks, Mask(scale=1.0))


def compile_for_a_card(dim, columns, warps, level):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kinds = {
        "*bf16": "q exact_keys exact_values",
        "*u8": "keys values",
        "*fp16": "key_scale value_scale",
        "*fp32": "part part_top part_total",
        "*i64": "page_table exact_page_table rows starts offsets",
        "fp32": "scale",
        "i32": "cold_window num_rows tiles_per_row table_stride exact_table_stride num_units q_stride "
        "q_head_stride exact_stride key_stride value_stride scale_stride",
    }
    signature = {name: kind for kind, names in kinds.items() for name in names.split()}
    constants = {
        "TOKENS": columns // 4, "SHARED": 4, "HEADS": 32, "DIM": dim, "COLUMNS": columns, "PAGE_SIZE": 16,
        "LEVEL": level, "IS_EVEN": False, "IS_CAUSAL": True, "ROW_BLOCK": 256, "WARPS": warps,
        "SPLITS": warps > 1, "PDL": True,
    }  # fmt: skip
    kernel = kv_mma._attend_kernel
    names = kernel.arg_names
    source = GluonASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in signature if name.endswith("_stride")},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert "mma.sync" in made.asm["ptx"]
    assert "wgmma" not in made.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["128 8 1 0", "64 16 1 1", "128 64 4 1", "64 64 4 2"])
def test_it_compiles_for_a_card_that_is_not_there(shape):
    """If a lane loads other values than it gives to the tensor cores, it does not compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.test_kv_mma", *shape.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compile_for_a_card(*map(int, sys.argv[1:]))
