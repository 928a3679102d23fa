"""PyTorch's imports take seconds: how they take less, and what the driver can do meanwhile."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from blockdraft.machine.machine import may_have_gpu


@contextmanager
def quick_imports() -> Iterator[None]:
    """PyTorch is made of a thousand modules, which are no garbage: nobody need look through them."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def wake_card(device: str) -> None:
    """Have the context of `device` ("auto", "cuda:1") made on a thread of its own; PyTorch takes it over."""
    if device != "cpu" and may_have_gpu():
        Thread(target=_make_context, args=(_index(device),), name="wake-card", daemon=True).start()


def _make_context(index: int) -> None:
    """What is missing here, PyTorch misses too, and says so."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    card, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(card), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), card)


def _index(device: str) -> int:
    index = device.rpartition(":")[2]
    return int(index) if index.isdigit() else 0
