"""The whole engine on Triton's kernels without a card: their interpreter, step by step, in float32.

Slow, so two short requests have to say it: one greedy, one with every part of sampling. The kernels' own
tests are in tests/kernels; here it counts that the step hands them the right tensors.
"""

import functools
from dataclasses import replace

import pytest
import torch

from blockdraft.cache.rows import Rows
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.kernels.kernels import REFERENCE, kernels_for
from tests import stepping, tiny
from tests.grammar import json_tokens
from tests.lossless import families
from tests.matrix import slow_but
from tests.stepping import pin

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a card the kernels run on it"),
    # The interpreter computes with NumPy, which warns where unsigned words wrap as they should.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
pytest.importorskip("triton")
WIDTH = 3
REQUESTS = [
    ([4, 5, 6], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)),
    (
        [9, 30],
        SamplingParams(
            temperature=1.0,
            seed=4,
            top_p=0.9,
            top_k=20,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.1,
            logit_bias={7: 2.0},
            min_tokens=4,
            max_tokens=4,
        ),
    ),
]


def answers(kernels, drafter, requests=REQUESTS):
    # A short page table: attention then has one split of the keys to interpret.
    plan = {"width": WIDTH, "page_size": 4, "num_pages": 24, "max_num_seqs": 2, "max_model_len": 16}
    engine = tiny.engine(drafter, dtype="float32", kernels=kernels, max_positions=32, **plan)
    if requests is not REQUESTS:  # without padding, as the widths say
        return engine, tiny.run(engine, requests)
    return engine, tiny.run(pin(engine, is_captured=False), REQUESTS)


@pytest.mark.parametrize(
    "drafter",
    slow_but(
        ["trained", "DFlash2", "DSpark", "XPress", "Domino", "LiLiCorr"], "trained", "DFlash2", "DSpark"
    ),
)
def test_tokens_and_lengths_are_those_of_the_reference(drafter):
    """And so is the number of steps: the same drafts were right."""
    reference, expected = answers(REFERENCE, drafter)
    kernels = kernels_for(torch.float32, torch.device("cpu"), is_interpreted=True)
    engine, got = answers(kernels, drafter)
    assert got == expected
    assert [len(tokens) for [(tokens, _, _)] in got] == [2, 4]
    assert engine.rows.length[:2].tolist() == reference.rows.length[:2].tolist()
    assert engine.stats.num_blocks == reference.stats.num_blocks
    if drafter != "DFlash2":  # whose head knows nothing
        assert engine.stats.num_blocks < engine.stats.num_emitted, "no draft was accepted"
    assert engine.rows.length[2] == 0, "the scratch row, which filled the last step up, has moved"


def test_trees_that_are_often_right_emit_plain_decodings_tokens():
    kernels = kernels_for(torch.float32, torch.device("cpu"), is_interpreted=True)
    plan = {"width": tiny.BLOCK, "page_size": 4, "num_pages": 24, "max_num_seqs": 2, "max_model_len": 16}
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    requests = [([4, 5, 6], params), ([9, 30], replace(params, temperature=1.0, seed=4, max_tokens=4))]
    expected = tiny.run(tiny.engine("none", dtype="float32", **plan), requests)
    answers = {
        params.seed: [*prompt, *tokens]
        for (prompt, params), ((tokens, _, _),) in zip(requests, expected, strict=True)
    }
    engine = tiny.engine("DFlash2", dtype="float32", kernels=kernels, tree=32, max_positions=32, **plan)
    tiny.hint_trees(engine, answers, is_beside=True)
    assert tiny.run(engine, requests) == expected
    assert engine.stats.num_blocks < engine.stats.num_emitted - 2


@pytest.mark.parametrize("drafter", ["trained", "DFlash2"])
def test_rows_of_different_widths_emit_the_tokens_of_rows_alone(drafter, monkeypatch):
    kernels = kernels_for(torch.float32, torch.device("cpu"), is_interpreted=True)
    requests = [
        (prompt, replace(params, width=width))
        for (prompt, params), width in zip(REQUESTS, (3, 2), strict=True)
    ]
    alone = [answers(kernels, drafter, [request])[1][0] for request in requests]
    activate, given = Rows.activate, []
    monkeypatch.setattr(
        Rows, "activate", lambda *rows, **filled: given.append(filled) or activate(*rows, **filled)
    )
    assert answers(kernels, drafter, requests)[1] == alone
    assert {"widths": (3, 2), "limits": ()} in given


