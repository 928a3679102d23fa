"""Choosing tokens: the reference against plain Python, the kernels against the reference.

The CPU's kernel chooses the reference's ids. The two take logarithms that differ in their last places, and
sum probabilities in another order: with these seeds no two noisy scores, and no sum and its top_p, are that
near.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from scipy.stats import chisquare

from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.kernels.llvm.compiler import kernel
from blockdraft.kernels.llvm.jit import Jit
from blockdraft.kernels.llvm.language import Floats, Int, load, store
from blockdraft.kernels.llvm.sampling import weight
from blockdraft.kernels.llvm.tape import Arena, StepTape
from blockdraft.kernels.noise import gumbel
from blockdraft.kernels.sampling import (
    NEVER,
    Allowed,
    keep_likely,
    penalise,
    places_of,
    reference_choose,
    reference_forbid,
)
from blockdraft.kernels.sampling_tables import MAX_LISTED, Real, Whole
from tests.kernels.implementations import (
    CPU,
    DEVICE,
    HALF,
    HAS_CARD,
    implementation_of,
    only_kernels,
    only_llvm,
    only_triton,
    quiet,
    slow_triton,
)
from tests.matrix import slow_but

pytestmark = quiet
VOCAB = 12


def sampling_of(rule):
    return RowSampling(**{"temperature": 1.0} | rule)


def make_rows(rules, texts, vocab_size=VOCAB):
    """Rows whose `texts` are all in the cache but for the last token, the anchor."""
    rows = Rows(
        max_rows=len(rules), max_pages=1, vocab_size=vocab_size, scratch_page=1, device=torch.device("cpu")
    )
    for row, (rule, text) in enumerate(zip(rules, texts, strict=True)):
        rows.place(row, text, len(text) - 1, sampling_of(rule))
    rows.activate(range(len(rules)))
    return rows


def choose_next(rules, texts, logits, vocab_size=VOCAB):
    """The token after each text: what plain decoding does with logits [R, V]."""
    rows = make_rows(rules, texts, vocab_size)
    anchor = rows.anchor[rows.active][:, None]
    return reference_choose(logits[:, None], rows.length[rows.active], anchor, rows.sampling())[:, 0].tolist()


def oracle(rule, text, logits):
    """The scores that noise is added to, by vLLM's order: None for a token that cannot be chosen."""
    rule = sampling_of(rule)
    scores = list(logits)
    for token, value in rule.bias:
        scores[token] += value
    if len(text) < rule.min_end:
        for token in rule.stop_ids:
            scores[token] = NEVER
    outputs = text[rule.output_start :]
    for token in range(len(scores)):
        if token in text:
            factor = rule.repetition
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        scores[token] -= rule.frequency * outputs.count(token)
        scores[token] -= rule.presence * (token in outputs)
    if rule.temperature == 0:
        best = max(range(len(scores)), key=lambda token: scores[token])
        return [s if token == best else None for token, s in enumerate(scores)]
    scores = [s / rule.temperature for s in scores]
    kept = filter_scores(scores, rule)
    return [s if token in kept else None for token, s in enumerate(scores)]


def filter_scores(scores, rule):
    """The tokens that min_p, then top_k, then top_p leave."""
    best = max(scores)
    kept = [t for t, s in enumerate(scores) if s > NEVER and math.exp(s - best) >= rule.min_p]
    kept.sort(key=lambda token: -scores[token])
    if rule.top_k:
        kept = kept[: rule.top_k]
    total = sum(math.exp(scores[token] - best) for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        if nucleus and rule.top_p < 1 and mass >= rule.top_p:
            break
        nucleus.append(token)
        mass += math.exp(scores[token] - best) / total
    return nucleus


def oracle_choices(rules, texts, logits):
    """The oracle's scores plus the engine's own noise at the positions being chosen."""
    seeds = torch.tensor([rule["seed"] for rule in rules])
    positions = torch.tensor([[len(text)] for text in texts])
    noise = gumbel(seeds, positions, logits.shape[-1], torch.float64)[:, 0].tolist()
    chosen = []
    for rule, text, row, added in zip(rules, texts, logits.tolist(), noise, strict=True):
        scores = oracle(rule, text, row)  # one token alone is left when greedy
        allowed = [token for token, score in enumerate(scores) if score is not None]
        chosen.append(max(allowed, key=lambda t, s=scores, a=added: s[t] + a[t]))
    return chosen


RULES = {  # tokens are counted modulo the vocabulary
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
    "top_p": {"temperature": 1.0, "top_p": 0.613},
    "little top_p": {"temperature": 4.0, "top_p": 0.0213},
    "much top_p": {"temperature": 2.3, "top_p": 0.9871},
    "least top_p": {"temperature": 1.0, "top_p": 1e-9},
    "top_k and top_p": {"temperature": 2.0, "top_k": 20, "top_p": 0.513},
    "filters": {"temperature": 1.5, "top_k": 40, "top_p": 0.713, "min_p": 0.05},
    "the default model's": {"temperature": 0.2, "top_p": 0.9},
    "many biases": {"temperature": 1.0, "bias": tuple((token, 0.5 * token) for token in range(12))},
    "min_end reached": {"temperature": 1.0, "stop_ids": (2, 5), "min_end": 6, "bias": ((2, 8.0),)},
    "penalty before filters": {"temperature": 1.0, "repetition": 3.0, "top_k": 2},
    "all": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.813,
        "min_p": 0.01,
        "repetition": 1.2,
        "presence": 0.3,
        "frequency": 0.2,
        "stop_ids": (4, 1),
        "min_end": 40,
        "bias": ((4, 9.0), (6, 4.0)),
    },
}


