"""Kernels are chosen once, when a model is built: which ones, and what must never meet them."""

import importlib
import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton, which other tests interpret
    os.environ.setdefault("TRITON_INTERPRET", "1")

from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.kernels import attention, choice, cpu, gated_delta, heads, linear
from blockdraft.kernels.candidates import PairScores
from blockdraft.kernels.choice import OPERATIONS, Available
from blockdraft.kernels.kernels import REFERENCE, kernels_for
from blockdraft.kernels.pick import attention as pick_attention
from blockdraft.kernels.pick import pointwise, products, recurrent
from blockdraft.models.dflash import DFlash
from blockdraft.models.kernel_module import with_kernels
from blockdraft.models.layers import GatedMLP, RMSNorm
from blockdraft.training.trainer import BlockForward, block_hidden
from tests import tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class _Called(Exception):
    pass


class _Kernel:
    """Stands in for every kernel: using it shows."""

    def __call__(self, *args, **kwargs):
        raise _Called

    rms_norm = gate_mul = rotate = scan = fold = convolve = norm_rope_write = __call__


# ---- which operation has which kernel


def _attend(kernels):
    blocks = attention.Blocks(pages=torch.tensor([[1]]), starts=torch.tensor([3]), counts=(2,), page_size=8)
    keys, values = torch.randn(2, 1, 16, 4)
    return kernels.attend(torch.randn(2, 2, 4), keys, values, blocks, attention.Mask(scale=0.5))


def _scan(kernels):
    q, k = torch.randn(2, 1, 3, 1, 4)
    state = torch.zeros(1, 2, 4, 5)
    return kernels.scan(q, k, torch.randn(1, 3, 2, 5), -torch.rand(1, 3, 2), torch.rand(1, 3, 2), state)[0]


def _fold(kernels):
    state = torch.zeros(1, 2, 4, 5)
    tape = gated_delta.Tape(torch.rand(1, 3, 2), torch.randn(1, 3, 1, 4), torch.randn(1, 3, 2, 5))
    kernels.fold(state, tape, torch.tensor([2]))
    return state


def _rows(kernels=REFERENCE):
    made = Rows(max_rows=1, max_pages=1, vocab_size=8, scratch_page=0, device=CPU, kernels=kernels)
    made.place(0, [1, 2], 1, RowSampling(temperature=1.0))
    made.activate([0])
    return made


def _advance(kernels):
    made = _rows(kernels)
    made.advance(torch.tensor([[2, 3]]), torch.tensor([[3, 4]]), torch.tensor([2]))
    return made.length


def _lookup(kernels):
    history, block = torch.tensor([[1, 2, 1, 0]], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64)
    kernels.lookup(block, history, torch.tensor([0]), torch.tensor([2]), 1)
    return block


def _remember(kernels):
    history = torch.zeros(1, 4, dtype=torch.int32)
    kernels.remember(history, torch.tensor([[3, 4]]), torch.tensor([0]), torch.tensor([1]))
    return history


def _heads():
    slots = heads.Slots(torch.zeros(1, 4, 4), torch.zeros(1, 4, 4), torch.tensor([1, 3]))
    angles = torch.ones(2, 1, 2), torch.zeros(2, 1, 2)
    return *torch.randn(3, 2, 1, 4), None, angles, slots


def _write_context(kernels):
    _, *given, slots = _heads()
    kernels.norm_rope_write(None, *given, slots)
    return slots.keys


