"""A kernel that this card really cannot compile, or launch: the start says so, and speculation stays exact.

Plain decoding at the same number of rows and the same width is what the tokens are held to.
"""

import pytest
import torch

from blockdraft.engine.trial_engine import serve, trial_engine
from blockdraft.phases import StartProgress
from blockdraft.settings.settings import Settings
from blockdraft.start.memory import release
from blockdraft.start.start_engine import plain_engine, start_engine
from blockdraft.step.drafter import NoDrafter
from tests import stepping, tiny
from tests.stepping import CARD, FAMILY_BLOCK, gather, make_requests

triton = pytest.importorskip("triton")
tl = triton.language
SETTINGS = Settings(
    model=tiny.TARGET,
    draft=tiny.DRAFT,
    device="cuda",
    dtype="bfloat16",
    max_model_len=200,
    width=tiny.BLOCK,
    max_num_seqs=1,
    gpu_memory_utilization=0.5,
)


@triton.jit
def _never_compiles(x):
    tl.static_assert(False, "this kernel is for another card")


@triton.jit
def _needs_too_much(x):
    """Its second factor alone is 256 KB of shared memory: more than any card has until now."""
    row, inner, column = tl.arange(0, 256), tl.arange(0, 512), tl.arange(0, 256)
    one = tl.load(x + row[:, None] * 512 + inner[None, :])
    other = tl.load(x + inner[:, None] * 256 + column[None, :])
    tl.store(x + row[:, None] * 256 + column[None, :], tl.dot(one, other).to(x.dtype.element_ty))


@pytest.fixture(autouse=True)
def as_before():
    yield
    release()


def breaks(monkeypatch, module, name, kernel):
    def launch(*args, **kwargs):
        kernel[(1,)](torch.zeros(256 * 512, dtype=torch.bfloat16, device="cuda"), num_warps=8)
        raise AssertionError("the kernel was launched all the same")

    monkeypatch.setattr(f"blockdraft.kernels.triton.{module}.{name}", launch)


def tokens(engine, request):
    engine.add(*request)
    return gather(serve(engine)).token_ids


@pytest.mark.parametrize("kernel", [_never_compiles, _needs_too_much], ids=["compiler", "shared memory"])
@pytest.mark.parametrize(
    ("module", "name", "operation", "has_graphs"),
    [
        ("attention", "attend", "attention", False),
        ("sampling", "choose", "sampling", False),
        ("acceptance", "advance", "acceptance", False),
        ("pointwise", "locate", "slots", False),
        ("pointwise", "norm_rope_write", "heads", True),
        ("pointwise", "rms_norm", "norms", True),
        ("linear", "linear", "products", True),
    ],
)
def test_a_start_without_a_kernel_serves_exactly(monkeypatch, kernel, module, name, operation, has_graphs):
    breaks(monkeypatch, module, name, kernel)
    startup = StartProgress()
    engine = start_engine(SETTINGS, startup)
    # Products and gated products are one kernel: each of the two is found out by itself.
    off = engine.models.target.kernels.off
    assert operation in off
    assert set(off) <= {operation, "gated products"}
    assert f"the kernel of {operation} does not compile on this card" in " ".join(startup.warnings)
    assert (engine.graphs is not None) == has_graphs
    for request in make_requests(count=2, temperature=0.0) + make_requests(count=2, temperature=1.0):
        drafted = tokens(trial_engine(engine), request)
        assert drafted == tokens(trial_engine(engine, NoDrafter(tiny.BLOCK)), request)


def test_the_python_api_starts_without_it_too(monkeypatch):
    breaks(monkeypatch, "attention", "attend", _needs_too_much)
    warnings = []
    engine = plain_engine(SETTINGS, lambda text: None, warnings.append)
    assert engine.models.target.kernels.off == ("attention",)
    assert len(warnings) == 1
    (request,) = make_requests(count=1, temperature=0.0)
    assert tokens(trial_engine(engine), request) == tokens(
        trial_engine(engine, NoDrafter(tiny.BLOCK)), request
    )


@pytest.mark.parametrize(
    "operation", ["gated delta", "gated norms", "heads' gates", "activations", "routing", "gated products"]
)
def test_a_graph_holds_the_references_that_ask_nobody(operation):
    """The bits of hybrids and mixtures in graphs are those of the same step kernel by kernel."""
    name = "qwen3_next-whole"
    drafter = stepping.family_script(name, CARD)  # its answers are kept for other tests: with all kernels
    engines = [
        stepping.family_engine(name, CARD, drafter, is_captured=is_it, off=[operation])
        for is_it in (True, False)
    ]
    assert len(set(stepping.lockstep(*engines, stepping.family_requests()))) >= 4


@pytest.mark.parametrize("operation", ["gated delta", "routing", "experts"])
def test_hybrids_and_mixtures_emit_the_tokens_of_plain_decoding(operation):
    name = "qwen3_next-whole"
    drafter, requests = stepping.family_script(name, CARD), stepping.family_requests()
    got, plain = (
        stepping.serve(stepping.family_engine(name, CARD, one, is_captured=False, off=[operation]), requests)
        for one in (drafter, NoDrafter(FAMILY_BLOCK))
    )
    assert stepping.tokens_of(got) == stepping.tokens_of(plain)