def rule_of(rule, vocab_size=VOCAB, **own):
    """A rule whose tokens are in the vocabulary, and a row's own."""
    lists = {
        "bias": tuple((token % vocab_size, value) for token, value in rule.get("bias", ())),
        "stop_ids": tuple(token % vocab_size for token in rule.get("stop_ids", ())),
    }
    return {"temperature": 0.0} | rule | lists | own


def random_text(rng):
    """A prompt of 1 to 4 tokens and an answer of 0 to 4; returns the text and the prompt's length."""
    num_prompt = rng.randint(1, 4)
    return [rng.randrange(VOCAB) for _ in range(num_prompt + rng.randint(0, 4))], num_prompt


def random_logits(rng, *shape):
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    return torch.randn(*shape, VOCAB, dtype=torch.float64, generator=generator) * 2


@pytest.mark.parametrize("name", RULES)
def test_each_rule_chooses_what_plain_python_chooses(name):
    rng = random.Random(name)
    cases = []
    for _ in range(40):
        text, num_prompt = random_text(rng)
        cases.append((rule_of(RULES[name], output_start=num_prompt, seed=rng.getrandbits(60)), text))
    logits = random_logits(rng, len(cases))
    rules, texts = zip(*cases, strict=True)
    actual = choose_next(rules, texts, logits)
    assert actual == oracle_choices(rules, texts, logits)


def test_rows_with_different_rules_do_not_disturb_each_other():
    rng = random.Random(0)
    for _ in range(12):
        names = rng.sample(list(RULES), 6)
        texts, rules = [], []
        for name in names:
            text, num_prompt = random_text(rng)
            texts.append(text)
            rules.append(rule_of(RULES[name], output_start=num_prompt, seed=rng.getrandbits(60)))
        logits = random_logits(rng, len(names))
        assert choose_next(rules, texts, logits) == oracle_choices(rules, texts, logits), names


@pytest.mark.parametrize("name", RULES)
def test_columns_of_a_block_choose_what_decoding_one_at_a_time_chooses(name):
    """Tokens repeat inside the block, and the anchor may still be prompt."""
    rng, width = random.Random(name), 7
    for _ in range(6):
        text, num_prompt = random_text(rng)
        rule = rule_of(RULES[name], output_start=num_prompt, seed=rng.getrandbits(60)) | {"min_end": 10}
        block = [text[-1]] + [rng.choice([1, 2, 3]) for _ in range(width - 1)]
        logits = random_logits(rng, width)
        rows = make_rows([rule], [text])
        start = torch.tensor([len(text) - 1])
        actual = reference_choose(logits[None], start, torch.tensor([block]), rows.sampling())[0].tolist()
        prefixes = [text[:-1] + block[: index + 1] for index in range(width)]
        assert actual == oracle_choices([rule] * width, prefixes, logits)


