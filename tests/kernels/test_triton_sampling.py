"""The Triton `choose` against its reference: on the card, or in Triton's interpreter without one."""

import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from blockdraft.cache.rows import Rows, RowSampling  # noqa: E402
from blockdraft.kernels.noise import gumbel  # noqa: E402
from blockdraft.kernels.sampling import Allowed, reference_choose, reference_forbid  # noqa: E402
from blockdraft.kernels.sampling_tables import Real, Whole  # noqa: E402
from blockdraft.kernels.triton.forbid import forbid  # noqa: E402
from blockdraft.kernels.triton.sampling import CHUNK, choose  # noqa: E402
from tests.matrix import slow_but  # noqa: E402

HAS_CARD = torch.cuda.is_available()
HALF = torch.bfloat16 if HAS_CARD else torch.float16
DEVICE = torch.device("cuda" if HAS_CARD else "cpu")
# The interpreter computes with NumPy, which warns where unsigned words wrap as they should, and of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

NEAR = 1e-5  # noisy scores closer than this may swap: the two logarithms differ in their last places

RULES = {
    "greedy": {},
    "coldest": {"temperature": 1e-6, "top_p": 0.5},
    "random": {"temperature": 1.0},
    "cool": {"temperature": 0.37},
    "hot": {"temperature": 3.1},
    "bias": {"temperature": 0.9, "bias": ((7, 6.0), (2, -3.0), (-1, 9.0))},
    "greedy bias": {"bias": ((5, 30.0), (-1, 30.0))},
    "banned": {"temperature": 0.8, "stop_ids": (0, 3, -1), "min_end": 9, "bias": ((3, 20.0), (4, 8.0))},
    "greedy banned": {"stop_ids": (3,), "min_end": 8, "bias": ((3, 50.0),)},
    "repetition": {"temperature": 0.9, "repetition": 1.7},
    "repetition below one": {"repetition": 0.4},
    "counts": {"temperature": 0.5, "presence": 1.3, "frequency": 0.7},
    "greedy counts": {"presence": -3.0, "frequency": -1.5},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "min_p of one": {"temperature": 1.0, "min_p": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k of one": {"temperature": 1.0, "top_k": 1},
    "top_k of 300": {"temperature": 5.0, "top_k": 300},
    "top_k of all": {"temperature": 1.0, "top_k": 10**6},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "little top_p": {"temperature": 4.0, "top_p": 0.02},
    "least top_p": {"temperature": 1.0, "top_p": 1e-9},
    "top_k and top_p": {"temperature": 2.0, "top_k": 20, "top_p": 0.5},
    "filters": {"temperature": 1.5, "top_k": 40, "top_p": 0.7, "min_p": 0.05},
    "all": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.8,
        "min_p": 0.01,
        "repetition": 1.2,
        "presence": 0.3,
        "frequency": 0.2,
        "stop_ids": (4, 1),
        "min_end": 40,
        "bias": ((4, 9.0), (6, 4.0)),
    },
}


def place_rows(rules, vocab_size, seed=0):
    """Rows of prompts and answers, and one that stays empty: the scratch row, which pads a graph."""
    rng = random.Random(seed)
    rows = Rows(max_rows=len(rules), max_pages=1, vocab_size=vocab_size, scratch_page=0, device=DEVICE)
    for row, rule in enumerate(rules):
        text = [rng.randrange(min(10, vocab_size)) for _ in range(rng.randint(2, 8))]
        lists = {
            "bias": tuple((token % vocab_size, value) for token, value in rule.get("bias", ())),
            "stop_ids": tuple(token % vocab_size for token in rule.get("stop_ids", ())),
        }
        own = {"seed": rng.getrandbits(64) - 2**63, "output_start": rng.randint(1, len(text))}
        rows.place(row, text, len(text) - 1, RowSampling(**rule | lists | own))
    rows.activate(range(len(rules)))
    return rows


