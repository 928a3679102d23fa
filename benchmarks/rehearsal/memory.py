"""Compares the memory of a plan with the memory that a ready server has taken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rehearsal.sheet import Failure, Found
from blockdraft.machine.machine import read_machine

# Of the planned bytes. A small model leaves a tenth of them to estimates (context, graphs, activations): 6 %
# were off on an H200. On a CPU the allocator and Python have a say.
TOLERANCE = {"cuda": 0.10, "cpu": 0.25}
PAGES_TOLERANCE = {"cuda": 0.05, "cpu": 0.25}  # on a CPU they follow what other programs leave free
EXTRA_PAGES = 2  # that the cache holds beside those it gives away
WINDOWS = "exact windows"  # of compressed keys: the engine counts them as its cache's, a plan apart
NOT_RESIDENT = ("target cache", "drafter cache", WINDOWS)  # on a CPU a page is there once it is written
MB = 1e6


def kind_of(device: str) -> str:
    return device.partition(":")[0]


def free_bytes(device: str) -> int | None:
    """Return the card's free bytes; None on a CPU, or if the driver does not tell."""
    if kind_of(device) != "cuda":
        return None
    number, gpus = int(device.partition(":")[2] or 0), read_machine().gpus
    return gpus[number].free_bytes if number < len(gpus) else None


def compare(
    plan: Mapping[str, object], engine: Mapping[str, object], *, pid: int | None, free_before: int | None
) -> Found:
    """Raises Failure beyond the tolerances above. Without `pid`, a CPU's cache is compared and no more."""
    device = str(engine["device"])
    kind = kind_of(device)
    _check_cache(plan, engine, PAGES_TOLERANCE[kind])
    planned, taken = _planned(plan, kind), _taken(device, pid, free_before)
    if taken is None:
        unknown = "" if pid is None else "; what the process has taken is unknown here"
        return Found(f"the cache is as planned{unknown}")
    off = taken / planned - 1
    where = "on the card" if kind == "cuda" else "of memory, the cache apart"
    allowed = f"±{TOLERANCE[kind]:.0%} allowed"
    says = f"{taken / MB:,.0f} MB taken, {planned / MB:,.0f} planned {where}: {off:+.1%} ({allowed})"
    if abs(off) > TOLERANCE[kind]:
        raise Failure(says)
    return Found(says, {"planned_bytes": planned, "taken_bytes": taken, "tolerance": TOLERANCE[kind]})


def _check_cache(plan: Mapping[str, object], engine: Mapping[str, object], tolerance: float) -> None:
    """Bytes of a page are exact; how many there are depends on what else runs."""
    per_token = plan["cache"]["bytes_per_token"]  # type: ignore[index]
    expected_pages = plan["plan"]["num_pages"]  # type: ignore[index]
    num_pages, num_bytes = engine["num_pages"], engine["num_cache_bytes"]
    expected = (num_pages + EXTRA_PAGES) * engine["page_size"] * per_token  # type: ignore[operator]
    expected += sum(item["num_bytes"] for item in _items(plan) if item["name"] == WINDOWS)
    if num_bytes != expected:
        raise Failure(f"{num_pages} pages take {num_bytes:,} bytes, the plan's arithmetic says {expected:,}")
    if abs(num_pages / expected_pages - 1) > tolerance:
        raise Failure(
            f"the cache has {num_pages:,} pages, {expected_pages:,} were planned (±{tolerance:.0%})"
        )


def _items(plan: Mapping[str, object]) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = plan["memory"]["items"]  # type: ignore[index]
    return found


def _planned(plan: Mapping[str, object], kind: str) -> int:
    left_out = NOT_RESIDENT if kind == "cpu" else ()
    return sum(item["num_bytes"] for item in _items(plan) if item["name"] not in left_out)


def _taken(device: str, pid: int | None, free_before: int | None) -> int | None:
    if kind_of(device) == "cuda":
        free_now = free_bytes(device)
        return None if free_before is None or free_now is None else free_before - free_now
    if pid is None:
        return None
    engine = _engine_of(pid)
    resident = anonymous_bytes(engine)
    return None if resident is None else resident - _bare_bytes() + mapped_weights(engine)


def _engine_of(pid: int) -> int:
    """Return the process of a server's engine: its first child."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = children.read_text().split() if children.exists() else []
    return int(found[0]) if found else pid


def anonymous_bytes(pid: int | str) -> int | None:
    """Resident memory that is no file's; None where there is no /proc."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return None
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def mapped_weights(pid: int | str) -> int:
    """Resident memory of weights that are read where their file is mapped, as packed ones are on a CPU."""
    num_bytes, is_weights = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # the head of a mapping, which ends with its file
            is_weights = line.endswith(".safetensors")
        elif is_weights and name in ("Rss:", "Anonymous:"):  # the second is among anonymous_bytes
            num_bytes += int(values[0]) * 1024 * (1 if name == "Rss:" else -1)
    return num_bytes


def _bare_bytes() -> int:
    """Return the memory of a process that only imported torch: no plan counts it."""
    code = "import torch\nprint(open('/proc/self/status').read().partition('RssAnon:')[2].split()[0])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout) * 1024
