"""A walk over candidates: what `choose` would make of a row in which nothing else can be chosen.

Where nothing filters, candidates are the best under the noise: without pairs the walk is `choose`.
The CPU's kernel is held to the reference with numbers that are summed exactly in any order, so also ties have
to agree; and once with numbers that are not.
"""

import random

import pytest
import torch

from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.checkpoints.read_draft_config import MAX_CANDIDATES
from blockdraft.kernels.candidates import PairScores, reference_walk
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.kernels import kernels_for
from blockdraft.kernels.llvm.candidates import MOST, CandidateKernels
from blockdraft.kernels.llvm.tape import Arena, StepTape
from blockdraft.kernels.noise import gumbel
from blockdraft.kernels.sampling import NEVER, reference_choose
from blockdraft.kernels.sampling_tables import Whole

VOCAB, RANK, DRAFTS, TOP_K = 50, 6, 4, 9
CPU = torch.device("cpu")
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


needs_kernel = pytest.mark.skipif(
    why_no_llvm(torch.float32, CPU) is not None, reason="the CPU kernels are not chosen"
)


def place_rows(rules, vocab_size=VOCAB):
    """Rows of short texts, all but the first token of which were answered."""
    rows = Rows(max_rows=len(rules), max_pages=1, vocab_size=vocab_size, scratch_page=0, device=CPU)
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
    anchor = rows.anchor[rows.active][:, None]
    return walk(logits, pairs, rows.length[rows.active], anchor, rows.sampling())


def is_open(rule):
    """Whether candidates are chosen under the noise."""
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
    ("way", "vocab_size", "top_k"),
    [
        ("reference", VOCAB, 1),
        ("reference", 1000, 9),
        *(
            pytest.param("kernel", *sizes, marks=needs_kernel)
            for sizes in ((VOCAB, 1), (1000, 2), (8003, 16), (70_003, 2))
        ),
    ],
)
def test_where_pairs_say_nothing_rows_without_filters_draft_what_choose_draws(way, vocab_size, top_k):
    """Also beside others: greedy rows draft the same, rows with filters what their candidates leave."""
    walk = {"reference": reference_walk, "kernel": kernel_walk}[way]
    choose = {"reference": reference_choose, "kernel": kernels_for(torch.float32, CPU).choose}[way]
    rules = [RULES[name] for name in ("random", "greedy", "filters", "bias", "penalties", "cold", "top_p")]
    rules += [{"temperature": 3.1, "stop_ids": (3, 4), "min_end": 9}]
    rows = place_rows(rules, vocab_size)
    spread = 2 * torch.randn(len(rules), 5, vocab_size, generator=torch.Generator().manual_seed(top_k))
    level = torch.zeros_like(spread)  # but for a few, which hardly any noise reaches
    level[..., 5:9] = 9.0
    pairs = PairScores(torch.zeros(vocab_size, 3), torch.ones(vocab_size, 3), None, top_k)
    starts, anchor = rows.length[rows.active], rows.anchor[rows.active][:, None]
    same = [row for row, rule in enumerate(rules) if is_open(rule) or rule.get("temperature", 0.0) < 1e-5]
    assert len(same) == 6
    for logits in (spread, level):
        chosen = choose(logits, starts, anchor, rows.sampling())
        assert walked(walk, rows, logits, pairs)[same].tolist() == chosen[same].tolist()


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


def kernel_walk(logits, pairs, *rest):
    """The walk that a CPU has, where it is the kernel that walks."""
    assert CandidateKernels().takes(logits, pairs)
    return kernels_for(torch.float32, CPU).walk(logits, pairs, *rest)


@needs_kernel
@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_drafts_what_the_reference_does_also_where_candidates_are_equal(seed):
    chance = random.Random(seed)
    vocab_size = chance.choice([64, 65, 127, 300, 1000])
    top_k, rank = chance.choice([1, 2, 5, 16, 17, MOST]), chance.choice([1, 3, 16, 40])
    rules = chance.choices(list(RULES.values()), k=chance.choice([1, 2, 7]))
    shape = (len(rules), chance.choice([1, 3, 8]), vocab_size)
    rows, (logits, pairs) = place_rows(rules, vocab_size), exact_case(seed, shape, top_k=top_k, rank=rank)
    expected = walked(reference_walk, rows, logits, pairs)
    assert walked(kernel_walk, rows, logits, pairs).tolist() == expected.tolist()


