"""At temperature 1 the engine samples the target's own distribution, and drafts share its noise."""

import functools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from blockdraft.engine.request import SamplingParams
from tests import tiny
from tests.matrix import slow_but

PROMPT = [4, 6, 8, 10]
NUM_SAMPLES = 1500


def behind(prompt, drafter):
    """An engine that has read all of the prompt, and has not decoded."""
    engine = tiny.engine(drafter, width=tiny.BLOCK)
    engine.add(prompt, SamplingParams(temperature=1.0, max_tokens=2, logprobs=0))
    while True:
        batch = engine.scheduler.schedule()
        engine._place(batch)
        if batch.kind != "prefill":
            return engine
        engine._collect(batch, engine._launch(batch))


def next_token(engine):
    """The target's distribution [V]."""
    target, view = engine.models.target, engine.cache.view(engine.rows, 1)
    hidden, _ = target(engine.rows.anchor[engine.rows.active], view)
    return target.logits(hidden)[0].softmax(-1)


@torch.inference_mode()
def exact_pairs():
    """The joint distribution [V, V] of the next two tokens, from the model's own logits."""

    def probabilities(prompt):
        return next_token(behind(prompt, "none"))

    first = probabilities(PROMPT)
    likely = (first > 1e-4).nonzero().flatten().tolist()
    second = {token: probabilities([*PROMPT, token]) for token in likely}
    joint = torch.zeros(64, 64, dtype=torch.float64)
    for token, row in second.items():
        joint[token] = first[token] * row
    return joint.numpy()


@functools.cache
def served(drafter):
    """Serve NUM_SAMPLES answers of two tokens; return their tokens and numbers of steps."""
    engine = tiny.engine(drafter, width=4, max_num_seqs=64, max_queue=10**6, num_pages=4000)
    for seed in range(NUM_SAMPLES):
        engine.add(PROMPT, SamplingParams(temperature=1.0, max_tokens=2, seed=seed, ignore_eos=True))
    tokens, steps = {}, []
    for delta in tiny.drain(engine):
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        steps += [] if delta.metrics is None else [delta.metrics.steps]
    return list(tokens.values()), steps


@pytest.mark.parametrize("drafter", slow_but(["none", "trained", "random"], "trained"))
def test_pairs_of_tokens_follow_the_exact_distribution(drafter):
    joint = exact_pairs()
    counts = np.zeros((64, 64))
    for first, second in served(drafter)[0]:
        counts[first, second] += 1
    expected = joint * NUM_SAMPLES
    is_common = expected >= 5
    observed = np.append(counts[is_common], counts[~is_common].sum())
    wanted = np.append(expected[is_common], NUM_SAMPLES - expected[is_common].sum())
    assert len(observed) >= 5
    assert chisquare(observed, wanted).pvalue > 1e-3


@torch.inference_mode()
def exact_acceptance(drafter):
    """Return the first draft's acceptance: with shared noise, with independent noise, and at best.

    Of two distributions with one Gumbel noise both choose x with a chance of 1 / sum_y max(p_y/p_x, q_y/q_x).
    """
    engine = behind(PROMPT, drafter)
    p = next_token(engine).double()
    anchor, view = engine.rows.anchor[engine.rows.active][:, None], engine.cache.view(engine.rows, tiny.BLOCK)
    q = engine.models.drafter.block_logits(anchor, view)[0, 0].double().softmax(-1)
    shared = 1 / torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(dim=1)
    return shared.sum().item(), (p * q).sum().item(), torch.minimum(p, q).sum().item()


@pytest.mark.parametrize("drafter", slow_but(["trained", "random"], "trained"))
def test_drafts_are_accepted_as_often_as_one_noise_for_both_allows(drafter):
    shared, independent, best = exact_acceptance(drafter)
    assert independent < shared < best
    _, steps = served(drafter)
    found, error = steps.count(1) / NUM_SAMPLES, (shared * (1 - shared) / NUM_SAMPLES) ** 0.5
    assert len(steps) == NUM_SAMPLES
    assert abs(found - shared) < 3.5 * error
    assert found > independent + 3.5 * error
