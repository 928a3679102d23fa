"""A test that asks for `implementation` runs with each of them; `indirect=True` chooses some."""

import importlib.util

import pytest

from tests.kernels.implementations import NAMES, implementation_of

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_triton_*"]


@pytest.fixture(scope="session", params=NAMES)
def implementation(request):
    return implementation_of(request.param)
