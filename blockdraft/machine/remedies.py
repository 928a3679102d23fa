"""Explains why PyTorch finds no GPU, and what to do; for the doctor and the start of a server."""

from __future__ import annotations

from typing import NamedTuple

from blockdraft.machine.machine import Machine
from blockdraft.machine.nvml import NO_PACKAGE

INSTALL = "see https://pytorch.org/get-started/locally/"
NO_COMPILER = "Triton compiles a small C file: install gcc, or set CC"
NO_HEADERS = "Triton compiles a small C file: install Python's headers (python3-dev)"
MIN_DRIVERS = {11: 450, 12: 525, 13: 580}  # the oldest driver for a major version of CUDA, on Linux


class Unseen(NamedTuple):
    """The reason why torch finds no GPU, and advice, both without a full stop."""

    says: str
    advice: str


def why_unseen(machine: Machine, torch_version: str, cuda: str | None) -> Unseen | None:
    """Return why torch, built for `cuda`, finds no GPU; None if the machine has no GPU."""
    if machine.gpu_error is not None and not machine.gpus:
        says = f"there is an NVIDIA driver, but it does not answer: {machine.gpu_error}"
        return Unseen(says, driver_advice(machine))
    if not machine.gpus:
        return None
    gpu = machine.gpus[0]
    if cuda is None:
        says = f"there is a GPU ({gpu.name}), but PyTorch {torch_version} was built without CUDA"
        return Unseen(says, f"install PyTorch for CUDA: {INSTALL}")
    needed, driver = MIN_DRIVERS.get(_major(cuda), 0), _major(gpu.driver)
    found = f"there is a GPU ({gpu.name}, driver {gpu.driver or 'unknown'}), but PyTorch {torch_version} for "
    if 0 < driver < needed:
        says = f"{found}CUDA {cuda} does not find it: CUDA {_major(cuda)} needs driver {needed} or newer"
        older = machine.cuda if machine.cuda is not None else "an older version"
        return Unseen(says, f"update the driver, or install PyTorch for CUDA {older} or before: {INSTALL}")
    says = f"{found}CUDA {cuda} does not find it"
    if machine.limits.container is not None:
        return Unseen(says, f"{driver_advice(machine)}, with NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    return Unseen(
        says, "compare with the driver's version: CUDA 13 needs 580 or newer, CUDA 12 needs 525; then reboot"
    )


def driver_advice(machine: Machine) -> str:
    """Return advice for a driver that does not answer."""
    if machine.gpu_error == NO_PACKAGE:
        return "pip install nvidia-ml-py"
    if machine.limits.container is not None:
        return "start the container with --gpus all (docker) or --device nvidia.com/gpu=all (podman)"
    return (
        "reboot if the driver was updated while running, and compare `cat /proc/driver/nvidia/version` with "
        "nvidia-smi; Blackwell needs the open kernel modules (nvidia-driver-580-open)"
    )


def _major(version: str) -> int:
    number = version.partition(".")[0]
    return int(number) if number.isdigit() else 0
