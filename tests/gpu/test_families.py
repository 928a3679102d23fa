"""Every family on the GPU: the logits and the tokens that the CPU gives."""

import random
from dataclasses import replace

import pytest
import torch

from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from tests.models.checkpoints import load_pair, write_target
from tests.models.families import BASE, CASES, config_of

NAMES = [name for name, (_, overrides) in CASES.items() if overrides is not None]


def answers(folder, device, dtype, prompts, width):
    models, plan = load_pair(
        folder,
        device=device,
        dtype=dtype,
        max_model_len=300,
        page_size=4,
        max_prefill_tokens=11,
        max_num_seqs=3,
    )
    engine = Engine(models, replace(plan, num_pages=400, block=width, width=width))
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, logprobs=0)
    ids = [engine.add(prompt, params) for prompt in prompts]
    found = {request_id: [] for request_id in ids}
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id] += [(item.token_id, item.logprob) for item in delta.logprobs]
    return [found[request_id] for request_id in ids]


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_float64_tokens_and_logprobs_are_those_of_the_cpu(name, width, tmp_path):
    _, overrides = CASES[name]
    write_target(tmp_path, config_of(name, overrides), seed=5)
    rng = random.Random(1)
    prompts = [[rng.randrange(BASE["vocab_size"]) for _ in range(length)] for length in (30, 3, 17)]
    cpu = answers(tmp_path, "cpu", "float64", prompts, 1)
    gpu = answers(tmp_path, "cuda", "float64", prompts, width)
    for mine, theirs in zip(gpu, cpu, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in theirs]
        logprobs = [[logprob for _, logprob in answer] for answer in (mine, theirs)]
        # The rope tables are float32, and the GPU rounds their cosines differently.
        torch.testing.assert_close(*map(torch.tensor, logprobs), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_runs(name, tmp_path):
    _, overrides = CASES[name]
    write_target(tmp_path, config_of(name, overrides), seed=5)
    found = answers(tmp_path, "cuda", "bfloat16", [[1, 2, 3, 4, 5]], 8)
    assert len(found[0]) == 24
    assert all(logprob <= 0 for _, logprob in found[0])
