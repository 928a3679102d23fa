"""NVIDIA's cards as the driver describes them: by its library, or by nvidia-smi where that fails."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from blockdraft.machine.cards import MIB, Capability

LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
SMI = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
SMI_FIELDS = ("index", "uuid", "name", "compute_cap", "memory.total", "memory.free", "driver_version")
SMI_SECONDS = 5.0
TEXT_BYTES = 96  # the longest name or version that the library writes
MAX_PROCESSES = 256  # of one card; more are not listed
UNKNOWN_BYTES = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE

# nvmlReturn_t; others are named by their number.
ERRORS = {
    4: "no permission to ask the driver",
    9: "the driver is not loaded",
    12: "the driver's library is missing",
    15: "a GPU has fallen off the bus",
    17: "the operating system blocks the GPU",
    18: "driver and library are of different versions",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One card. None: the driver does not say, as GB10's of its memory."""

    name: str
    uuid: str
    capability: Capability | None
    memory_bytes: int | None
    free_bytes: int | None
    driver: str


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that uses a card. None: the driver does not say how much."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found, and what went wrong where something should have been found."""

    devices: tuple[Device, ...] = ()
    cuda: str | None = None  # the newest CUDA that the driver runs
    error: str | None = None


class Library(Protocol):
    """libnvidia-ml: every function returns 0, or one of ERRORS."""

    def __getattr__(self, name: str) -> Callable[..., int]: ...


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, as of version 2 of its functions."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def query(
    visible: str | None,
    open_library: Callable[[], Library | None] | None = None,
    run: Callable[[Sequence[str]], str] | None = None,
) -> Answer:
    """The cards in the driver's order; never raises. `visible` is CUDA_VISIBLE_DEVICES; None: all of them."""
    library = (open_library or _open_library)()
    answer = Answer(error="libnvidia-ml.so.1 cannot be loaded")
    if library is not None:
        answer = _ask(library, visible)
        if answer.error is None:
            return answer
    devices = _parse_smi((run or _run_smi)(SMI_FIELDS))
    if devices:
        return Answer(tuple(_chosen(devices, visible)), cuda=answer.cuda)
    return answer


def holders(
    visible: str | None, index: int, open_library: Callable[[], Library | None] | None = None
) -> tuple[Holder, ...]:
    """The processes that use card `index` of the visible ones, the largest first; never raises.

    None are found where the driver does not tell, as from inside many containers.
    """
    library = (open_library or _open_library)()
    if library is None or _call(library, "nvmlInit_v2") != 0:
        return ()
    try:
        handle = next(itertools.islice(_handles(library, visible), index, None), None)
        if handle is None:
            return ()
        found: dict[int, Holder] = {}
        for kind in ("Compute", "Graphics"):
            found |= {holder.pid: holder for holder in _running(library, handle, kind)}
    finally:
        _call(library, "nvmlShutdown")
    return tuple(sorted(found.values(), key=lambda holder: -(holder.used_bytes or 0)))


def _running(library: Library, handle: ctypes.c_void_p, kind: str) -> Iterator[Holder]:
    count, processes = ctypes.c_uint(MAX_PROCESSES), (_Process * MAX_PROCESSES)()
    for version in ("_v3", "_v2"):
        name = f"nvmlDeviceGet{kind}RunningProcesses{version}"
        if _call(library, name, handle, ctypes.byref(count), processes) == 0:
            break
    else:
        return
    for process in processes[: count.value]:
        yield Holder(process.pid, None if process.used == UNKNOWN_BYTES else process.used)


def _open_library() -> Library | None:
    for name in LIBRARIES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


# ---- the library


def _ask(library: Library, visible: str | None) -> Answer:
    code = _call(library, "nvmlInit_v2")
    if code != 0:
        return Answer(error=ERRORS.get(code, f"nvmlInit fails with code {code}"))
    try:
        driver = _text(library, "nvmlSystemGetDriverVersion")
        found = tuple(_describe(library, handle, driver) for handle in _handles(library, visible))
        return Answer(found, cuda=_cuda_version(library))
    finally:
        _call(library, "nvmlShutdown")


def _call(library: Library, name: str, *arguments: object) -> int:
    """The function's code; 13 ("no such function") where the library is too old to have it."""
    try:
        function = getattr(library, name)
    except AttributeError:
        return 13
    return int(function(*arguments))


def _handles(library: Library, visible: str | None) -> Iterator[ctypes.c_void_p]:
    """CUDA stops at the first entry that is not a card, and so do we."""
    count = ctypes.c_uint()
    if _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count)) != 0:
        return
    wanted = [str(index) for index in range(count.value)] if visible is None else _entries(visible)
    for entry in wanted:
        handle = ctypes.c_void_p()
        if entry.isdigit():
            code = _call(
                library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(entry)), ctypes.byref(handle)
            )
        else:
            code = _call(library, "nvmlDeviceGetHandleByUUID", entry.encode(), ctypes.byref(handle))
        if code != 0:
            return
        yield handle


def _describe(library: Library, handle: ctypes.c_void_p, driver: str) -> Device:
    memory = _Memory()
    has_memory = (
        _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)) == 0 and memory.total > 0
    )
    major, minor = ctypes.c_int(), ctypes.c_int()
    code = _call(
        library, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor)
    )
    return Device(
        name=_text(library, "nvmlDeviceGetName", handle),
        uuid=_text(library, "nvmlDeviceGetUUID", handle),
        capability=(major.value, minor.value) if code == 0 else None,
        memory_bytes=memory.total if has_memory else None,
        free_bytes=memory.free if has_memory else None,
        driver=driver,
    )


def _text(library: Library, name: str, *handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    code = _call(library, name, *handle, buffer, ctypes.c_uint(TEXT_BYTES))
    return buffer.value.decode(errors="replace") if code == 0 else ""


def _cuda_version(library: Library) -> str | None:
    version = ctypes.c_int()
    if _call(library, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


# ---- nvidia-smi


def _run_smi(names: Sequence[str]) -> str:
    for program in SMI:
        command = (program, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS, check=True
            )
            return done.stdout
    return ""


def _parse_smi(text: str) -> list[Device]:
    found = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(SMI_FIELDS) or not values[0].isdigit():
            continue
        _, uuid, name, capability, total, free, driver = values
        major, _, minor = capability.partition(".")
        found.append(
            Device(
                name=name,
                uuid=uuid,
                capability=(int(major), int(minor)) if major.isdigit() and minor.isdigit() else None,
                memory_bytes=int(total) * MIB if total.isdigit() else None,
                free_bytes=int(free) * MIB if free.isdigit() else None,
                driver=driver,
            )
        )
    return found


def _chosen(devices: Sequence[Device], visible: str | None) -> Iterator[Device]:
    if visible is None:
        yield from devices
        return
    for entry in _entries(visible):
        if entry.isdigit():
            match = devices[int(entry)] if int(entry) < len(devices) else None
        else:  # the beginning of a UUID is enough
            match = next((device for device in devices if device.uuid.startswith(entry)), None)
        if match is None:
            return
        yield match


def _entries(visible: str) -> list[str]:
    return [entry for entry in (part.strip() for part in visible.split(",")) if entry]
