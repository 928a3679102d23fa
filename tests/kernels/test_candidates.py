"""A walk over candidates: what `choose` would make of a row in which nothing else can be chosen.

Where nothing filters, candidates are the best under the noise: without pairs the walk is `choose`.
The kernels are held to the reference with numbers that are summed exactly in any order, so also ties have to
agree; and once with numbers that are not.
"""

import functools
import itertools
import random

import pytest
import torch

from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.checkpoints.read_draft_config import MAX_CANDIDATES
from blockdraft.kernels.candidates import PairScores, reference_walk
from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.llvm.candidates import MOST, takes
from blockdraft.kernels.llvm.tape import Arena, StepTape
from blockdraft.kernels.noise import gumbel
from blockdraft.kernels.sampling import NEVER, places_of, reference_choose
from blockdraft.kernels.sampling_tables import Whole
from tests.kernels.implementations import CPU, HALF, only_kernels, only_llvm, quiet, slow_triton
from tests.kernels.test_sampling import OPEN
from tests.matrix import slow_but

pytestmark = quiet
VOCAB, RANK, DRAFTS, TOP_K = 50, 6, 4, 9
RULES = {
    "greedy": {},
    "random": {"temperature": 1.0},
    "cold": {"temperature": 1e-6, "top_p": 0.5},
    "filters": {"temperature": 1.5, "top_k": 5, "top_p": 0.7, "min_p": 0.02},
    "top_k": {"temperature": 0.8, "top_k": 3},
    "top_p": {"temperature": 1.3, "top_p": 0.813},
    "min_p": {"temperature": 2.0, "min_p": 0.1},
    "banned": {"stop_ids": (3, 4), "min_end": 9},
    "bias": {"temperature": 1.0, "bias": ((0, 2.0), (7, -3.0), (21, 1.5))},
    "penalties": {"temperature": 0.7, "presence": 3.0, "frequency": 2.0, "repetition": 1.5},
}


def place_rows(rules, vocab_size=VOCAB, device=CPU):
    """Rows of short texts, all but the first token of which were answered."""
    rows = Rows(max_rows=len(rules), max_pages=1, vocab_size=vocab_size, scratch_page=0, device=device)
    for row, rule in enumerate(rules):
        text = [1 + row % 5, 2, 3, 2, 1 + row][: 3 + row % 3]
        rows.place(row, text, len(text) - 1, RowSampling(seed=40 + row, output_start=1, **rule))
    rows.activate(range(len(rules)))
    return rows


