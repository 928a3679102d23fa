"""Whether the kernels in `kernels/llvm` can serve, and the reason where they cannot."""

from __future__ import annotations

import ctypes
import importlib.util
import platform

import torch


def why_no_llvm(dtype: torch.dtype, device: torch.device) -> str | None:
    """None where the CPU kernels are known to win, else why the PyTorch reference is taken."""
    if device.type != "cpu":
        return f"the CPU kernels are not for '{device.type}'"
    if dtype not in (torch.float32, torch.float64):
        return f"the CPU kernels compute in float32 or float64, not {dtype}"
    if platform.machine() != "aarch64":
        return f"the CPU kernels were never measured on {platform.machine()}"
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed (pip install llvmlite)"
    if not hasattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel"):
        return "this PyTorch was not built with GNU OpenMP"
    return None


def extra_features() -> tuple[str, ...]:
    return ("+dotprod",) if platform.machine() == "aarch64" else ()
