"""What this machine has, read without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts a plan is made from."""

    memory_bytes: int  # free for new work, as the kernel estimates it
    gpu_bytes: int = 0  # of the GPU in use, and what of it is free; 0: no GPU
    gpu_free_bytes: int = 0


def read_machine() -> Machine:
    return Machine(memory_bytes=_available_bytes())


def may_have_gpu() -> bool:
    """Whether a driver is there, NVIDIA's, AMD's or that of WSL; torch may find no device all the same."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def _available_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
