"""Without a card Triton's kernels run in its interpreter: Triton must know before anyone imports it."""

import os

import torch

from tests.not_run import (  # noqa: F401  # hooks: what a run leaves out is said at its end
    pytest_deselected,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
