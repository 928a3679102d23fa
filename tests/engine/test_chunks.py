"""Prompts share the machine with decoding: the rules one by one, then simulated arrivals."""

import random
from types import SimpleNamespace

import pytest

from benchmarks.arrivals import Alternating
from blockdraft.engine.chunks import MAX_BESIDE, MIN_CHUNK, SURPRISE, Chunks, Observed, share
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from tests import tiny
from tests.engine.arrivals import Arrivals, Costs, capacity, percentile, poisson

TOKEN_S, STEP_S = 0.04e-3, 8e-3  # 200 tokens a step


def made(most=8192, token_s=TOKEN_S, step_s=STEP_S):
    """A policy that has seen what tokens and steps take."""
    chunks = Chunks(most)
    chunks.observe_prefill(1000, 1000 * token_s)
    chunks.observe_decode(step_s)
    return chunks


def num_decodes_owed(chunks):
    count = 0
    while not chunks.is_due:
        chunks.count_decode()
        count += 1
    return count


# ---- how large


def test_a_chunk_is_as_large_as_the_plan_allows_while_nobody_decodes():
    assert made().take([30_000], is_decoding=False) == [8192]


def test_a_chunk_takes_a_few_steps_beside_decoding_and_more_the_more_prompts_wait():
    alone, crowd = ([30_000] * num_prompts for num_prompts in (1, 20))
    assert made().take(alone, is_decoding=True) == [3 * 200 // MIN_CHUNK * MIN_CHUNK]
    assert sum(made().take(crowd, is_decoding=True)) == 8 * 200 // MIN_CHUNK * MIN_CHUNK


def test_a_chunk_beside_decoding_is_bounded_whatever_a_step_takes():
    assert made(step_s=10.0).take([30_000], is_decoding=True) == [MAX_BESIDE]
    assert made(most=500, step_s=10.0).take([30_000], is_decoding=True) == [500]


def test_a_chunk_that_takes_longer_than_it_should_is_followed_by_more_decode_steps():
    chunks = made(token_s=STEP_S / 16)  # the least chunk takes eight steps, and three are allowed
    assert chunks.take([1000], is_decoding=True) == [MIN_CHUNK]
    assert num_decodes_owed(chunks) == 2


def test_nothing_observed_means_the_least_chunk():
    assert Chunks(8192).take([1000], is_decoding=True) == [MIN_CHUNK]


# ---- whose


def test_a_short_prompt_does_not_wait_for_a_long_one_that_came_first():
    assert share([30_000, 400], 640, 2048) == [320, 400]
    assert share([30_000, 100, 90], 640, 2048) == [450, 100, 90]


def test_a_prompt_is_finished_rather_than_cut():
    assert share([1000, 1000], 640, 2048) == [1000, 0]
    assert share([1000, 1000], 640, 900) == [640, 0], "but not past what may ever be"
    assert share([1000, 1000, 1000], 2048, 2048) == [1000, 1000, 0], "none is begun without its end"


def test_equal_prompts_are_served_in_order():
    assert share([5, 5, 5, 5], 12, 12) == [5, 5, 0, 0]


def test_the_oldest_always_goes_on_and_nothing_is_exceeded():
    chance = random.Random(0)
    for _ in range(2000):
        left = [chance.randint(1, 300) for _ in range(chance.randint(1, 8))]
        most = chance.randint(1, 400)
        size = chance.randint(1, most)
        counts = share(left, size, most)
        assert all(0 <= count <= rest for count, rest in zip(counts, left, strict=True))
        assert counts[0] > 0
        assert sum(counts) <= min(most, 2 * size)
        assert sum(counts) >= min(sum(left), size) or any(map(int.__eq__, counts, left))


# ---- what steps take


def test_what_was_observed_fades():
    cost = Observed()
    for seconds in (1.0, *[3.0] * 12):
        cost.observe(seconds, 1)
    assert cost.each_s == pytest.approx(3.0, rel=0.05)


def test_one_long_step_is_not_believed():
    cost = Observed()
    for seconds in (1.0, 1.0, 1.0, 1.0, 100.0):
        cost.observe(seconds, 1)
    assert cost.each_s < SURPRISE / 2


def test_short_chunks_teach_nothing_once_longer_ones_were_seen():
    chunks, before = made(), made()
    for _ in range(20):
        chunks.observe_prefill(2, 5e-3)
    assert chunks.take([9000], is_decoding=True) == before.take([9000], is_decoding=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_engine_sees_what_each_step_takes(overlap, monkeypatch):
    """On a card the device runs behind: here its result is there when the clock says so."""
    clock = SimpleNamespace(now_s=100.0)
    like = tiny.engine(max_prefill_tokens=8, overlap=overlap, width=4)
    engine = Engine(like.models, like.plan, lambda: clock.now_s)
    seen, free_s, ends = [], 0.0, {}
    launch, outcome = engine._launch, engine._outcome

    def launched(batch):
        nonlocal free_s
        free_s = max(clock.now_s, free_s) + (0.5 if batch.kind == "prefill" else 0.25)
        ends[id(batch)] = free_s
        return launch(batch)

    def waited(batch, launched):
        clock.now_s = max(clock.now_s, ends[id(batch)])
        return outcome(batch, launched)

    monkeypatch.setattr(engine, "_launch", launched)
    monkeypatch.setattr(engine, "_outcome", waited)
    monkeypatch.setattr(
        engine.scheduler, "observe", lambda batch, seconds: seen.append((batch.kind, round(seconds, 6)))
    )
    for number in range(2):
        engine.add(list(range(20)), SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0))
        while engine.has_work:
            engine.step()
        clock.now_s += 7.0 * number  # idle time is nobody's
    assert set(seen) == {("prefill", 0.5), ("decode", 0.25)}


# ---- requests that arrive


def ratios(run):
    """Time per token, its 99th percentile over its median; the 99th percentile of the first token's."""
    per_token, first = run.per_token_s(), run.first_token_s()
    return percentile(per_token, 0.99) / percentile(per_token, 0.5), percentile(first, 0.99)


def first_token_of_free_decoding_s(arrivals, prompt_s):
    """Prompts one behind the other, and nothing else."""
    free_s, found = 0.0, []
    for arrival_s, _, _ in arrivals:
        free_s = max(free_s, arrival_s) + prompt_s
        found.append(free_s - arrival_s)
    return percentile(found, 0.99)


@pytest.mark.slow
def test_arrivals_at_70_percent_of_capacity():
    """Against a rule that takes turns with chunks of 2,048, on costs like an H200's with an 8B model.

    At capacity three quarters of the time is prefill. Even if decoding took no time at all, the 99th
    percentile of the time to the first token would be 4.6 times a prompt's own: that is waiting in a queue.
    """
    costs, prompt_s = Costs(), 1000 * Costs().token_s
    before = {"chunks": Alternating, "max_prefill_tokens": 2048}
    rate = 0.7 * capacity(costs, **before)
    assert capacity(costs) > 0.97 * capacity(costs, **before)
    arrivals = poisson(rate, 300)
    now, then = Arrivals(costs).serve(arrivals), Arrivals(costs, **before).serve(arrivals)
    least_s = first_token_of_free_decoding_s(arrivals, prompt_s)
    (spread, first_s), (spread_before, first_before_s) = ratios(now), ratios(then)
    stall_s, stall_before_s = (percentile(run.gaps_s(), 0.99) for run in (now, then))
    shown = (
        f"TPOT p99 / p50 {spread:.2f} (before {spread_before:.2f}); "
        f"TTFT p99 {first_s / prompt_s:.2f} prompts ({first_before_s / prompt_s:.2f}, free decoding "
        f"{least_s / prompt_s:.2f}); gap p99 {1e3 * stall_s:.0f} ms ({1e3 * stall_before_s:.0f})"
    )
    print(shown)  # noqa: T201
    assert spread <= 2.5, shown
    assert spread <= spread_before, shown
    assert first_s <= 1.15 * first_before_s, shown
    assert first_s <= 2 * least_s, shown
    assert stall_s <= 0.65 * stall_before_s, shown


@pytest.mark.slow
def test_short_prompts_among_long_ones():
    costs, chance = Costs(), random.Random(3)
    arrivals = [
        (at_s, 8000 if chance.random() < 0.1 else 500, answer) for at_s, _, answer in poisson(10, 150)
    ]
    firsts = []
    for ways in ({}, {"chunks": Alternating, "max_prefill_tokens": 2048}):
        run = Arrivals(costs, **ways).serve(arrivals)
        each = zip(run.first_token_s(), arrivals, strict=True)
        firsts.append(percentile([first_s for first_s, (_, prompt, _) in each if prompt == 500], 0.99))
    assert firsts[0] < 0.4 * firsts[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lone_long_prompt_takes_little_longer_than_by_itself(overlap):
    costs = Costs()
    run = Arrivals(costs, overlap=overlap)
    run.serve([(0.0, 100, 10_000), (1.0, 30_000, 5)])
    assert run.first_token_s()[1] < 1.45 * 30_000 * costs.token_s


def test_a_slow_machine_decodes_on_beside_a_long_prompt():
    """As on a CPU: the least chunk takes as long as many steps."""
    costs = Costs(token_s=3e-3, one_row_s=40e-3, many_rows_s=1.0)
    run = Arrivals(costs, overlap=False, max_prefill_tokens=256).serve([(0.0, 10, 2000), (2.0, 3000, 5)])
    own_s = 3000 * costs.token_s
    assert run.first_token_s()[1] < 1.45 * own_s
    begin_s = run.arrived["1"]
    beside = [at_s for at_s, _ in run.token_times["0"] if begin_s < at_s < begin_s + own_s]
    assert len(beside) * costs.one_row_s > 0.15 * own_s
