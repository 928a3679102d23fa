"""The sampling rules against plain Python, one token at a time, and the distribution that comes out."""

import math
import random

import pytest
import torch
from scipy.stats import chisquare

from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.kernels.noise import gumbel
from blockdraft.kernels.sampling import keep_likely, penalise, reference_choose
from blockdraft.kernels.sampling_tables import MAX_LISTED

VOCAB = 12
NEVER = -math.inf
OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
    "seed": 0,
    "output_start": 0,
    "min_end": 0,
    "stop_ids": (),
    "bias": (),
}


def make_rows(rules, texts, vocab_size=VOCAB):
    """Rows whose `texts` are all in the cache but for the last token, the anchor."""
    rows = Rows(
        max_rows=len(rules),
        max_pages=1,
        vocab_size=vocab_size,
        scratch_page=1,
        device=torch.device("cpu"),
    )
    for row, (rule, text) in enumerate(zip(rules, texts, strict=True)):
        rows.place(row, text, len(text) - 1, RowSampling(**OFF | rule))
    rows.activate(range(len(rules)))
    return rows


def choose_next(rules, texts, logits, vocab_size=VOCAB):
    """The token after each text: what plain decoding does with logits [R, V]."""
    rows = make_rows(rules, texts, vocab_size)
    anchor = rows.anchor[rows.active][:, None]
    return reference_choose(logits[:, None], rows.length[rows.active], anchor, rows.sampling())[:, 0].tolist()


def oracle(rule, text, logits):
    """The scores that noise is added to, by vLLM's order: None for a token that cannot be chosen."""
    rule = OFF | rule
    scores = list(logits)
    for token, value in rule["bias"]:
        scores[token] += value
    if len(text) < rule["min_end"]:
        for token in rule["stop_ids"]:
            scores[token] = NEVER
    outputs = text[rule["output_start"] :]
    for token in range(len(scores)):
        if token in text:
            factor = rule["repetition"]
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        scores[token] -= rule["frequency"] * outputs.count(token)
        scores[token] -= rule["presence"] * (token in outputs)
    if rule["temperature"] == 0:
        best = max(range(len(scores)), key=lambda token: scores[token])
        return [s if token == best else None for token, s in enumerate(scores)]
    scores = [s / rule["temperature"] for s in scores]
    kept = filter_scores(scores, rule)
    return [s if token in kept else None for token, s in enumerate(scores)]


def filter_scores(scores, rule):
    """The tokens that min_p, then top_k, then top_p leave."""
    best = max(scores)
    kept = [t for t, s in enumerate(scores) if s > NEVER and math.exp(s - best) >= rule["min_p"]]
    kept.sort(key=lambda token: -scores[token])
    if rule["top_k"]:
        kept = kept[: rule["top_k"]]
    total = sum(math.exp(scores[token] - best) for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        if nucleus and rule["top_p"] < 1 and mass >= rule["top_p"]:
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


RULES = {
    "nothing": {},
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.4},
    "hot": {"temperature": 5.0},
    "bias": {"bias": ((3, 4.0), (0, -50.0), (7, 2.5))},
    "many biases": {"bias": tuple((token, 0.5 * token) for token in range(VOCAB))},
    "greedy bias": {"temperature": 0.0, "bias": ((0, 6.0),)},
    "min_end": {"stop_ids": (2, 5, 0), "min_end": 9, "bias": ((2, 8.0),)},
    "min_end reached": {"stop_ids": (2, 5), "min_end": 6, "bias": ((2, 8.0),)},
    "repetition": {"repetition": 1.8},
    "repetition below one": {"repetition": 0.5},
    "frequency": {"frequency": 0.9},
    "presence": {"presence": 1.1},
    "negative presence": {"presence": -1.5, "frequency": -0.4},
    "all penalties, greedy": {"temperature": 0.0, "repetition": 1.5, "presence": 0.4, "frequency": 0.3},
    "min_p": {"min_p": 0.2},
    "min_p 1": {"min_p": 1.0},
    "top_k": {"top_k": 3},
    "top_k 1": {"top_k": 1},
    "top_k of everything": {"top_k": 10**6},
    "top_p": {"top_p": 0.6},
    "tiny top_p": {"top_p": 1e-6},
    "top_k then top_p": {"top_k": 4, "top_p": 0.7},
    "temperature before filters": {"temperature": 2.5, "min_p": 0.3, "top_p": 0.8},
    "penalty before filters": {"repetition": 3.0, "top_k": 2},
    "everything": {
        "temperature": 0.8,
        "min_p": 0.02,
        "top_k": 6,
        "top_p": 0.9,
        "repetition": 1.2,
        "presence": 0.3,
        "frequency": 0.2,
        "stop_ids": (4, 1),
        "min_end": 40,
        "bias": ((4, 9.0), (6, 1.0)),
    },
}


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
        cases.append((RULES[name] | {"output_start": num_prompt, "seed": rng.getrandbits(60)}, text))
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
            rules.append(RULES[name] | {"output_start": num_prompt, "seed": rng.getrandbits(60)})
        logits = random_logits(rng, len(names))
        assert choose_next(rules, texts, logits) == oracle_choices(rules, texts, logits), names