def test_penalties_of_a_block_are_those_of_counts_kept_token_by_token():
    """Scores, not only choices: after `advance` the table says what the block's own columns said."""
    rng = random.Random(1)
    rule = {"repetition": 1.7, "presence": 0.6, "frequency": 0.35, "output_start": 2}
    text, block = [4, 5, 6], [6, 1, 1, 6, 5, 1]
    logits = random_logits(rng, len(block))
    rows = make_rows([rule], [text])
    start = torch.tensor([len(text) - 1])
    together = penalise(logits[None], start, torch.tensor([block]), rows.sampling())[0]
    for index in range(len(block)):
        token = torch.tensor([[block[index]]])
        start = rows.length[rows.active]
        alone = penalise(logits[index].view(1, 1, -1), start, token, rows.sampling())[0, 0]
        assert torch.equal(alone, together[index])
        expected = oracle(rule, text[:-1] + block[: index + 1], logits[index].tolist())
        assert alone.tolist() == pytest.approx(expected, abs=1e-6)  # rules are stored in float32
        following = torch.tensor([[block[(index + 1) % len(block)]]])
        rows.advance(token, following, torch.tensor([1]))


def test_a_row_that_is_given_away_keeps_nothing_of_its_last_sequence():
    first = {"frequency": 1.0, "bias": tuple((t, 9.0) for t in range(10)), "stop_ids": (1, 2)}
    rows = make_rows([first], [[4, 5]])
    rows.place(0, [1, 2, 3], 2, sampling_of({"presence": 1.0, "output_start": 1}))
    rows.activate([0])
    batch = rows.sampling()
    assert batch.prompt_seen[0].nonzero().flatten().tolist() == [1]
    assert batch.output_counts[0].nonzero().flatten().tolist() == [2]  # the anchor, 3, is not counted yet
    assert (batch.bias_ids == -1).all()
    assert (batch.bias_values == 0).all()
    assert (batch.stop_ids == -1).all()
    assert not batch.needs.bias


def test_tables_never_move_however_long_a_list_is():
    tables = ("real", "whole", "stop_ids", "bias_ids", "bias_values", "prompt_seen", "output_counts")
    rows = make_rows([{}], [[1]])
    before = {name: getattr(rows.sampling(), name).data_ptr() for name in tables}
    longest = {"stop_ids": tuple(range(MAX_LISTED)), "bias": tuple((t, 1.0) for t in range(MAX_LISTED))}
    rows.place(0, [1, 2], 1, sampling_of(longest | {"presence": 1.0, "output_start": 1}))
    assert {name: getattr(rows.sampling(), name).data_ptr() for name in tables} == before
    with pytest.raises(AssertionError, match="refuses longer lists"):
        rows.place(0, [1, 2], 1, sampling_of({"stop_ids": tuple(range(MAX_LISTED + 1))}))


def kept(logits, **rule):
    rows = make_rows([rule], [[0]], vocab_size=len(logits))
    scores = keep_likely(torch.tensor(logits, dtype=torch.float64).view(1, 1, -1), rows.sampling())
    return (~torch.isneginf(scores[0, 0])).nonzero().flatten().tolist()


def test_filters_are_applied_in_vllms_order():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept(logits, top_p=0.65) == [0, 1]
    assert kept(logits, top_k=2) == [0, 1]
    # top_p counts what top_k left: 0.4 is 0.57 of two tokens, and 0.4 of four.
    assert kept(logits, top_k=2, top_p=0.5) == [0]
    assert kept(logits, top_p=0.5) == [0, 1]
    # min_p is relative to the likeliest: 0.4 * 0.6 = 0.24.
    assert kept(logits, min_p=0.6) == [0, 1]
    # and comes first: 0.4 of the 0.7 that are left is 0.57.
    assert kept(logits, min_p=0.6, top_p=0.5) == [0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-30, 1e-38, 1e-44])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_coldest_temperatures_are_greedy(temperature, top_p):
    logits = torch.tensor([[1.0, 5.0, 9.0] + [0.0] * 9])
    for seed in range(5):
        assert choose_next([{"temperature": temperature, "top_p": top_p, "seed": seed}], [[0]], logits) == [2]


def test_half_precision_logits_are_widened_first():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0] * 3], dtype=torch.bfloat16)
    rule = {"seed": 7, "temperature": 0.7}
    texts = [[0] * n for n in range(1, 25)]
    wide = [choose_next([rule], [text], logits.float())[0] for text in texts]
    assert [choose_next([rule], [text], logits)[0] for text in texts] == wide
    assert len(set(wide)) > 3


