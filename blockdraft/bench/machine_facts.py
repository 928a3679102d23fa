"""Describes the measuring machine without torch."""

from __future__ import annotations

import platform
from pathlib import Path

from blockdraft.machine.machine import read_machine
from blockdraft.machine.nvml import output_of, run_smi


def machine_facts() -> dict[str, object]:
    """Return facts about this machine, which measures; the server may run on another machine."""
    found = read_machine()
    return {
        "platform": platform.platform(),
        "architecture": platform.machine(),
        "cpu": _cpu_name(),
        "num_cpus": found.cpu.num_cores,
        "memory_available_bytes": found.memory_bytes,
        "gpus": _gpus(),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    for line in [*text.splitlines(), *output_of("lscpu").splitlines()]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "model name":
            return value.strip()
    return output_of("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.machine()


def _gpus() -> list[dict[str, str]]:
    names = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")
    lines = run_smi(names, units=True).splitlines()
    found = [[value.strip() for value in line.split(",")] for line in lines]
    keys = ("name", "driver", "memory", "power_limit", "max_clock")
    return [dict(zip(keys, values, strict=True)) for values in found if len(values) == len(keys)]
