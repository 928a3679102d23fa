"""use("reference"): every operation leaves its kernel aside, in this thread and only inside the `with`.

use("triton"), for tests: tensors on a CPU go where those on a GPU would.
"""

import importlib
import os
import threading

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton, which other tests interpret
    os.environ.setdefault("TRITON_INTERPRET", "1")

from blockdraft.cache.rows import Rows, RowSampling
from blockdraft.kernels import (
    acceptance,
    attention,
    choice,
    gated_delta,
    heads,
    linear,
    rows,
    sampling,
)


class _Called(Exception):
    pass


class _Kernel:
    """Stands in for every kernel class: using it shows."""

    def __call__(self, *args, **kwargs):
        raise _Called

    rms_norm = silu_mul = gelu_mul = rotate = scan = fold = convolve = __call__


@pytest.fixture
def kernels(monkeypatch):
    for module in (attention, gated_delta, linear, rows):
        monkeypatch.setattr(module, "_chosen", lambda *_: _Kernel())


def _attend():
    blocks = attention.Blocks(pages=torch.tensor([[1]]), starts=torch.tensor([3]), counts=(2,), page_size=8)
    keys, values = torch.randn(2, 1, 16, 4)
    return attention.attend_paged(torch.randn(2, 2, 4), keys, values, blocks, attention.Mask(scale=0.5))


def _delta():
    q, k = torch.randn(2, 1, 3, 1, 4)
    state = torch.zeros(1, 2, 4, 5)
    return q, k, torch.randn(1, 3, 2, 5), -torch.rand(1, 3, 2), torch.rand(1, 3, 2), state


def _fold():
    state = torch.zeros(1, 2, 4, 5)
    tape = gated_delta.Tape(torch.rand(1, 3, 2), torch.randn(1, 3, 1, 4), torch.randn(1, 3, 2, 5))
    gated_delta.fold(state, tape, torch.tensor([2]))
    return state