PROBABILITIES = [0.31, 0.23, 0.16, 0.12, 0.08, 0.06, 0.03, 0.01]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, PROBABILITIES),
        ({"top_k": 3}, PROBABILITIES[:3]),
        ({"top_p": 0.75}, PROBABILITIES[:4]),
        ({"min_p": 0.25}, PROBABILITIES[:5]),
        ({"temperature": 2.0}, [math.sqrt(p) for p in PROBABILITIES]),
        ({"temperature": 0.5, "top_k": 4}, [p * p for p in PROBABILITIES[:4]]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_samples_follow_the_distribution(rule, expected, dtype):
    num_rows, num_columns = 40, 1000
    rows = make_rows([rule | {"seed": 1000 + row} for row in range(num_rows)], [[0]] * num_rows, vocab_size=8)
    logits = torch.tensor(PROBABILITIES, dtype=dtype).log().expand(num_rows, num_columns, -1)
    starts = torch.zeros(num_rows, dtype=torch.int64)
    chosen = reference_choose(logits, starts, starts[:, None], rows.sampling()).flatten()
    counts = torch.bincount(chosen, minlength=8)
    assert counts[len(expected) :].sum() == 0
    share = torch.tensor(expected, dtype=torch.float64)
    result = chisquare(counts[: len(expected)], (share / share.sum() * len(chosen)).numpy())
    assert result.pvalue > 1e-3


def test_neighbouring_positions_are_independent():
    rows = make_rows([{"seed": 5}], [[0]], vocab_size=4)
    starts = torch.zeros(1, dtype=torch.int64)
    chosen = reference_choose(torch.zeros(1, 40_001, 4), starts, starts[:, None], rows.sampling())[0]
    pairs = torch.bincount(chosen[:-1] * 4 + chosen[1:], minlength=16)
    assert chisquare(pairs).pvalue > 1e-3


# ---- kernels

PENALTIES = ("presence", "frequency", "repetition")
TIES = [(0.0, {"top_k": 7}), (1.0, {"top_k": 200}), (1.0, {"top_p": 0.4}), (0.0, {"min_p": 0.9})]
OPEN = [rule for rule in RULES.values() if not {"bias", "stop_ids", *PENALTIES} & rule.keys()]
CHUNK = 2048  # tokens that Triton's kernel reads at a time
NEAR = 1e-5  # Triton's: noisy scores closer than this may swap


def place_rows(rules, vocab_size, seed=0, device=CPU):
    """Rows of prompts and answers, and one that stays empty: the scratch row, which pads a graph."""
    chance = random.Random(seed)
    rows = Rows(max_rows=len(rules), max_pages=1, vocab_size=vocab_size, scratch_page=0, device=device)
    for row, rule in enumerate(rules):
        text = [chance.randrange(min(10, vocab_size)) for _ in range(chance.randint(2, 8))]
        own = {"seed": chance.getrandbits(64) - 2**63, "output_start": chance.randint(1, len(text))}
        rows.place(row, text, len(text) - 1, RowSampling(**rule_of(rule, vocab_size, **own)))
    rows.activate(range(len(rules)))
    return rows


def make_block(rows, width, seed=0):
    """[R, width] tokens that repeat, with the anchor first."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(0, min(4, rows.vocab_size), (len(rows.active), width), generator=generator)
    block = block.to(rows.active.device)
    block[:, 0] = rows.anchor[rows.active]
    return block


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen_by(choose, rows, logits, recent=None):
    recent = rows.anchor[rows.active][:, None].expand(-1, logits.shape[1]) if recent is None else recent
    return choose(logits, rows.length[rows.active], recent, rows.sampling())


def check(implementation, rows, logits, recent=None):
    """Equal ids. Of Triton's some may differ, if both are open to rounding: see `is_rounding`."""
    logits = logits.to(rows.active.device)
    actual = chosen_by(implementation.kernels.choose, rows, logits, recent)
    expected = chosen_by(reference_choose, rows, logits, recent)
    assert actual.shape == expected.shape
    assert actual.dtype == torch.int64
    different = (actual != expected).nonzero().tolist()
    assert len(different) <= (actual.numel() // 100 if implementation.name == "triton" else 0), different
    for r, c in different:
        assert is_rounding(logits, rows, recent, r, c, int(actual[r, c])), (r, c)
    return actual


def is_rounding(logits, rows, recent, r, c, token):
    """Return whether `token` is as good as the best to the reference in float64, but for rounding."""
    batch = rows.sampling()
    position = rows.length[rows.active][r] + 1 + c
    noise = gumbel(
        batch.integers(Whole.SEED)[r : r + 1], position.view(1, 1), logits.shape[-1], torch.float64
    )
    wide = logits[r : r + 1, c : c + 1].double() / batch.numbers(Real.TEMPERATURE)[r].double()
    expected = chosen_by(reference_choose, rows, logits.double(), recent)[r, c]
    noisy = (wide + noise)[0, 0]
    return bool((noisy[expected] - noisy[token]).abs() < NEAR)


FAST = ("greedy", "random", "top_k of 300", "all")  # of the interpreter


@pytest.mark.parametrize(
    ("implementation", "name"),
    slow_but(
        [(one, name) for one in ("llvm", "triton") for name in RULES],
        *(("llvm", name) for name in RULES),
        *(("triton", name) for name in FAST),
    ),
    indirect=["implementation"],
)
def test_a_kernel_chooses_what_the_reference_chooses(implementation, name):
    num_rows, width = (1, 1) if implementation.is_interpreted else (20, 5)
    rows = place_rows([RULES[name]] * num_rows, 2500, device=implementation.device)
    for spread in (2.0,) if implementation.is_interpreted else (0.1, 1.0, 4.0):
        check(implementation, rows, spread * normal(0, num_rows, width, 2500), make_block(rows, width))


TOGETHER = [("llvm", size) for size in (10, 15, 63, 64, 65, 127, 1000, 49152, 100_003)]
TOGETHER.append(("triton", 60_001 if HAS_CARD else 61))


@pytest.mark.parametrize(
    ("implementation", "vocab_size"),
    slow_but(TOGETHER, *(case for case in TOGETHER if 61 < case[1] <= 1000)),
    indirect=["implementation"],
)
def test_rows_of_every_rule_and_of_none_share_a_call(implementation, vocab_size):
    width, dtype = (1, torch.float16) if implementation.is_interpreted else (3, torch.float32)
    rows = place_rows(list(RULES.values()), vocab_size, vocab_size, implementation.device)
    rows.active = torch.cat((rows.active, torch.full((2,), rows.max_rows).to(rows.active)))  # the scratch row
    logits = 2 * normal(vocab_size, len(rows.active), width, vocab_size).to(implementation.device, dtype)
    chosen = check(implementation, rows, logits)
    assert torch.equal(chosen[-2:], logits[-2:].argmax(dim=-1))


@slow_triton
def test_a_column_sees_the_tokens_of_the_block_up_to_itself(implementation):
    """Each column alone, with what came before it in its own text, chooses the same."""
    device = implementation.device
    rows = place_rows([RULES["greedy counts"], RULES["counts"]], 700, device=device)
    logits, block = normal(0, 2, 4, 700).to(device), make_block(rows, 4)
    together = check(implementation, rows, logits, block)
    anchored = check(implementation, rows, logits, block[:, :1])  # a drafter knows its anchor only
    assert torch.equal(together[:, :1], anchored[:, :1])
    assert not torch.equal(together, anchored)
    for column in range(4):
        alone = chosen_by(
            implementation.kernels.choose, rows, logits[:, column : column + 1], block[:, column:]
        )
        assert torch.equal(alone[:, 0], together[:, column])
        one = torch.ones(2, dtype=torch.int64, device=device)
        rows.advance(block[:, column : column + 1], block[:, (column + 1) % 4][:, None], one)


@pytest.mark.parametrize(
    ("implementation", "spread", "rule"),
    slow_but(
        [(name, *tie) for name in ("llvm", "triton") for tie in TIES],
        *(("llvm", *tie) for tie in TIES),
        ("triton", *TIES[0]),
    ),
    indirect=["implementation"],
    ids=str,
)
def test_equal_scores_are_ranked_by_id(implementation, rule, spread):
    """`spread` 0: all tokens alike, so top_k keeps the lowest ids; 1: a handful of different scores."""
    num_rows = 1 if implementation.is_interpreted else 20
    rows = place_rows([{"temperature": 2.0} | rule] * num_rows, 4500, device=implementation.device)
    chosen = check(implementation, rows, (spread * normal(0, num_rows, 1, 4500)).round())
    if spread == 0 and "top_k" in rule:
        assert int(chosen.max()) < rule["top_k"]


@only_kernels
@pytest.mark.parametrize("token", slow_but([CHUNK - 1, CHUNK, 2 * CHUNK - 1], CHUNK))
def test_lists_reach_the_borders_of_a_chunk(implementation, token):
    pushed = {"bias": ((token, 50.0), (3, 20.0))}
    rules = [pushed, pushed | {"stop_ids": (token,), "min_end": 99}]
    rows = place_rows(rules, 2 * CHUNK, device=implementation.device)
    assert check(implementation, rows, normal(0, 2, 1, 2 * CHUNK)).tolist() == [[token], [3]]


@only_kernels
def test_greedy_takes_the_lowest_of_equal_ids_across_chunks(implementation):
    rows = place_rows([{}], 9000, device=implementation.device)
    logits = torch.zeros(1, 2, 9000)
    logits[0, 1, [4500, 8999]] = 1.0
    assert check(implementation, rows, logits).tolist() == [[0, 4500]]


SOME = [RULES[name] for name in ("greedy", "random", "top_k", "top_p", "filters")]


@slow_triton
def test_minus_infinity_is_never_chosen(implementation):
    """As in the logits of a drafter with a reduced vocabulary."""
    rows, logits = place_rows(SOME, 300, device=implementation.device), normal(0, 5, 1, 300)
    logits[..., torch.randperm(300, generator=torch.Generator().manual_seed(1))[:290]] = -math.inf
    chosen = check(implementation, rows, logits).cpu()
    assert torch.isfinite(logits.gather(2, chosen[..., None])).all()


@only_kernels
def test_logits_may_be_a_slice_and_nothing_outside_it_is_read(implementation):
    names = ["all"] if implementation.is_interpreted else ["greedy", "cool", "all"]
    rows = place_rows([RULES[name] for name in names], 130, device=implementation.device)
    whole = torch.full((len(names), 5, 160), math.inf, device=implementation.device)
    whole[:, 1:4, :130] = 2.0 * normal(0, len(names), 3, 130).to(implementation.device)
    check(implementation, rows, whole[:, 1:4, :130], make_block(rows, 3))


@only_kernels
def test_a_draw_does_not_depend_on_the_rows_beside_it(implementation):
    names = ["random", "greedy counts"] if implementation.is_interpreted else RULES
    rows = place_rows([RULES[name] for name in names], 2500, device=implementation.device)
    logits, choose = (
        2 * normal(3, len(names), 1, 2500).to(implementation.device),
        implementation.kernels.choose,
    )
    together = chosen_by(choose, rows, logits)
    order = list(range(len(names)))[::-2]
    rows.activate(order)
    assert torch.equal(chosen_by(choose, rows, logits[order]), together[order])


@slow_triton
def test_nan_logits_end_with_a_token_of_the_vocabulary(implementation):
    rows = place_rows(SOME, 300, device=implementation.device)
    chosen = chosen_by(
        implementation.kernels.choose, rows, torch.full((5, 1, 300), math.nan, device=implementation.device)
    )
    assert ((chosen >= 0) & (chosen < 300)).all()


def test_a_stream_of_some_columns_chooses_what_the_columns_of_its_rows_choose(implementation):
    """Rows of 1, 3, 2, … columns: with every rule, and after what forms forbid."""
    names, width, vocab_size, device = list(RULES), 3, 70, implementation.device
    if implementation.is_interpreted:
        names = ["greedy", "all", "greedy counts", "banned"]
    rows = place_rows([RULES[name] for name in names], vocab_size, device=device)
    block = make_block(rows, width)
    logits = (2 * normal(0, len(names), width, vocab_size)).to(device)
    words = torch.randint(-(2**31), 2**31, (len(names), width, 3)).to(device, torch.int32)
    allowed = Allowed(words, (torch.arange(len(names)) % 4).to(device, torch.int32))
    widths = [(1, 3, 2)[row % 3] for row in range(len(names))]
    offsets = torch.tensor([0, *itertools.accumulate(widths)], device=device)
    places = places_of(offsets, sum(widths), width)
    assert places.rows.tolist() == [row for row, its in enumerate(widths) for _ in range(its)]
    assert places.columns.tolist() == [column for its in widths for column in range(its)]
    stream = places.take(logits)
    implementation.kernels.forbid(logits, allowed)
    implementation.kernels.forbid(stream, allowed, places)
    assert torch.equal(stream, places.take(logits))
    starts = rows.length[rows.active]
    expected = implementation.kernels.choose(logits, starts, block, rows.sampling())
    got = implementation.kernels.choose(stream, starts, block, rows.sampling(), places)
    assert torch.equal(got, places.take(expected))


@only_triton
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    slow_but(
        [(size, dtype) for size in (61, 64, 2500) for dtype in (torch.float32, HALF)], (64, torch.float32)
    ),
)
def test_what_a_form_forbids_is_never_chosen(implementation, vocab_size, dtype):
    """In the bound columns alone, and nothing else changes; under every rule that is not penalised."""
    names = ["greedy", "random", "bias", "top_k", "top_p", "filters"]
    if implementation.is_interpreted:  # only one is drawn from what is left
        names = ["greedy"] * 5 + ["filters"]
    rows, width = place_rows([RULES[name] for name in names], vocab_size, device=DEVICE), 3
    logits = (2 * normal(0, len(names), width, vocab_size)).to(DEVICE, dtype)
    words = torch.zeros(len(names), width, -(-vocab_size // 32), dtype=torch.int32, device=DEVICE)
    words[..., 1] = -(2**31) + 5  # tokens 32, 34 and 63
    counts = torch.tensor([3, 2, 1, 0, 3, 2], dtype=torch.int32, device=DEVICE)
    got, expected = logits.clone(), logits.clone()
    implementation.kernels.forbid(got, Allowed(words, counts))
    reference_forbid(expected, Allowed(words, counts))
    assert torch.equal(got, expected)
    assert torch.equal(got[3], logits[3])
    chosen = check(implementation, rows, got, make_block(rows, width))
    for row, count in enumerate(counts.tolist()):
        assert set(chosen[row, :count].tolist()) <= {32, 34, 63}


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CARD, reason="needs a CUDA device")
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_a_real_vocabulary_in_bfloat16(spread):
    rules = [rule for rule, _ in zip(list(RULES.values()) * 2, range(32), strict=False)]
    rows = place_rows(rules, 151936, device=DEVICE)
    logits = (spread * normal(0, 32, 16, 151936)).to(DEVICE, torch.bfloat16)
    check(implementation_of("triton"), rows, logits, make_block(rows, 16))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CARD, reason="needs a CUDA device")
def test_a_graph_serves_rows_of_every_rule():
    """Captured while every row is greedy, replayed after the tables, the lengths and the logits changed."""
    triton, names, vocab_size = implementation_of("triton"), list(RULES), 151936
    rows = place_rows([{}] * len(names), vocab_size, device=DEVICE)
    logits = (3 * normal(0, len(names), 4, vocab_size)).to(DEVICE, torch.bfloat16)
    starts, block, batch = rows.length[rows.active], make_block(rows, 4), rows.sampling()
    triton.kernels.choose(logits, starts, block, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton.kernels.choose(logits, starts, block, batch)
    for seed in range(3):
        random.Random(seed).shuffle(names)
        for row, name in enumerate(names):
            own = {"seed": seed * 1000 + row, "output_start": 2}
            text = [1, 2, 3, 1, row]
            rows.place(row, text, 4, RowSampling(**rule_of(RULES[name], vocab_size, **own)))
        rows.activate(range(len(names)))
        starts.copy_(rows.length[rows.active])
        block.copy_(make_block(rows, 4, seed))
        logits.copy_(3 * normal(seed, *logits.shape))
        graph.replay()
        assert torch.equal(out, check(triton, rows, logits, block))


# ---- the kernel of a CPU alone


@only_llvm
@pytest.mark.parametrize("seed", slow_but(range(60), *range(0, 60, 4)))
def test_scores_that_are_equal_are_ranked_by_their_ids(implementation, seed):
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
    check(implementation, place_rows(rules, vocab_size, seed), logits)


@only_llvm
@pytest.mark.parametrize("top_p", [0.125, 0.25, 0.5, 0.75, 0.875])
def test_a_mass_that_is_just_top_p_keeps_nothing_more(implementation, top_p):
    """Eight tokens of 1/8 each, whose sums nothing rounds: the first 8 * top_p of them are left."""
    vocab_size, ids = 700, [3, 64, 65, 191, 300, 301, 640, 699]
    rows = place_rows([{"temperature": 0.7, "top_p": top_p}] * 8, vocab_size)
    logits = torch.full((8, 60, vocab_size), NEVER)
    logits[..., ids] = 2.5
    assert set(check(implementation, rows, logits).flatten().tolist()) == set(ids[: int(8 * top_p)])


@only_llvm
@pytest.mark.parametrize(
    "rule", [name for name, rule in RULES.items() if rule in OPEN and rule.get("temperature", 0.0) > 1e-5]
)
def test_no_token_is_passed_over_that_its_noise_lifts(implementation, rule):
    """Scores that their noise makes equal, but for as little as tells them apart."""
    vocab_size, generator = 3000, torch.Generator().manual_seed(1)
    rows = place_rows([RULES[rule]] * 40, vocab_size)
    position = rows.length[rows.active][:, None] + 1
    noise = gumbel(rows.sampling().integers(Whole.SEED), position, vocab_size, torch.float32)
    for _ in range(2):
        little = torch.rand(40, 1, vocab_size, generator=generator).argsort(dim=-1) * 1e-4
        chosen = check(implementation, rows, (little - noise) * RULES[rule]["temperature"])
        assert rule != "random" or chosen.tolist() == little.argmax(dim=-1).tolist()


@only_llvm
def test_threads_share_columns_and_change_nothing(implementation):
    rows = place_rows(OPEN, 5000)
    logits = normal(4, len(OPEN), 7, 5000)
    expected = chosen_by(reference_choose, rows, logits).tolist()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert chosen_by(implementation.kernels.choose, rows, logits).tolist() == expected
    finally:
        torch.set_num_threads(threads)


@only_llvm
@pytest.mark.parametrize("rule", RULES)
def test_a_recorded_choice_asks_anew_what_the_rows_need(implementation, rule):
    rows, logits = place_rows([{}, {}], 50), normal(5, 2, 4, 50)
    tape = StepTape(Arena())
    with torch.inference_mode(), tape:
        chosen = chosen_by(implementation.kernels.choose, rows, logits)
    for row in range(2):
        rows.place(row, [5, 6, 7], 2, RowSampling(seed=row, output_start=1, **RULES[rule]))
    rows.activate(range(2))
    tape.replay()
    assert chosen.tolist() == chosen_by(reference_choose, rows, logits).tolist()


def forbidden(logits):
    """Forms forbid tokens by NEVER; where nothing is left, the first is chosen."""
    logits[:, 0] = NEVER
    logits[:, 1, 3:] = NEVER
    logits[:, 2, :-3] = NEVER
    logits[:, 3, torch.arange(logits.shape[2]) != logits.shape[2] // 2] = NEVER
    logits[:, 4, ::2] = NEVER


def undefined(logits):
    """The first NaN, or else the first infinity, counts as the largest."""
    logits[:, 0] = math.nan
    logits[:, 1, 11::3] = math.nan
    logits[:, 2, -1] = math.nan
    logits[:, 3, 5::4] = math.inf
    logits[:, 4, 5], logits[:, 4, 7], logits[:, 4, 2] = math.inf, math.nan, NEVER


def huge(logits):
    """Noise is rounded away, and a temperature makes scores infinite."""
    logits[:, 0] *= 1e9
    logits[:, 1] *= 1e30
    logits[:, 2] *= 1e38


def zeros(logits):
    """Zeros of both signs are one score."""
    logits.copy_(logits.sign() * 0.0)
    logits[:, :2, ::5] = -1.0


@only_llvm
@pytest.mark.parametrize("change", [forbidden, undefined, huge, zeros])
@pytest.mark.parametrize("vocab_size", [20, 64, 150])
def test_odd_logits_are_ranked_as_by_the_reference(implementation, vocab_size, change):
    rows, logits = place_rows(OPEN, vocab_size), normal(6, len(OPEN), 5, vocab_size)
    change(logits)
    chosen = check(implementation, rows, logits)
    if change is undefined:
        assert chosen.unique(dim=0).tolist() == [[0, 11, vocab_size - 1, 5, 7]]


@only_llvm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_strides(implementation, dtype):
    logits = 2 * normal(10, 100, 5, len(OPEN)).to(dtype)
    check(implementation, place_rows(OPEN, 100), logits.permute(2, 1, 0))


@only_llvm
@pytest.mark.parametrize("size", [1, 2, 5, 15, 16, 17, 31, 33, 64, 1000])
def test_a_greedy_choice_is_the_first_of_the_largest(implementation, size):
    generator = torch.Generator().manual_seed(size)
    few = torch.randint(-2, 3, (60, size), generator=generator).float()  # many are equal
    never = few.masked_fill(few < 1, NEVER)
    never[0] = NEVER
    undefined = few.masked_fill(torch.rand(60, size, generator=generator) < 0.1, math.nan)
    undefined[0] = math.nan
    infinite = few.masked_fill(few == 2, math.inf)
    zeros = torch.randint(0, 2, (60, size), generator=generator).float().mul(-0.0)
    rows = Rows(max_rows=20, max_pages=1, vocab_size=size, scratch_page=0, device=CPU)  # greedy
    rows.activate(range(20))
    for logits in (few, torch.randn(60, size, generator=generator), never, undefined, infinite, zeros, -few):
        given = logits.view(20, 3, size)
        assert torch.equal(chosen_by(implementation.kernels.choose, rows, given), given.argmax(dim=-1))


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
