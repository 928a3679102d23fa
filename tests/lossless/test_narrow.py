"""A drafter that is causal inside its block runs no more columns than are verified, for the same drafts.

Any other runs its whole block, but its head on those columns alone.
"""

import functools

import pytest
import torch

from blockdraft.cache.rows import RowSampling
from blockdraft.engine.request import SamplingParams
from blockdraft.kernels.kernels import REFERENCE, kernels_for
from blockdraft.step.dflash import DFlashDrafter
from tests import tiny
from tests.matrix import slow_but

PROMPTS = [[3, 5, 7, 9, 11, 13, 15, 17, 2, 4], [40, 41, 42]]
KERNELS = [(dtype, kernels) for dtype in ("float32", "float64") for kernels in (None, REFERENCE)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@functools.cache
def drafter(dtype, windows=(None, None), is_causal=(True, True), from_anchor=False):
    """The trained one with other masks: it drafts worse, but not at random."""
    return tiny.changed_drafter(dtype, windows=windows, is_causal=is_causal, drafts_from_anchor=from_anchor)


def whole_block(narrow):
    """Return the same drafter, told that its columns may read each other."""
    wide = DFlashDrafter(narrow.model, narrow.target)
    wide.is_causal = False
    return wide


def watched(one):
    """The number of columns that each of its forwards has."""
    seen, run = [], one.block_hidden
    one.block_hidden = lambda anchor, view, *counts: (
        seen.append(len(view.positions)) or run(anchor, view, *counts)
    )
    return seen


@torch.inference_mode()
def drafts(one, dtype, width, kernels=None):
    """Two prompts in the cache, and what is drafted after them."""
    engine = tiny.engine(one, dtype=dtype, kernels=kernels, page_size=4)
    one = engine.models.drafter
    for row, prompt in enumerate(PROMPTS):
        pages = engine.scheduler.pages.allocate(8)
        engine.rows.place(row, prompt, 0, RowSampling(seed=row, temperature=float(row)))
        engine.rows.set_pages([(row, 0, pages)])
        engine.rows.activate([row])
        view = engine.cache.view(engine.rows, len(prompt) - 1, is_known=True)
        _, features = engine.models.target(torch.tensor(prompt[:-1]), view)
        one.absorb(features, view)
        engine.rows.extend((len(prompt) - 1,))
    engine.rows.activate([0, 1])
    return one.draft(engine.rows, engine.cache, engine.cache.view(engine.rows, width), width)


@pytest.mark.parametrize("from_anchor", [False, True], ids=["behind", "from the anchor"])
@pytest.mark.parametrize("windows", [(None, None), (3, 6)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "kernels"),
    slow_but(KERNELS, ("float32", None), ("float64", REFERENCE)),
    ids=lambda value: value if isinstance(value, str) else "kernels" if value is None else "reference",
)
def test_fewer_columns_draft_the_same(dtype, kernels, windows, from_anchor):
    narrow = drafter(dtype, windows, from_anchor=from_anchor)
    for width in range(2, tiny.BLOCK + 1):
        expected = drafts(whole_block(narrow), dtype, width, kernels)
        assert drafts(narrow, dtype, width, kernels).tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card the kernels run on it")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_fewer_columns_draft_the_same_on_the_gpu_kernels():
    pytest.importorskip("triton")
    narrow, kernels = drafter("float32"), kernels_for(torch.float32, torch.device("cpu"), is_interpreted=True)
    expected = drafts(whole_block(narrow), "float32", 3, kernels)
    assert drafts(narrow, "float32", 3, kernels).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("is_causal", "num_columns"),
    [((True, True), 3), ((True, False), tiny.BLOCK), ((False, False), tiny.BLOCK)],
)
@pytest.mark.parametrize("from_anchor", [False, True])
def test_only_where_every_layer_is_causal(is_causal, num_columns, from_anchor):
    num_columns -= from_anchor
    one = drafter("float64", is_causal=is_causal, from_anchor=from_anchor)
    one = DFlashDrafter(one.model, one.target)
    seen = watched(one)
    drafts(one, "float64", 3)
    assert seen == [len(PROMPTS) * num_columns]


class WholeHead(DFlashDrafter):
    """Its head runs on all columns."""

    def block_hidden(self, *block):
        self.whole = super().block_hidden(*block)
        return self.whole

    def column_logits(self, hidden):
        return super().column_logits(self.drafting(self.whole))[:, : hidden.shape[1]]


@pytest.mark.parametrize("kernels", [None, REFERENCE], ids=["kernels", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_head_runs_on_the_columns_that_are_verified(dtype, kernels):
    one = drafter(dtype, is_causal=(False, False))
    for width in range(2, tiny.BLOCK + 1):
        expected = drafts(WholeHead(one.model, one.target), dtype, width, kernels)
        assert drafts(one, dtype, width, kernels).tolist() == expected.tolist()


def test_it_runs_on_no_other(monkeypatch):
    one, seen = drafter("float64", is_causal=(False, False)), []
    run = DFlashDrafter.logits

    def watching(self, hidden):
        seen.append(len(hidden))
        return run(self, hidden)

    monkeypatch.setattr(DFlashDrafter, "logits", watching)
    drafts(one, "float64", 3)
    assert seen == [len(PROMPTS) * 2]


@pytest.mark.parametrize("width", [2, 5])
def test_answers_and_acceptance_do_not_change(width):
    narrow = drafter("float32")
    found = []
    for one in (narrow, whole_block(narrow)):
        engine = tiny.engine(one, dtype="float32", width=width)
        for prompt in PROMPTS:
            engine.add(prompt, GREEDY)
        deltas = tiny.drain(engine)
        metrics = [delta.metrics for delta in deltas if delta.metrics is not None]
        found.append(([d.token_ids for d in deltas], [(m.accepted, m.steps) for m in metrics]))
    assert found[0] == found[1]
    assert any(sum(accepted) for accepted, _ in found[0][1]), "nothing was accepted"