OPERATIONS = {
    "linear": lambda: linear.linear(torch.randn(2, 4), torch.randn(3, 4)),
    "attend_paged": _attend,
    "rms_norm": lambda: rows.rms_norm(torch.randn(2, 4), None, 1e-6),
    "silu_mul": lambda: rows.silu_mul(torch.randn(2, 8)),
    "gelu_mul": lambda: rows.gelu_mul(torch.randn(2, 8)),
    "rotate": lambda: rows.rotate(torch.randn(2, 1, 4), (torch.rand(2, 1, 2), torch.rand(2, 1, 2))),
    "scan": lambda: gated_delta.scan(*_delta())[0],
    "fold": _fold,
    "convolve": lambda: gated_delta.convolve(torch.randn(1, 3, 6), torch.randn(1, 2, 6), torch.randn(6, 3)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_takes_its_reference_inside_and_its_kernel_outside(kernels, name):
    with choice.use("reference"):
        assert OPERATIONS[name]().isfinite().all()
    with pytest.raises(_Called):
        OPERATIONS[name]()


def test_another_thread_keeps_its_kernels(kernels):
    found = []
    with choice.use("reference"):
        thread = threading.Thread(target=lambda: found.append(choice.takes_reference()))
        thread.start()
        thread.join()
        assert choice.takes_reference()
    assert found == [False]


def test_it_nests_and_ends_with_an_error():
    with choice.use("reference"):
        with pytest.raises(_Called), choice.use("reference"):
            raise _Called
        assert choice.takes_reference()
    assert not choice.takes_reference()


def test_an_unknown_path_is_refused():
    with pytest.raises(ValueError, match="'fast'"), choice.use("fast"):
        pass


# ---- Triton's kernels


@pytest.fixture
def has_triton(monkeypatch):
    monkeypatch.setattr(choice, "has_triton", lambda: True)


class OnGpu:
    """As much of a tensor on a GPU as the choice asks for."""

    is_cuda = True

    def __init__(self, dtype=torch.bfloat16):
        self.dtype = dtype


def test_a_gpu_takes_triton_and_a_cpu_does_not(has_triton):
    assert choice.is_on_gpu(OnGpu(), "norms")
    assert choice.takes_triton(OnGpu(), "norms")
    assert not choice.is_on_gpu(torch.zeros(1), "norms")
    assert not choice.takes_triton(torch.zeros(1), "norms")


def test_without_triton_nobody_takes_it(monkeypatch):
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    assert not choice.is_on_gpu(OnGpu(), "norms")
    with choice.use("triton"):
        assert not choice.takes_triton(torch.zeros(1), "norms")


def test_a_cpu_takes_triton_where_it_is_asked_for(has_triton):
    with choice.use("triton"):
        assert choice.is_on_gpu(torch.zeros(1), "norms")
        assert choice.takes_triton(torch.zeros(1), "norms")
        assert not choice.takes_reference(torch.zeros(1))
    assert not choice.takes_triton(torch.zeros(1), "norms")


@pytest.mark.parametrize(
    ("dtype", "is_served"),
    [
        (torch.bfloat16, True),
        (torch.float16, True),
        (torch.float32, True),
        (torch.float64, False),
        (torch.int64, False),
    ],
    ids=str,
)
def test_triton_computes_in_float32_and_below(has_triton, dtype, is_served):
    """Whole numbers are read where they are exact: `is_on_gpu` asks nothing of the dtype."""
    assert choice.takes_triton(OnGpu(dtype), "norms") == is_served
    with choice.use("triton"):
        assert choice.takes_triton(torch.zeros(1, dtype=dtype), "norms") == is_served
        assert choice.is_on_gpu(torch.zeros(1, dtype=dtype), "norms")


def test_the_innermost_path_is_the_one_taken(has_triton):
    x = torch.zeros(1)
    with choice.use("triton"):
        with choice.use("reference"):
            assert choice.takes_reference(x)
            assert not choice.takes_triton(x, "norms")
            with choice.use("triton"):
                assert choice.takes_triton(x, "norms")
                assert not choice.takes_reference(x)
            assert choice.takes_reference(x)
        assert choice.takes_triton(x, "norms")
        assert not choice.takes_reference(x)
    assert not choice.takes_triton(x, "norms")
    assert not choice.takes_reference(x)


def test_triton_ends_with_an_error(has_triton):
    with choice.use("reference"):
        with pytest.raises(_Called), choice.use("triton"):
            raise _Called
        assert choice.takes_reference()
        assert not choice.is_on_gpu(torch.zeros(1), "norms")
    assert not choice.is_on_gpu(torch.zeros(1), "norms")


def test_another_thread_stays_on_its_own_path(has_triton):
    found = []
    with choice.use("triton"):
        thread = threading.Thread(target=lambda: found.append(choice.is_on_gpu(torch.zeros(1), "norms")))
        thread.start()
        thread.join()
        assert choice.is_on_gpu(torch.zeros(1), "norms")
    assert found == [False]


def test_gradients_take_the_reference_whatever_the_path(has_triton):
    learned = torch.zeros(1, requires_grad=True)
    with choice.use("triton"):
        assert choice.takes_reference(torch.zeros(1), learned)
        with torch.no_grad():
            assert not choice.takes_reference(torch.zeros(1), learned)


def _batch():
    rows = Rows(max_rows=1, max_pages=1, vocab_size=8, scratch_page=0, device=torch.device("cpu"))
    rows.place(0, [1, 2], 1, RowSampling(temperature=1.0))
    rows.activate([0])
    return rows


def _advance():
    rows = _batch()
    rows.advance(torch.tensor([[2, 3]]), torch.tensor([[3, 4]]), torch.tensor([2]))
    return rows.length


def _enter():
    slots = heads.Slots(torch.zeros(1, 4, 4), torch.zeros(1, 4, 4), torch.tensor([1, 3]))
    q, (k, v) = torch.randn(2, 2, 4), torch.randn(2, 2, 1, 4)
    return heads.enter(q, k, v, norms=None, angles=(torch.ones(2, 1, 2), torch.zeros(2, 1, 2)), slots=slots)


ON_GPU = {  # what has a kernel in Triton, and the kernel's module and name
    "linear": (OPERATIONS["linear"], "linear", "linear"),
    "gated_linear": (
        lambda: linear.gated_linear(torch.randn(2, 4), torch.randn(6, 4), None, rows.silu_mul),
        "linear",
        "linear",
    ),
    "attend_paged": (OPERATIONS["attend_paged"], "attention", "attend"),
    "rms_norm": (OPERATIONS["rms_norm"], "rows", "rms_norm"),
    "silu_mul": (OPERATIONS["silu_mul"], "rows", "gate_mul"),
    "gelu_mul": (OPERATIONS["gelu_mul"], "rows", "gate_mul"),
    "enter": (_enter, "rows", "enter"),
    "open_heads": (
        lambda: heads.open_heads(torch.randn(2, 1, 4), torch.randn(2, 1, 4)),
        "rows",
        "open_heads",
    ),
    "gated_norm": (
        lambda: gated_delta.gated_norm(torch.randn(2, 3, 4), torch.randn(2, 12), torch.ones(4), 1e-6),
        "gated_delta",
        "gated_norm",
    ),
    "choose": (
        lambda: sampling.choose(
            torch.randn(1, 2, 8), torch.tensor([1]), torch.tensor([[2, 3]]), _batch().sampling()
        ),
        "sampling",
        "choose",
    ),
    "count_accepted": (
        lambda: acceptance.count_accepted(torch.tensor([[1, 2]]), torch.tensor([[0, 1]])),
        "acceptance",
        "count_accepted",
    ),
    "draw_accepted": (
        lambda: acceptance.draw_accepted(torch.ones(3), torch.tensor([1]), _batch().sampling()),
        "acceptance",
        "draw_accepted",
    ),
    "advance": (_advance, "acceptance", "advance"),
}


@pytest.mark.parametrize("name", ON_GPU)
def test_every_operation_of_a_gpu_takes_its_kernel_outside_and_its_reference_inside(name, monkeypatch):
    pytest.importorskip("triton")
    operation, module, kernel = ON_GPU[name]
    monkeypatch.setattr(importlib.import_module(f"blockdraft.kernels.triton.{module}"), kernel, _Kernel())
    with choice.use("triton"):
        with pytest.raises(_Called):
            operation()
        with choice.use("reference"):
            assert operation().isfinite().all()


def test_compiled_code_takes_the_references():
    """PyTorch 2.11's compiler does not see what `use` has set, so it must not matter there."""

    def traced(x):
        return x + choice.takes_reference(x)

    compiled = torch.compile(traced, backend="eager")
    assert compiled(torch.zeros(2)).tolist() == [1, 1]
    assert traced(torch.zeros(2)).tolist() == [0, 0]
