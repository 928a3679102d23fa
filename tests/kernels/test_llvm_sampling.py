"""The CPU's `choose` against its reference, with `==`.

The two take logarithms that differ in their last places, and sum probabilities in another order: with these
seeds no two noisy scores, and no sum and its top_p, are as near as that.
"""

from __future__ import annotations

import random

import pytest
import torch

from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.llvm.compiler import kernel
from blockdraft.kernels.llvm.jit import Jit
from blockdraft.kernels.llvm.language import Floats, Int, load, store
from blockdraft.kernels.llvm.sampling import weight
from blockdraft.kernels.llvm.tape import Arena, StepTape
from blockdraft.kernels.noise import gumbel
from blockdraft.kernels.sampling import NEVER, reference_choose
from blockdraft.kernels.sampling_tables import Whole

CPU = torch.device("cpu")
NAN, INFINITE = float("nan"), float("inf")
RULES = {
    "greedy": {},
    "coldest": {"temperature": 1e-6, "top_p": 0.5},
    "random": {"temperature": 1.0},
    "cool": {"temperature": 0.37},
    "hot": {"temperature": 3.1},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "min_p of one": {"temperature": 1.0, "min_p": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k of one": {"temperature": 1.0, "top_k": 1},
    "top_k of 300": {"temperature": 5.0, "top_k": 300},
    "top_k of all": {"temperature": 1.0, "top_k": 10**6},
    "top_p": {"temperature": 1.0, "top_p": 0.613},
    "much top_p": {"temperature": 2.3, "top_p": 0.9871},
    "little top_p": {"temperature": 4.0, "top_p": 0.0213},
    "least top_p": {"temperature": 1.0, "top_p": 1e-9},
    "top_k and top_p": {"temperature": 2.0, "top_k": 20, "top_p": 0.513},
    "filters": {"temperature": 1.5, "top_k": 40, "top_p": 0.713, "min_p": 0.05},
    "the default model's": {"temperature": 0.2, "top_p": 0.9},
}
ADJUSTED = {
    "bias": {"temperature": 0.9, "bias": ((7, 6.0), (2, -3.0))},
    "banned": {"temperature": 0.8, "stop_ids": (0, 3), "min_end": 9, "bias": ((3, 20.0), (4, 8.0))},
    "greedy counts": {"presence": -3.0, "frequency": -1.5, "repetition": 1.3},
    "all": {
        "temperature": 0.8, "top_k": 30, "top_p": 0.813, "min_p": 0.01, "repetition": 1.2, "presence": 0.3,
        "frequency": 0.2, "stop_ids": (4, 1), "min_end": 40, "bias": ((4, 9.0), (6, 4.0)),
    },
}  # fmt: skip

pytestmark = pytest.mark.skipif(
    why_no_llvm(torch.float32, CPU) is not None, reason="the CPU kernels are not chosen"
)


def place_rows(rules, vocab_size, seed=0):
    chance = random.Random(seed)
    rows = Rows(max_rows=len(rules), max_pages=1, vocab_size=vocab_size, scratch_page=0, device=CPU)
    for row, rule in enumerate(rules):
        text = [chance.randrange(10) for _ in range(chance.randint(2, 8))]
        own = {"seed": chance.getrandbits(64) - 2**63, "output_start": chance.randint(1, len(text))}
        rows.place(row, text, len(text) - 1, RowSampling(**rule | own))
    rows.activate(range(len(rules)))
    return rows


def chosen_by(choose, rows, logits):
    recent = rows.anchor[rows.active][:, None].expand(-1, logits.shape[1])
    return choose(logits, rows.length[rows.active], recent, rows.sampling())


def kernel_choose(logits, *rest):
    return kernels_for(torch.float32, CPU).choose(logits, *rest)


def check(rows, logits):
    chosen, expected = chosen_by(kernel_choose, rows, logits), chosen_by(reference_choose, rows, logits)
    assert chosen.tolist() == expected.tolist()
    return chosen


def numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("name", RULES)
def test_each_rule_chooses_what_the_reference_chooses(name, spread):
    rows = place_rows([RULES[name]] * 20, 2500)
    check(rows, spread * numbers(0, 20, 5, 2500))


@pytest.mark.parametrize("vocab_size", [10, 15, 63, 64, 65, 127, 1000, 49152, 100_003])
def test_rows_of_every_rule_share_a_call(vocab_size):
    rules = [*RULES.values(), *ADJUSTED.values()]
    rows = place_rows(rules, vocab_size, seed=vocab_size)
    check(rows, 2 * numbers(vocab_size, len(rules), 3, vocab_size))


@pytest.mark.parametrize("seed", range(60))
def test_scores_that_are_equal_are_ranked_by_their_ids(seed):
    """Multiples of 1/4, under temperatures that keep them exact: a score has many tokens."""
    chance = random.Random(seed)
    vocab_size = chance.choice([12, 64, 65, 300, 1000, 5000])
    rules = []
    for _ in range(12):
        rule = {"temperature": chance.choice([0.5, 1.0, 2.0, 4.0])}
        rule |= {"top_k": chance.choice([1, 2, 7, 40, 77, 500])} if chance.random() < 0.6 else {}
        rule |= {"top_p": chance.choice([0.0771, 0.513, 0.8131, 0.9771])} if chance.random() < 0.6 else {}
        rule |= {"min_p": chance.choice([0.01, 0.2, 1.0])} if chance.random() < 0.3 else {}
        rules.append(rule)
    generator = torch.Generator().manual_seed(seed)
    reach = chance.choice([1, 3, 24])
    logits = torch.randint(-reach, reach + 1, (12, 4, vocab_size), generator=generator) / 4
    check(place_rows(rules, vocab_size, seed), logits)


@pytest.mark.parametrize("top_p", [0.125, 0.25, 0.5, 0.75, 0.875])
def test_a_mass_that_is_just_top_p_keeps_nothing_more(top_p):
    """Eight tokens of 1/8 each, whose sums nothing rounds: the first 8 * top_p of them are left."""
    vocab_size, ids = 700, [3, 64, 65, 191, 300, 301, 640, 699]
    rows = place_rows([{"temperature": 0.7, "top_p": top_p}] * 8, vocab_size)
    logits = torch.full((8, 60, vocab_size), NEVER)
    logits[..., ids] = 2.5
    assert set(check(rows, logits).flatten().tolist()) == set(ids[: int(8 * top_p)])


@pytest.mark.parametrize("rule", [name for name in RULES if name not in ("greedy", "coldest")])
def test_no_token_is_passed_over_that_its_noise_lifts(rule):
    """Scores that their noise makes equal, but for as little as tells them apart."""
    vocab_size, generator = 3000, torch.Generator().manual_seed(1)
    rows = place_rows([RULES[rule]] * 40, vocab_size)
    position = rows.length[rows.active][:, None] + 1
    noise = gumbel(rows.sampling().integers(Whole.SEED), position, vocab_size, torch.float32)
    for _ in range(5):
        little = torch.rand(40, 1, vocab_size, generator=generator).argsort(dim=-1) * 1e-4
        chosen = check(rows, (little - noise) * RULES[rule]["temperature"])
        assert rule != "random" or chosen.tolist() == little.argmax(dim=-1).tolist()


def test_a_column_is_chosen_alone_as_in_any_company():
    rules = [*RULES.values(), *ADJUSTED.values()]
    rows = place_rows(rules, 9000)
    logits = numbers(3, len(rules), 4, 9000)
    together = chosen_by(kernel_choose, rows, logits).tolist()
    start = rows.length.clone()
    for row in range(len(rules)):
        rows.activate([row])
        assert chosen_by(kernel_choose, rows, logits[[row]]).tolist() == [together[row]]
        if row < len(RULES):  # penalties count the columns before
            for column in range(4):
                rows.length[row] = start[row] + column
                alone = chosen_by(kernel_choose, rows, logits[row, column].view(1, 1, -1))
                assert alone.tolist() == [[together[row][column]]]


def test_threads_share_columns_and_change_nothing():
    rows = place_rows(list(RULES.values()), 5000)
    logits = numbers(4, len(RULES), 7, 5000)
    expected = chosen_by(reference_choose, rows, logits).tolist()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert chosen_by(kernel_choose, rows, logits).tolist() == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("rule", [*RULES, *ADJUSTED])
def test_a_recorded_choice_asks_anew_what_the_rows_need(rule):
    rows, logits = place_rows([{}, {}], 50), numbers(5, 2, 4, 50)
    tape = StepTape(Arena())
    with torch.inference_mode(), tape:
        chosen = chosen_by(kernel_choose, rows, logits)
    for row in range(2):
        rows.place(row, [5, 6, 7], 2, RowSampling(seed=row, output_start=1, **(RULES | ADJUSTED)[rule]))
    rows.activate(range(2))
    tape.replay()
    assert chosen.tolist() == chosen_by(reference_choose, rows, logits).tolist()


@pytest.mark.parametrize("vocab_size", [20, 64, 150])
def test_columns_where_little_or_nothing_may_be_chosen(vocab_size):
    """Forms forbid tokens by NEVER; where nothing is left, the first is chosen."""
    rows = place_rows(list(RULES.values()), vocab_size)
    logits = numbers(6, len(RULES), 6, vocab_size)
    logits[:, 0] = NEVER
    logits[:, 1, 3:] = NEVER
    logits[:, 2, :-3] = NEVER
    logits[:, 3, torch.arange(vocab_size) != vocab_size // 2] = NEVER
    logits[:, 4, ::2] = NEVER
    logits[:, 5] = -0.0
    check(rows, logits)


@pytest.mark.parametrize("vocab_size", [20, 64, 150])
def test_what_is_no_number_or_infinite_is_the_largest(vocab_size):
    rows = place_rows(list(RULES.values()), vocab_size)
    logits = numbers(7, len(RULES), 5, vocab_size)
    logits[:, 0] = NAN
    logits[:, 1, 11::3] = NAN
    logits[:, 2, -1] = NAN
    logits[:, 3, 5::4] = INFINITE
    logits[:, 4, 5], logits[:, 4, 7], logits[:, 4, 2] = INFINITE, NAN, NEVER
    chosen = check(rows, logits)
    assert chosen.unique(dim=0).tolist() == [[0, 11, vocab_size - 1, 5, 7]]


def test_zeros_of_both_signs_are_one_score():
    rows = place_rows([RULES["top_k"], RULES["filters"], RULES["top_p"]] * 10, 90)
    signs = torch.randint(0, 2, (30, 4, 90), generator=torch.Generator().manual_seed(8)) * 2 - 1
    check(rows, signs * 0.0)
    logits = signs * 0.0
    logits[..., ::5] = -1.0
    check(rows, logits)


def test_scores_that_swallow_the_noise():
    """Numbers so large that noise is rounded away, and a temperature that makes them infinite."""
    rows = place_rows(list(RULES.values()), 100)
    logits = numbers(9, len(RULES), 3, 100)
    logits[:, 0] *= 1e9
    logits[:, 1] *= 1e30
    logits[:, 2] *= 1e38
    check(rows, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_strides(dtype):
    rows = place_rows(list(RULES.values()), 100)
    logits = 2 * numbers(10, 100, 5, len(RULES)).to(dtype)
    check(rows, logits.permute(2, 1, 0))


@pytest.mark.parametrize("size", [1, 2, 5, 15, 16, 17, 31, 33, 64, 1000])
def test_a_greedy_choice_is_the_first_of_the_largest(size):
    generator = torch.Generator().manual_seed(size)
    few = torch.randint(-2, 3, (60, size), generator=generator).float()  # many are equal
    never = few.masked_fill(few < 1, NEVER)
    never[0] = NEVER
    undefined = few.masked_fill(torch.rand(60, size, generator=generator) < 0.1, NAN)
    undefined[0] = NAN
    infinite = few.masked_fill(few == 2, INFINITE)
    zeros = torch.randint(0, 2, (60, size), generator=generator).float().mul(-0.0)
    rows = Rows(max_rows=20, max_pages=1, vocab_size=size, scratch_page=0, device=CPU)  # greedy
    rows.activate(range(20))
    for logits in (few, torch.randn(60, size, generator=generator), never, undefined, infinite, zeros, -few):
        given = logits.view(20, 3, size)
        assert torch.equal(chosen_by(kernel_choose, rows, given), given.argmax(dim=-1))


@kernel
def weigh(count: Int, x: Floats, weights: Floats) -> None:
    for i in range(0, count, 16):
        store(weights + i, weight(load(x + i, 16)))


def test_what_a_token_weighs():
    x = torch.cat((-torch.arange(80 * 1024) / 1024, torch.full((16,), NEVER)))
    weights = torch.empty_like(x)
    Jit(weigh)(len(x), x, weights)
    assert float(weights[0]) == 1.0
    assert torch.allclose(weights[:-16].double(), x[:-16].double().exp(), rtol=5e-7, atol=0)
    assert (weights[-16:] < 1e-34).all()
