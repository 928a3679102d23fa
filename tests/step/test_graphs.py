"""StepGraphs and Reading without a card: sizes, the choice of a graph, padding, results on their way.

What a graph must not change is compared here too, kernel by kernel: tests/gpu repeats it with graphs.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from blockdraft.engine import structured_steps
from blockdraft.engine.request import SamplingParams
from blockdraft.engine.trial_engine import serve
from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.step.graphs import MAX_SHARE, CapturedParts, CaptureTime, Reading, pack
from blockdraft.step.prefill_graphs import SMALL, PrefillGraph, PrefillGraphs, filled, first_shapes, shapes
from blockdraft.step.row_sizes import row_sizes
from blockdraft.step.step_sizes import EVEN, StepSize, even, few_means, fill, uneven_places, widest
from blockdraft.step.verify import Verdict
from tests import stepping
from tests.grammar import json_tokens
from tests.matrix import slow_but
from tests.stepping import HOST, SCENES, KernelByKernel


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (9, [1, 2, 4, 8, 9]),
        (17, [1, 2, 4, 8, 16, 17]),
        (30, [1, 2, 4, 8, 16, 30]),
        (100, [1, 2, 4, 8, 16, 32, 48, 64, 96, 100]),
    ],
)
def test_row_sizes(max_num_seqs, sizes):
    assert row_sizes(max_num_seqs) == sizes


def test_a_bucket_is_less_than_twice_its_rows():
    for max_num_seqs in range(1, 200):
        sizes = row_sizes(max_num_seqs)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == max_num_seqs
        for rows in range(1, max_num_seqs + 1):
            bucket = min(size for size in sizes if size >= rows)
            assert bucket < 2 * rows
            assert rows <= 16 or bucket <= 2 * rows if rows < 32 else bucket <= 1.5 * rows


def graphs(sizes, widths):
    found = KernelByKernel(lambda width: None, None)
    found.capture(sizes, widths)
    return found


def test_find_takes_the_smallest_graph_with_room():
    found = graphs([8, 1, 4], [8, 1])
    assert len(found) == 6
    assert [found.find(rows, 8).size.rows for rows in range(1, 9)] == [1, 4, 4, 4, 8, 8, 8, 8]
    assert found.find(3, 1) is not found.find(3, 8)


class Watched(KernelByKernel):
    """Says what was captured, in order."""

    def __init__(self, **options):
        super().__init__(lambda width: None, None, **options)
        self.captured = []

    def _capture(self, size):
        self.captured.append(size[:2])
        return super()._capture(size)


def test_the_largest_is_captured_first():
    found = Watched()
    found.capture([1, 4, 2], [1, 8])
    assert found.captured == [(4, 8), (2, 8), (1, 8), (4, 1), (2, 1), (1, 1)]
    assert not found.capture_next(found.places)


def test_what_can_wait_is_captured_when_it_is_wanted_or_in_idle_time():
    found = Watched()
    found.capture([1, 2, 3, 4], [1, 8, 3], now=[(1, 1), (4, 8), (1, 8), (4, 1), (7, 8)])
    assert found.captured == [(4, 8), (1, 8), (4, 1), (1, 1)]
    assert len(found) == 12
    assert found.find(2, 8) is found.find(2, 8)
    assert found.captured[4:] == [(2, 8)], "wanted, and captured once"
    assert found.find(5, 8) is None
    assert found.find(1, 2, 2).size == even(1, 3)
    assert not found.has(3, 1)
    while found.capture_next([(2, 1), (3, 1), (3, 8), (2, 8)]):
        pass
    assert found.has(3, 1)
    assert found.captured[6:] == [(2, 1), (3, 1), (3, 8)], "of width 3 none is likely"
    assert found.find(3, 8).size.rows == 3
    assert len(found.captured) == 9


def test_rows_of_different_widths_take_the_size_with_the_fewest_tokens():
    found = Watched(most_padding=2.0)
    found.capture([1, 2, 4], [1, 8], now=(), uneven=uneven_places([1, 2, 4], 8, lambda rows, block: (2, 4)))
    assert found.places == sorted(found.places, key=lambda size: size.tokens)
    assert {size for size in found.places if not size.is_even} == {
        *((2, 3, 4), (2, 7, 8)),
        *((4, 5, 8), (4, 8, 16)),
    }, "one row has no other to be wider than"
    assert found.size(4, 5, 8) == (4, 5, 8)
    assert found.size(4, 6, 9) == (4, 8, 16)
    assert found.size(3, 4, 8) == (4, 8, 16), "the row that is missing takes a token, too"
    assert found.size(3, 5, 7) == (4, 5, 8)
    assert found.size(2, 2) == (2, 3, 4)
    assert found.size(4, 8) == even(4, 8)
    assert found.size(4, 1) == even(4, 1)
    assert found.size(1, 3) == even(1, 4)
    assert found.size(1, 6) == even(1, 8)
    assert found.find(4, 6, 9).size == (4, 8, 16)
    assert found.has(3, 4, 8)
    found.capture([1, 2, 4], [1, 8], now=())
    assert found.size(1, 3) is None, "with more than twice the tokens it would be slower than without a graph"
    assert found.size(1, 4) == even(1, 8)


def test_on_a_card_any_padding_is_faster_than_a_step_without_a_graph():
    """Here one row of sixteen drafts a whole block, the others nothing."""
    for most_padding, size in ((2.0, None), (math.inf, (16, 16, 64))):
        found = Watched(most_padding=most_padding)
        found.capture([16], [1, 16], now=(), uneven=uneven_places([16], 16, few_means))
        assert found.size(16, 16, 31) == size


def test_few_kinds_of_steps_are_captured():
    places = uneven_places(row_sizes(256), 16, few_means)
    assert len(places) == len(set(places)) == 49
    assert {place.rows for place in places if place.is_even and place.width == 1} == set(row_sizes(256))


def test_a_batch_fills_a_size_and_commits_no_more_than_its_own_widths():
    for widths, size in (
        ((3, 1, 2), StepSize(4, 4, 12)),
        ((1, 1), StepSize(2, 5, 7)),
        ((8, 1), StepSize(2, 8, 9)),
        ((2,), StepSize(3, 4, 9)),
    ):
        found, limits = fill(widths, size)
        assert len(found) == size.rows
        assert sum(found) == size.tokens
        assert max(found) <= size.width
        assert all(its >= own for its, own in zip(found, widths, strict=False))
        is_padded = found[: len(widths)] != widths
        assert limits == (widths if is_padded else ())
    assert fill((4, 4), even(2, 4)) == fill((4,), even(3, 4)) == EVEN
    assert fill((2, 4), even(2, 4)) == ((), (2, 4))
    assert widest(StepSize(3, 4, 7)) == (4, 2, 1)


def test_a_step_that_runs_kernel_by_kernel_captures_nothing():
    """Log-probabilities are not in a graph; the step runs as many rows as the graph would."""
    engine = stepping.tiny_engine(HOST, now=())
    engine.add([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, logprobs=2))
    serve(engine)
    assert engine.graphs._graphs == {}
    assert len(engine.rows.active) == engine.plan.max_num_seqs
    engine.add([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4))
    serve(engine)
    assert len(engine.graphs._graphs) == 1


def test_a_reading_gives_the_committed_tokens_of_each_row():
    token_ids = torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13]])
    verdict = Verdict(token_ids, torch.tensor([1, 3, 2]), None)
    assert pack(verdict).tolist() == [[1, 5, 6, 7], [3, 8, 9, 10], [2, 11, 12, 13]]
    assert Reading(pack(verdict)).token_ids() == [(5,), (8, 9, 10), (11, 12)]


# ---- the comparisons of tests/gpu, kernel by kernel


@pytest.mark.parametrize("scene", SCENES[1:3], ids=range(2))
def test_a_bucket_runs_the_engine_s_own_step(scene):
    engine, other = (stepping.tiny_engine(HOST) for _ in range(2))
    expected = stepping.play_directly(other, scene)
    stepping.assert_same_play(stepping.play(engine, scene), expected, scene)
    assert any(len(tokens) > 1 for rows, _ in expected for tokens in rows)


def test_a_bucket_that_is_filled_up_touches_only_the_active_rows():
    stepping.check_padding(stepping.tiny_engine(HOST), stepping.tiny_engine(HOST))


@pytest.mark.skipif(not HOST.has_graphs, reason="steps are not captured here")
@pytest.mark.parametrize(
    ("drafter", "overlap"),
    slow_but(
        [(drafter, overlap) for drafter in ("ngram", "trained") for overlap in (False, True)],
        ("trained", True),
    ),
)
def test_drafts_from_n_grams_are_captured(drafter, overlap):
    stepping.check_ngrams(HOST, drafter, overlap=overlap)


@pytest.mark.parametrize("now", [None, ()], ids=["captured", "captured-when-wanted"])
def test_a_step_in_flight_changes_no_text(now):
    expected = stepping.serve_mixed(stepping.tiny_engine(HOST))
    got = stepping.serve_mixed(stepping.tiny_engine(HOST, overlap=True, now=now), has_aborts=True)
    stepping.assert_same_mixed(got, expected)


def test_buckets_survive_preemption():
    results = [
        stepping.serve_tightly(stepping.tiny_engine(HOST, num_pages=stepping.FEW_PAGES)) for _ in range(2)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize(("max_num_seqs", "temperature"), [(1, 0.0), (4, 1.0)])
def test_dflash_is_plain_decoding_at_pinned_rows_and_width(max_num_seqs, temperature):
    stepping.check_lossless(HOST, max_num_seqs=max_num_seqs, temperature=temperature)


def test_the_bits_of_a_token_do_not_depend_on_its_column():
    stepping.check_columns(HOST, max_num_seqs=4)


@pytest.mark.parametrize("name", slow_but(["qwen3_next-whole", "gemma4-mixture"], "qwen3_next-whole"))
def test_a_scripted_drafter_changes_no_bit_of_a_family(name):
    stepping.check_family(name, HOST)
    drafter = stepping.family_script(name, HOST)
    engines = [stepping.family_engine(name, HOST, drafter, is_captured=False) for _ in range(2)]
    counts = stepping.lockstep(*engines, stepping.family_requests())
    assert len(set(counts)) >= 4


def test_widths_are_compared():
    found = stepping.compare_widths(HOST, 16)
    assert found.margins == []
    assert "400 of 400" in found.text


def test_what_a_prefill_has_less_than_its_graph_is_the_last_rows():
    assert filled([7, 8, 9], [8, 9, 4], [1, 2], 5, 4) == [7, 8, 9, 0, 0, 8, 9, 4, 0, 0, 0, 1, 3, 3, 5]
    assert filled([7, 8], [8, 9], [2], 2, 2) == [7, 8, 8, 9, 0, 2, 2]
    assert filled((), (), (0,), 2, 3) == [0, 0, 0, 0, 0, 0, 0, 2]


def test_there_is_a_prefill_graph_for_every_number_of_prompts_and_tokens():
    assert shapes(100, 4) == [(32, 2), (64, 2), (96, 2), (32, 5), (64, 5), (96, 5)]
    assert max(tokens for tokens, _ in shapes(8192, 256)) == 2048


def test_captures_take_a_small_share_of_the_time_of_those_who_are_served():
    now = [100.0]
    graphs = KernelByKernel(lambda width: None, None)
    graphs.time = CaptureTime(lambda: now[0])
    capture = graphs._capture

    def slow(size):
        now[0] += 0.3
        return capture(size)

    graphs.capture([1, 2, 4, 8], [1, 4], now=[(4, 4)])
    graphs._capture = slow
    assert graphs.find(1, 4).size.rows == 1, (
        "nothing was captured for long, and the next has four times as many"
    )
    assert not graphs.is_cheap(2, 4)
    assert graphs.find(2, 4).size.rows == 4, "twice the rows, but nobody waits"
    assert graphs.is_cheap(4, 4)
    assert graphs.find(2, 1).size.rows == 2, "no other is near"
    now[0] += 0.3 / MAX_SHARE + 0.01
    assert graphs.is_cheap(2, 4)
    assert graphs.find(2, 4).size.rows == 2


def test_a_step_that_is_timed_is_no_wider_one():
    now = [0.0]
    graphs = KernelByKernel(lambda width: None, None)
    graphs.time = CaptureTime(lambda: now[0])
    graphs.capture([1], [1, 4, 8], now=[(1, 8)])
    with graphs.time.counted():
        now[0] += 1.0
    assert graphs.find(1, 4).size.width == 8, "nobody waits for a capture"
    assert graphs.captured_for(1, 4).size.width == 4


class BarePrefills(PrefillGraphs):
    """PrefillGraphs that capture nothing."""

    def __init__(self, clock, *, most=128, rows=8):
        steps = SimpleNamespace(captures=None, time=CaptureTime(clock))
        super().__init__(None, SimpleNamespace(max_rows=rows), max_tokens=most, steps=steps)
        self.fails = False

    def _capture(self, num_tokens, num_rows):
        if self.fails:
            raise RuntimeError("no memory")
        return PrefillGraph(num_tokens, num_rows, None, None)


def test_a_prefill_that_nobody_has_time_to_capture_has_no_graph_and_one_that_failed_is_tried_again():
    now = [0.0]
    graphs = BarePrefills(lambda: now.__setitem__(0, now[0] + 0.1) or now[0])
    graphs.fails = True
    with pytest.raises(RuntimeError):
        graphs.find(20, 1)
    graphs.fails, now[0] = False, 100.0
    found = graphs.find(20, 1)
    assert (found.num_tokens, found.num_rows) == (32, 2)
    assert graphs.has(20, 1)
    assert graphs.find(60, 3) is None, "the last capture was just now"
    assert graphs.find(32, 1) is found
    assert graphs.find(500, 1) is None
    assert graphs.find(20, 9) is None
    count = 1
    while graphs.capture_next():
        count += 1
    assert count == len(graphs._graphs) == len(shapes(128, 8))


def test_a_prefill_without_a_graph_is_padded_to_one_that_is_captured():
    now = [0.0]
    graphs = BarePrefills(lambda: now[0])
    graphs.capture_first()
    assert sorted(graphs._graphs) == [(64, 2), (128, 2), (128, 9)], "sizes that this engine has"
    with graphs._time.counted():
        now[0] += 1.0
    found = {asked: graphs.find(*asked) for asked in [(20, 1), (40, 1), (90, 1), (20, 2), (128, 8), (129, 1)]}
    assert {asked: one and (one.num_tokens, one.num_rows) for asked, one in found.items()} == {
        (20, 1): (64, 2),
        (40, 1): (64, 2),
        (90, 1): (128, 2),
        (20, 2): (128, 9),
        (128, 8): (128, 9),
        (129, 1): None,
    }
    assert not graphs.has(20, 1)
    now[0] += 1.0 / MAX_SHARE + 0.01
    assert graphs.find(20, 1).num_tokens == 32, "there is time for its own"


def test_a_prefill_is_not_padded_to_far_more_tokens():
    graphs = BarePrefills(lambda: 0.0, most=2048)
    for shape in (1024, 2), (2048, 9):
        graphs._graphs[shape] = PrefillGraph(*shape, None, None)
    graphs._time._free_s = 1.0
    found = [graphs.find(tokens, 1) for tokens in (384, 500, 1024, 1025)]
    assert [one and one.num_tokens for one in found] == [None, 1024, 1024, 2048]
    assert graphs.find(700, 2) is None


def test_the_first_graphs_serve_every_prompt_of_up_to_half_a_thousand_tokens():
    every = shapes(8192, 256)
    first = first_shapes(every)
    assert len(first) == 6
    assert first_shapes(shapes(16, 8)) == set(), "chunks of so few tokens have no graphs"
    graphs = BarePrefills(lambda: 0.0, most=8192, rows=256)
    graphs.capture_first()
    graphs._time._free_s = 1.0
    assert all(graphs.find(tokens, 1).num_tokens <= max(64, 2 * tokens) for tokens in range(1, SMALL + 1))
    assert all(graphs.find(SMALL, rows).num_tokens == SMALL for rows in range(1, 65))


def test_outputs_beside_none_with_a_step_in_flight_or_not(monkeypatch):
    """The answers of both are equal, though one knows only a step later what was committed.

    And by whatever way forced tokens come into a block: a card's does not read the drafts before. And
    whether its parts are captured or not.
    """
    results = [
        stepping.serve_structured(HOST, is_captured=False, overlap=overlap)[0] for overlap in (True, False)
    ]
    captured, parts = stepping.serve_structured(HOST, is_captured=HOST.has_graphs)
    assert all(isinstance(one, CapturedParts) for one in parts) is HOST.has_graphs
    results.append(captured)
    monkeypatch.setattr(structured_steps, "_correct", structured_steps._force)
    results.append(stepping.serve_structured(HOST, is_captured=False)[0])
    # Not `columns`: blocks may come to hold other drafts.
    told = [[(one.token_ids, one.text, one.finish_reason) for one in result] for result in results]
    assert told[0] == told[1] == told[2] == told[3]


def test_a_step_of_structured_outputs_is_read_before_another_one_overwrites_its_masks(monkeypatch):
    """Also where the answer that had one is gone, and the next comes with its prompt in the cache."""
    engine = stepping.tiny_engine(HOST, is_captured=False, overlap=True, tokenizer=json_tokens.tokenizer())
    (bound, asked), (plain, other) = stepping.make_requests(2)
    asked = replace(asked, ignore_eos=False, structured_outputs=StructuredOutputs(regex="[ab]{40}"))
    names = [engine.add(bound, asked), engine.add(plain, other)]
    while engine._pending is None or not engine._pending[1].is_in_parts:
        engine.step()
    engine.abort(names[0])
    collected = []
    monkeypatch.setattr(
        engine,
        "_launch",
        lambda batch, launch=engine._launch: (collected.append(engine._pending), launch(batch))[1],
    )
    engine.step()
    assert collected == [None]
