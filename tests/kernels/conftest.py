"""A test that asks for `implementation` runs with each of them; `indirect=True` chooses some."""

import pytest

from tests.kernels.implementations import NAMES, implementation_of


@pytest.fixture(scope="session", params=NAMES)
def implementation(request):
    return implementation_of(request.param)