CALLS = {
    "linear": lambda kernels: kernels.linear(torch.randn(2, 4), torch.randn(3, 4)),
    "gated_linear": lambda kernels: kernels.gated_linear(torch.randn(2, 4), torch.randn(6, 4), None, "silu"),
    "attend": _attend,
    "rms_norm": lambda kernels: kernels.rms_norm(torch.randn(2, 4), None, 1e-6),
    "silu": lambda kernels: kernels.gate_mul(torch.randn(2, 8), "silu"),
    "gelu": lambda kernels: kernels.gate_mul(torch.randn(2, 8), "gelu"),
    "rotate": lambda kernels: kernels.rotate(
        torch.randn(2, 1, 4), (torch.rand(2, 1, 2), torch.rand(2, 1, 2))
    ),
    "norm_rope_write": lambda kernels: kernels.norm_rope_write(*_heads()),
    "norm_rope_write of a context": _write_context,
    "gate_heads": lambda kernels: kernels.gate_heads(torch.randn(2, 1, 4), torch.randn(2, 1, 4)),
    "scan": _scan,
    "fold": _fold,
    "convolve": lambda kernels: kernels.convolve(
        torch.randn(1, 3, 6), torch.randn(1, 2, 6), torch.randn(6, 3)
    ),
    "gated_norm": lambda kernels: kernels.gated_norm(
        torch.randn(2, 3, 4), torch.randn(2, 12), torch.ones(4), 1e-6
    ),
    "route": lambda kernels: kernels.route(torch.randn(2, 5), 2, "all", None).weights,
    "choose": lambda kernels: kernels.choose(
        torch.randn(1, 2, 8), torch.tensor([1]), torch.tensor([[2, 3]]), _rows().sampling()
    ),
    "count_accepted": lambda kernels: kernels.count_accepted(
        torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), torch.tensor([2])
    ),
    "draw_accepted": lambda kernels: kernels.draw_accepted(
        torch.ones(3), torch.tensor([1]), torch.tensor([4]), _rows().sampling()
    ),
    "advance": _advance,
    "conv_before": lambda kernels: kernels.conv_before(
        torch.randn(4, 6), torch.randn(2, 6), torch.randn(12, 6), 2
    )[0],
    "conv_after": lambda kernels: kernels.conv_after(
        torch.randn(4, 6), torch.randn(2, 6), torch.randn(4, 2, 3), 2, torch.randn(4, 6), torch.ones(6), 1e-6
    )[1],
    "walk": lambda kernels: kernels.walk(
        torch.randn(1, 2, 8),
        PairScores(torch.randn(8, 3), torch.randn(8, 3), torch.randn(1, 2, 3), 4),
        torch.tensor([1]),
        torch.tensor([[2]]),
        _rows().sampling(),
    ),
    "lookup": _lookup,
    "remember": _remember,
}
ON_CPU = ["linear", "attend", "rms_norm", "silu", "gelu", "rotate", "scan", "fold", "convolve"]
ON_CPU += ["norm_rope_write", "norm_rope_write of a context"]
ON_GPU = {  # the kernel's module and name, and the operation that it belongs to
    "linear": ("linear", "linear", "products"),
    "gated_linear": ("linear", "linear", "gated products"),
    "attend": ("attention", "attend", "attention"),
    "rms_norm": ("pointwise", "rms_norm", "norms"),
    "silu": ("pointwise", "gate_mul", "activations"),
    "gelu": ("pointwise", "gate_mul", "activations"),
    "norm_rope_write": ("pointwise", "norm_rope_write", "heads"),
    "norm_rope_write of a context": ("pointwise", "norm_rope_write", "heads"),
    "gate_heads": ("pointwise", "gate_heads", "heads' gates"),
    "gated_norm": ("gated_delta", "gated_norm", "gated norms"),
    "route": ("routing", "route", "routing"),
    "choose": ("sampling", "choose", "sampling"),
    "count_accepted": ("acceptance", "count_accepted", "acceptance"),
    "draw_accepted": ("acceptance", "draw_accepted", "acceptance"),
    "advance": ("acceptance", "advance", "acceptance"),
    "conv_before": ("block_conv", "conv_before", "block convolutions"),
    "conv_after": ("block_conv", "conv_after", "block convolutions"),
    "walk": ("candidates", "walk", "candidates"),
    "lookup": ("ngram_lookup", "lookup", "lookup"),
    "remember": ("ngram_lookup", "remember", "lookup"),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_operation_has_a_reference(name):
    assert CALLS[name](REFERENCE).isfinite().all()


@pytest.mark.parametrize("name", ON_CPU)
def test_a_cpu_takes_its_kernels_where_they_can_serve(name, monkeypatch):
    for module, compiled in (
        (pick_attention, "_llvm_kernel"),
        (recurrent, "_llvm_delta"),
        (pointwise, "_llvm_heads"),
        (products, "_llvm_linear"),
        (pointwise, "llvm_rows"),
    ):
        monkeypatch.setattr(module, compiled, lambda *_: _Kernel())
    monkeypatch.setattr(choice, "why_no_llvm", lambda dtype, device: None)
    with pytest.raises(_Called):
        CALLS[name](kernels_for(torch.float32, CPU))
    monkeypatch.setattr(choice, "why_no_llvm", lambda dtype, device: "an odd machine")
    assert CALLS[name](kernels_for(torch.float32, CPU)).isfinite().all()


def test_a_cpu_finds_places_by_its_kernel_where_it_can_serve(monkeypatch):
    monkeypatch.setattr(choice, "why_no_llvm", lambda dtype, device: None)
    assert kernels_for(torch.float32, CPU).locate is pick_attention.llvm_locate
    monkeypatch.setattr(choice, "why_no_llvm", lambda dtype, device: "an odd machine")
    assert kernels_for(torch.float32, CPU).locate is None


def test_states_of_half_precision_models_are_float32_and_take_the_cpu_s_kernels(monkeypatch):
    monkeypatch.setattr(recurrent, "_llvm_delta", lambda dtype: dtype)
    monkeypatch.setattr(choice, "why_no_llvm", lambda dtype, device: {torch.bfloat16: "half"}.get(dtype))
    available = Available("llvm", torch.bfloat16)
    assert available.has_llvm(torch.float32)
    assert not available.has_llvm()


@pytest.mark.parametrize("name", ON_GPU)
def test_a_gpu_takes_its_kernels_but_for_those_that_are_off(name, monkeypatch):
    pytest.importorskip("triton")
    module, kernel, operation = ON_GPU[name]
    monkeypatch.setattr(importlib.import_module(f"blockdraft.kernels.triton.{module}"), kernel, _Kernel())
    kernels = kernels_for(torch.float32, CPU, is_interpreted=True)
    with pytest.raises(_Called):
        CALLS[name](kernels)
    off = {operation} | ({"products"} if operation == "gated products" else set())  # they are one kernel
    assert (
        CALLS[name](kernels_for(torch.float32, CPU, off=frozenset(off), is_interpreted=True)).isfinite().all()
    )
    assert CALLS[name](kernels.references()).isfinite().all()


def test_triton_is_for_a_gpu_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(choice, "has_triton", lambda: True)
    on_gpu, on_cpu = kernels_for(torch.bfloat16, CUDA).available, kernels_for(torch.float32, CPU).available
    assert all(on_gpu.has_triton(operation) for operation in OPERATIONS)
    assert not any(on_cpu.has_triton(operation) for operation in OPERATIONS)
    assert "cpu" in on_cpu.why_reference("routing")
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    assert not any(on_gpu.has_triton(operation) for operation in OPERATIONS)
    assert "not installed" in on_gpu.why_reference("norms")


@pytest.mark.parametrize(
    ("dtype", "is_served"),
    [(torch.bfloat16, True), (torch.float16, True), (torch.float32, True), (torch.float64, False)],
    ids=str,
)
def test_triton_computes_in_float32_and_below(dtype, is_served, monkeypatch):
    """Kernels on integers serve a model of any dtype."""
    monkeypatch.setattr(choice, "has_triton", lambda: True)
    available = Available("triton", dtype, CUDA)
    assert available.has_triton("norms") == is_served
    assert is_served or str(dtype) in available.why_reference("norms")
    assert available.has_triton("slots")
    assert available.has_triton("acceptance")


def test_a_cpu_says_why_it_has_no_kernels():
    available = Available("llvm", torch.float16, CPU)
    assert available.why_reference("norms") == cpu.why_no_llvm(torch.float16, CPU)
    assert REFERENCE.available.why_reference("norms") is not None


# ---- a model and its kernels


def _raising():
    return replace(kernels_for(torch.float32, CPU), rms_norm=_Kernel(), gated_linear=_Kernel())


def _mlp():
    mlp = GatedMLP(4, 6).requires_grad_(False)
    for parameter in mlp.parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(1))
    return mlp


