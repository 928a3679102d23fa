"""A test that asks for `implementation` runs with each of them; `indirect=True` chooses some."""

import importlib.util

import pytest
import torch

from tests.kernels.implementations import NAMES, implementation_of

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_triton_*"]


@pytest.fixture(scope="session", params=NAMES)
def implementation(request):
    return implementation_of(request.param)


@pytest.fixture
def threads():
    """Return a function that sets the number of threads; restore it afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
