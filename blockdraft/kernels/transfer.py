"""Copies values from the host to a device without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a copy of `values` on `device`; on a GPU the copy is queued after earlier work."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def array_to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy of an array on `device`, in the array's dtype, like `to_device`."""
    held = torch.from_numpy(values)
    return (held.pin_memory() if device.type == "cuda" else held).to(device, non_blocking=True)
