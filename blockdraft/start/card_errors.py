"""Explains a GPU that is not available or has too little memory: cause, processes and advice in one line."""

from __future__ import annotations

import torch

from blockdraft.errors import BlockdraftError, CapacityError, ModelError
from blockdraft.machine.machine import process_name, read_holders, read_machine
from blockdraft.machine.remedies import why_unseen

MAX_NAMED = 4  # processes named in one line
# Messages of CUDA and its libraries for too little memory, besides torch.OutOfMemoryError; in lower case.
OUT_OF_MEMORY = ("out of memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the GPU had too little memory, by torch's class or the messages of other libraries."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120].rstrip(". ") if lines else type(error).__name__


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of a GPU, from the driver if CUDA no longer answers."""
    try:
        return torch.cuda.mem_get_info(device)
    except RuntimeError:
        gpus, index = read_machine().gpus, device.index or 0
        return (gpus[index].free_bytes, gpus[index].memory_bytes) if index < len(gpus) else (0, 0)


def usage(device: torch.device) -> str:
    """Return a text: how much of a GPU's memory is free, and how much other processes hold, if known."""
    free, total = memory_of(device)
    text = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free"
    held = _held(device.index or 0)
    return f"{text}, {held}" if held else text


def _held(index: int) -> str:
    """Return "process 12 (python3) holds 3.0 GB and …", or "" if the driver lists no other process."""
    holders = read_holders(index)
    parts = []
    for holder in holders[:MAX_NAMED]:
        name = process_name(holder.pid)
        amount = "some" if holder.used_bytes is None else f"{holder.used_bytes / 1e9:.1f} GB"
        parts.append(f"process {holder.pid}{f' ({name})' if name else ''} holds {amount}")
    if len(holders) > MAX_NAMED:
        parts.append(f"{len(holders) - MAX_NAMED} more hold the rest")
    return " and ".join(parts)


def unused_gpu() -> str | None:
    """Return for a start on the CPU which GPU is not used, why, and what to do, or None without a GPU."""
    unseen = why_unseen(read_machine(), torch.__version__, torch.version.cuda)
    return None if unseen is None else f"{unseen.says}, so the CPU serves: {unseen.advice}."


def unusable(name: str, error: Exception) -> BlockdraftError:
    """Return the error to raise for device `name`, which torch could not use."""
    line, text = first_line(error), str(error).lower()
    if not name.startswith("cuda"):
        return ModelError(f"device '{name}' cannot be used: {line}.")
    suffix = name.partition(":")[2]
    device = torch.device("cuda", int(suffix) if suffix.isdigit() else 0)
    if "busy or unavailable" in text:
        held = _held(device.index)
        return CapacityError(
            f"device '{name}' is taken ({line}{f'; {held}' if held else ''}): another process has it "
            "for itself. End that process, choose another card by CUDA_VISIBLE_DEVICES, or let them share "
            "this one by `nvidia-smi -c DEFAULT`."
        )
    if is_out_of_memory(error):
        return CapacityError(
            f"device '{name}' has no memory left to begin with ({line}): {usage(device)}. End what holds it, "
            "or choose another card by CUDA_VISIBLE_DEVICES."
        )
    if "invalid device ordinal" in text:
        count = torch.cuda.device_count()
        seen = (
            "one GPU is visible: use cuda" if count == 1 else f"{count} GPUs are visible: use cuda:0 and up"
        )
        return ModelError(f"device '{name}' cannot be used ({line}): {seen}, or change CUDA_VISIBLE_DEVICES.")
    unseen = why_unseen(read_machine(), torch.__version__, torch.version.cuda)
    if unseen is None:
        return ModelError(
            f"device '{name}' cannot be used ({line}): there is no GPU that this process may see. Use "
            "--device cpu, or look at CUDA_VISIBLE_DEVICES; in a container, at --gpus."
        )
    return ModelError(f"device '{name}' cannot be used ({line}): {unseen.says}. To mend it, {unseen.advice}.")