def test_rows_of_different_widths_leave_a_hybrid_s_states_as_alone():
    models, plan = stepping.family_pair("qwen3_5-whole", stepping.HOST)
    models = models.with_kernels(kernels_for(torch.float32, torch.device("cpu"), is_interpreted=True))
    plan = replace(plan, max_num_seqs=2, num_pages=100)
    requests = [
        (prompt, replace(params, min_tokens=0, max_tokens=3, width=width))
        for (prompt, params), width in zip(REQUESTS, (3, 2), strict=True)
    ]
    found = []
    for batch in (requests[:1], requests[1:], requests):
        engine, states = Engine(models, plan), {}
        for prompt, params in batch:
            engine.add(prompt, params)
        while engine.has_work:
            engine.step()
            states |= families.committed(engine)
        found.append(states)
    alone, together = found[0] | found[1], found[2]
    common = alone.keys() & together.keys()
    assert len({seed for seed, _ in common}) == 2
    for key in common:
        for mine, theirs in zip(together[key], alone[key], strict=True):
            assert torch.equal(mine[0], theirs[0])
            assert torch.equal(mine[1], theirs[1])


def test_a_model_s_own_head_drafts_as_with_the_reference():
    """Its keys are written by prefills, blocks and its own runs, and a graph's prefill leaves the same."""
    models, plan = families.mtp_pair("qwen3_5-mrope", dtype="float32", device="cpu")
    plan = replace(plan, width=WIDTH, block=WIDTH, page_size=4, num_pages=24, max_num_seqs=2)
    found, kernels = [], kernels_for(torch.float32, torch.device("cpu"), is_interpreted=True)
    for used in (REFERENCE, kernels):
        engine = Engine(models.with_kernels(used), replace(plan, max_num_seqs=2))
        found.append((tiny.run(pin(engine, is_captured=False), REQUESTS), engine.stats.num_blocks))
    assert found[0] == found[1]
    assert found[0][1] < sum(len(tokens) for [(tokens, _, _)] in found[0][0])
    steps, plan = (
        (((2, 2), (0, 1)), ((2, 1), (1, 1))),
        replace(plan, max_num_seqs=stepping.MAX_ROWS, num_pages=100),
    )
    as_a_graph = functools.partial(stepping.prefill_filled_up, num_tokens=4, num_rows=4)
    ways = (as_a_graph, stepping.prefill_alone)
    models = models.with_kernels(kernels)
    stepping.assert_same_prefills(*(stepping.play_prefills(Engine(models, plan), steps, way) for way in ways))


def test_a_prefill_of_a_graph_s_shape_leaves_a_hybrid_s_states_as_without():
    """Kernel by kernel; its tokens and rows beyond the batch's are the scratch row's."""
    steps, name = (((2, 2), (0, 1)), ((2, 1), (1, 1))), "qwen3_5-whole"
    models, plan = stepping.family_pair(name, stepping.HOST)
    models = models.with_kernels(kernels_for(torch.float32, torch.device("cpu"), is_interpreted=True))
    plan = replace(plan, max_num_seqs=stepping.MAX_ROWS, num_pages=100)
    as_a_graph = functools.partial(stepping.prefill_filled_up, num_tokens=4, num_rows=4)
    found = [
        stepping.play_prefills(Engine(models, plan), steps, run)
        for run in (as_a_graph, stepping.prefill_alone)
    ]
    stepping.assert_same_prefills(*found)


def test_an_output_is_kept_to_by_the_kernels():
    """In parts, beside a request without a structured output."""
    requests = [
        (
            [4, 5, 6],
            SamplingParams(temperature=1.0, seed=2, structured_outputs=StructuredOutputs(choice=["true"])),
        ),
        REQUESTS[0],
    ]
    found = []
    for kernels in (REFERENCE, kernels_for(torch.float32, torch.device("cpu"), is_interpreted=True)):
        plan = {"width": WIDTH, "page_size": 4, "num_pages": 24, "max_num_seqs": 2, "max_model_len": 16}
        tokens = json_tokens.tokenizer()
        engine = tiny.engine(
            "trained", dtype="float32", kernels=kernels, max_positions=32, tokenizer=tokens, **plan
        )
        found.append(tiny.run(engine, requests))
    assert found[0] == found[1]
    assert found[0][0][0][1] == "true"
