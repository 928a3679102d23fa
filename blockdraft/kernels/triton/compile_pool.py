"""Compiles many kernels concurrently, in worker processes, as threads would wait for Python's lock."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from blockdraft.settings.settings import child_environment

MAX_WORKERS = 16
TIMEOUT_S = 120  # the longest wait for a kernel; after it, the start compiles the rest itself
NICENESS = 10
WORKERS = (sys.executable, "-m", "blockdraft.kernels.triton.compile_workers")

Progress = Callable[[int, int, str], None]  # finished kernels, all kernels, name of the last


class CompilePool:
    """Worker processes and their queue of kernels. The start compiles the kernels that they do not finish."""

    def __init__(self, num_workers: int) -> None:
        self.num_asked = self.num_done = 0
        self.errors: list[str] = []  # kernels that do not compile: name and error
        self._asked: set[str] = set()
        self._jobs: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
        self._process = _started(num_workers)
        for run in (self._write, self._read):
            threading.Thread(target=run, daemon=True).start()

    def ask(self, module: str, name: str, specialization: str, target: GPUTarget) -> None:
        """Queue a kernel to be compiled for `target`, unless it was queued before."""
        if specialization not in self._asked:
            self._asked.add(specialization)
            self.num_asked += 1
            asked = {"module": module, "name": name, "specialization": specialization, "target": vars(target)}
            self._jobs.put(json.dumps(asked))

    def wait(self, tell: Progress = lambda done, total, name: None) -> None:
        """Wait until all kernels are compiled, no worker is left, or no kernel is finished for TIMEOUT_S."""
        idle_s = 0
        while self.num_done < self.num_asked and idle_s < TIMEOUT_S:
            try:
                name, error = self._done.get(timeout=1)
            except queue.Empty:
                if self._process.poll() is not None:
                    return
                idle_s += 1
                continue
            idle_s, self.num_done = 0, self.num_done + 1
            if error is not None:
                self.errors.append(f"{name}: {error}")
            tell(self.num_done, self.num_asked, name)

    def close(self) -> None:
        """Kill the workers."""
        self._jobs.put(None)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _write(self) -> None:
        """Write the queued jobs to the workers, in a thread of its own: a pipe holds only a few lines."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the workers have ended
            while (job := self._jobs.get()) is not None:
                self._process.stdin.write(job + "\n")
                self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # output of the compiler, not an answer
                answer = json.loads(line)
                self._done.put((answer["name"], answer["error"]))


def _started(num_workers: int) -> subprocess.Popen[str]:
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(
        (*WORKERS, str(num_workers)),
        stdin=pipe,
        stdout=pipe,
        stderr=nowhere,
        env=child_environment({}),
        encoding="utf-8",
        start_new_session=True,  # to end with all its children
    )
    os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)  # the start runs meanwhile and goes first
    return process


@contextmanager
def collecting(pool: CompilePool) -> Iterator[None]:
    """Queue our kernels in `pool` while this context is open, instead of compiling and running them.

    All new tensors and indexes are zero meanwhile. PyTorch's own code still runs, and on a GPU an index out
    of bounds would end the process.
    """

    def skip(*, key: str, fn: Any, compile: dict[str, Any], **others: object) -> bool:  # as Triton names them
        # Triton would serialise a type as its name, which reads like a string.
        assert not any(isinstance(value, tl.dtype) for value in compile["constants"].values())
        pool.ask(fn.module, fn.name, compile["specialization_data"], target)
        kernels = fn.jit_function.device_caches[compile["device"]][0]
        kernels[key] = _NotCompiled()  # otherwise Triton would call this again at every launch
        left_out.append((kernels, key))
        return True

    target = driver.active.get_current_target()
    left_out: list[tuple[dict[str, Any], str]] = []
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = skip
    try:
        with _Zeroed():
            yield
    finally:
        knobs.runtime.jit_cache_hook = before
        for kernels, key in left_out:
            del kernels[key]


class _NotCompiled:
    """A placeholder for a compiled kernel; running it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args: object) -> None:
        pass

    def run(self, *args: object) -> None:
        pass


class _Zeroed(TorchDispatchMode):
    """A mode of PyTorch in which new memory and all indexes are zero."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if any(word in name for word in ("index", "gather", "scatter", "embedding")):
            args = (args[0], *tree_map_only(torch.Tensor, _zero_if_whole, args[1:]))
        made = function(*args, **(kwargs or {}))
        if "empty" in name and isinstance(made, torch.Tensor):
            made.zero_()
        return made


def _zero_if_whole(tensor: Tensor) -> Tensor:
    is_whole = tensor.dtype in (torch.int64, torch.int32)
    return torch.zeros_like(tensor) if is_whole else tensor