@needs_kernel
@pytest.mark.parametrize("rule", ["greedy", "top_k"])
def test_of_candidates_that_are_equal_with_their_pairs_the_lowest_id_comes_first(rule):
    """Token 5 has less by itself than 9 and 30, and as much more behind the anchor."""
    rows = place_rows([RULES[rule]] * 40)
    anchors = rows.anchor[rows.active]
    logits = torch.zeros(40, 1, VOCAB)
    logits[..., [5, 9, 12, 30]] = torch.tensor([1.0, 3.0, 1.0, 3.0])
    before, after = torch.zeros(VOCAB, 1), torch.zeros(VOCAB, 1)
    before[anchors], after[[5, 12]] = 1.0, 2.0
    pairs = PairScores(before, after, None, TOP_K)
    expected = walked(reference_walk, rows, logits, pairs)
    assert walked(kernel_walk, rows, logits, pairs).tolist() == expected.tolist()
    assert set(expected.flatten().tolist()) == ({5} if rule == "greedy" else {5, 9, 12})


@needs_kernel
@pytest.mark.parametrize("vocab_size", [49152, 65536, 100_003])
def test_a_large_vocabulary_is_searched_in_parts(vocab_size):
    rules = [RULES["random"], RULES["top_p"], RULES["greedy"]]
    rows = place_rows(rules, vocab_size)
    generator = torch.Generator().manual_seed(3)
    coarse, pairs = exact_case(1, (3, 7, vocab_size), top_k=16, rank=32)
    fine = 3 * torch.randn(3, 7, vocab_size, generator=generator)
    rising = torch.arange(vocab_size).expand(3, 7, -1) / 1024.0
    for logits in (coarse, fine, rising.contiguous(), rising.flip(-1).contiguous()):
        expected = walked(reference_walk, rows, logits, pairs)
        assert walked(kernel_walk, rows, logits, pairs).tolist() == expected.tolist()


@needs_kernel
@pytest.mark.parametrize("has_mixture", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_numbers_whose_sums_are_rounded(rule, has_mixture):
    rows = place_rows([RULES[rule]] * 5)
    logits, pairs = make_walk(rows, has_mixture=has_mixture)
    expected = walked(reference_walk, rows, logits, pairs)
    assert walked(kernel_walk, rows, logits, pairs).tolist() == expected.tolist()


@needs_kernel
def test_a_row_drafts_the_same_whoever_is_served_beside_it():
    """By bits: also numbers whose sums are rounded."""
    rules = list(RULES.values())
    together = place_rows(rules, 70_000)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(rules), 7, 70_000, generator=generator)
    books = (torch.randn(70_000, 50, generator=generator) for _ in range(2))
    pairs = PairScores(*books, torch.randn(len(rules), 7, 50, generator=generator), 16)
    drafts = walked(kernel_walk, together, logits, pairs).tolist()
    for row in range(len(rules)):
        together.activate([row])
        own = pairs._replace(mixture=pairs.mixture[[row]])
        assert walked(kernel_walk, together, logits[[row]], own).tolist() == [drafts[row]]


@needs_kernel
def test_threads_share_columns_and_rows_and_change_nothing():
    rows = place_rows([RULES["greedy"], RULES["top_p"], RULES["random"]], 70_000)
    logits, pairs = exact_case(1, (3, 7, 70_000), top_k=16, rank=32)
    expected = walked(reference_walk, rows, logits, pairs).tolist()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert walked(kernel_walk, rows, logits, pairs).tolist() == expected
    finally:
        torch.set_num_threads(threads)


@needs_kernel
def test_drafts_of_nan_are_tokens():
    rows = place_rows([RULES["greedy"], RULES["filters"], RULES["random"]])
    logits, pairs = make_walk(rows, has_mixture=True)
    logits[:, 0] = float("nan")
    logits[:, 1, ::2] = float("nan")
    pairs.predecessors[3:9] = float("nan")
    drafts = walked(kernel_walk, rows, logits, pairs)
    assert ((drafts >= 0) & (drafts < VOCAB)).all()


@needs_kernel
def test_columns_with_fewer_tokens_than_candidates_and_with_none():
    """A reduced head has NEVER for all other tokens; where there is nothing else, the first is drafted."""
    rows = place_rows([RULES["greedy"], RULES["top_p"], RULES["random"]])
    logits, pairs = make_walk(rows, has_mixture=True)
    logits[:, 0] = NEVER
    logits[:, 1, 3:] = NEVER
    logits[:, 2, :-3] = NEVER
    expected = walked(reference_walk, rows, logits, pairs)
    assert walked(kernel_walk, rows, logits, pairs).tolist() == expected.tolist()


@needs_kernel
def test_what_the_kernel_does_not_take_is_walked_by_the_reference():
    assert MOST >= MAX_CANDIDATES  # no drafter that loads has more
    rows = place_rows([RULES["greedy"], RULES["top_p"]], 200)
    logits, pairs = exact_case(1, (2, 3, 200), top_k=MOST + 1, rank=8)
    half = pairs._replace(
        predecessors=pairs.predecessors.half(), successors=pairs.successors.half(), top_k=16
    )
    for one in (pairs, half):
        assert not CandidateKernels().takes(logits, one)
        expected = walked(reference_walk, rows, logits, one)
        assert walked(kernels_for(torch.float32, CPU).walk, rows, logits, one).tolist() == expected.tolist()
