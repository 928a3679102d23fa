"""Options of kernel launches, and limits of the device."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the blocks of the next kernel become resident; see `has_pdl`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the writes of earlier kernels are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_and_wait(PDL: tl.constexpr):
    """Do `let_next_start`, then `wait_for_previous`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Return whether the device has programmatic dependent launch.

    With it, a kernel's blocks become resident while the previous kernel ends. So every kernel waits
    (`gdc_wait`) before it accesses memory that an earlier kernel may have written.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Return whether the device has Hopper's products of four warps; later cards have others."""
    return has_pdl(device) and torch.cuda.get_device_capability(device)[0] == 9


def overlap(device: torch.device) -> dict[str, bool]:
    """Return the options of the kernel and of Triton that let a launch overlap with adjacent launches."""
    pdl = has_pdl(device)
    return {"PDL": pdl, "launch_pdl": pdl}


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors, or a constant if there is no GPU, for the interpreter."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory of a multiprocessor, or those of an H200 if there is no GPU."""
    if device.type != "cuda":
        return 228 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