def make_block(rows, width, seed=0):
    """[R, width] tokens that repeat, with the anchor first."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(0, min(4, rows.vocab_size), (len(rows.active), width), generator=generator).to(
        DEVICE
    )
    block[:, 0] = rows.anchor[rows.active]
    return block


def make_logits(shape, spread, dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(DEVICE, dtype)


def check(logits, rows, recent):
    """Equal ids. Where not, both ids must be open to rounding: see `is_rounding`."""
    starts, batch = rows.length[rows.active], rows.sampling()
    actual, expected = choose(logits, starts, recent, batch), reference_choose(logits, starts, recent, batch)
    assert actual.shape == expected.shape
    assert actual.dtype == torch.int64
    different = (actual != expected).nonzero().tolist()
    assert len(different) <= actual.numel() // 100, different
    for r, c in different:
        assert is_rounding(logits, rows, recent, r, c, int(actual[r, c])), (r, c)
    return actual


def is_rounding(logits, rows, recent, r, c, token):
    """Whether the reference in float64, whose own rounding does not matter, has `token` as near as best."""
    batch = rows.sampling()
    position = rows.length[rows.active][r] + 1 + c
    noise = gumbel(
        batch.integers(Whole.SEED)[r : r + 1], position.view(1, 1), logits.shape[-1], torch.float64
    )
    wide = logits[r : r + 1, c : c + 1].double() / batch.numbers(Real.TEMPERATURE)[r].double()
    expected = reference_choose(logits.double(), rows.length[rows.active], recent, batch)[r, c]
    noisy = (wide + noise)[0, 0]
    return bool((noisy[expected] - noisy[token]).abs() < NEAR)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("vocab_size", [2500, 61] if HAS_CARD else [2500])
def test_each_rule_chooses_what_the_reference_chooses(name, vocab_size):
    rows = place_rows([RULES[name]] * (20 if HAS_CARD else 1), vocab_size)
    width = 3 if HAS_CARD else 1
    check(make_logits((len(rows.active), width, vocab_size), spread=2.0), rows, make_block(rows, width))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.bfloat16] if HAS_CARD else [torch.float16]
)
@pytest.mark.parametrize("spread", [0.1, 3.0] if HAS_CARD else [0.1])
def test_rows_of_every_rule_and_of_none_share_a_call(dtype, spread):
    vocab_size = 60001 if HAS_CARD else 61
    rows = place_rows(list(RULES.values()), vocab_size)
    scratch = rows.max_rows
    rows.active = torch.cat((rows.active, torch.tensor([scratch, scratch], device=DEVICE)))
    logits = make_logits((len(rows.active), 1, vocab_size), spread, dtype)
    chosen = check(logits, rows, make_block(rows, 1))
    assert torch.equal(chosen[-2:], logits[-2:].argmax(dim=-1))


def test_a_column_sees_the_tokens_of_the_block_up_to_itself():
    """Each column alone, with what came before it in its own text, chooses the same."""
    rows = place_rows([RULES["greedy counts"], RULES["counts"]], 700)
    logits, block = make_logits((2, 4, 700), 1.0), make_block(rows, 4)
    together = check(logits, rows, block)
    anchored = check(logits, rows, block[:, :1])  # a drafter knows its anchor only
    assert torch.equal(together[:, :1], anchored[:, :1])
    assert not torch.equal(together, anchored)
    for column in range(4):
        alone = choose(
            logits[:, column : column + 1], rows.length[rows.active], block[:, column:], rows.sampling()
        )
        assert torch.equal(alone[:, 0], together[:, column])
        one = torch.ones(2, dtype=torch.int64, device=DEVICE)
        rows.advance(block[:, column : column + 1], block[:, (column + 1) % 4][:, None], one)


@pytest.mark.parametrize("rule", [{"top_k": 7}, {"top_k": 200}, {"top_p": 0.4}, {"min_p": 0.9}], ids=str)
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_equal_scores_are_ranked_by_id(rule, spread):
    """`spread` 0: all tokens alike, so top_k keeps the lowest ids; 1: a handful of different scores."""
    rows = place_rows([{"temperature": 2.0} | rule] * (20 if HAS_CARD else 2), 4500)
    logits = make_logits((len(rows.active), 1, 4500), spread).round()
    chosen = check(logits, rows, make_block(rows, 1))
    if spread == 0 and "top_k" in rule:
        assert int(chosen.max()) < rule["top_k"]


@pytest.mark.parametrize("token", [CHUNK.value - 1, CHUNK.value, 2 * CHUNK.value - 1])
def test_lists_reach_the_borders_of_a_chunk(token):
    pushed = {"bias": ((token, 50.0), (3, 20.0))}
    rows = place_rows([pushed, pushed | {"stop_ids": (token,), "min_end": 99}], 2 * CHUNK.value)
    assert check(make_logits((2, 1, rows.vocab_size), 1.0), rows, make_block(rows, 1)).tolist() == [
        [token],
        [3],
    ]


def test_greedy_takes_the_lowest_of_equal_ids_across_chunks():
    rows = place_rows([{}], 9000)
    logits = torch.zeros(1, 2, 9000, device=DEVICE)
    logits[0, 1, [4500, 8999]] = 1.0
    assert check(logits, rows, make_block(rows, 2)).tolist() == [[0, 4500]]


def test_minus_infinity_is_never_chosen():
    """As in the logits of a drafter with a reduced vocabulary."""
    rows = place_rows([RULES[name] for name in ("greedy", "random", "top_k", "top_p", "filters")], 300)
    logits = make_logits((5, 1, 300), 1.0)
    logits[..., torch.randperm(300, generator=torch.Generator().manual_seed(1))[:290].to(DEVICE)] = -torch.inf
    chosen = check(logits, rows, make_block(rows, 1))
    assert torch.isfinite(logits.gather(2, chosen[..., None])).all()


def test_logits_may_be_a_slice_and_nothing_outside_it_is_read():
    rows = place_rows([RULES["greedy"], RULES["cool"], RULES["all"]], 130)
    whole = torch.full((3, 5, 160), torch.inf, device=DEVICE)
    whole[:, 1:4, :130] = make_logits((3, 3, 130), 2.0)
    check(whole[:, 1:4, :130], rows, make_block(rows, 3))


def test_a_draw_does_not_depend_on_the_rows_beside_it():
    rows = place_rows([RULES[name] for name in ("random", "top_p", "greedy counts", "all")], 2500)
    logits, block = make_logits((4, 1, 2500), 2.0), make_block(rows, 1)
    together = choose(logits, rows.length[rows.active], block, rows.sampling())
    order = torch.tensor([3, 1])
    rows.activate(order.tolist())
    some = choose(logits[order], rows.length[rows.active], block[order], rows.sampling())
    assert torch.equal(some, together[order])


def test_nan_logits_end_with_a_token_of_the_vocabulary():
    rows = place_rows([RULES[name] for name in ("greedy", "random", "top_k", "top_p", "filters")], 300)
    logits = torch.full((5, 1, 300), torch.nan, device=DEVICE)
    chosen = choose(logits, rows.length[rows.active], make_block(rows, 1), rows.sampling())
    assert ((chosen >= 0) & (chosen < 300)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CARD, reason="needs a CUDA device")
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_a_real_vocabulary_in_bfloat16(spread):
    rules = [rule for rule, _ in zip(list(RULES.values()) * 2, range(32), strict=False)]
    rows = place_rows(rules, 151936)
    check(make_logits((32, 16, 151936), spread, torch.bfloat16), rows, make_block(rows, 16))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CARD, reason="needs a CUDA device")
def test_a_graph_serves_rows_of_every_rule():
    """Captured while every row is greedy, replayed after the tables, the lengths and the logits changed."""
    names, vocab_size = list(RULES), 151936
    rows = place_rows([{}] * len(names), vocab_size)
    logits = make_logits((len(names), 4, vocab_size), 3.0, torch.bfloat16)
    starts, block, batch = rows.length[rows.active], make_block(rows, 4), rows.sampling()
    choose(logits, starts, block, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = choose(logits, starts, block, batch)
    for seed in range(3):
        random.Random(seed).shuffle(names)
        for row, name in enumerate(names):
            own = {"seed": seed * 1000 + row, "output_start": 2}
            text = [1, 2, 3, 1, row]
            bias = tuple((token % vocab_size, value) for token, value in RULES[name].get("bias", ()))
            stops = tuple(token % vocab_size for token in RULES[name].get("stop_ids", ()))
            rule = RowSampling(**RULES[name] | own | {"bias": bias, "stop_ids": stops})
            rows.place(row, text, 4, rule)
        rows.activate(range(len(names)))
        starts.copy_(rows.length[rows.active])
        block.copy_(make_block(rows, 4, seed))
        logits.copy_(make_logits(logits.shape, 3.0, torch.bfloat16, seed))
        graph.replay()
        assert torch.equal(out, check(logits, rows, block))


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    slow_but(
        [(size, dtype) for size in (61, 64, 2500) for dtype in (torch.float32, HALF)],
        (64, torch.float32),
    ),
)
def test_what_a_form_forbids_is_never_chosen(vocab_size, dtype):
    """In the bound columns alone, and nothing else changes; under every rule that is not penalised."""
    names = ["greedy", "random", "bias", "top_k", "top_p", "filters"]
    rows, width = place_rows([RULES[name] for name in names], vocab_size), 3
    logits = make_logits((len(names), width, vocab_size), 2.0, dtype)
    words = torch.zeros(len(names), width, -(-vocab_size // 32), dtype=torch.int32, device=DEVICE)
    words[..., 1] = -(2**31) + 5  # tokens 32, 34 and 63
    counts = torch.tensor([3, 2, 1, 0, 3, 2], dtype=torch.int32, device=DEVICE)
    got, expected = logits.clone(), logits.clone()
    forbid(got, Allowed(words, counts))
    reference_forbid(expected, Allowed(words, counts))
    assert torch.equal(got, expected)
    assert torch.equal(got[3], logits[3])
    chosen = check(got, rows, make_block(rows, width))
    for row, count in enumerate(counts.tolist()):
        assert set(chosen[row, :count].tolist()) <= {32, 34, 63}
