"""Without a card Triton's kernels run in its interpreter: Triton must know before anyone imports it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
