"""Findings about the machine: cards, processor, memory, container limits, disks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from blockdraft.doctor.finding import Finding, Level
from blockdraft.machine.machine import Gpu, Machine, may_have_gpu
from blockdraft.machine.remedies import driver_advice
from blockdraft.planner.replicas import is_free

GIB = 1 << 30
MIN_CAPABILITY = (8, 0)
MIN_MEMORY = 2 * GIB  # for SmolLM2 in float32, its cache, and Python
MIN_SHM = GIB  # processes of one engine communicate through /dev/shm
MIN_OPEN_FILES = 4096  # one per connection and per shard of a checkpoint
MIN_LOCKED = 64 * GIB  # RDMA registers memory; any limit is wrong
SPARE_SHARE = 0.5  # of a card's memory: if less is free, other programs use the card
FULL_DISK, LOW_DISK = 2 * GIB, 40 * GIB  # too little for anything; too little for a large model


def machine_findings(machine: Machine, root: Path = Path("/")) -> Iterator[Finding]:
    yield from _gpus(machine, root)
    yield from _processor(machine)
    yield _memory(machine)


# ---- cards


def _gpus(machine: Machine, root: Path) -> Iterator[Finding]:
    if machine.gpu_error is not None:
        says = f"there is an NVIDIA driver, but it does not answer: {machine.gpu_error}"
        yield Finding("machine", "driver", "problem", says, driver_advice(machine))
    elif not machine.gpus:
        yield _no_gpu(root)
    for index, gpu in enumerate(machine.gpus):
        yield from _gpu(f"GPU {index}", gpu)
    if len({gpu.name for gpu in machine.gpus}) > 1:
        says = "the cards differ: CUDA numbers the fastest first, nvidia-smi by place on the bus"
        advice = "set CUDA_DEVICE_ORDER=PCI_BUS_ID, and CUDA_VISIBLE_DEVICES to the card you mean"
        yield Finding("machine", "cards", "warning", says, advice)
    elif len(machine.gpus) > 1:
        num_free = sum(map(is_free, machine.gpus))
        says = f"{num_free} of {len(machine.gpus)} cards are free for an engine each: serve --replicas auto"
        yield Finding("machine", "replicas", "ok", says)


def _gpu(name: str, gpu: Gpu) -> Iterator[Finding]:
    level: Level = "ok"
    capability, advice = "{}.{}".format(*gpu.capability), None
    if gpu.capability == (0, 0):
        level, capability = "warning", "unknown"
        advice = (
            "the driver and our table do not know this card: rely on the kernel checks (run without --quick)"
        )
    elif gpu.capability < MIN_CAPABILITY:
        level, advice = "problem", "our kernels need Ampere (8.0) or newer: use --device cpu"
    speed = "" if gpu.card is None else f", {gpu.card.bandwidth / 1e9:,.0f} GB/s"
    memory = f"{gpu.memory_bytes / GIB:.1f} GiB" + (" unified with the CPU's" if gpu.is_unified else "")
    says = f"{gpu.name}: capability {capability}, {memory} ({gpu.free_bytes / GIB:.1f} free){speed}"
    yield Finding("machine", name, level, f"{says}, driver {gpu.driver}", advice)
    if gpu.memory_bytes and gpu.free_bytes < SPARE_SHARE * gpu.memory_bytes:
        says = f"other programs use {(gpu.memory_bytes - gpu.free_bytes) / GIB:.1f} GiB of its memory"
        advice = "nvidia-smi names them; --gpu-memory-utilization counts their share as ours"
        yield Finding("machine", f"{name} in use", "warning", says, advice)


def _no_gpu(root: Path) -> Finding:
    if (root / "dev/kfd").exists():
        says, advice = "an AMD card: blockdraft was never tested on one", "use --device cpu, or vLLM for ROCm"
        return Finding("machine", "GPU", "warning", says, advice)
    if may_have_gpu(root):
        says = "there is a driver, but no card that this process may see"
        advice = "look at CUDA_VISIBLE_DEVICES; in a container, at --gpus"
        return Finding("machine", "GPU", "warning", says, advice)
    return Finding("machine", "GPU", "ok", "none: the native engine runs on the CPU")


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
        says = f"the quota is {cpus:g} CPUs, but {cpu.num_cores} cores are visible: too many threads compete"
        advice = f"set OMP_NUM_THREADS={max(1, int(cpus))}, or raise the quota (--cpus)"
        yield Finding("limits", "CPU quota", "warning", says, advice)


def _memory(machine: Machine) -> Finding:
    limit = machine.limits.memory_bytes
    bound = "" if limit is None else f"; the container's limit is {limit / GIB:.1f} GiB"
    says = f"{machine.memory_bytes / GIB:.1f} GiB free of {machine.total_bytes / GIB:.1f} GiB{bound}"
    if machine.memory_bytes >= MIN_MEMORY:
        return Finding("machine", "memory", "ok", says)
    advice = f"free {MIN_MEMORY / GIB:.0f} GiB at least, or raise the container's limit (--memory)"
    return Finding("machine", "memory", "problem", says, advice)


# ---- limits


def limit_findings(machine: Machine) -> Iterator[Finding]:
    limits = machine.limits
    where = "none" if limits.container is None else limits.container
    files = "unlimited" if limits.open_files is None else str(limits.open_files)
    shm = "no /dev/shm" if limits.shm_bytes is None else f"/dev/shm {limits.shm_bytes / GIB:.1f} GiB"
    yield Finding("limits", "container", "ok", f"{where}; {shm}; open files {files}")
    num_gpus = len(machine.gpus)
    if limits.shm_bytes is not None and limits.shm_bytes < MIN_SHM and num_gpus > 1:
        says = (
            f"{limits.shm_bytes >> 20} MiB of shared memory for {num_gpus} GPUs: NCCL and the workers of "
            "vLLM and SGLang end with 'Bus error'"
        )
        advice = "start the container with --ipc=host or --shm-size=16g"
        yield Finding("limits", "/dev/shm", "problem", says, advice)
    if limits.open_files is not None and limits.open_files < MIN_OPEN_FILES:
        says = f"at most {limits.open_files}: too few for a busy server"
        advice = "ulimit -n 65536 (docker: --ulimit nofile=65536)"
        yield Finding("limits", "open files", "warning", says, advice)
    if limits.has_rdma and limits.locked_bytes is not None and limits.locked_bytes < MIN_LOCKED:
        says = (
            f"at most {limits.locked_bytes / GIB:.2f} GiB, and there are RDMA adapters: NCCL between "
            "machines ends with 'Cannot allocate memory'"
        )
        advice, thread = "ulimit -l unlimited (docker: --ulimit memlock=-1)", "eugr/spark-vllm-docker#389"
        yield Finding("limits", "locked memory", "warning", says, advice, thread)
    if limits.address_bytes is not None and machine.gpus:
        most = f"{limits.address_bytes / GIB:.0f} GiB"
        says = f"at most {most}: CUDA reserves more than the memory of all cards"
        yield Finding("limits", "address space", "problem", says, "ulimit -v unlimited")


# ---- disks

_VARIABLES = {"downloads": "BLOCKDRAFT_CACHE", "hub": "HF_HOME", "triton": "TRITON_CACHE_DIR"}


def disk_findings(folders: Mapping[str, Path]) -> Iterator[Finding]:
    """Yield one finding per cache folder. For a missing folder, check its nearest existing parent."""
    for name, folder in folders.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free_bytes = shutil.disk_usage(there).free
        says, advice = f"{folder}: {free_bytes / GIB:.1f} GiB free", f"point {_VARIABLES[name]}"
        if not os.access(there, os.W_OK):
            yield Finding("disk", name, "problem", f"{folder} cannot be written", f"{advice} elsewhere")
        elif free_bytes < FULL_DISK:
            yield Finding("disk", name, "problem", says, f"{advice} to a disk with room")
        elif free_bytes < LOW_DISK and name != "triton":
            says += "; a model of 8 billion values in bfloat16 takes 16 GB, one of 31 billion 62 GB"
            yield Finding("disk", name, "warning", says, f"{advice} to a disk with room")
        else:
            yield Finding("disk", name, "ok", says)
