"""The tensors of a GGUF file by rows, packed or dequantised, each read into memory of its own."""

from __future__ import annotations

import torch

from blockdraft.checkpoints.checkpoint import read_bytes, row_range
from blockdraft.checkpoints.gguf_header import PLAIN_TYPES, GgufHeader, StoredTensor
from blockdraft.models.packed_gguf import unpack


def value_dtype(tensor: StoredTensor) -> torch.dtype:
    """The type of a tensor's values once read: the stored one, float32 for blocks."""
    dtype: torch.dtype = getattr(torch, PLAIN_TYPES.get(tensor.quantization, "float32"))
    return dtype


class GgufFile(GgufHeader):
    """One open GGUF file: its header, and its tensors on request."""

    def read(self, tensor: str) -> torch.Tensor:
        """The tensor's values, plain ones as stored and quantised ones in float32."""
        return self.decode(tensor, self.read_rows(tensor))

    def read_rows(self, tensor: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """The stored bytes of entries [begin, end) of the first axis: uint8 [rows, bytes of a row]."""
        info = self.tensors[tensor]
        begin, end = row_range(info.shape, begin, end)
        row_bytes = info.num_bytes // info.shape[0]
        raw = read_bytes(
            self._file,
            offset=info.offset + begin * row_bytes,
            num_bytes=(end - begin) * row_bytes,
            owner=f"'{self.name}'",
        )
        return raw.view(end - begin, row_bytes)

    def decode(self, tensor: str, rows: torch.Tensor) -> torch.Tensor:
        """The values of bytes that `read_rows` gave for `tensor`, in the tensor's shape."""
        info = self.tensors[tensor]
        values = unpack(rows, info.quantization) if info.is_quantised else rows.view(value_dtype(info))
        return values.view(len(rows), *info.shape[1:])
