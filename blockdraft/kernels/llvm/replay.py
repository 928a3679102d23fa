"""Runs a row of recorded kernels: no kernel begins before the one before it is done."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockdraft.kernels.llvm.jit import run_together
from blockdraft.kernels.llvm.pool import table
from blockdraft.kernels.llvm.tape import Call


class Program:
    """Kernels one after another, with the jobs they were recorded with."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls  # their jobs stay with them
        self._table = table([(call.address, call.job) for call in calls])

    def run(self) -> None:
        run_together(self._table, torch.get_num_threads())
