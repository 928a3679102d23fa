"""A checkpoint's own MTP head: its drafts against transformers' layers, and heads that are refused."""

from dataclasses import replace

import pytest
import torch

from blockdraft.engine.engine import Engine
from blockdraft.engine.request import SamplingParams
from tests import stepping
from tests.matrix import slow_but
from tests.models.checkpoints import load_pair, randomise
from tests.models.families import widen
from tests.models.mtp import MtpReference, assert_drafts_of_reference, write_mtp_target
from tests.stepping import HOST

NAMES = ("qwen3_5-mrope", "qwen3_next-whole", "qwen3_5_moe-whole")
SETTINGS = {"dtype": "float64", "max_model_len": 120, "max_num_seqs": 3, "page_size": 3}


@pytest.fixture(scope="module", params=NAMES)
def served(request, tmp_path_factory):
    """The head as transformers computes it, and the loaded pair with its plan."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        widen(monkeypatch)
        folder = tmp_path_factory.mktemp("target")
        hf, head = write_mtp_target(folder, request.param)
        pair = load_pair(folder, draft="mtp", max_prefill_tokens=7, **SETTINGS)
        hf.double()
        yield head.double(), pair


@pytest.mark.parametrize(
    ("served", "width"),
    slow_but([(name, width) for name in NAMES for width in (1, 5)], *zip(NAMES, (1, 5, 5), strict=True)),
    indirect=["served"],
)
def test_drafts_are_those_of_the_head_in_transformers(served, width, monkeypatch):
    """After every step: prompts in chunks, rows of other lengths, and blocks of any committed length."""
    head, (models, plan) = served
    engine, num_compared = Engine(models, plan), 0
    for seed, length in enumerate((1, 9, 18)):
        prompt = [(5 * i * i + seed) % 90 for i in range(length)]
        sampling = SamplingParams(temperature=seed % 2, seed=seed, max_tokens=9, width=width)
        engine.add(prompt, replace(sampling, ignore_eos=True))
    while engine.has_work:
        num_compared += assert_drafts_of_reference(engine, head, monkeypatch)
        engine.step()
    assert num_compared > 12


@pytest.mark.parametrize("overlap", [False, True])
def test_captured_steps_draft_as_steps_kernel_by_kernel_do(overlap):
    stepping.check_mtp("qwen3_5-mrope", HOST, overlap=overlap)


def test_another_head_drafts_other_tokens(served):
    """Else the comparison above would say little."""
    head, _ = served
    other, text, drafts = MtpReference(head._target[0]).double(), torch.arange(9), [1, 2]
    randomise(other, seed=7)
    far = (head.logits(text, drafts) - other.logits(text, drafts)).abs().max()
    assert far > 0.1
