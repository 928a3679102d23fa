"""Products with 4-bit codes in Triton: the bits of a product with what `dequantise` makes of the weight."""

import os
import re
import subprocess
import sys

import pytest
import torch

from blockdraft.kernels import packed as contract
from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.packed_speeds import MEASURED, KernelSpeed
from blockdraft.kernels.pointwise import reference_gate_mul
from blockdraft.kernels.triton import linear as chains
from blockdraft.kernels.triton import narrow, packed, packed_asm
from blockdraft.models.packed import Stacked
from blockdraft.models.packed_gguf import GgufPacked
from blockdraft.models.packed_groups import Fp4Groups, IntGroups, e8m0, pack_nibbles
from blockdraft.models.packed_words import Words, pack_for_kernel
from tests.kernels import ptx
from tests.kernels.implementations import DEVICE, HALF, HAS_CARD, assert_close, normal, quiet
from tests.matrix import slow_but

pytestmark = quiet
FP8 = torch.float8_e4m3fn
SHAPE = (48, 192)  # three tiles and three chunks: programs and steps of two leave tails


def numbers(low, high, *shape, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def int4(rows, columns, *, group=64, has_zero=True, scale=torch.bfloat16, seed=0):
    sizes = (rows, columns // group)
    buffers = {
        "codes": numbers(0, 256, rows, columns // 2, seed=seed).to(torch.uint8),
        "scale": (0.01 + 0.1 * torch.rand(sizes, generator=torch.Generator().manual_seed(seed))).to(scale),
        "zero": numbers(0, 16, *sizes, seed=seed + 1).to(torch.uint8) if has_zero else None,
        "group_index": None,
    }
    return IntGroups((rows, columns), buffers, bits=4, group_size=group).to(DEVICE)


def nvfp4(rows, columns, *, second="multiplier", has_factors=False, seed=0):
    """Every number that fp8 can be is a scale somewhere, but for NaN."""
    codes = numbers(0, 256, rows, columns // 2, seed=seed).to(torch.uint8)
    scale = numbers(0, 127, rows, columns // 16, seed=seed + 1).to(torch.uint8).view(FP8)
    given = {second: torch.full((1, 1), 0.00372 if second == "multiplier" else 1 / 0.00372)}
    if has_factors:
        factors = torch.rand(1, columns, generator=torch.Generator().manual_seed(seed))
        given["column_factors"] = (0.5 + factors).to(torch.bfloat16)
    return Fp4Groups(codes, scale, **given if second else {}).to(DEVICE)


def mxfp4(rows, columns, *, seed=0):
    codes = numbers(0, 256, rows, columns // 2, seed=seed).to(torch.uint8)
    return Fp4Groups(codes, e8m0(numbers(110, 125, rows, columns // 32, seed=seed).to(torch.uint8))).to(
        DEVICE
    )


def gguf(rows, columns, *, kind, seed=0):
    """Random blocks whose scales, and minimums, are of both signs."""
    num_numbers, num_codes = {2: (1, 16), 3: (2, 16), 8: (1, 32)}[kind]
    sizes = (rows, columns // 32)
    numbers_ = 0.01 * normal(*sizes, num_numbers, dtype=torch.float16, seed=seed).cpu()
    codes = numbers(0, 256, *sizes, num_codes, seed=seed).to(torch.uint8)
    return GgufPacked(torch.cat((numbers_.view(torch.uint8), codes), dim=-1).flatten(1), kind).to(DEVICE)


KINDS = {
    "int4 128": lambda rows, columns: int4(rows, columns, group=128),
    "int4 64": int4,
    "int4 32": lambda rows, columns: int4(rows, columns, group=32),
    "int4 16": lambda rows, columns: int4(rows, columns, group=16, has_zero=False),
    "int4 of a row": lambda rows, columns: int4(rows, columns, group=columns),
    "int4 float16": lambda rows, columns: int4(rows, columns, group=32, scale=torch.float16),
    "nvfp4 multiplied": nvfp4,
    "nvfp4 divided": lambda rows, columns: nvfp4(rows, columns, second="divisor"),
    "nvfp4 awq": lambda rows, columns: nvfp4(rows, columns, has_factors=True),
    "mxfp4": mxfp4,
    "q4_0": lambda rows, columns: gguf(rows, columns, kind=2),
    "q4_1": lambda rows, columns: gguf(rows, columns, kind=3),
    "q8_0": lambda rows, columns: gguf(rows, columns, kind=8),
}
IN_FLOAT32 = ("nvfp4 awq", "q4_1", "q8_0")  # kinds without assembly


def columns_of(kind):
    return 384 if kind == "int4 128" else SHAPE[1]


def make(kind, rows=SHAPE[0]):
    """A weight in groups, and the same in words."""
    weight = KINDS[kind](rows, columns_of(kind))
    words = pack_for_kernel(weight)
    assert isinstance(words, Words), words
    return weight, words


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_unpacked_to_the_bits_of_dequantise(kind):
    """By the kernel, and by reading the words back; in all kinds every code meets many scales."""
    weight, words = make(kind)
    expected = weight.dequantise(HALF)
    assert expected.isfinite().all()
    assert torch.equal(packed.unpack(words.weight, HALF), expected)
    assert torch.equal(words.dequantise(HALF), expected)
    assert torch.equal(words[torch.tensor([17, 3], device=DEVICE)].dequantise(HALF), expected[[17, 3]])
    if isinstance(weight, GgufPacked):
        assert torch.equal(words.stored().raw, weight.raw)
    assert torch.equal(words.rows_from(16).dequantise(HALF), expected[16:])
    assert torch.equal(words.rows_from(9).dequantise(HALF), expected[9:])


CONFIG = packed.Config(16, tiles=2, chunks=2, warps=1, stages=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", slow_but([0, 1, 16, 19], 19))
def test_a_product_has_the_bits_of_one_with_the_unpacked_weight(kind, count):
    weight, words = make(kind)
    values, columns = weight.dequantise(HALF), columns_of(kind)
    x, bias = normal(count, columns, dtype=HALF), normal(48, dtype=HALF, seed=2)
    if not HAS_CARD:  # NumPy adds in different orders: its sums have to be exact
        x = one_of_each(count, columns)
    onto = 30 * normal(count, 48, dtype=HALF, seed=3)
    got = packed.linear(x, words.weight, bias, onto=onto, config=CONFIG)
    expected = chains.linear(x, values, bias, onto=onto, config=chains.Config(16, 64, 1, warps=1, stages=2))
    assert torch.equal(got, expected)


def one_of_each(count, columns):
    """Tokens that have one value each, in one column after the other, so that a product is not rounded."""
    x = torch.zeros(count, columns, dtype=HALF)
    x[torch.arange(count), 7 * torch.arange(count) % columns] = 0.5
    return x


@pytest.mark.parametrize("kind", slow_but(list(KINDS), "int4 32", "nvfp4 awq", "q8_0"))
@pytest.mark.parametrize("config", [CONFIG, packed.Config(16, tiles=1, chunks=4, warps=1, stages=2), None])
def test_products_agree_with_float64(kind, config):
    weight, words = make(kind)
    x = normal(3, columns_of(kind), dtype=HALF)
    expected = x.double() @ weight.dequantise(HALF).double().T
    assert_close(packed.linear(x, words.weight, config=config), expected)


@pytest.mark.parametrize("kind", slow_but(list(KINDS), "int4 128", "nvfp4 divided"))
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_a_gated_product_joins_the_halves(kind, gate):
    weight, words = make(kind, rows=96)
    x, bias = normal(5, columns_of(kind), dtype=HALF), normal(96, dtype=HALF, seed=2)
    product = x.double() @ weight.dequantise(HALF).double().T + bias.double()
    got = packed.linear(x, words.weight, bias, gate=gate, config=CONFIG)
    assert got.shape == (5, 48)
    assert_close(got, reference_gate_mul(product, gate))


def test_tokens_may_be_part_of_a_wider_row():
    _, words = make("int4 64")
    wide = normal(6, 400, dtype=HALF)
    for x in (wide[:, 64:256], wide[::2, :192], wide.new_zeros(1, 192).expand(4, 192)):
        one, other = (packed.linear(each, words.weight, config=CONFIG) for each in (x, x.contiguous()))
        assert torch.equal(one, other)


# ---- which weights are packed


def test_parts_of_one_input_become_one_weight():
    parts = [nvfp4(48, 192), nvfp4(32, 192, second="", seed=5), nvfp4(16, 192, seed=9)]
    words = pack_for_kernel(Stacked(parts))
    assert torch.equal(words.dequantise(HALF), torch.cat([part.dequantise(HALF) for part in parts]))
    assert torch.equal(packed.unpack(words.weight, HALF), words.dequantise(HALF))
    parts = [int4(48, 192), int4(32, 192, has_zero=False)]
    words = pack_for_kernel(Stacked(parts))
    assert torch.equal(words.dequantise(HALF), torch.cat([part.dequantise(HALF) for part in parts]))


def ordered(rows, columns):
    weight = int4(rows, columns)
    index = torch.zeros(1, columns, dtype=torch.int32)
    return weight.rebuild(weight.shape, {**weight.tensors(), "group_index": index})


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (lambda: int4(24, 192), "24 x 192 values are not tiles of 16 x 64"),
        (lambda: int4(16, 96, group=32), "16 x 96 values are not tiles"),
        (lambda: int4(16, 192, group=24), "groups of 24 columns"),
        (lambda: int4(16, 192, scale=torch.float32), "scales in float32"),
        (lambda: ordered(16, 192), "columns in the order of their activations"),
        (lambda: Stacked([int4(16, 192), mxfp4(16, 192)]), "parts of several formats"),
        (lambda: Stacked([gguf(16, 192, kind=2), gguf(16, 192, kind=8)]), "blocks of Q4_0 and Q8_0"),
        (lambda: gguf(24, 192, kind=2), "24 x 192 values are not tiles of 16 x 64"),
        (lambda: Stacked([int4(16, 192), int4(16, 192, group=32)]), "groups of several sizes"),
        (lambda: Stacked([nvfp4(16, 192), nvfp4(16, 192, second="divisor")]), "multipliers and divisors"),
        (lambda: Stacked([nvfp4(16, 192), nvfp4(16, 192, has_factors=True)]), "column factors of their own"),
    ],
)
def test_weights_that_the_kernel_does_not_read_are_named(weight, why):
    found = pack_for_kernel(weight())
    assert isinstance(found, str)
    assert why in found


def test_nvfp4_whose_factor_has_no_two_pieces_is_widened_in_float32():
    assert contract.split_factors(torch.tensor([1e-36]), is_divisor=False) is None
    assert not contract.PackedWords("nvfp4", *[torch.empty(0)] * 2, 16).is_fast


# ---- who multiplies


@pytest.fixture
def calls(monkeypatch):
    """(number of tokens, gate) of every product that the kernel computes."""
    found, linear = [], packed.linear

    def count(x, *arguments, gate="none", **options):
        found.append((x.shape[0], gate))
        return linear(x, *arguments, gate=gate, **options)

    monkeypatch.setattr(packed, "linear", count)
    monkeypatch.setattr(packed, "choose", lambda *_: CONFIG)
    monkeypatch.setitem(MEASURED, ((0, 0), "int4"), KernelSpeed(3, plain=1, gated=2))
    return found


@pytest.mark.parametrize("has_values", [False, True])
def test_more_tokens_and_narrow_weights_are_multiplied_unpacked(calls, monkeypatch, has_values):
    """With the bits of the unpacked weight, whichever form the number of tokens takes."""
    weight, words = make("int4 64", rows=32)
    words = words.with_values(HALF) if has_values else words
    unpacked, unpack = [], packed.unpack
    monkeypatch.setattr(packed, "unpack", lambda *given: unpacked.append(1) or unpack(*given))
    values, kernels = weight.dequantise(HALF), kernels_for(HALF, DEVICE, is_interpreted=True)
    x, bias, onto = one_of_each(4, 192), normal(32, dtype=HALF), normal(4, 32, dtype=HALF, seed=3)

    def check(some, *kinds):
        before = len(calls)
        expected = kernels.linear(x[:some], values, bias, onto[:some])
        assert torch.equal(words.matmul(x[:some], bias, onto=onto[:some], kernels=kernels), expected)
        expected = kernels.gated_linear(x[:some], values, bias, "silu")
        assert torch.equal(words.gated(x[:some], bias, "silu", kernels=kernels), expected)
        assert calls[before:] == [(some, kind) for kind in kinds]

    check(1)
    monkeypatch.setattr(narrow, "MAX_ROWS", 16)
    check(1, "none", "silu")
    check(2, *(["silu"] if has_values else ["none", "silu"]))
    check(3, *([] if has_values else ["none", "silu"]))
    check(4)
    assert bool(unpacked) != has_values
    assert words.num_bytes == words.weight.words.nbytes * (1 + 4 * has_values) + words.weight.scales.nbytes
    assert torch.equal(
        words.matmul(x[None], bias, kernels=kernels)[0], words.matmul(x, bias, kernels=kernels)
    )


def test_nothing_is_packed_before_it_was_measured():
    assert all(speed.unpacking >= speed.gated >= speed.plain > 0 for speed in MEASURED.values())
    assert contract.speed_of("mxfp4", DEVICE).unpacking == 0
    assert contract.speed_of("int4", torch.device("cpu")).unpacking == 0


def test_the_measured_division_is_taken_where_it_fits(monkeypatch):
    """On other cards, and for tokens that are not aligned, it is Triton's."""
    _, words = make("int4 64", rows=128)
    division = packed.Division(16)
    monkeypatch.setitem(packed._MEASURED, "int4", ((16, 128, False, division), (16, 64, True, CONFIG)))
    x = torch.zeros(3, 256, dtype=torch.bfloat16, device=DEVICE)[:, :192]
    weight = words.weight.rows(0, 128)
    assert packed.choose(x, weight, "none") == packed.likely(3, 128)
    monkeypatch.setattr(packed.packed_few, "takes", lambda *_: True)
    assert packed.choose(x, weight, "none") == division
    assert packed.choose(x, weight, "silu") == CONFIG
    assert packed.choose(x.new_zeros(17, 192), weight, "none") == packed.likely(17, 128)


# ---- the assembly, which only a card runs


def assembled(words, across):
    """What the assembly makes of words; two that meet are of a row, or of both rows of a lane (`across`)."""
    one = words.weight
    tiles, chunks = one.words.shape[:2]
    num_scales = 1 if one.is_float else max(1, 64 // one.group)
    text, _ = packed_asm.widening(one.arithmetic, num_scales, is_half=one.is_half)
    each = one.words.view(tiles, chunks, 32, 2, 2).to(torch.int64) & ptx.ALL  # half, odd
    groups = torch.arange(chunks) if one.is_float else torch.arange(chunks) * 64 // one.group
    found = [one.scales[:, groups + i] for i in range(num_scales)]
    found += [] if one.pieces is None else [one.pieces.view(tiles, 1, 16).expand(-1, chunks, -1)]
    lanes = torch.arange(32) // 4
    spread = [number.reshape(tiles, chunks, 8, 2)[:, :, lanes] for number in found]
    given = [(number.to(torch.int64) & ptx.ALL)[..., None].expand(each.shape) for number in spread]
    axis = -2 if across else -1
    pairs = [side for number in (each, *given) for side in number.unbind(axis)]
    out = torch.stack(ptx.run(text, pairs, 8), dim=-1)  # tile, chunk, lane, the other, place
    both = torch.stack((out & 0xFFFF, out >> 16), dim=-2 if not across else -3)
    values = both.to(torch.int16).view(torch.bfloat16).view(tiles, chunks, 8, 4, 2, 2, 8)
    return values.permute(0, 4, 2, 1, 6, 3, 5).reshape(words.shape)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in IN_FLOAT32])
def test_the_assembly_gives_the_bits_of_dequantise(kind, across):
    """In bfloat16, which the interpreter cannot multiply, for rows of scales of many sizes."""
    weight = KINDS[kind](256, columns_of(kind)).cpu()
    words = pack_for_kernel(weight)
    assert words.weight.is_fast
    assert torch.equal(assembled(words, across), weight.dequantise(torch.bfloat16))


def test_every_scale_of_float16_has_two_pieces():
    """Each with 16 codes and a zero point. Every second row is negative, as scales of GGUF may be."""
    scale = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).view(1984, 16)
    scale = scale * torch.tensor([[1.0], [-1.0]], dtype=torch.float16).repeat(992, 1)
    buffers = {
        "codes": numbers(0, 256, 1984, 128).to(torch.uint8),
        "scale": scale,
        "zero": numbers(0, 16, 1984, 16, seed=3).to(torch.uint8),
        "group_index": None,
    }
    weight = IntGroups((1984, 256), buffers, bits=4, group_size=16)
    words = pack_for_kernel(weight)
    assert torch.equal(assembled(words, False), weight.dequantise(torch.bfloat16))


@pytest.mark.parametrize("is_divisor", [False, True])
def test_the_pieces_of_a_factor_give_all_products(is_divisor):
    """All codes with all scales, for factors of many sizes: the assembly does what was tried."""
    for factor in torch.exp(12 * torch.rand(8, generator=torch.Generator().manual_seed(2)) - 9):
        codes = torch.arange(16, dtype=torch.uint8).repeat(4).repeat(128, 32)[:, :2048]
        scale = torch.arange(127, dtype=torch.uint8)[torch.arange(128 * 128) % 127].view(128, 128).view(FP8)
        given = {"divisor" if is_divisor else "multiplier": factor.view(1, 1)}
        weight = Fp4Groups(pack_nibbles(codes), scale, **given)
        words = pack_for_kernel(weight)
        assert torch.equal(assembled(words, False), weight.dequantise(torch.bfloat16))


# ---- compiled for a card that is not here


def compile_for_a_card(code, group, tokens, gate, rows):
    """Two versions of Triton were seen to give lanes other words, and columns another order."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    span, num_scales = (max(1, group // 64), max(1, 64 // group)) if "fp4" not in code else (1, 1)
    asm, constraints = None, None
    if code not in IN_FLOAT32:
        asm, constraints = packed_asm.widening(code, num_scales, is_half=False)
    config = packed.likely(tokens, rows)
    kinds = {
        "*bf16": "x out", "*i32": "words scales seconds",
        "i32": "num_tokens num_outputs num_chunks stride_x",
    }  # fmt: skip
    signature = {name: kind for kind, names in kinds.items() for name in names.split()}
    constants = {
        "factors": None, "bias": None, "onto": None, "BLOCK_M": config.block_m, "TILES": config.tiles,
        "CHUNKS": config.chunks, "CODE": code, "PARTS": num_scales, "SPAN": span, "IS_HALF": False,
        "IS_DIVISOR": False, "ASM": asm, "CONSTRAINTS": constraints, "GATE": gate, "IS_EVEN": True,
        "IS_CARD": True, "PDL": True,
    }  # fmt: skip
    names = packed._packed.arg_names
    source = ASTSource(
        packed._packed,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in signature if name != "num_tokens"},
    )
    options = {"num_warps": config.warps, "num_stages": config.stages, "launch_pdl": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert set(re.findall(r"kWidth = (\d)", made.asm["ttgir"])) == {"2"}, "columns in their order"
    assert "shfl" not in made.asm["ptx"], "values stay in their lanes"
    loop = re.search(r"scf\.for.*?scf\.yield", made.asm["ttgir"], re.DOTALL)[0]
    assert "local_store" not in loop
    assert "local_alloc" not in loop
    waits = set(re.findall(r"warp_group_dot_wait.*?pendings = (\d+)", loop))
    assert waits <= {"0"}, "registers that a product reads are overwritten"
    assert ".local" not in made.asm["ptx"], "nothing is spilled"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "int4 128 1 none 4096", "int4 128 16 silu 12288", "int4 32 64 none 4096", "nvfp4 16 16 none 4096",
        "nvfp4 16 512 silu 12288", "mxfp4 32 8 silu 12288", "q4_1 32 16 silu 12288", "q8_0 32 16 none 4096",
    ],
)  # fmt: skip
def test_values_stay_in_the_lanes_that_load_them(case):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.test_triton_packed", *case.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compile_for_a_card(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
