"""What every launch asks of the device."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the blocks of the kernel behind this one become resident; see `has_pdl`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all that earlier kernels wrote can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_and_wait(PDL: tl.constexpr):
    """`let_next_start`, then `wait_for_previous`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch: a kernel's blocks become resident while the kernel before it ends.

    Every kernel waits (`gdc_wait`) before it touches what an earlier one may have written.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def overlap(device: torch.device) -> dict[str, bool]:
    """The options of a launch that say whether it overlaps with its neighbours: the kernel's and Triton's."""
    pdl = has_pdl(device)
    return {"PDL": pdl, "launch_pdl": pdl}


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of the card; a constant where there is none, so that the interpreter takes the same paths."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes a multiprocessor has for its blocks; that of an H200 where there is none."""
    if device.type != "cuda":
        return 228 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
