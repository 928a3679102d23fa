"""Runs a row of recorded kernels: every thread goes through all of them, and none begins one too early."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from blockdraft.kernels.llvm.compiler import kernel
from blockdraft.kernels.llvm.jit import Jit, gomp
from blockdraft.kernels.llvm.language import Int, Longs, invoke, invoked
from blockdraft.kernels.llvm.tape import Call


class Program:
    """Kernels one after another, with the jobs they were recorded with."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._table = (ctypes.c_int64 * (2 * len(calls)))()
        for index, call in enumerate(calls):
            self._table[2 * index : 2 * index + 2] = [call.address, ctypes.addressof(call.job)]
        barrier, number = (ctypes.cast(one, ctypes.c_void_p).value for one in _thread_functions())
        self._run = _runner().prepared(
            len(calls), ctypes.addressof(self._table), int(torch.get_num_threads() > 1), barrier, number
        )

    def run(self) -> None:
        self._run()


@cache
def _runner() -> Jit:
    return Jit(run_calls)


@cache
def _thread_functions() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]:
    return gomp().GOMP_barrier, gomp().omp_get_thread_num


@kernel
def run_calls(count: Int, calls: Longs, has_others: Int, barrier: Longs, number: Longs) -> None:
    """Calls are pairs of addresses: of a kernel, and of its job, whose counter is set back afterwards."""
    is_first = invoked(number) == 0
    for i in range(count):
        job = calls.pointer(2 * i + 1)
        invoke(calls.pointer(2 * i), job)
        if has_others != 0:
            invoke(barrier)
        if is_first:
            job[0] = 0
