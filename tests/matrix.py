"""Cases of a matrix: without a card, where kernels are interpreted, the default run has some of them."""

import pytest
import torch

HAS_CARD = torch.cuda.is_available()


def slow_but(cases, *kept):
    """`cases` for `parametrize`, all but `kept` marked slow; a case of several values is a tuple."""
    assert all(case in list(cases) for case in kept), "what is kept is one of the cases"
    return [case if HAS_CARD or case in kept else _slow(case) for case in cases]


def _slow(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
