"""GgufCheckpoint: a GGUF file with Hugging Face's configuration keys, tensor names and weight layout.

llama.cpp applies rotary positions to neighbouring values of a head, Hugging Face to the two halves of a head.
So llama.cpp's converter reorders the rows of q_proj and k_proj of `llama` models, and `read` restores the
order. The experts of a layer are one tensor [experts, rows, columns] per projection, named
`model.layers.N.mlp.experts.gate_proj`, `up_proj` or `down_proj`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from blockdraft.checkpoints.checkpoint import TensorInfo, own_memory, read_bytes
from blockdraft.checkpoints.gguf_config import (
    LLAMA_CPP_SAMPLING,
    hugging_face_names,
    own_sampling,
    permuted_heads,
    published_names,
    read_config,
)
from blockdraft.checkpoints.gguf_header import GgufHeader, StoredTensor
from blockdraft.checkpoints.gguf_tokenizer import tokenizer_parts
from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.errors import ModelError
from blockdraft.models.packed_gguf import has_finite_scales, unpack

_PLAIN_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


class GgufCheckpoint:
    """One GGUF file of a supported architecture."""

    quant_file: Mapping[str, object] | None = None  # only folders have one
    fit_file: Mapping[str, object] = MappingProxyType({})
    has_tokenizer = True

    def __init__(self, path: Path, *, name: str, generation_file: Mapping[str, object] | None = None) -> None:
        """Without `generation_file`, use the file's sampling advice and llama.cpp's defaults."""
        self.name = name
        self.file, self.files = path, [path]
        self._header = GgufHeader(path, name=name)
        self.own_sampling = own_sampling(self._header)
        self.published_names = published_names(self._header)
        llama_cpp = {**LLAMA_CPP_SAMPLING, **self.own_sampling}
        self.generation_file = llama_cpp if generation_file is None else generation_file
        try:
            self.config: Mapping[str, object] = read_config(self._header)
            stored_names = hugging_face_names(self._header)
            self._permuted_heads = permuted_heads(self._header)
            self._tensors = {name: self._header.tensors[stored] for name, stored in stored_names.items()}
        except ModelError:
            self.close()
            raise

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(info.shape, _value_dtype(info)) for name, info in self._tensors.items()}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        rows, info = self._read_rows(name, begin, end), self._tensors[name]
        if not info.is_quantised:
            return rows.view(_value_dtype(info)).view(len(rows), *info.shape[1:])
        self._check_scales(name, rows)
        values = unpack(rows, info.quantization)
        return values.view(len(rows), *info.shape[1:])

    def ggml_type(self, name: str) -> int | None:
        info = self._stored(name)
        return info.quantization if info.is_quantised else None

    def read_packed(self, name: str) -> torch.Tensor:
        info = self._stored(name)
        rows = self._read_rows(name)
        self._check_scales(name, rows)
        return rows.view(len(rows), *info.shape[1:-1], info.num_bytes // info.num_rows)

    @property
    def main_type(self) -> str:
        """Return the name of the ggml type in which most of the file's bytes are stored."""
        return self._header.main_type

    def tokenizer_parts(self) -> TokenizerParts:
        return tokenizer_parts(self._header)

    def close(self) -> None:
        self._header.close()

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise ModelError(f"'{self.name}' has no tensor for '{name}': the file is not a complete model.")
        return self._tensors[name]

    def _check_scales(self, name: str, rows: torch.Tensor) -> None:
        if not has_finite_scales(rows, self._tensors[name].quantization):
            raise ModelError(
                f"'{self.name}': a scale of '{name}' is infinite or undefined: the file is damaged. "
                "Download it again or convert it again."
            )

    def _read_rows(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Read rows [begin, end) in Hugging Face's order, as uint8 [rows, bytes]."""
        info = self._stored(name)
        end = info.shape[0] if end is None else end
        num_heads = self._permuted_heads.get(name.split(".")[-2])
        if num_heads is None:
            return self._stored_rows(info, begin, end)
        if info.shape[0] % (2 * num_heads):
            raise ModelError(
                f"'{self.name}': '{name}' has {info.shape[0]} rows, which is not a multiple of 2 x "
                f"{num_heads} heads. Convert the model again."
            )
        head_rows = info.shape[0] // num_heads
        first = begin // head_rows * head_rows  # read whole heads: the rows of a head are interleaved
        last = -(-end // head_rows) * head_rows
        heads = self._stored_rows(info, first, last)
        order = _permuted(begin, end, head_rows=head_rows) - first
        rows = own_memory((end - begin, heads.shape[1]), heads.dtype)
        return torch.index_select(heads, 0, order, out=rows)

    def _stored_rows(self, info: StoredTensor, begin: int, end: int) -> torch.Tensor:
        row_bytes = info.num_bytes // info.shape[0]
        offset, num_bytes = info.offset + begin * row_bytes, (end - begin) * row_bytes
        raw = read_bytes(self._header.file, offset=offset, num_bytes=num_bytes, owner=f"'{self.name}'")
        return raw.view(end - begin, row_bytes)


def _value_dtype(tensor: StoredTensor) -> torch.dtype:
    """Return the dtype of `read`: the stored dtype, or float32 for quantised blocks."""
    return _PLAIN_DTYPES.get(tensor.quantization, torch.float32)


def _permuted(begin: int, end: int, *, head_rows: int) -> torch.Tensor:
    """Return where llama.cpp stores rows [begin, end): a head is in (pair, half), not (half, pair) order."""
    rows = torch.arange(begin, end)
    row_in_head = rows % head_rows
    half, pair = row_in_head // (head_rows // 2), row_in_head % (head_rows // 2)
    return rows - row_in_head + 2 * pair + half
