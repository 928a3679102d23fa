"""A captured step is the step: the same tokens, lengths, anchors, counts and cache bits as kernel by kernel.

In bfloat16, at pinned (rows, width), which is where arithmetic promises equality. tests/step/test_graphs.py
runs the same comparisons on the CPU without graphs, as a check of the comparisons themselves.
"""

from dataclasses import replace

import pytest
import torch

from blockdraft.engine.request import SamplingParams
from blockdraft.engine.trial_engine import serve
from blockdraft.step.graphs import CapturedParts, CaptureTime
from blockdraft.step.row_sizes import row_sizes
from tests import stepping
from tests.stepping import CARD, MAX_ROWS, SCENES

# Delta layers, mixtures, sinks, windows and shared layers: whatever a graph could hold wrongly.
FAMILIES = ["qwen3_next-whole", "qwen3_5_moe-whole", "gpt_oss-whole", "gemma4-mixture", "gemma4-shared"]


@pytest.fixture(scope="module")
def captured():
    return stepping.tiny_engine(CARD, is_captured=True)


@pytest.fixture(scope="module")
def eager():
    return stepping.tiny_engine(CARD, is_captured=False)


@pytest.mark.parametrize("scene", SCENES, ids=range(len(SCENES)))
def test_a_replay_is_the_eager_step_whatever_the_rows_hold(captured, eager, scene):
    """One graph throughout: lengths, pages, tokens, sampling and the active rows change under it."""
    expected = stepping.play_directly(eager, scene)
    stepping.assert_same_play(stepping.play(captured, scene), expected, scene)
    assert any(len(tokens) > 1 for rows, _ in expected for tokens in rows), "nothing was ever accepted"


def test_a_bucket_that_is_filled_up_touches_only_the_active_rows(captured, eager):
    stepping.check_padding(captured, eager)
    scratch = captured.rows.max_rows
    assert captured.rows.length[scratch] == 0
    assert captured.rows.anchor[scratch] == 0
    assert not captured.rows._output_counts[scratch].any()


def test_the_smallest_bucket_with_room_is_replayed():
    engine = stepping.tiny_engine(CARD, is_captured=False)
    engine.capture(row_sizes(MAX_ROWS), [engine.plan.width])
    assert len(engine.graphs) == 3
    eager = stepping.tiny_engine(CARD, is_captured=False)
    for scene, num_rows in ((SCENES[0], 4), (SCENES[2], 4), (SCENES[3], 1)):
        expected = stepping.play_directly(eager, scene, num_rows=num_rows)
        stepping.assert_same_play(stepping.play(engine, scene), expected, scene)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", ["ngram", "trained"])
def test_drafts_from_n_grams_are_captured(drafter, overlap):
    stepping.check_ngrams(CARD, drafter, overlap=overlap)


@pytest.mark.parametrize("now", [None, ()], ids=["captured", "captured-when-wanted"])
def test_graphs_with_a_step_in_flight_serve_the_same_texts(now):
    expected = stepping.serve_mixed(stepping.tiny_engine(CARD, is_captured=False))
    engine = stepping.tiny_engine(CARD, is_captured=True, overlap=True, now=now)
    got = stepping.serve_mixed(engine, has_aborts=True)
    stepping.assert_same_mixed(got, expected)


@pytest.mark.parametrize("has_overlap", [False, True])
def test_preempted_sequences_resume_in_graphs_as_they_do_without(has_overlap):
    """Against an engine that takes the same steps: a prompt computed again has other bits than a decode."""
    results = [
        stepping.serve_tightly(
            stepping.tiny_engine(
                CARD, is_captured=is_captured, overlap=has_overlap, num_pages=stepping.FEW_PAGES
            )
        )
        for is_captured in (True, False)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_hybrids_and_mixtures_are_captured_whole(name):
    """With a scripted drafter, so that any number of drafts is accepted; a real one absorbs beside it."""
    drafter = stepping.family_script(name, CARD)
    engines = [stepping.family_engine(name, CARD, drafter, is_captured=is_it) for is_it in (True, False)]
    counts = stepping.lockstep(*engines, stepping.family_requests())
    assert len(set(counts)) >= 4


def test_prompts_are_prefilled_by_graphs_as_they_are_without():
    """Alone and together; what a graph has more than a batch is the scratch row's.

    In float32, where products of any number of tokens of so small a model have the same bits.
    """
    place = replace(CARD, dtype="float32")
    prompts = [[(7 * i + 13 * n) % 60 for i in range(n)] for n in (2, 20, 33, 64, 90)]
    asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = {}
    for is_captured in (True, False):
        engine = stepping.tiny_engine(place, is_captured=is_captured, max_prefill_tokens=128)
        while is_captured and engine.prefill_graphs.capture_next():
            pass  # while requests are served there may be no time for it
        for together in (prompts, *([prompt] for prompt in prompts)):
            names = [engine.add(prompt, asked) for prompt in together]
            deltas = serve(engine)
            answers.setdefault(is_captured, []).extend(
                [token for delta in deltas if delta.request_id == name for token in delta.token_ids]
                for name in names
            )
        if is_captured:
            assert len(engine.prefill_graphs._graphs) > 2
            assert engine.rows.length[engine.rows.max_rows] == 0
    assert answers[True] == answers[False]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_next-whole", "qwen3_5-whole", "qwen3_5_moe-whole"])
def test_a_captured_prefill_leaves_the_states_of_one_kernel_by_kernel(name, dtype):
    """In every layer, though a graph holds other numbers of tokens and rows; see `stepping.PREFILLS`."""
    if dtype == "bfloat16" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the library adds in another order for other numbers of tokens")
    place = replace(CARD, dtype=dtype)
    engine = stepping.prefill_engine(name, place, is_captured=True)
    engine.prefill_graphs._time = CaptureTime(lambda: 0.0)  # captures take no time: all that are wanted
    got = stepping.play_prefills(engine, stepping.PREFILLS, stepping.prefill_by_graph)
    assert sorted(engine.prefill_graphs._graphs) == [(32, 2), (32, 5), (64, 2), (64, 5)]
    eager = stepping.prefill_engine(name, place, is_captured=False)
    expected = stepping.play_prefills(eager, stepping.PREFILLS, stepping.prefill_alone)
    stepping.assert_same_prefills(got, expected)


@pytest.mark.parametrize("has_overlap", [True, False])
def test_outputs_are_kept_to_by_graphs_in_parts_as_kernel_by_kernel(has_overlap):
    captured, parts = stepping.serve_structured(CARD, is_captured=True, overlap=has_overlap)
    assert [type(one) for one in parts] == [CapturedParts]
    assert captured == stepping.serve_structured(CARD, is_captured=False, overlap=has_overlap)[0]
