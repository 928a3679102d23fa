"""What every launch asks of the device."""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch: a kernel's blocks become resident while the kernel before it ends.

    Every kernel waits (`gdc_wait`) before it touches what an earlier one may have written.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of the card; a constant where there is none, so that the interpreter takes the same paths."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