def test_a_model_has_the_references_until_it_is_bound_and_keeps_them_in_its_copies():
    mlp, kernels = _mlp(), _raising()
    bound = with_kernels(mlp, kernels)
    with pytest.raises(_Called):
        bound(torch.ones(1, 4))
    assert mlp(torch.ones(1, 4)).isfinite().all()
    assert bound.down.kernels is kernels
    assert bound.down.weight is mlp.down.weight
    again = with_kernels(bound, REFERENCE)
    assert torch.equal(again(torch.ones(1, 4)), mlp(torch.ones(1, 4)))


def test_parameters_that_are_trained_keep_the_references():
    model = RMSNorm(4, 1e-6)
    with pytest.raises(ValueError, match="gradients"):
        with_kernels(model, kernels_for(torch.float32, CPU))
    with_kernels(model, REFERENCE)(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("part", ["logits", "draft", "absorb"])
def test_a_frozen_model_on_kernels_refuses_what_wants_a_gradient(part):
    models = tiny.load("float32")
    target, drafter = models.target, models.drafter.model
    wanted = torch.ones(2, models.config.hidden_size, requires_grad=True)
    calls = {
        "logits": lambda target, drafter: target.logits(wanted),
        "draft": lambda target, drafter: drafter(wanted, None, 1),
        "absorb": lambda target, drafter: drafter.absorb(wanted, None),
    }
    with pytest.raises(ValueError, match="gradient"):
        calls[part](target, drafter)
    with torch.no_grad():
        assert target.logits(wanted.detach()).isfinite().all()
    with_kernels(target, REFERENCE).logits(wanted).sum().backward()
    assert wanted.grad.abs().sum() > 0


# ---- training


def test_a_drafter_on_kernels_is_not_trained():
    models = tiny.load("float32")
    with pytest.raises(AssertionError, match="references"):
        BlockForward(models.drafter.model, models.target)


def test_compiled_code_has_the_references_and_their_gradients(monkeypatch):
    """A drafter as training builds it: what the compiler traces has no kernel of ours in it."""
    monkeypatch.setattr(linear, "_slow_on_cpu", tuple)  # which a compiler cannot ask; a GPU does not
    config = tiny.load("float32").drafter.model.config
    model = DFlash(config, first_layer=0, max_positions=64, has_head=False, device=CPU)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    assert model.kernels is REFERENCE
    block, hidden = config.block, config.hidden_size
    masks = dict.fromkeys(range(config.num_layers), torch.ones(1, 1, block, 5 + block, dtype=torch.bool))
    given = (
        torch.randn(5, len(config.taps) * config.target_hidden_size),
        torch.randn(block, hidden),
        torch.arange(5),
        torch.arange(5, 5 + block),
        1,
        masks,
        block,
    )
    compiled = torch.compile(block_hidden, backend="eager", fullgraph=True, dynamic=False)
    expected = block_hidden(model, *given)
    assert torch.equal(compiled(model, *given), expected)
    compiled(model, *given).sum().backward()
    assert all(one.grad is not None for one in model.layers[0].parameters())
