"""The check of bits: it finds nothing in kernels that keep the rule, and names the way that breaks it."""

from dataclasses import replace

import pytest
import torch

from blockdraft.check import batch_invariance, selfcheck
from blockdraft.check.batch_invariance import check_bits
from blockdraft.check.expert_tiles import TileRun
from blockdraft.check.selfcheck import verify_engine
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.kernels.kernels import kernels_for
from tests import tiny

IDS = [3, 5, 7, 11, 2, 9]
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    why_no_llvm(torch.float32, CPU) is not None, reason="the CPU kernels are not chosen"
)


def engine_with(operation, wrong):
    """An engine on the CPU's kernels, one of which is replaced by `wrong(it)`."""
    kernels = kernels_for(torch.float32, CPU)
    kernels = replace(kernels, **{operation: wrong(getattr(kernels, operation))})
    return tiny.engine(dtype="float32", kernels=kernels)


def test_kernels_that_keep_the_rule_pass_and_leave_no_trace():
    engine = tiny.engine(dtype="float32")
    free = engine.scheduler.pages.num_free
    found = check_bits(engine, IDS)
    assert found.is_same
    assert found.num_values > 200
    assert engine.scheduler.pages.num_free == free
    assert not engine.has_work


@pytest.mark.parametrize(
    ("least", "way"),
    [(2, "in a block of 4"), (9, "among 8 rows"), (50, "in a prompt of 120 tokens")],
)
def test_a_product_that_follows_the_number_of_tokens_is_found(least, way):
    def wrong(linear):
        def product(x, weight, bias=None, onto=None):
            y = linear(x, weight, bias, onto)
            return y * (1 + 2**-20) if len(x) >= least and x.dim() == 2 else y

        return product

    found = check_bits(engine_with("linear", wrong), IDS)
    assert not found.is_same
    assert way in found.difference
    assert "near-ties" in found.detail


def test_attention_that_follows_the_piece_of_a_prompt_is_found():
    def wrong(attend):
        def attention(q, keys, values, blocks, mask, sinks=None):
            out = attend(q, keys, values, blocks, mask, sinks)
            return out * (1 + 2**-20) if max(blocks.counts) == 40 else out

        return attention

    found = check_bits(engine_with("attend", wrong), IDS)
    assert "pieces of 40" in found.difference


def test_experts_whose_bits_follow_the_number_of_tokens_are_found(monkeypatch):
    """A made-up mixture: tests/check/test_expert_tiles.py runs real ones."""
    monkeypatch.setattr(batch_invariance, "mixtures", lambda engine: ["one"])
    few, where = torch.ones(3, 4), "2 of 8 experts, [4, 4], 512 tokens"
    for got, is_same in ((few.clone(), True), (few * (1 + 2**-20), False)):
        runs = [TileRun(where, few, few), TileRun(where, got, few)]
        monkeypatch.setattr(batch_invariance, "tile_runs", lambda *_, runs=runs: iter(runs))
        found = check_bits(tiny.engine(dtype="float32"), IDS)
        assert found.is_same is is_same
        assert is_same or found.detail.startswith(f"{where} have other outputs than 32 tokens at a time")


def test_a_verification_says_what_holds_by_construction(monkeypatch):
    monkeypatch.setattr(selfcheck, "_verify_pair", lambda *_: selfcheck.Verification(()))
    found = verify_engine(tiny.engine(dtype="float32"), lambda text: None)
    assert (found.same_bits, found.bits) == (True, "our kernels add in one order")
    found = verify_engine(tiny.engine(dtype="bfloat16"), lambda text: None)  # which they do not compute in
    assert not found.same_bits
    engine = tiny.engine(dtype="float32", same_bits=False)  # --allow-batch-variance
    assert verify_engine(engine, lambda text: None).same_bits is None