def make_walk(rows, *, has_mixture, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    num_rows = len(rows.active)
    mixture = noise(num_rows, DRAFTS, RANK)
    pairs = PairScores(noise(VOCAB, RANK), noise(VOCAB, RANK), mixture if has_mixture else None, TOP_K)
    return 2 * noise(num_rows, DRAFTS, VOCAB), pairs


def walked(walk, rows, logits, pairs):
    device, parts = rows.active.device, {}
    for name in ("predecessors", "successors", "mixture", "successor_rows"):
        part = getattr(pairs, name)
        parts[name] = None if part is None else part.to(device)
    anchor = rows.anchor[rows.active][:, None]
    return walk(logits.to(device), pairs._replace(**parts), rows.length[rows.active], anchor, rows.sampling())


def check(implementation, rows, logits, pairs):
    """The implementation drafts what the reference does."""
    if implementation.name == "llvm":
        assert takes(logits, pairs)
    drafts, expected = (
        walked(one, rows, logits, pairs) for one in (implementation.kernels.walk, reference_walk)
    )
    assert drafts.dtype == torch.int64
    assert drafts.tolist() == expected.tolist()
    return drafts


def test_rows_of_different_widths_draft_the_first_drafts_of_whole_rows(implementation):
    names = list(RULES) if not implementation.is_interpreted else ["greedy", "random", "filters", "penalties"]
    rows = place_rows([RULES[name] for name in names], device=implementation.device)
    logits, pairs = make_walk(rows, has_mixture=True)
    whole = walked(implementation.kernels.walk, rows, logits, pairs)
    widths = [(1, DRAFTS, 0, 2)[row % 4] for row in range(len(names))]
    offsets = torch.tensor([0, *itertools.accumulate(widths)])
    places = places_of(offsets, sum(widths), DRAFTS)
    stream = pairs._replace(mixture=places.take(pairs.mixture).contiguous())
    there = places_of(offsets.to(implementation.device), sum(widths), DRAFTS)
    walk = functools.partial(implementation.kernels.walk, places=there)
    got = walked(walk, rows, places.take(logits).contiguous(), stream)
    assert torch.equal(got, there.take(whole))


def is_open(rule):
    """Return whether candidates are chosen under the noise."""
    return rule.get("temperature", 0.0) >= 1e-5 and not {"top_k", "top_p", "min_p"} & rule.keys()


CASES = {name: [rule] * 3 for name, rule in RULES.items() if name not in ("banned", "bias", "penalties")}
CASES["mixed"] = [RULES["random"], RULES["greedy"], RULES["filters"], {"temperature": 2.5}, RULES["cold"]]


@pytest.mark.parametrize("has_mixture", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_each_draft_is_what_choose_makes_of_its_candidates_behind_the_one_before(case, has_mixture):
    rules = CASES[case]
    rows = place_rows(rules)
    logits, pairs = make_walk(rows, has_mixture=has_mixture, dtype=torch.float64)
    drafts = walked(reference_walk, rows, logits, pairs)
    starts, block = rows.length[rows.active], torch.cat((rows.anchor[rows.active][:, None], drafts), dim=1)
    positions = starts[:, None] + 1 + torch.arange(DRAFTS)
    noise = gumbel(rows.sampling().integers(Whole.SEED), positions, VOCAB, torch.float64)
    kept = torch.full_like(logits, NEVER)
    for r, rule in enumerate(rules):
        for draft in range(DRAFTS):
            said = pairs.predecessors[block[r, draft]] * (pairs.mixture[r, draft] if has_mixture else 1)
            own = logits[r, draft]
            worth = own / rule["temperature"] + noise[r, draft] if is_open(rule) else own
            for token in worth.topk(TOP_K).indices:
                kept[r, draft, token] = own[token] + said @ pairs.successors[token]
    assert torch.equal(drafts, reference_choose(kept, starts, block, rows.sampling()))
    assert not torch.equal(drafts, reference_choose(logits, starts, block, rows.sampling()))


@pytest.mark.parametrize(
    ("implementation", "vocab_size", "top_k"),
    [
        ("reference", VOCAB, 1),
        ("reference", 1000, 9),
        *(("llvm", *sizes) for sizes in ((VOCAB, 1), (1000, 2), (8003, 16))),
        *slow_but([("llvm", 70_003, 2), ("triton", VOCAB, 2), ("triton", 4100, 2)]),
    ],
    indirect=["implementation"],
)
def test_where_pairs_say_nothing_rows_without_filters_draft_what_choose_draws(
    implementation, vocab_size, top_k
):
    """Also beside others: greedy rows draft the same, rows with filters what their candidates leave."""
    rules = [RULES[name] for name in ("random", "greedy", "filters", "bias", "penalties", "cold", "top_p")]
    rules += [{"temperature": 3.1, "stop_ids": (3, 4), "min_end": 9}]
    rows, num_columns = (
        place_rows(rules, vocab_size, implementation.device),
        1 if implementation.is_interpreted else 5,
    )
    spread = 2 * torch.randn(
        len(rules), num_columns, vocab_size, generator=torch.Generator().manual_seed(top_k)
    )
    level = torch.zeros_like(spread)  # but for a few, which hardly any noise reaches
    level[..., 5:9] = 9.0
    pairs = PairScores(torch.zeros(vocab_size, 3), torch.ones(vocab_size, 3), None, top_k)
    starts, anchor = rows.length[rows.active], rows.anchor[rows.active][:, None]
    same = [row for row, rule in enumerate(rules) if is_open(rule) or rule.get("temperature", 0.0) < 1e-5]
    assert len(same) == 6
    for logits in (spread.to(implementation.device), level.to(implementation.device)):
        chosen = implementation.kernels.choose(logits, starts, anchor, rows.sampling())
        found = walked(implementation.kernels.walk, rows, logits, pairs)
        assert found[same].tolist() == chosen[same].tolist()


@pytest.mark.parametrize("rule", RULES)
def test_on_a_cpu_a_recorded_walk_asks_anew_what_the_rows_need(rule):
    walk = kernels_for(torch.float32, CPU).walk
    rows = place_rows([{}, {}])
    logits, pairs = make_walk(rows, has_mixture=False)
    tape = StepTape(Arena())
    with torch.inference_mode(), tape:
        drafts = walked(walk, rows, logits, pairs)
    for row in range(2):
        rows.place(row, [5, 6, 7], 2, RowSampling(seed=row, output_start=1, **RULES[rule]))
    rows.activate(range(2))
    tape.replay()
    assert drafts.tolist() == walked(reference_walk, rows, logits, pairs).tolist()


def exact_case(seed, shape, *, top_k, rank):
    """Logits that are multiples of 1/4, pairs of whole numbers: many are equal, and no sum is rounded."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator).float()

    num_rows, num_columns, vocab_size = shape
    logits = whole(-24, 25, *shape) / 4
    size = vocab_size if seed % 3 else vocab_size // 2 + 1
    places = None if seed % 3 else torch.randint(0, size, (vocab_size,), generator=generator)
    mixture = whole(-1, 2, num_rows, num_columns, rank) if seed % 2 else None
    books = whole(-1, 2, vocab_size, rank), whole(-1, 2, size, rank)
    return logits, PairScores(*books, mixture, top_k, places, skips_first=seed % 4 == 1)


@only_llvm
@pytest.mark.parametrize("seed", slow_but(range(60), *range(0, 60, 3)))
def test_the_cpu_s_kernel_drafts_what_the_reference_does_also_where_candidates_are_equal(
    implementation, seed
):
    chance = random.Random(seed)
    vocab_size = chance.choice([64, 65, 127, 300, 1000])
    top_k, rank = chance.choice([1, 2, 5, 16, 17, MOST]), chance.choice([1, 3, 16, 40])
    rules = chance.choices(list(RULES.values()), k=chance.choice([1, 2, 7]))
    shape = (len(rules), chance.choice([1, 3, 8]), vocab_size)
    check(implementation, place_rows(rules, vocab_size), *exact_case(seed, shape, top_k=top_k, rank=rank))


SMALL = [(0, 1, 4, 3), (1, 16, 70, 2), (2, 20, 5, 2), (3, 17, 6, 3), (5, 3, 4, 1), (6, 4, 6, 2)]


@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("seed", "top_k", "rank", "num_columns"),
    slow_but([*SMALL, (1, 16, 70, 7)], *SMALL[:1], *SMALL[3:]),
    ids=str,
)
def test_a_gpu_s_kernel_does_so_with_any_number_of_candidates_ranks_and_columns(
    implementation, seed, top_k, rank, num_columns
):
    """`seed` says if there is a mixture, if the head is reduced, and if the first draft skips the mixture."""
    rows = place_rows([RULES["greedy"], RULES["filters"]], 64, implementation.device)
    check(implementation, rows, *exact_case(seed, (2, num_columns, 64), top_k=top_k, rank=rank))


def test_where_pairs_skip_the_first_draft_its_mixture_does_not_count():
    rows = place_rows([RULES["greedy"], RULES["filters"]])
    logits, pairs = make_walk(rows, has_mixture=True)
    without = pairs._replace(mixture=pairs.mixture.clone())
    without.mixture[:, 0] = 0
    drafts = walked(reference_walk, rows, logits, pairs._replace(skips_first=True)).tolist()
    assert drafts == walked(reference_walk, rows, logits, without).tolist()
    assert drafts != walked(reference_walk, rows, logits, pairs).tolist()


def test_a_reduced_head_is_one_whose_rows_are_spelled_out():
    rows = place_rows([RULES["greedy"], RULES["filters"]])
    logits, pairs = make_walk(rows, has_mixture=False)
    places = torch.arange(VOCAB).flip(0) % 40
    reduced = pairs._replace(successors=pairs.successors[:40].contiguous(), successor_rows=places)
    spelled = pairs._replace(successors=pairs.successors[places])
    ones = spelled._replace(mixture=torch.ones(2, DRAFTS, RANK))
    expected = walked(reference_walk, rows, logits, spelled).tolist()
    assert walked(reference_walk, rows, logits, reduced).tolist() == expected
    assert walked(reference_walk, rows, logits, ones).tolist() == expected, "no mixture is one of ones"


@only_kernels
@pytest.mark.parametrize("dtype", slow_but([HALF, torch.float32], HALF))
def test_of_equal_candidates_the_lowest_id_is_taken_and_kept(implementation, dtype):
    """Half precision has many ties: more tokens reach the last place than there is room for."""
    vocab_size = 2100  # two chunks
    rows = place_rows([RULES["greedy"]] * 2, vocab_size, implementation.device)
    num_columns = 3 if implementation.is_interpreted else 4
    logits = torch.zeros(2, num_columns, vocab_size)
    logits[:, 1, 9::300] = 2.0
    logits[:, 2, -3:] = 1.0
    if implementation.name == "triton":
        logits = logits.to(dtype)
    generator = torch.Generator().manual_seed(1)
    books = (torch.randn(vocab_size, 2, generator=generator).to(logits.dtype) for _ in range(2))
    pairs = PairScores(*books, torch.randn(2, num_columns, 2, generator=generator).to(logits.dtype), 4)
    flat = pairs._replace(mixture=torch.zeros_like(pairs.mixture))
    assert check(implementation, rows, logits, flat).tolist() == [[0, 9, vocab_size - 3, 0][:num_columns]] * 2
    assert max(check(implementation, rows, logits, pairs)[:, 0].tolist()) < 4


@only_llvm
@pytest.mark.parametrize("rule", ["greedy", "top_k"])
def test_of_candidates_that_are_equal_with_their_pairs_the_lowest_id_comes_first(implementation, rule):
    """Token 5 has less by itself than 9 and 30, and as much more behind the anchor."""
    rows = place_rows([RULES[rule]] * 40)
    anchors = rows.anchor[rows.active]
    logits = torch.zeros(40, 1, VOCAB)
    logits[..., [5, 9, 12, 30]] = torch.tensor([1.0, 3.0, 1.0, 3.0])
    before, after = torch.zeros(VOCAB, 1), torch.zeros(VOCAB, 1)
    before[anchors], after[[5, 12]] = 1.0, 2.0
    pairs = PairScores(before, after, None, TOP_K)
    expected = check(implementation, rows, logits, pairs)
    assert set(expected.flatten().tolist()) == ({5} if rule == "greedy" else {5, 9, 12})


@only_llvm
@pytest.mark.parametrize("vocab_size", slow_but([49152, 65536, 100_003], 49152))
def test_a_large_vocabulary_is_searched_in_parts(implementation, vocab_size):
    rules = [RULES["random"], RULES["top_p"], RULES["greedy"]]
    rows = place_rows(rules, vocab_size)
    generator = torch.Generator().manual_seed(3)
    coarse, pairs = exact_case(1, (3, 7, vocab_size), top_k=16, rank=32)
    fine = 3 * torch.randn(3, 7, vocab_size, generator=generator)
    rising = torch.arange(vocab_size).expand(3, 7, -1) / 1024.0
    for logits in (coarse, fine, rising.contiguous(), rising.flip(-1).contiguous()):
        check(implementation, rows, logits, pairs)


@pytest.mark.parametrize(
    ("implementation", "vocab_size", "num_columns"),
    [
        ("llvm", VOCAB, DRAFTS),
        *slow_but(
            [("triton", *sizes) for sizes in ((40, 1), (40, 3), (2048, 3), (5000, 3))], ("triton", 40, 1)
        ),
    ],
    indirect=["implementation"],
)
def test_numbers_whose_sums_are_rounded(implementation, vocab_size, num_columns):
    """Rows of every rule in one call."""
    rules = [rule | {"stop_ids": (3,)} if "stop_ids" in rule else rule for rule in OPEN]
    rules += [RULES[name] for name in ("banned", "bias", "penalties")]
    rules += [{"temperature": 9.0, "top_k": 2}] * 6  # a third candidate would be drafted by some
    rules = rules[::3] if implementation.is_interpreted else rules
    rows, generator = place_rows(rules, vocab_size, implementation.device), torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(len(rules), num_columns, vocab_size, generator=generator)
    books = (torch.randn(vocab_size, RANK, generator=generator) for _ in range(2))
    mixture = torch.randn(len(rules), num_columns, RANK, generator=generator) * RANK**-0.5
    drafts = check(implementation, rows, logits, PairScores(*books, mixture, 16))
    assert len(set(drafts.flatten().tolist())) > (3 if implementation.is_interpreted else 8)


@only_llvm
def test_a_row_drafts_the_same_whoever_is_served_beside_it(implementation):
    """By bits: also numbers whose sums are rounded."""
    rules = list(RULES.values())
    together = place_rows(rules, 70_000)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(rules), 7, 70_000, generator=generator)
    books = (torch.randn(70_000, 50, generator=generator) for _ in range(2))
    pairs = PairScores(*books, torch.randn(len(rules), 7, 50, generator=generator), 16)
    drafts = walked(implementation.kernels.walk, together, logits, pairs).tolist()
    for row in range(len(rules)):
        together.activate([row])
        own = pairs._replace(mixture=pairs.mixture[[row]])
        assert walked(implementation.kernels.walk, together, logits[[row]], own).tolist() == [drafts[row]]


@only_llvm
def test_threads_share_columns_and_rows_and_change_nothing(implementation):
    rows = place_rows([RULES["greedy"], RULES["top_p"], RULES["random"]], 70_000)
    logits, pairs = exact_case(1, (3, 7, 70_000), top_k=16, rank=32)
    expected = walked(reference_walk, rows, logits, pairs).tolist()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert walked(implementation.kernels.walk, rows, logits, pairs).tolist() == expected
    finally:
        torch.set_num_threads(threads)


@slow_triton
def test_drafts_of_nan_are_tokens(implementation):
    rows = place_rows([RULES["greedy"], RULES["filters"], RULES["random"]], device=implementation.device)
    logits, pairs = make_walk(rows, has_mixture=True)
    logits[:, 0] = float("nan")
    logits[:, 1, ::2] = float("nan")
    pairs.predecessors[3:9] = float("nan")
    drafts = walked(implementation.kernels.walk, rows, logits, pairs)
    assert ((drafts >= 0) & (drafts < VOCAB)).all()


@slow_triton
def test_columns_with_fewer_tokens_than_candidates_and_with_none(implementation):
    """A reduced head has NEVER for all other tokens; where there is nothing else, some token is drafted."""
    rows = place_rows([RULES["greedy"], RULES["top_p"], RULES["random"]], device=implementation.device)
    logits, pairs = make_walk(rows, has_mixture=True)
    logits[:, 1, 3:] = NEVER
    logits[:, 2, :-3] = NEVER
    check(implementation, rows, logits, pairs)
    logits[:, 0] = NEVER
    if implementation.name == "llvm":
        check(implementation, rows, logits, pairs)
    drafts = walked(implementation.kernels.walk, rows, logits, pairs)
    assert ((drafts >= 0) & (drafts < VOCAB)).all()


@only_llvm
def test_what_the_kernel_does_not_take_is_walked_by_the_reference(implementation):
    assert MOST >= MAX_CANDIDATES  # no drafter that loads has more
    rows = place_rows([RULES["greedy"], RULES["top_p"]], 200)
    logits, pairs = exact_case(1, (2, 3, 200), top_k=MOST + 1, rank=8)
    half = pairs._replace(
        predecessors=pairs.predecessors.half(), successors=pairs.successors.half(), top_k=16
    )
    for one in (pairs, half):
        assert not takes(logits, one)
        expected = walked(reference_walk, rows, logits, one)
        assert walked(kernels_for(torch.float32, CPU).walk, rows, logits, one).tolist() == expected.tolist()
