"""Reads the limits of this process: cgroup memory and CPUs, shared memory, ulimits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number just below 2**63


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of this process. None means no limit, or an unreadable one."""

    memory_bytes: int | None = None  # limit of the tightest cgroup
    memory_free_bytes: int | None = None  # the least of any limited cgroup; file caches count as free
    cpus: float | None = None  # CPU seconds per second
    shm_bytes: int | None = None  # size of /dev/shm
    open_files: int | None = None
    locked_bytes: int | None = None
    address_bytes: int | None = None
    has_rdma: bool = False  # has RDMA adapters, which need locked memory
    container: str | None = None  # "docker", "podman", "kubernetes", ...


def read_limits(root: Path) -> Limits:
    """Read the limits of the process whose /proc, /sys and /dev lie under `root`."""
    limits = list(_memory_limits(root))
    ulimits = _ulimits(root)
    return Limits(
        memory_bytes=min((limit for limit, _ in limits), default=None),
        memory_free_bytes=min((free for _, free in limits), default=None),
        cpus=min(_cpu_limits(root), default=None),
        shm_bytes=_size_of(root / "dev/shm"),
        open_files=ulimits.get("Max open files"),
        locked_bytes=ulimits.get("Max locked memory"),
        address_bytes=ulimits.get("Max address space"),
        has_rdma=(root / "dev/infiniband").is_dir(),
        container=_container(root),
    )


def read_text(path: Path) -> str:
    """Return the file's text; empty if it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- cgroups


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of our cgroups (versions 1 and 2), innermost first.

    A container sees its own group at the top of the mount, but may read the host's path: try both.
    """
    base = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller in names.split(","):
            mounts = [base / name for name in dict.fromkeys((names, *names.split(",")))]
        elif number == "0" and not names:
            mounts = [base, base / "unified"]
        else:
            continue
        for mount in mounts:
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for length in range(len(parts), -1, -1):
                yield mount.joinpath(*parts[:length])


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the free memory of each cgroup that has a limit."""
    for group in _groups(root, "memory"):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(read_text(group / limit_name))
            if limit is None or limit >= UNLIMITED:
                continue
            used = _number(read_text(group / used_name)) or 0
            stat = dict(line.partition(" ")[::2] for line in read_text(group / "memory.stat").splitlines())
            cached = _number(stat.get(cache_name, "")) or 0
            yield limit, max(0, min(limit, limit - used + cached))


def _cpu_limits(root: Path) -> Iterator[float]:
    for group in _groups(root, "cpu"):
        both = read_text(group / "cpu.max").split()
        if not both:
            both = [read_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = _number(both[0]), _number(both[-1])
        if quota and period:
            yield quota / period


def _number(text: str) -> int | None:
    """Return the number in a file's text; None if it is "max", -1 or empty."""
    text = text.strip()
    return int(text) if text.isdigit() else None


# ---- the rest


def _ulimits(root: Path) -> dict[str, int]:
    """Return the soft limits by name, without unlimited ones."""
    found = {}
    for line in read_text(root / "proc/self/limits").splitlines():
        value = _number(line[26:47])  # columns of a fixed width, as names contain spaces
        if value is not None:
            found[line[:26].strip()] = value
    return found


def _size_of(path: Path) -> int | None:
    with contextlib.suppress(OSError, AttributeError):  # Windows has no statvfs
        found = os.statvfs(path)
        return found.f_frsize * found.f_blocks
    return None


def _container(root: Path) -> str | None:
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    groups = read_text(root / "proc/1/cgroup")
    for word, name in (("kubepods", "kubernetes"), ("docker", "docker"), ("lxc", "lxc")):
        if word in groups:
            return name
    return None
