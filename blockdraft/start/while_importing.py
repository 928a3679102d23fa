"""What the driver and the disk can do while Python imports PyTorch, which takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util
from threading import Thread

from blockdraft.machine.machine import may_have_gpu


def prepare_card(device: str) -> None:
    """Begin, on a thread of its own, what a start on `device` ("auto", "cuda:1") would wait for later."""
    if device != "cpu" and may_have_gpu():
        Thread(target=_prepare, args=(_index(device),), name="prepare-card", daemon=True).start()


def _prepare(index: int) -> None:
    _make_context(index)
    _hash_triton()


def _make_context(index: int) -> None:
    """The context that PyTorch takes over. What is missing here, PyTorch misses too, and says so."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    card, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(card), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), card)


def _hash_triton() -> None:
    """Triton's hash of its own files, which is part of every kernel's name and computed once in a process."""
    if importlib.util.find_spec("triton") is not None:
        from triton.runtime.cache import triton_key

        triton_key()


def _index(device: str) -> int:
    index = device.rpartition(":")[2]
    return int(index) if index.isdigit() else 0
