"""At temperature 1 the engine samples the target's own distribution, with and without a drafter."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from blockdraft.engine.request import SamplingParams
from tests import tiny
from tests.matrix import slow_but

PROMPT = [4, 6, 8, 10]
NUM_SAMPLES = 1500


@torch.inference_mode()
def exact_pairs():
    """The joint distribution [V, V] of the next two tokens, from the model's own logits."""

    def probabilities(prompt):
        engine = tiny.engine("none", width=1)
        engine.add(prompt, SamplingParams(temperature=1.0, max_tokens=1, logprobs=0))
        while engine.has_work:
            batch = engine.scheduler.schedule()
            engine._place(batch)
            if batch.kind == "prefill":
                engine._collect(batch, engine._launch(batch))
                continue
            models = engine.models
            view = engine.cache.view(engine.rows, 1)
            hidden, _ = models.target(engine.rows.anchor[engine.rows.active], view)
            return models.target.logits(hidden)[0].softmax(-1)
        raise AssertionError

    first = probabilities(PROMPT)
    likely = (first > 1e-4).nonzero().flatten().tolist()
    second = {token: probabilities([*PROMPT, token]) for token in likely}
    joint = torch.zeros(64, 64, dtype=torch.float64)
    for token, row in second.items():
        joint[token] = first[token] * row
    return joint.numpy()


@pytest.mark.parametrize("drafter", slow_but(["none", "trained", "random"], "trained"))
def test_pairs_of_tokens_follow_the_exact_distribution(drafter):
    joint = exact_pairs()
    engine = tiny.engine(drafter, width=4, max_rows=64, max_queue=10**6, num_pages=4000)
    for seed in range(NUM_SAMPLES):
        engine.add(PROMPT, SamplingParams(temperature=1.0, max_tokens=2, seed=seed, ignore_eos=True))
    counts = np.zeros((64, 64))
    tokens = {}
    for delta in tiny.drain(engine):
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    for first, second in tokens.values():
        counts[first, second] += 1
    expected = joint * NUM_SAMPLES
    is_common = expected >= 5
    observed = np.append(counts[is_common], counts[~is_common].sum())
    wanted = np.append(expected[is_common], NUM_SAMPLES - expected[is_common].sum())
    assert len(observed) >= 5
    assert chisquare(observed, wanted).pvalue > 1e-3
