"""Speeds up the imports of PyTorch, which take seconds, and starts the driver meanwhile."""

from __future__ import annotations

import ctypes
import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread, current_thread, main_thread


@contextmanager
def quick_imports() -> Iterator[None]:
    """Turn off garbage collection during imports, because PyTorch's thousand modules are not garbage."""
    gc.disable()
    try:
        with ended_by_ctrl_c():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once during imports, without a KeyboardInterrupt.

    A module might catch and lose that exception, or stay half imported.
    """
    is_main = current_thread() is main_thread()
    is_caught = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_caught:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_caught:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def wake_card(device: str) -> None:
    """Make the CUDA context of `device` ("auto", "cuda:1") on its own thread. PyTorch takes it over."""
    from blockdraft.machine.machine import may_have_gpu

    if device != "cpu" and may_have_gpu():
        Thread(target=_make_context, args=(_index(device),), name="wake-card", daemon=True).start()


def _make_context(index: int) -> None:
    """Make the CUDA context of a GPU. Ignore errors: PyTorch gets them too, and reports them."""
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
