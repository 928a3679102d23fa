"""Counters: exact numbers, on real engines with a clock of our own."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from blockdraft.engine.engine import Engine
from blockdraft.engine.histogram import Recorder, one_two_five
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.stats import LATELY_S, RECENT_S, Drafts, Load, Stats
from blockdraft.server.page.metrics import render
from tests import tiny


class Clock:
    """Stands still until it is told to move."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def make_engine(clock, **plan):
    engine = tiny.engine(**{"width": tiny.BLOCK, **plan})
    return Engine(engine.models, engine.plan, clock)


def greedy(**changes):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **changes})


def drain(engine, clock, step_s=0.0):
    deltas = []
    while engine.has_work:
        clock.now_s += step_s
        deltas += engine.step()
    return deltas


# ---- histograms


def test_a_value_on_the_edge_belongs_to_the_bucket_below_it():
    recorder = Recorder((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 5.1, 100):
        recorder.observe(value)
    histogram = recorder.histogram()
    assert histogram.counts == (2, 1, 1, 2)
    assert (histogram.count, histogram.sum) == (6, pytest.approx(113.1))


def test_token_buckets_go_up_to_the_context():
    assert one_two_five(1) == (1,)
    assert one_two_five(60) == (1, 2, 5, 10, 20, 50)
    assert one_two_five(500)[-1] == 500


# ---- counters


def test_an_answer_is_counted_once_with_all_its_tokens(clock):
    engine = make_engine(clock)
    engine.add([1, 2, 3, 4], greedy())
    deltas = drain(engine, clock)
    snapshot, metrics = engine.snapshot(), deltas[-1].metrics
    assert snapshot.generation_tokens == metrics.num_tokens == 20
    assert snapshot.prompt_tokens == 4
    assert snapshot.num_prefill_tokens == 3  # the last one is the first anchor
    assert snapshot.num_prefill_steps == 1
    assert snapshot.num_decode_steps == snapshot.num_blocks == snapshot.num_drafts == metrics.steps
    # The answer ends inside the last block: drafts behind its end do not count.
    assert snapshot.num_drafted == metrics.drafted < metrics.steps * (tiny.BLOCK - 1)
    assert snapshot.num_accepted == metrics.num_tokens - metrics.steps
    assert snapshot.accepted == metrics.accepted
    assert snapshot.num_accepted == sum(metrics.accepted) > 0
    assert snapshot.finished == {"length": 1}
    assert snapshot.histograms["request_generation_tokens"].sum == 20
    assert snapshot.histograms["request_prompt_tokens"].sum == 4


def test_blocks_of_width_one_hold_no_draft(clock):
    engine = make_engine(clock)
    engine.add([1, 2, 3], greedy(width=1))
    drain(engine, clock)
    snapshot = engine.snapshot()
    assert snapshot.num_blocks == 20
    assert (snapshot.num_drafts, snapshot.num_drafted, snapshot.num_accepted) == (0, 0, 0)


def test_prompt_tokens_from_the_prefix_cache_are_told_apart(clock):
    engine = make_engine(clock, page_size=16)
    prompt = [1 + i % 50 for i in range(40)]
    for _ in range(2):
        engine.add(prompt, greedy())
        drain(engine, clock)
    snapshot = engine.snapshot()
    assert snapshot.prompt_tokens == 80
    assert snapshot.num_cached_tokens == 32
    assert snapshot.num_prefill_tokens == 39 + 39 - 32


def test_times_are_those_of_the_clock(clock):
    engine = make_engine(clock)
    engine.add([1, 2, 3], greedy(width=1, max_tokens=5))
    clock.now_s += 3.0  # in the queue
    engine.step()  # prefill: the row is taken
    drain(engine, clock, step_s=0.5)
    histograms = engine.snapshot().histograms
    assert histograms["request_queue_time_seconds"].sum == 3.0
    assert histograms["time_to_first_token_seconds"].sum == 3.5
    latency = histograms["inter_token_latency_seconds"]
    assert (latency.count, latency.sum) == (4, 2.0)
    assert histograms["request_time_per_output_token_seconds"].sum == 0.5
    assert histograms["e2e_request_latency_seconds"].sum == 5.5
    assert histograms["e2e_request_latency_seconds"].counts[8] == 1  # 5 < 5.5 <= 10


def test_an_answer_of_one_token_has_no_time_per_further_token(clock):
    engine = make_engine(clock)
    engine.add([1, 2, 3], greedy(max_tokens=1))
    drain(engine, clock)
    histograms = engine.snapshot().histograms
    assert histograms["request_time_per_output_token_seconds"].count == 0
    assert histograms["e2e_request_latency_seconds"].count == 1


def test_tokens_per_step_are_prompt_and_answer_tokens(clock):
    engine = make_engine(clock, max_prefill_tokens=8)
    engine.add(list(range(1, 21)), greedy(width=1, max_tokens=3))
    drain(engine, clock)
    tokens = engine.snapshot().histograms["iteration_tokens_total"]
    assert (tokens.count, tokens.sum) == (3 + 3, 19 + 3)


def test_aborted_answers_are_counted_by_reason_and_not_as_latencies(clock):
    engine = make_engine(clock)
    engine.add([1, 2, 3], greedy(n=2), "gone")
    for _ in range(3):
        engine.step()
    engine.abort("gone")
    engine.abort("gone")
    engine.abort("never came")
    snapshot = engine.snapshot()
    assert snapshot.finished == {"abort": 2}
    assert snapshot.histograms["e2e_request_latency_seconds"].count == 0
    assert (snapshot.num_running, snapshot.num_pages_used) == (0, 0)


def test_preemptions_and_load_are_seen(clock):
    engine = make_engine(clock, num_pages=12, max_num_seqs=4, prefix_cache=False, page_size=4)
    for i in range(6):
        engine.add([1 + i, 2, 3], greedy(max_tokens=30))
    deltas, loads = [], []
    while engine.has_work:
        deltas += engine.step()
        loads.append(engine.snapshot())
    assert engine.snapshot().num_preemptions == sum(d.metrics.preemptions for d in deltas if d.metrics) > 0
    assert engine.snapshot().prompt_tokens == 6 * 3
    assert loads[0].num_waiting + loads[0].num_running == 6
    assert max(load.num_pages_used for load in loads) <= 12 == loads[0].num_pages
    assert (loads[-1].num_running, loads[-1].num_waiting, loads[-1].num_pages_used) == (0, 0, 0)


# ---- the last seconds


def test_each_second_has_the_work_of_its_steps(clock):
    engine = make_engine(clock)
    engine.add([1, 2, 3], greedy(width=1, max_tokens=10))
    drain(engine, clock, step_s=0.25)  # prefill, then ten tokens
    clock.now_s += 3
    points = engine.snapshot().recent
    assert [point.time_s for point in points] == [1000, 1001, 1002, 1003, 1004]
    assert [point.tokens for point in points] == [2, 4, 4, 0, 0]
    assert [point.steps for point in points] == [3, 4, 4, 0, 0]


def test_after_a_long_rest_only_quiet_seconds_are_left(clock):
    engine = make_engine(clock)
    engine.add([1, 2, 3], greedy())
    drain(engine, clock)
    clock.now_s += 10 * RECENT_S
    points = engine.snapshot().recent
    assert len(points) == RECENT_S
    assert sum(point.tokens for point in points) == 0
    assert points[-1].time_s == int(clock.now_s) - 1


def test_a_snapshot_can_be_taken_while_another_thread_counts():
    stats, stop, seen = Stats(), threading.Event(), []
    lost = SimpleNamespace(request=SimpleNamespace(id="a"), index=0)

    def look():
        while not stop.is_set():
            snapshot = stats.snapshot(Load())
            seen.append(snapshot.finished.get("error", 0))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(2000):
        stats.count_lost([lost])
    stop.set()
    thread.join()
    assert seen == sorted(seen)
    assert stats.snapshot(Load()).finished == {"error": 2000}


def test_a_request_with_many_choices_is_counted_when_the_last_has_ended(clock):
    engine = make_engine(clock)
    engine.add([1, 2, 3], SamplingParams(seed=0, n=3, max_tokens=9, ignore_eos=True), "three")
    engine.add([1, 2, 3], SamplingParams(seed=0, n=2, ignore_eos=True), "aborted")
    deltas = []
    while any(request_id == "three" for request_id in engine.live_ids):
        deltas += engine.step()
    engine.abort("aborted")
    histograms = engine.snapshot().histograms
    assert (histograms["request_params_n"].count, histograms["request_params_n"].sum) == (1, 3)
    longest = histograms["request_max_num_generation_tokens"]
    assert (longest.count, longest.sum) == (1, 9)
    limit = histograms["request_params_max_tokens"]
    assert (limit.count, limit.sum) == (3, 27)


def test_max_tokens_is_what_the_context_leaves_where_nobody_said(clock):
    engine = make_engine(clock)
    engine.add([1, 2, 3], greedy(max_tokens=None))
    drain(engine, clock)
    left = engine.plan.max_model_len - 3
    assert engine.snapshot().histograms["request_params_max_tokens"].sum == left


# ---- drafts, lately


def test_a_position_is_judged_by_the_drafts_that_were_tried_there(clock):
    engine = make_engine(clock)
    engine.add([1, 2, 3, 4], greedy())
    drain(engine, clock)
    wide = engine.snapshot().lately
    engine.add([1, 2, 3, 4], greedy(width=2))
    drain(engine, clock)
    both = engine.snapshot().lately
    assert len(wide.drafted) == len(both.drafted) == tiny.BLOCK - 1
    assert both.drafted[0] > wide.drafted[0]
    assert both.drafted[1:] == wide.drafted[1:]  # narrow blocks have no second draft
    assert both.acceptance[1:] == wide.acceptance[1:]
    assert sum(both.drafted) == engine.snapshot().num_drafted


def test_drafts_of_long_ago_are_not_those_of_now(clock):
    engine = make_engine(clock)
    engine.add([1, 2, 3, 4], greedy())
    drain(engine, clock)
    clock.now_s += LATELY_S - 1
    before = engine.snapshot().lately
    assert before.tokens_per_block > 1
    engine.add([1, 2, 3, 4], greedy(width=1, max_tokens=10))
    drain(engine, clock)
    mixed = engine.snapshot().lately
    assert mixed.num_blocks == before.num_blocks + 10
    assert 1 < mixed.tokens_per_block < before.tokens_per_block
    clock.now_s += 1  # only the plain blocks are young enough
    now = engine.snapshot().lately
    assert (now.num_blocks, now.tokens_per_block, now.acceptance) == (10, 1.0, [])
    clock.now_s += LATELY_S
    assert engine.snapshot().lately.tokens_per_block is None
    assert engine.snapshot().accepted[0] > 0  # the totals stay


def test_drafts_since_a_narrower_block():
    now, before = Drafts(5, (5, 3), (4, 1)), Drafts(2, (2,), (2,))
    assert now.since(before) == Drafts(3, (3, 3), (2, 1))


# ---- what drafts gain


def test_a_speedup_is_that_of_all_steps_of_late_plain_ones_included(clock):
    """Wide steps take as long as two plain ones here."""
    engine = make_engine(clock)
    engine.scheduler.num_plain = lambda batch, size: 1.0 if max(batch.counts) == 1 else 2.0
    engine.add([1, 2, 3, 4], greedy(max_tokens=66))
    drain(engine, clock)
    wide = engine.snapshot()
    assert wide.speedup == pytest.approx(wide.lately.tokens_per_block / 2)
    engine.add([1, 2, 3, 4], greedy(width=1, max_tokens=30))
    drain(engine, clock)
    mixed = engine.snapshot()
    num_plain = 2 * wide.lately.num_blocks + 30
    assert mixed.speedup == pytest.approx(mixed.lately.tokens_per_block * mixed.lately.num_blocks / num_plain)
    clock.now_s += LATELY_S - 1
    engine.add([1, 2, 3, 4], greedy(width=1, max_tokens=10))
    drain(engine, clock)
    clock.now_s += 1
    assert engine.snapshot().speedup == 1.0, "plain steps alone, after steps with drafts"
    clock.now_s += LATELY_S
    assert engine.snapshot().speedup is None


def test_a_speedup_is_not_known_where_one_step_is_not(clock):
    engine = make_engine(clock)
    for num_plain in (1.0, None):
        engine.scheduler.num_plain = lambda batch, size: num_plain  # noqa: B023
        engine.add([1, 2, 3, 4], greedy(width=1, max_tokens=10))
        drain(engine, clock)
        assert (engine.snapshot().speedup is None) == (num_plain is None)


def test_a_speedup_that_is_not_known_is_not_shown():
    nothing = Stats().snapshot(Load(chosen_rows=1, chosen_tokens=4, speedup=1.5))
    assert nothing.speedup is None, "nothing was decoded"
    assert nothing.speculation == "speculation: on, 4 tokens tried per step with one answer"
    for snapshot, is_there in ((nothing, False), (replace(nothing, speedup=1.5), True)):
        text = render([snapshot], None, "x")[0].decode()
        assert ("blockdraft:speculation_speedup{" in text) == is_there
    beside = replace(nothing, speedup=1.96)
    assert beside.speculation.endswith("lately 1.9x the speed of plain decoding"), "not beyond 1.96 tokens"
