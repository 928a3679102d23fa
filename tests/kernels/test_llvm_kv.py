"""The CPU kernels of the compressed cache against their references, and their promise on bits."""

import itertools

import pytest
import torch

from blockdraft.kernels import kv_codec
from blockdraft.kernels.attention import Blocks, Mask
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.heads import HeadNorms, Rotation, Slots, apply_rotation, write
from blockdraft.kernels.kernels import REFERENCE, kernels_for
from blockdraft.kernels.kv_compressed import Tiles
from blockdraft.kernels.kv_positions import PositionRule
from tests.kernels import compressed_case

pytest.importorskip("llvmlite")
from blockdraft.kernels.llvm.kv_attention import CompressedAttention
from blockdraft.kernels.llvm.tape import Arena, StepTape
from tests.matrix import slow_but

CPU = torch.device("cpu")
if why_no_llvm(torch.float32, CPU) is not None:
    pytest.skip(f"the kernels are not chosen: {why_no_llvm(torch.float32, CPU)}", allow_module_level=True)

KERNELS = {dtype: kernels_for(dtype, CPU) for dtype in (torch.float32, torch.float64)}
DTYPES = list(KERNELS)
NEAR = PositionRule(window=16)
MASKS = {
    "causal": {},
    "bidirectional": {"is_causal": False},
    "window": {"window": 7},
    "wide window": {"window": 200},
    "anchored": {"window": 100, "is_anchored": True},
    "anchored bidirectional": {"window": 300, "is_anchored": True, "is_causal": False},
}


def attend(case, sinks=None, blocks=None, q=None):
    q, blocks = case.q if q is None else q, blocks or case.blocks
    return KERNELS[q.dtype].attend_compressed(q, case.pages, blocks, case.mask, sinks)


def reference(case, sinks=None):
    """Attend in float64; the difference is the kernel's own rounding."""
    pages = case.pages._replace(
        exact_keys=case.pages.exact_keys.double(), exact_values=case.pages.exact_values.double()
    )
    return REFERENCE.attend_compressed(case.q.double(), pages, case.blocks, case.mask, sinks)


def compressed(**kwargs):
    """Make a case and compress all its tiles that are read compressed."""
    case = compressed_case.make(**kwargs)
    REFERENCE.compress(case.pages, case.tiles)
    return case


def assert_near(out, expected):
    tolerance = 5e-6 if out.dtype == torch.float32 else 1e-13
    torch.testing.assert_close(out.double(), expected.double(), rtol=0, atol=tolerance)


# --------------------------------------------------------------------------------------------- attention


SIZES = [("int8", 20, DTYPES[1]), *itertools.product(kv_codec.FORMATS, (32, 64, 96, 128), DTYPES)]
FEW = [SIZES[0], ("int8", 32, DTYPES[0]), ("tq4", 32, DTYPES[1]), ("tq4v3", 64, DTYPES[0])]
sizes = pytest.mark.parametrize(("form", "dim", "dtype"), slow_but(SIZES, *FEW), ids=str)


@sizes
def test_ragged_rows_agree_with_the_reference(form, dim, dtype):
    case = compressed(form=form, lengths=(300, 17, 640), counts=(16, 5, 100), dim=dim, dtype=dtype)
    assert_near(attend(case), reference(case))


FLOAT64 = {"rule": NEAR, "dtype": torch.float64}
AGREEING = [
    # These heads do not fill a register: the reference attends.
    *({"form": form, "lengths": (300,), "dim": d} for form, d in [("int8", 6), ("tq4", 8), ("tq4v3", 40)]),
    *({"lengths": (end, end + 1), "counts": (16, 16), **FLOAT64} for end in range(190, 290, 7)),
    *(
        {"lengths": (272,), "counts": (8,), "heads": heads, "groups": groups, **FLOAT64}
        for heads, groups in [(1, 1), (9, 3), (7, 1), (40, 2)]
    ),
]


@pytest.mark.parametrize("kwargs", AGREEING, ids=str)
def test_heads_of_every_size_and_borders_at_every_offset_agree(kwargs):
    case = compressed(**kwargs)
    assert_near(attend(case), reference(case))


ROTATED = list(itertools.product(("tq4", "tq4v3"), (16, 64, 80)))


@pytest.mark.parametrize(("form", "dim"), slow_but(ROTATED, ("tq4v3", 64)))
def test_levels_are_the_same_by_either_instruction(form, dim):
    case = compressed(form=form, lengths=(300,), dim=dim)
    kernel = CompressedAttention(torch.float32, dim, case.pages.format, permute=False)
    out = kernel(case.q, case.pages, case.blocks, case.mask)
    assert torch.equal(out, attend(case))
    assert_near(out, reference(case))


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_sinks(name, has_sinks):
    mask = Mask(scale=0.2, **MASKS[name])
    case = compressed(lengths=(334, 700, 20), counts=(16, 40, 9), rule=NEAR, mask=mask, dtype=torch.float64)
    sinks = torch.tensor([0.5, -3.0, 4.0, 0.0], dtype=torch.float64) if has_sinks else None
    assert_near(attend(case, sinks), reference(case, sinks))


