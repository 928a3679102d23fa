"""Lists NVIDIA cards through nvidia-ml-py, or through nvidia-smi if that fails."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

from blockdraft.machine.cards import MIB, Capability

WSL_LIBRARY = "/usr/lib/wsl/lib/libnvidia-ml.so.1"  # the loader does not always search this folder
SMI = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
SMI_FIELDS = ("index", "uuid", "name", "compute_cap", "memory.total", "memory.free", "driver_version")
PROGRAM_SECONDS = 20.0

NO_PACKAGE = "the package nvidia-ml-py is not installed, and nvidia-smi gives no cards"
ERRORS = {  # nvmlReturn_t; others are named by their number
    4: "no permission to ask the driver",
    9: "the driver is not loaded",
    12: "the driver's library, libnvidia-ml.so.1, cannot be loaded",
    15: "a GPU has fallen off the bus",
    17: "the operating system blocks the GPU",
    18: "driver and library are of different versions",
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Device:
    """One card. A field is None if the driver hides it, as GB10's driver hides its memory."""

    name: str
    uuid: str
    capability: Capability | None
    memory_bytes: int | None
    free_bytes: int | None
    driver: str


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that uses a card. `used_bytes` is None if the driver hides it."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class DriverReply:
    """The devices found, and the error if the driver did not answer."""

    devices: tuple[Device, ...] = ()
    cuda: str | None = None  # the newest CUDA that the driver runs
    error: str | None = None


class _NoAnswer(Exception):
    """The driver's library does not work; the message says why."""


def load_pynvml() -> ModuleType:
    """Import pynvml; raise ImportError if nvidia-ml-py is not installed."""
    import pynvml

    with contextlib.suppress(OSError):
        ctypes.CDLL(WSL_LIBRARY)  # once loaded, pynvml finds it by name
    module: ModuleType = pynvml
    return module


def output_of(*command: str) -> str:
    """Return the output of a program; "" if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROGRAM_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace")


def run_smi(names: Sequence[str], *, units: bool = False) -> str:
    """Return nvidia-smi's values of these fields, a line for each card; "" if it fails."""
    words = f"--query-gpu={','.join(names)}", "--format=csv,noheader" + ("" if units else ",nounits")
    return output_of(SMI[0], *words) or output_of(SMI[1], *words)


def query(
    visible: str | None,
    load: Callable[[], ModuleType] = load_pynvml,
    run: Callable[[Sequence[str]], str] = run_smi,
) -> DriverReply:
    """Return the cards in the driver's order, or the error. `visible` is CUDA_VISIBLE_DEVICES; None: all."""
    try:
        with _opened(load) as nvml:
            driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion) or ""
            devices = tuple(_describe(nvml, handle, driver) for handle in _handles(nvml, visible))
            version = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
            cuda = None if version is None else f"{version // 1000}.{version % 1000 // 10}"
            return DriverReply(devices, cuda=cuda)
    except _NoAnswer as error:
        listed = _parse_smi(run(SMI_FIELDS))
        return DriverReply(tuple(_chosen(listed, visible))) if listed else DriverReply(error=str(error))


def holders(
    visible: str | None, index: int, load: Callable[[], ModuleType] = load_pynvml
) -> tuple[Holder, ...]:
    """Return the processes that use visible card number `index`, the largest first; never raise.

    The result is empty if the driver hides them, as in many containers.
    """
    found: dict[int, Holder] = {}
    with contextlib.suppress(_NoAnswer), _opened(load) as nvml:
        for handle in itertools.islice(_handles(nvml, visible), index, index + 1):
            for kind in ("Compute", "Graphics"):
                found |= {holder.pid: holder for holder in _running(nvml, handle, kind)}
    return tuple(sorted(found.values(), key=lambda holder: -(holder.used_bytes or 0)))


# ---- the driver's library


@contextlib.contextmanager
def _opened(load: Callable[[], ModuleType]) -> Iterator[ModuleType]:
    """Open pynvml and close it again; raise _NoAnswer if the driver does not answer."""
    try:
        nvml = load()
    except ImportError:
        raise _NoAnswer(NO_PACKAGE) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _NoAnswer(ERRORS.get(error.value, f"nvmlInit fails with code {error.value}")) from None
    try:
        yield nvml
    finally:
        _ask(nvml, nvml.nvmlShutdown)


def _ask(nvml: ModuleType, function: Callable[..., T], *arguments: object) -> T | None:
    """Return the driver's answer; None if it fails or lacks the function."""
    try:
        return function(*arguments)
    except (nvml.NVMLError, UnicodeDecodeError):
        return None


def _handles(nvml: ModuleType, visible: str | None) -> Iterator[object]:
    """Yield the visible cards; stop at the first entry that is not a card, as CUDA does."""
    count = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
    for entry in map(str, range(count)) if visible is None else _entries(visible):
        if entry.isdigit():
            handle = _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, int(entry))
        else:
            handle = _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, entry)
        if handle is None:
            return
        yield handle


def _describe(nvml: ModuleType, handle: object, driver: str) -> Device:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    total, free = (memory.total, memory.free) if memory is not None and memory.total else (None, None)
    return Device(
        name=_ask(nvml, nvml.nvmlDeviceGetName, handle) or "",
        uuid=_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or "",
        capability=_ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle),
        memory_bytes=total,
        free_bytes=free,
        driver=driver,
    )


def _running(nvml: ModuleType, handle: object, kind: str) -> Iterator[Holder]:
    for version in ("_v3", "_v2"):
        function = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses{version}")
        processes = _ask(nvml, function, handle)
        if processes is not None:
            yield from (Holder(process.pid, process.usedGpuMemory) for process in processes)
            return


# ---- nvidia-smi


def _parse_smi(text: str) -> list[Device]:
    found = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(SMI_FIELDS) and values[0].isdigit():
            _, uuid, name, capability, total, free, driver = values
            found.append(Device(name, uuid, _pair(capability), _bytes(total), _bytes(free), driver))
    return found


def _pair(text: str) -> Capability | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _bytes(mebibytes: str) -> int | None:
    return int(mebibytes) * MIB if mebibytes.isdigit() else None


def _chosen(devices: Sequence[Device], visible: str | None) -> Iterator[Device]:
    numbers = {str(index): device for index, device in enumerate(devices)}
    for entry in numbers if visible is None else _entries(visible):
        # An entry may be the beginning of a UUID.
        by_uuid = (device for device in devices if device.uuid.startswith(entry))
        match = numbers.get(entry) or next(by_uuid, None)
        if match is None:
            return
        yield match


def _entries(visible: str) -> list[str]:
    return [entry for entry in (part.strip() for part in visible.split(",")) if entry]
