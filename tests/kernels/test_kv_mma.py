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
from blockdraft.kernels.triton import kv_codes, kv_mma
from tests.kernels import cold_case

SHAPE = {"num_groups": 8, "shared": 4}


def run_ptx(code, inputs):
    """The registers after a few whole-number instructions of PTX; `inputs` by name."""
    found = dict(inputs)
    value = lambda name: found[name] if name in found else int(name, 0)  # noqa: E731
    for name, rest in re.findall(r"(mov|prmt|lop3|xor|or|shr|shl|sub)\.\w+ ([^;]+);", code):
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
            result = {
                "xor": a ^ others[0], "or": a | others[0], "sub": a - others[0],
                "shr": a >> min(others[0], 32), "shl": a << min(others[0], 32),
            }[name]  # fmt: skip
        found[target] = result & 0xFFFFFFFF
    return found


choice = random.Random(0)
low, high = kv_codes.STEP_TABLES.value
LEVELS = [*(-size for size in reversed(kv_codec.LEVELS[4])), *kv_codec.LEVELS[4]]


def bytes_of(words):
    return torch.tensor(words).to(torch.int32).view(torch.int8).tolist()


@pytest.mark.parametrize("word", [0x76543210, 0xFEDCBA98, *(choice.getrandbits(32) for _ in range(20))])
def test_words_become_levels_by_tables(word):
    found = run_ptx(kv_codes._BITS4.value, {"$4": word})
    pairs = torch.tensor([found[f"${i}"] for i in range(4)]).to(torch.int32).view(torch.bfloat16)
    codes = [word >> 4 * i & 15 for i in (0, 2, 4, 6, 1, 3, 5, 7)]  # low nibbles, then high ones
    assert pairs.tolist() == [LEVELS[code] for code in codes]
    found = run_ptx(kv_codes.WORD_AS_STEPS.value, {"$2": word, "$3": low, "$4": high})
    levels = [(2 * step - 107) / 32 for step in bytes_of([found["$0"], found["$1"]])]
    assert levels == [LEVELS[word >> 4 * i & 15] for i in range(8)]


def test_words_of_four_tokens_become_levels_by_places():
    for _ in range(20):
        words, names = [choice.getrandbits(32) for _ in range(4)], [f"${8 + i}" for i in range(6)]
        found = run_ptx(
            kv_codes.FOUR_WORDS_AS_STEPS.value, dict(zip(names, [*words, low, high], strict=True))
        )
        levels = [(2 * step - 107) / 32 for step in bytes_of([found[f"${i}"] for i in range(8)])]
        nibbles = [*range(0, 8, 2), *range(1, 8, 2)]
        assert levels == [LEVELS[word >> 4 * nibble & 15] for nibble in nibbles for word in words]


@pytest.mark.parametrize(
    ("rows", "width", "queries", "warps", "level"),
    [
        (1, 1, 4, 1, 0),
        (1, 2, 8, 1, 0),
        (8, 1, 4, 1, 1),
        (1, 4, 16, 2, 1),
        (1, 16, 64, 4, 1),
        (64, 16, 64, 4, 2),
        (2, 2048, 64, 4, 2),
    ],
)
def test_the_work_is_cut_by_the_number_of_queries(rows, width, queries, warps, level):
    config = kv_mma.choose(num_rows=rows, max_count=width, **SHAPE)
    assert (config.queries, config.warps, config.level) == (queries, warps, level)
    assert config.tokens * SHAPE["shared"] <= queries


def folded(whole, part):
    """Sums, top and total of both, in powers of 2."""
    top = torch.maximum(whole[1], part[1])
    before, after = torch.exp2(whole[1] - top), torch.exp2(part[1] - top)
    return whole[0] * before[:, None] + part[0] * after[:, None], top, whole[2] * before + part[2] * after


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_programs_leave_is_folded_and_turned_back(level):
    keys, heads, dim = 2 * 64 * 4 + 64 + 9, 3, 64  # two runs of segments, and two segments
    count = (10, 3, 1)[level]
    sums = torch.randn(heads, count, dim)
    tops, totals = 5 * torch.randn(heads, count), torch.rand(heads, count) + 1
    whole = sums[:, 0].double(), tops[:, 0].double(), totals[:, 0].double()
    for unit in range(1, count):
        whole = folded(whole, (sums[:, unit].double(), tops[:, unit].double(), totals[:, unit].double()))
    rows = [dim // 2 * (d // 32) + d % 4 * 8 + d % 32 // 4 for d in range(dim)]  # where a coordinate is
    expected = kv_codec.rotate_back((whole[0] / whole[2][:, None])[:, rows])
    out = torch.empty(1, heads, dim)
    kv_mma._merge_kernel[(1, heads)](
        sums, tops, totals, out, torch.tensor([keys - 1]), torch.tensor([0, 1]), out,
        kv_codec.signs(dim, out.device), 1.0, 1, 1, count, HEADS=heads, DIM=dim, LEVEL=level, IS_EVEN=True,
        IS_CAUSAL=True, HAS_SINKS=False, ROW_BLOCK=256, SEGMENT=64, MAX_SEGMENTS=128, RUN=4,
        RUNS=kv_mma.MERGED_RUNS, PDL=False,
    )  # fmt: skip
    torch.testing.assert_close(out[0].double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_only_a_card_has_it():
    case = cold_case.make(dim=64, dtype=torch.bfloat16)
    assert not kv_mma.serves(case.q, case.pages, case.blocks, Mask(scale=1.0))


def compile_for_a_card(dim, queries, warps, level):
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
        "TOKENS": queries // 4, "SHARED": 4, "HEADS": 32, "DIM": dim,
        "COLUMNS": queries if warps > 1 else 2 * queries, "PAGE_SIZE": 16,
        "LEVEL": level, "IS_EVEN": False, "IS_CAUSAL": True, "ROW_BLOCK": 256, "WARPS": warps,
        "SPLITS": warps > 1, "PDL": True,
    }  # fmt: skip
    kernel = kv_mma._attend_kernel
    names = kernel.arg_names
    source = GluonASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in signature.items()
            if name.endswith("_stride") or kind.startswith("*")
        },
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert "mma.sync" in made.asm["ptx"]
    assert "wgmma" not in made.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["128 4 1 0", "64 8 1 1", "128 64 4 1", "64 64 4 2"])
def test_it_compiles_for_a_card_that_is_not_there(shape):
    """What a lane loads is what it gives to the tensor cores, or it does not compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.test_kv_mma", *shape.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compile_for_a_card(*map(int, sys.argv[1:]))