@pytest.mark.parametrize("name", RULES)
def test_columns_of_a_block_choose_what_decoding_one_at_a_time_chooses(name):
    """Tokens repeat inside the block, and the anchor may still be prompt."""
    rng, width = random.Random(name), 7
    for _ in range(6):
        text, num_prompt = random_text(rng)
        rule = RULES[name] | {"output_start": num_prompt, "seed": rng.getrandbits(60), "min_end": 10}
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


def test_counts_after_a_partly_accepted_block_are_those_of_the_committed_tokens():
    rule = {"frequency": 1.0, "output_start": 2}
    rows = make_rows([rule, rule], [[4, 5, 6], [7, 8]])
    block = torch.tensor([[6, 1, 1, 2], [8, 3, 3, 3]])
    rows.advance(block, torch.tensor([[1, 1, 9, 9], [3, 9, 9, 9]]), torch.tensor([3, 2]))
    counts = rows.sampling().output_counts
    assert counts[0].nonzero().flatten().tolist() == [1, 6]
    assert counts[0, [1, 6]].tolist() == [2, 1]
    assert counts[1].nonzero().flatten().tolist() == [3]  # 8 belongs to the prompt
    assert rows.anchor[:2].tolist() == [9, 9]
    assert rows.length[:2].tolist() == [5, 3]


def test_a_row_that_is_given_away_keeps_nothing_of_its_last_sequence():
    first = {"frequency": 1.0, "bias": tuple((t, 9.0) for t in range(10)), "stop_ids": (1, 2)}
    rows = make_rows([first], [[4, 5]])
    rows.place(0, [1, 2, 3], 2, RowSampling(**OFF | {"presence": 1.0, "output_start": 1}))
    rows.activate([0])
    batch = rows.sampling()
    assert batch.prompt_seen[0].nonzero().flatten().tolist() == [1]
    assert batch.output_counts[0].nonzero().flatten().tolist() == [2]  # the anchor, 3, is not counted yet
    assert (batch.bias_ids == -1).all()
    assert (batch.bias_values == 0).all()
    assert (batch.stop_ids == -1).all()
    assert not batch.has_bias


def test_tables_never_move_however_long_a_list_is():
    tables = ("real", "whole", "stop_ids", "bias_ids", "bias_values", "prompt_seen", "output_counts")
    rows = make_rows([{}], [[1]])
    before = {name: getattr(rows.sampling(), name).data_ptr() for name in tables}
    longest = {"stop_ids": tuple(range(MAX_LISTED)), "bias": tuple((t, 1.0) for t in range(MAX_LISTED))}
    rows.place(0, [1, 2], 1, RowSampling(**OFF | longest | {"presence": 1.0, "output_start": 1}))
    assert {name: getattr(rows.sampling(), name).data_ptr() for name in tables} == before
    with pytest.raises(AssertionError, match="no longer list"):
        rows.place(0, [1, 2], 1, RowSampling(**OFF | {"stop_ids": tuple(range(MAX_LISTED + 1))}))


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


def test_the_likeliest_token_survives_every_filter():
    assert kept([0.0, 5.0, 1.0], top_p=1e-9, top_k=1, min_p=1.0) == [1]
    assert kept([0.0, 0.0, 0.0], min_p=1.0) == [0, 1, 2]
    assert kept([-math.inf, 2.0, -math.inf], top_p=0.5) == [1]


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
