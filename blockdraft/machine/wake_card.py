"""Waking a card while Python is still importing."""

from __future__ import annotations

import ctypes
from threading import Thread


def wake_card(device: str) -> None:
    """Let the driver make its context on `device`, "auto" or "cuda:1", meanwhile; it lasts half a second.

    PyTorch takes the same context over. Where there is no card, it is PyTorch that says so.
    """
    if device == "cpu":
        return
    Thread(target=_make_context, args=(_index(device),), name="wake-card", daemon=True).start()


def _make_context(index: int) -> None:
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
