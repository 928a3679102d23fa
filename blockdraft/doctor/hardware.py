"""Findings of the machine itself: cards, processor, memory, what a container allows, disks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from blockdraft.doctor.finding import Finding, Level
from blockdraft.machine.machine import Gpu, Machine, may_have_gpu
from blockdraft.machine.remedies import driver_advice

GIB = 1 << 30
MIN_CAPABILITY = (8, 0)
MIN_MEMORY = 2 * GIB  # SmolLM2 in float32, its cache and Python
MIN_SHM = GIB  # several processes of one engine talk through it
MIN_OPEN_FILES = 4096  # a connection each, and the shards of a checkpoint
MIN_LOCKED = 64 * GIB  # what RDMA registers; a limit at all is the mistake
SPARE_SHARE = 0.5  # of a card: less is free where somebody else uses it
FULL_DISK, LOW_DISK = 2 * GIB, 40 * GIB  # nothing fits; a model of some size does not


def machine_findings(machine: Machine, root: Path = Path("/")) -> Iterator[Finding]:
    yield from _gpus(machine, root)
    yield from _processor(machine)
    yield from _memory(machine)


# ---- cards


def _gpus(machine: Machine, root: Path) -> Iterator[Finding]:
    if machine.gpu_error is not None:
        yield Finding(
            "machine",
            "driver",
            "problem",
            f"there is an NVIDIA driver, but it does not answer: {machine.gpu_error}",
            advice=driver_advice(machine),
        )
    for index, gpu in enumerate(machine.gpus):
        yield from _gpu(index, gpu)
    if len({gpu.name for gpu in machine.gpus}) > 1:
        yield Finding(
            "machine",
            "cards",
            "warning",
            "the cards differ: CUDA counts the fastest first, nvidia-smi by their place on the bus",
            advice="set CUDA_DEVICE_ORDER=PCI_BUS_ID, and CUDA_VISIBLE_DEVICES to the card you mean",
        )
    if not machine.gpus and machine.gpu_error is None:
        yield _no_gpu(root)


def _gpu(index: int, gpu: Gpu) -> Iterator[Finding]:
    capability = (
        "capability unknown" if gpu.capability == (0, 0) else "capability {}.{}".format(*gpu.capability)
    )
    card = gpu.card
    speed = "" if card is None else f", {card.bandwidth / 1e9:,.0f} GB/s"
    memory = f"{gpu.memory_bytes / GIB:.1f} GiB" + (" unified with the CPU's" if gpu.is_unified else "")
    says = f"{gpu.name}: {capability}, {memory} ({gpu.free_bytes / GIB:.1f} free){speed}, driver {gpu.driver}"
    name = f"GPU {index}"
    level, advice = _judged(gpu)
    yield Finding("machine", name, level, says, advice)
    if gpu.memory_bytes and gpu.free_bytes < SPARE_SHARE * gpu.memory_bytes:
        yield Finding(
            "machine",
            f"{name} in use",
            "warning",
            f"others hold {(gpu.memory_bytes - gpu.free_bytes) / GIB:.1f} GiB of its memory",
            advice="nvidia-smi names them; --gpu-memory-utilization counts their share as ours",
        )


def _judged(gpu: Gpu) -> tuple[Level, str | None]:
    if gpu.capability == (0, 0):
        return "warning", "neither the driver nor we know it: trust the kernels' checks (run without --quick)"
    if gpu.capability < MIN_CAPABILITY:
        return "problem", "our kernels need Ampere (8.0) or newer: use --device cpu"
    return "ok", None


def _no_gpu(root: Path) -> Finding:
    if (root / "dev/kfd").exists():
        return Finding(
            "machine",
            "GPU",
            "warning",
            "an AMD card: nothing here was ever run on one",
            advice="use --device cpu, or vLLM for ROCm",
        )
    if may_have_gpu(root):
        return Finding(
            "machine",
            "GPU",
            "warning",
            "there is a driver, but no card that this process may see",
            advice="look at CUDA_VISIBLE_DEVICES; in a container, at --gpus",
        )
    return Finding("machine", "GPU", "ok", "none: the native engine runs on the CPU, in float32")


# ---- processor and memory

FEATURES = {
    "aarch64": ("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
    "x86_64": ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile"),
}


def _processor(machine: Machine) -> Iterator[Finding]:
    cpu, cpus = machine.cpu, machine.limits.cpus
    matters = FEATURES.get(cpu.architecture, ())
    present = [name for name in matters if name in cpu.features]
    absent = [name for name in matters if name not in cpu.features]
    says = f"{cpu.name} ({cpu.architecture}), {cpu.num_cores} cores"
    says += f"; has {', '.join(present)}" if present else ""
    says += f"; lacks {', '.join(absent)}" if absent else ""
    yield Finding("machine", "CPU", "ok", says)
    if cpus is not None and cpus < cpu.num_cores:
        threads = max(1, int(cpus))
        yield Finding(
            "limits",
            "CPU quota",
            "warning",
            f"{cpus:g} CPUs may be used, but {cpu.num_cores} cores are seen: too many threads take turns",
            advice=f"set OMP_NUM_THREADS={threads}, or raise the quota (--cpus)",
        )


def _memory(machine: Machine) -> Iterator[Finding]:
    limit = machine.limits.memory_bytes
    bound = "" if limit is None else f"; the container's limit is {limit / GIB:.1f} GiB"
    says = f"{machine.memory_bytes / GIB:.1f} GiB free of {machine.total_bytes / GIB:.1f} GiB{bound}"
    if machine.memory_bytes >= MIN_MEMORY:
        yield Finding("machine", "memory", "ok", says)
        return
    yield Finding(
        "machine",
        "memory",
        "problem",
        says,
        advice=f"free {MIN_MEMORY / GIB:.0f} GiB at least, or raise the container's limit (--memory)",
    )


# ---- limits


def limit_findings(machine: Machine) -> Iterator[Finding]:
    limits = machine.limits
    where = "none" if limits.container is None else limits.container
    files = "unlimited" if limits.open_files is None else str(limits.open_files)
    shm = "no /dev/shm" if limits.shm_bytes is None else f"/dev/shm {limits.shm_bytes / GIB:.1f} GiB"
    yield Finding("limits", "container", "ok", f"{where}; {shm}; open files {files}")
    if limits.shm_bytes is not None and limits.shm_bytes < MIN_SHM and len(machine.gpus) > 1:
        yield Finding(
            "limits",
            "/dev/shm",
            "problem",
            f"{limits.shm_bytes >> 20} MiB of shared memory for {len(machine.gpus)} GPUs: NCCL and the "
            "workers of vLLM and SGLang end with 'Bus error'",
            advice="start the container with --ipc=host or --shm-size=16g",
        )
    if limits.open_files is not None and limits.open_files < MIN_OPEN_FILES:
        yield Finding(
            "limits",
            "open files",
            "warning",
            f"at most {limits.open_files}: a busy server runs out of them",
            advice="ulimit -n 65536 (docker: --ulimit nofile=65536)",
        )
    if limits.has_rdma and limits.locked_bytes is not None and limits.locked_bytes < MIN_LOCKED:
        yield Finding(
            "limits",
            "locked memory",
            "warning",
            f"at most {limits.locked_bytes / GIB:.2f} GiB, and there are RDMA adapters: NCCL between "
            "machines ends with 'Cannot allocate memory'",
            advice="ulimit -l unlimited (docker: --ulimit memlock=-1)",
            thread="eugr/spark-vllm-docker#389",
        )
    if limits.address_bytes is not None and machine.gpus:
        yield Finding(
            "limits",
            "address space",
            "problem",
            f"at most {limits.address_bytes / GIB:.0f} GiB: CUDA reserves more than the memory of all cards",
            advice="ulimit -v unlimited",
        )


# ---- disks


class Room(NamedTuple):
    """Of the disk that a folder lies on, or would."""

    free_bytes: int
    may_write: bool


def room_of(folder: Path) -> Room:
    """A folder that is not there yet is made in the nearest one that is."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return Room(shutil.disk_usage(folder).free, os.access(folder, os.W_OK))


def disk_findings(folders: Mapping[str, Path], room: Callable[[Path], Room] = room_of) -> Iterator[Finding]:
    """One per folder that fills up."""
    for name, folder in folders.items():
        found = room(folder)
        says = f"{folder}: {found.free_bytes / GIB:.1f} GiB free"
        if not found.may_write:
            yield Finding(
                "disk",
                name,
                "problem",
                f"{folder} cannot be written",
                advice=_MOVED[name].format("elsewhere"),
            )
        elif found.free_bytes < FULL_DISK:
            yield Finding("disk", name, "problem", says, advice=_MOVED[name].format("to a disk with room"))
        elif found.free_bytes < LOW_DISK and name != "triton":
            yield Finding(
                "disk",
                name,
                "warning",
                f"{says}; a model of 8 billion values in bfloat16 takes 16 GB, one of 31 billion 62 GB",
                advice=_MOVED[name].format("to a disk with room"),
            )
        else:
            yield Finding("disk", name, "ok", says)


_MOVED = {
    "downloads": "point BLOCKDRAFT_CACHE {}",
    "hub": "point HF_HOME {}",
    "triton": "point TRITON_CACHE_DIR {}",
}