# ------------------------------------------------------------------------------------------------ bits


def part(case, row, start, count):
    """Attend for one row's queries [start, start + count) alone."""
    first = sum(case.blocks.counts[:row])
    begin = first + start - int(case.blocks.starts[row])
    blocks = Blocks(
        pages=case.blocks.table,
        exact_pages=case.blocks.exact_table,
        rows=torch.tensor([row]),
        starts=torch.tensor([start]),
        counts=(count,),
        page_size=case.blocks.page_size,
    )
    return begin, attend(case, blocks=blocks, q=case.q[begin : begin + count])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["causal", "wide window"])
def test_bits_do_not_depend_on_width_chunks_or_the_other_rows(name, dtype):
    mask = Mask(scale=0.2, **MASKS[name])
    case = compressed(
        lengths=(530, 300), counts=(530, 100), heads=9, groups=3, rule=NEAR, mask=mask, dtype=dtype
    )
    whole = attend(case)
    for size in (1, 5, 16, 100):
        starts = range(0, 530 - size, size) if size >= 16 else range(265, 300, size)
        for row, start in [*((0, start) for start in starts), (1, 200), (1, 271 - size // 2)]:
            count = min(size, 300 - start) if row else size
            begin, out = part(case, row, start, count)
            assert torch.equal(out, whole[begin : begin + count])


def moved(case, page_size):
    """Copy the rows to pages of another size."""
    counts = case.blocks.counts
    lengths = tuple(len(k) for k, _ in case.exact)
    new = compressed_case.make(
        form=case.pages.format.name, lengths=lengths, counts=counts, page_size=page_size, dim=case.q.shape[-1]
    )
    for row, (k, v) in enumerate(case.exact):
        position = torch.arange(len(k))
        place = new.blocks.exact_table[row, position // page_size] * page_size + position % page_size
        new.pages.exact_keys[0][:, place] = k.transpose(0, 1)
        new.pages.exact_values[0][:, place] = v.transpose(0, 1)
    REFERENCE.compress(new.pages, new.tiles)
    return new


@pytest.mark.parametrize("form", slow_but(["int8", "tq4v3"], "int8"))
def test_bits_do_not_depend_on_pages_or_threads(form, threads):
    case = compressed(form=form, lengths=(700, 400), counts=(300, 16))
    expected = attend(case)
    for page_size, count in ((16, 1), (16, 2), (24, 3), (64, 2), (5, 1)):
        threads(count)
        other = case if page_size == 16 else moved(case, page_size)
        blocks = Blocks(  # units follow from the number of threads
            pages=other.blocks.table, exact_pages=other.blocks.exact_table, starts=case.blocks.starts,
            counts=case.blocks.counts, page_size=page_size,
        )  # fmt: skip
        assert torch.equal(attend(other, blocks=blocks, q=case.q), expected)


@pytest.mark.parametrize("name", MASKS)
def test_slots_that_no_query_reads_may_hold_anything(name):
    mask = Mask(scale=0.2, **MASKS[name])
    case = compressed(lengths=(350, 205), counts=(16, 5), rule=NEAR, mask=mask)
    clean = attend(case)
    is_read = {False: set(), True: set()}
    for reads, row in zip(case.blocks.groups, range(2), strict=True):
        is_compressed, is_seen = reads.is_compressed(NEAR)[0], reads.bias(mask, torch.float32)[0] == 0
        for cold, slots in ((True, reads.slots), (False, reads.exact_slots)):
            is_read[cold].update(slots[0][(is_seen & (is_compressed == cold)).any(dim=0)].tolist())
        assert is_read[False], row
    for cold, stores in ((True, (case.pages.keys.scale, case.pages.values.scale)),
                         (False, (case.pages.exact_keys, case.pages.exact_values))):  # fmt: skip
        rest = sorted(set(range(stores[0].shape[2])) - is_read[cold])
        for store in stores:
            store[:, :, rest] = float("nan")
    assert torch.equal(attend(case), clean)
    assert not clean.isnan().any()


# --------------------------------------------------------------------------------------------- compress


def spoiled(**kwargs):
    """Make a case with tiny, huge, zero and non-finite vectors."""
    case = compressed_case.make(**kwargs)
    for x in (case.pages.exact_keys[0], case.pages.exact_values[0]):
        for place, factor in enumerate((1e-6, 1e6, 1e-30, 1e30, 0.0, -0.0)):
            x[0, 40 + place * 9 : 49 + place * 9] *= factor
        x[1, 70, 3], x[1, 95, 0] = float("inf"), float("nan")
    return case


def stored(case):
    return [part.view(torch.uint8 if part.dtype == torch.uint8 else torch.int16)
            for codes in (case.pages.keys, case.pages.values) for part in codes]  # fmt: skip


@sizes
def test_compressed_bytes_are_the_references(form, dim, dtype):
    ours, theirs = (
        spoiled(form=form, dim=dim, lengths=(300, 17, 640), counts=(16,) * 3, dtype=dtype) for _ in range(2)
    )
    KERNELS[dtype].compress(ours.pages, ours.tiles)
    REFERENCE.compress(theirs.pages, theirs.tiles)
    assert all(torch.equal(a, b) for a, b in zip(stored(ours), stored(theirs), strict=True))


@pytest.mark.parametrize("form", kv_codec.FORMATS)
def test_a_vector_has_the_same_bytes_in_any_company(form):
    whole, alone = (spoiled(form=form, lengths=(300, 400), counts=(16, 16), page_size=24) for _ in range(2))
    KERNELS[torch.float32].compress(whole.pages, whole.tiles)
    all_tiles = alone.tiles
    rule = all_tiles.rule
    for row in (1, 0):
        for begin in range(0, int(all_tiles.ends[row]), 64):
            end = begin + rule.window - rule.block + 1
            of_one = (torch.tensor([number]) for number in (row, end, 64))
            tiles = Tiles(all_tiles.table, all_tiles.exact_table, *of_one, rule, 1, all_tiles.page_size)
            KERNELS[torch.float32].compress(alone.pages, tiles)
    assert all(torch.equal(a, b) for a, b in zip(stored(whole), stored(alone), strict=True))


def test_no_more_than_the_tiles_asked_for_are_compressed():
    case = compressed_case.make(lengths=(400, 400), counts=(16, 16))
    before = [one.clone() for one in stored(case)]
    tiles = case.tiles
    tiles.counts.zero_()
    KERNELS[torch.float32].compress(case.pages, tiles)
    assert all(torch.equal(a, b) for a, b in zip(stored(case), before, strict=True))


# ------------------------------------------------------------------------------------------------ heads


HEADS = list(itertools.product([8, 24, 32, 96, 128], [False, True], DTYPES))


@pytest.mark.parametrize(
    ("dim", "has_norms", "dtype"),
    slow_but(HEADS, (24, True, DTYPES[0]), (32, False, DTYPES[1]), (96, True, DTYPES[0])),
    ids=str,
)
def test_rotated_heads_have_the_references_bits(dim, has_norms, dtype):
    rng = torch.Generator().manual_seed(dim)

    def random(*shape):
        return torch.randn(*shape, generator=rng).to(dtype)

    q, k, v = (random(7, heads, dim) for heads in (6, 2, 2))
    norms = HeadNorms(random(dim), random(dim), 1e-5) if has_norms else None
    angles = random(7, 1, dim // 2), random(7, 1, dim // 2)
    rotation = Rotation(kv_codec.signs(dim, CPU), torch.randn(2, dim, generator=rng))
    place = torch.randperm(40, generator=rng)[:7]
    plain, ours, theirs = (
        Slots(torch.zeros(2, 40, dim, dtype=dtype), torch.zeros(2, 40, dim, dtype=dtype), place, one)
        for one in (None, rotation, rotation)
    )
    run = KERNELS[dtype].norm_rope_write
    out, rotated = (run(q, k, v, norms, angles, slots) for slots in (plain, ours))
    write(*(store[:, place].transpose(0, 1) for store in plain[:2]), theirs)
    assert torch.equal(rotated, apply_rotation(out, rotation))
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)


# ------------------------------------------------------------------------------------------------ tape


def test_a_recorded_step_follows_lengths_that_have_moved():
    case = compressed_case.make(lengths=(500, 430), counts=(16, 16), rule=NEAR)
    kernels, blocks, tiles = KERNELS[torch.float32], case.blocks, case.tiles
    ends = tiles.ends.clone()
    tape = StepTape(Arena())
    blocks.starts.fill_(100)
    tiles.ends.zero_()  # nothing to do while it is recorded
    with torch.inference_mode(), tape:
        kernels.compress(case.pages, tiles)
        out = attend(case)
    for back in (0, 1, 30):
        blocks.starts.copy_(torch.tensor([484 - back, 414 - back]))
        tiles.ends.copy_(ends)
        tape.replay()
        assert torch.equal(out, attend(case))
        fresh = compressed_case.make(lengths=(500, 430), counts=(16, 16), rule=NEAR)
        fresh.blocks.starts.copy_(blocks.starts)
        REFERENCE.compress(fresh.pages, case.tiles)
        assert_near(out, reference(fresh))
