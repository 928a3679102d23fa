"""A checkpoint: a configuration, named tensors and a tokenizer, whatever the files look like.

Three layouts answer to one protocol: a Hugging Face folder, a hub id (resolved to such a folder),
and a GGUF file. Names, shapes and configuration keys are Hugging Face's in all of them, so that
nothing past this file knows where a model came from. Nothing is ever unpickled or executed.

Files are read, never mapped: mapped pages count as the process's memory for as long as they stay, and
a model that fits only once must not be held twice while it loads. For the same reason a tensor can be
read in slices of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import FileIO
from typing import NamedTuple, Protocol

import torch

from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.errors import ModelError
from blockdraft.machine.file_parts import read_at
from blockdraft.machine.private_memory import private_memory

_MAPPED_BYTES = 512 << 10  # from here on a mapping's last, partly used page does not matter


class TensorInfo(NamedTuple):
    """What `read` returns for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint(Protocol):
    """Read access to one model's files.

    `begin` and `end` bound the rows to read: entries of a tensor's first axis, which are experts where
    they are stored together. A tensor without axes is read whole. What is read is memory of its own.
    """

    name: str  # as the user wrote it, for messages
    config: Mapping[str, object]  # config.json, or its equivalent built from GGUF metadata
    quant_file: Mapping[str, object] | None  # hf_quant_config.json, where a folder has one
    fit_file: Mapping[str, object]  # a drafter's fit.json; empty where there is none
    generation_file: Mapping[str, object]  # generation_config.json; empty where there is none

    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor: ...

    # The ggml type number of a tensor stored in quantised blocks; None for plain ones and in folders.
    def ggml_type(self, name: str) -> int | None: ...

    # Such a tensor's bytes: uint8 [rows, bytes] or [experts, rows, bytes], in the order of `read`.
    def read_packed(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor: ...

    @property
    def has_tokenizer(self) -> bool: ...
    def tokenizer_parts(self) -> TokenizerParts: ...
    def close(self) -> None: ...  # tensors already read stay valid


def own_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """An uninitialised tensor; a large one in the CPU's memory (or without a device) is a mapping of its own.

    Allocators keep what is freed between two weights, and one model's worth of slices leaves 10 to 30 % of
    its size behind. A mapping goes back to the system the moment its tensor does.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _MAPPED_BYTES or (device is not None and device.type != "cpu"):
        return torch.empty(*shape, dtype=dtype, device=device)
    # Huge pages: a few hundred times fewer page faults.
    return torch.frombuffer(private_memory(num_bytes, has_huge_pages=True), dtype=dtype).view(*shape)


def read_bytes(file: FileIO, *, offset: int, num_bytes: int, owner: str) -> torch.Tensor:
    """`num_bytes` of `file` from `offset` on: uint8 in fresh memory. `owner` names the file in errors."""
    raw = own_memory((num_bytes,), torch.uint8)
    view = raw.numpy().data
    num_read = 0
    while num_read < num_bytes:
        try:
            count = read_at(file, view[num_read:], offset + num_read)
        except OSError as error:
            raise ModelError(f"{owner} cannot be read: {error.strerror}. Check the disk.") from None
        if count == 0:
            raise ModelError(
                f"{owner} is truncated: it ends at byte {offset + num_read}, and {num_bytes - num_read} more "
                "were there when it was opened. Download it again."
            )
        num_read += count
    return raw


def row_range(shape: tuple[int, ...], begin: int, end: int | None) -> tuple[int, int]:
    """The rows that `begin` and `end` ask for; a tensor without axes has one."""
    num_rows = shape[0] if shape else 1
    stop = num_rows if end is None else end
    if not 0 <= begin <= stop <= num_rows:
        raise IndexError(f"rows [{begin}, {stop}) of a tensor of shape {list(shape)}")
    return begin, stop
