"""use("reference"): every operation leaves its kernel aside, in this thread and only inside the `with`."""

import threading

import pytest
import torch

from blockdraft.kernels import attention, choice, gated_delta, linear, rows


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
