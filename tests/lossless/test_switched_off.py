"""Speculation stays exact where one operation's kernel does not compile and its reference serves instead.

The others run in Triton's interpreter, and recurrent states lie in memory as a card's kernels like it.
"""

import pytest
import torch

from blockdraft.cache import recurrent
from blockdraft.engine.request import SamplingParams
from blockdraft.kernels.kernels import kernels_for
from blockdraft.step.drafter import NoDrafter
from tests import tiny
from tests.lossless import families
from tests.models.families import CASES
from tests.stepping import pin

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a card the kernels run on it"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
pytest.importorskip("triton")
WIDTH = 3
PLAN = {
    "width": WIDTH,
    "page_size": 4,
    "num_pages": 24,
    "max_num_seqs": 1,
    "max_model_len": 16,
    "max_positions": 32,
}
GREEDY = ([4, 5, 6], SamplingParams(temperature=0.0, seed=70, max_tokens=4, ignore_eos=True))
SAMPLED = (
    [9, 30],
    SamplingParams(temperature=1.0, seed=4, top_p=0.9, repetition_penalty=1.2, max_tokens=4, ignore_eos=True),
)


def interpreted(*off):
    return kernels_for(torch.float32, torch.device("cpu"), off=frozenset(off), is_interpreted=True)


@pytest.fixture(autouse=True)
def as_on_a_card(monkeypatch):
    def transposed(shape, dtype, device):
        *lead, key_size, value_size = shape
        return torch.zeros(*lead, value_size, key_size, dtype=dtype, device=device).mT

    monkeypatch.setattr(recurrent, "empty_states", transposed)


@pytest.mark.parametrize(
    ("operations", "request_"),
    [
        (("attention", "norms"), GREEDY),
        (("slots", "products"), GREEDY),
        (("heads", "gated products"), GREEDY),
        (("sampling",), SAMPLED),
        (("acceptance",), SAMPLED),
    ],
)
def test_the_trained_drafter_changes_no_token(operations, request_):
    kernels = interpreted(*operations)
    drafted, plain = (
        pin(tiny.engine(drafter, dtype="float32", kernels=kernels, **PLAN), is_captured=False)
        for drafter in ("trained", NoDrafter(tiny.BLOCK))
    )
    assert tiny.run(drafted, [request_]) == tiny.run(plain, [request_])
    assert drafted.stats.num_blocks <= plain.stats.num_blocks


@pytest.fixture(scope="module")
def hybrid():
    """Gated delta layers and gated attention."""
    return families.make_pair(
        *CASES["qwen3_5-whole"], seed=1, block=WIDTH, dtype="float32", max_model_len=64, max_num_seqs=1
    )


@pytest.mark.parametrize("operations", [("gated delta",), ("gated norms", "heads' gates", "activations")])
def test_recurrent_layers_commit_what_plain_decoding_does(hybrid, operations):
    models, plan = hybrid[0].with_kernels(interpreted(*operations)), hybrid[1]
    plain = pin(families.engine((models, plan), NoDrafter(WIDTH), **PLAN), is_captured=False)
    expected = tiny.run(plain, [GREEDY])
    drafter = families.hinted(models, [GREEDY], expected, most=WIDTH - 1)
    drafter.answers[0] = []  # of the scratch row
    drafted = pin(families.engine((models, plan), drafter, **PLAN), is_captured=False)
    assert tiny.run(drafted, [GREEDY]) == expected
    assert drafted.stats.num_blocks < plain.stats.num_blocks, "no draft was accepted"
