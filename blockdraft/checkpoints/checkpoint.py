"""A checkpoint: a configuration, named tensors and a tokenizer, independent of the file format.

Hugging Face folders (also downloaded ones) and GGUF files implement one protocol, Checkpoint. Both use
Hugging Face's names, shapes and configuration keys, so no other module depends on the file format. Nothing
is ever unpickled or executed.

Files are read, not mapped: mapped pages count as memory of the process, and a large model would be in memory
twice while it loads. For this reason tensors can also be read in slices of rows.
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

_MAPPED_BYTES = 512 << 10  # larger tensors get their own mapping; its unused end is then negligible


class TensorInfo(NamedTuple):
    """The shape and dtype that `read` returns for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint(Protocol):
    """Read access to one model's files.

    `begin` and `end` select entries of a tensor's first axis: rows, or experts if they are stored together.
    A scalar is read whole. Each read returns new memory.
    """

    name: str  # as the user wrote it, for messages
    config: Mapping[str, object]  # config.json, or its equivalent built from GGUF metadata
    quant_file: Mapping[str, object] | None  # hf_quant_config.json, if a folder has it
    fit_file: Mapping[str, object]  # a drafter's fit.json; empty if missing
    generation_file: Mapping[str, object]  # generation_config.json; empty if missing

    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor: ...

    # The ggml type number of a tensor stored in quantised blocks; None for other tensors and in folders.
    def ggml_type(self, name: str) -> int | None: ...

    # The bytes of a tensor in quantised blocks: uint8 [rows, bytes] or [experts, rows, bytes], in the order
    # of `read`.
    def read_packed(self, name: str) -> torch.Tensor: ...

    @property
    def has_tokenizer(self) -> bool: ...
    def tokenizer_parts(self) -> TokenizerParts: ...
    def close(self) -> None: ...  # tensors already read stay valid


def own_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Return an uninitialised tensor; a large one on the CPU (or without a device) gets its own mapping.

    An allocator keeps freed memory between two weights: after a model is read in slices, 10 to 30 % of its
    size. A mapping returns to the system as soon as its tensor is freed.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _MAPPED_BYTES or (device is not None and device.type != "cpu"):
        return torch.empty(*shape, dtype=dtype, device=device)
    # Huge pages cause a few hundred times fewer page faults.
    return torch.frombuffer(private_memory(num_bytes, has_huge_pages=True), dtype=dtype).view(*shape)


def read_bytes(file: FileIO, *, offset: int, num_bytes: int, owner: str) -> torch.Tensor:
    """Read `num_bytes` from `offset` as uint8 in new memory. `owner` names the file in errors."""
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
                f"{owner} is truncated: it ends at byte {offset + num_read}, but it had at least "
                f"{num_bytes - num_read} bytes more when it was opened. Download it again."
            )
        num_read += count
    return raw
