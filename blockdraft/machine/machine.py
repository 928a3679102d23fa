"""Describes this machine without torch: memory, cards, processor."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blockdraft.machine import nvml
from blockdraft.machine.cards import Capability, Card, find_card
from blockdraft.machine.limits import Limits, read_limits, read_text
from blockdraft.settings.settings import DEFAULTS, visible_gpus

ROOT = Path("/")
NO_LIMITS = Limits()
DRIVERS = ("dev/nvidiactl", "dev/kfd", "dev/dxg")  # NVIDIA's, AMD's, WSL's

# Share of unified memory for vLLM and SGLang, which use more than their setting.
EXTERNAL_MEMORY_SHARE = 0.8
# Names by CPU implementer and part, for kernels that give no name.
ARM_CPUS = {
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
    ("0x41", "0xd84"): "Neoverse V3",
    ("0x41", "0xd85"): "Cortex-X925",
    ("0x41", "0xd87"): "Cortex-A725",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. A unified card shares main memory; its free memory is what Linux calls available."""

    name: str
    capability: Capability  # (0, 0) if neither the driver nor our table knows it
    memory_bytes: int
    free_bytes: int
    driver: str
    is_unified: bool = False

    @property
    def card(self) -> Card | None:
        """This card's entry in the table of known cards; None if it has none."""
        return find_card(self.name, self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor, and the number of cores that we may use."""

    name: str
    architecture: str
    num_cores: int  # that this process may run on
    features: frozenset[str] = frozenset()  # as /proc/cpuinfo names them


UNKNOWN_CPU = Cpu(name="", architecture="", num_cores=1)


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts about a machine that a plan needs."""

    memory_bytes: int  # available by the kernel's estimate and the container's limit
    gpu_bytes: int = 0  # memory of the first GPU, in all and free; 0 without a GPU
    gpu_free_bytes: int = 0
    total_bytes: int = 0  # main memory; 0 if unknown
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str | None = None  # why the driver does not answer; None if it does, or is not installed
    cuda: str | None = None  # the newest CUDA that the driver runs
    cpu: Cpu = UNKNOWN_CPU
    limits: Limits = NO_LIMITS
    kernel: str = ""

    @property
    def is_unified(self) -> bool:
        return any(gpu.is_unified for gpu in self.gpus)


def external_memory_share(asked: float, machine: Machine | None) -> float:
    """Return the share of a card's memory for vLLM and SGLang.

    It is `asked`, except that unified memory has a smaller default.
    """
    default = DEFAULTS["gpu_memory_utilization"]
    return EXTERNAL_MEMORY_SHARE if asked == default and machine is not None and machine.is_unified else asked


def read_machine(root: Path = ROOT, query: Callable[[str | None], nvml.DriverReply] = nvml.query) -> Machine:
    """Describe this machine; never raise. Tests set `root` (of /proc and /sys) and `query` (the driver)."""
    limits = read_limits(root)
    available, total = _memory(root)
    answer = nvml.DriverReply()
    if _has_driver(root, "dev/nvidiactl", "dev/dxg"):
        answer = query(visible_gpus())
    gpus = tuple(_gpu(device, available, total) for device in answer.devices)
    free = available if limits.memory_free_bytes is None else min(available, limits.memory_free_bytes)
    return Machine(
        memory_bytes=free,
        gpu_bytes=gpus[0].memory_bytes if gpus else 0,
        gpu_free_bytes=gpus[0].free_bytes if gpus else 0,
        total_bytes=total,
        gpus=gpus,
        gpu_error=answer.error,
        cuda=answer.cuda,
        cpu=_cpu(root),
        limits=limits,
        kernel=read_text(root / "proc/sys/kernel/osrelease").strip(),
    )


def read_holders(
    index: int,
    root: Path = ROOT,
    ask: Callable[[str | None, int], tuple[nvml.Holder, ...]] = nvml.holders,
) -> tuple[nvml.Holder, ...]:
    """Return the other processes that use card `index`, the largest first; () if the driver hides them."""
    if not _has_driver(root, "dev/nvidiactl", "dev/dxg"):
        return ()
    return tuple(holder for holder in ask(visible_gpus(), index) if holder.pid != os.getpid())


def process_name(pid: int) -> str:
    """Return the program name of a process; "" if it is unreadable."""
    return read_text(ROOT / f"proc/{pid}/comm").strip()


def free_port() -> int:
    """Return a free port of the loopback address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def may_have_gpu(root: Path = ROOT) -> bool:
    """Return True if a GPU driver is present; torch may still find no device."""
    return _has_driver(root, *DRIVERS)


def _has_driver(root: Path, *names: str) -> bool:
    return any((root / name).exists() for name in names)


def _gpu(device: nvml.Device, available: int, total: int) -> Gpu:
    """Describe a card. Our table fills in what the driver hides, which is common with unified memory."""
    card = find_card(device.name, device.memory_bytes or 0)
    # A unified card that is not in the table: its driver reports no memory.
    is_unified = device.memory_bytes is None if card is None else card.is_unified
    if is_unified:
        memory, free = total, available
    else:
        memory = device.memory_bytes or (0 if card is None else card.memory_bytes)
        free = memory if device.free_bytes is None else device.free_bytes
    capability = device.capability or ((0, 0) if card is None else card.capability)
    return Gpu(device.name, capability, memory, free, device.driver, is_unified)


def _memory(root: Path) -> tuple[int, int]:
    """Return the available and the total bytes of memory."""
    found = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdigit():
            found[name] = int(number[0]) * 1024
    if "MemAvailable" in found:
        return found["MemAvailable"], found.get("MemTotal", found["MemAvailable"])
    total = _installed_memory()
    return total // 2, total


def _installed_memory() -> int:
    """Return the installed memory of a system without /proc."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kilobytes = ctypes.c_ulonglong()  # Windows; mypy looks at Linux
    ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes))  # type: ignore[attr-defined]
    return kilobytes.value << 10


def _cpu(root: Path) -> Cpu:
    fields: dict[str, str] = {}
    for line in read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    features = fields.get("flags") or fields.get("features") or ""
    part = (fields.get("cpu implementer", ""), fields.get("cpu part", ""))
    return Cpu(
        name=fields.get("model name") or ARM_CPUS.get(part) or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        features=frozenset(features.split()),
    )
