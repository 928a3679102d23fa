"""The GGUF container: metadata, tensor table and dequantisation, over one memory map.

A GGUF file is a header (magic, version, two counts), that many key/value pairs, that many tensor
descriptions, then the aligned tensor data. gguf-py's own reader builds numpy objects for every
string and takes 5 s on a 49k vocabulary; this one takes 0.1 s. Every length is checked against the
bytes that are left before it is used, so a damaged file costs an error and nothing else.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from blockdraft.errors import ModelError

Scalar: TypeAlias = str | int | float | bool
Value: TypeAlias = Scalar | Sequence[Scalar]

_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of keys
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {  # value type -> struct code
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32

# Far above any real model (the largest vocabularies have 262k entries); a damaged count stops here.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_ARRAY = 1 << 24
_MAX_STRING_BYTES = 1 << 26
_MAX_NAME_BYTES = 1 << 16
_MAX_DIMS = 4  # ggml's own limit


class _Damaged(Exception):
    """What is wrong with the bytes; GgufFile adds the file's name."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and place of one tensor."""

    shape: tuple[int, ...]  # outermost first, as in PyTorch; the file stores the reverse
    quantization: int  # gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class _Row(NamedTuple):
    """One tensor as the file describes it."""

    name: str
    shape: tuple[int, ...]
    quantization: int
    offset: int  # from the start of the tensor data


class _Cursor:
    """Reads little-endian values one after another, never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def skip(self, num_bytes: int) -> int:
        """Step over `num_bytes` and return where they start."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise _Damaged(f"it ends at byte {len(self.data)}, in the middle of its metadata")
        self.position = start + num_bytes
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.data, self.skip(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.data, self.skip(8))[0])

    def string(self, max_bytes: int = _MAX_STRING_BYTES) -> str:
        num_bytes = self.u64()
        if num_bytes > max_bytes:
            raise _Damaged(f"its metadata holds a string of {num_bytes} bytes")
        start = self.skip(num_bytes)
        try:
            return self.data[start : start + num_bytes].decode()
        except UnicodeDecodeError:
            raise _Damaged(f"its metadata holds bytes that are not UTF-8 at {start}") from None

    def value(self) -> Value:
        value_type = self.u32()
        if value_type == _STRING:
            return self.string()
        if value_type == _ARRAY:
            return self._array()
        return self._scalars(value_type, count=1)[0]

    def _array(self) -> Sequence[Scalar]:
        value_type, count = self.u32(), self.u64()
        if count > _MAX_ARRAY:
            raise _Damaged(f"its metadata holds an array of {count} values")
        if value_type == _STRING:
            return [self.string() for _ in range(count)]
        return self._scalars(value_type, count=count)

    def _scalars(self, value_type: int, *, count: int) -> tuple[Scalar, ...]:
        code = _SCALARS.get(value_type)
        if code is None:
            raise _Damaged(f"its metadata holds a value of unknown type {value_type}")
        layout = f"<{count}{code}"
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))


class GgufFile:
    """One open GGUF file: its metadata, and its tensors as float32 on request."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: Path, *, name: str) -> None:
        self.name = name
        try:
            self._data = _map(path)
            self.metadata, self.tensors = _parse(self._data)
        except OSError as error:
            raise ModelError(
                f"cannot open '{name}': {error.strerror}. Check the path and its permissions."
            ) from None
        except _Damaged as damage:
            raise ModelError(
                f"'{name}' cannot be read as GGUF: {damage}. Download it again or convert it anew."
            ) from None

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0) -> int:
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self._wrong(key, f"an integer of {minimum} or more")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        return self.integer(key, default, minimum=1)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._wrong(key, "a number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        return [item for item in self._array(key) if isinstance(item, str)]

    def numbers(self, key: str) -> list[float]:
        return [item for item in self._array(key) if isinstance(item, int | float)]

    def read(self, tensor: str) -> torch.Tensor:
        """The tensor's values in float32, in memory of their own."""
        info = self.tensors[tensor]
        raw = np.frombuffer(self._data, np.uint8, count=info.num_bytes, offset=info.offset)
        return _dequantize(raw, info.quantization).reshape(info.shape)

    def close(self) -> None:
        self._data.close()

    def _array(self, key: str) -> Sequence[Scalar]:
        value = self.metadata.get(key)
        if value is None or isinstance(value, Scalar):
            raise self._wrong(key, "an array")
        return value

    def _wrong(self, key: str, expected: str) -> ModelError:
        found = self.metadata.get(key)
        state = "is missing" if found is None else f"is {str(found)[:40]!r}"
        return ModelError(
            f"'{self.name}': metadata key '{key}' {state}, but must be {expected}. Convert the model anew."
        )


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            raise _Damaged("it is empty")
        # ACCESS_COPY: PyTorch warns about views of read-only memory. Nothing is ever written.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _parse(data: mmap.mmap) -> tuple[dict[str, Value], dict[str, TensorInfo]]:
    cursor = _Cursor(data)
    num_tensors, num_keys = _header(cursor)
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.string(max_bytes=_MAX_NAME_BYTES)
        if key in metadata:
            raise _Damaged(f"the key {key!r} appears twice")
        metadata[key] = cursor.value()
    rows = [_tensor_row(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise _Damaged(f"general.alignment is {alignment!r} and not a multiple of 8")
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for row in rows:
        if row.name in tensors:
            raise _Damaged(f"the tensor {row.name!r} appears twice")
        tensors[row.name] = _place(row, data_start, alignment=alignment, file_bytes=len(data))
    return metadata, tensors


def _header(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; the number of tensors and of keys."""
    if cursor.data[:4] != b"GGUF":
        raise _Damaged(f"it starts with {cursor.data[:4]!r} instead of b'GGUF'")
    _, version, num_tensors, num_keys = _HEADER.unpack_from(cursor.data, cursor.skip(_HEADER.size))
    if version & 0xFFFF == 0 and version != 0:
        raise _Damaged("it is big-endian, and only little-endian files are read")
    if version not in (2, 3):
        raise _Damaged(f"its version is {version}, and only 2 and 3 are read")
    if num_keys > _MAX_KEYS or num_tensors > _MAX_TENSORS:
        raise _Damaged(f"it claims {num_keys} metadata keys and {num_tensors} tensors")
    return num_tensors, num_keys


def _tensor_row(cursor: _Cursor) -> _Row:
    name = cursor.string(max_bytes=_MAX_NAME_BYTES)
    num_dims = cursor.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise _Damaged(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
    if 0 in shape:
        raise _Damaged(f"tensor {name!r} has an empty dimension: {shape}")
    return _Row(name, shape, quantization=cursor.u32(), offset=cursor.u64())


def _place(row: _Row, data_start: int, *, alignment: int, file_bytes: int) -> TensorInfo:
    """Where the tensor's bytes are, checked to be inside the file."""
    block_length, block_bytes = _block_size(row)
    if row.shape[-1] % block_length:
        raise _Damaged(f"{row.name!r} has rows of {row.shape[-1]} in blocks of {block_length}")
    if row.offset % alignment:
        raise _Damaged(f"{row.name!r} starts at {row.offset}, not a multiple of {alignment}")
    num_bytes = math.prod(row.shape) // block_length * block_bytes
    start = data_start + row.offset
    if start + num_bytes > file_bytes:
        raise _Damaged(
            f"it is truncated: tensor {row.name!r} ends at byte {start + num_bytes} of {file_bytes}"
        )
    return TensorInfo(row.shape, row.quantization, start, num_bytes)


def _block_size(row: _Row) -> tuple[int, int]:
    """How many values and how many bytes a block holds."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(row.quantization)
    except ValueError:
        raise _Damaged(f"tensor {row.name!r} has the unknown type {row.quantization}") from None
    block_length, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros(block_bytes, np.uint8), kind)
    except NotImplementedError:
        raise _Damaged(f"tensor {row.name!r} is of type {kind.name}, which is not supported") from None
    return block_length, block_bytes


def _dequantize(raw: npt.NDArray[np.uint8], quantization: int) -> torch.Tensor:
    """Float32 values of whole blocks, flat.

    The default model's two types are unpacked here in PyTorch: 0.86 s for all its tensors the first
    time and 0.23 s again, against 1.08 and 0.87 s by gguf-py (2 idle, pinned Neoverse-N1 cores, 2026-11).
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(quantization)
    if kind == GGMLQuantizationType.F32:
        return torch.from_numpy(raw).view(torch.float32).clone()
    if kind == GGMLQuantizationType.Q4_1:
        return _q4_1(torch.from_numpy(raw))
    if kind == GGMLQuantizationType.Q8_0:
        return _q8_0(torch.from_numpy(raw))
    return torch.from_numpy(np.asarray(dequantize(raw, kind), np.float32))


def _q4_1(raw: torch.Tensor) -> torch.Tensor:
    """32 values in 20 bytes: scale and minimum in float16, then 16 low and 16 high half-bytes."""
    blocks = raw.view(-1, 20)
    scale, minimum = blocks[:, :4].contiguous().view(torch.float16).float()[..., None].unbind(1)
    values = torch.empty(len(blocks), 2, 16)
    values[:, 0] = blocks[:, 4:] & 0x0F
    values[:, 1] = blocks[:, 4:] >> 4
    return values.view(-1, 32).mul_(scale).add_(minimum).flatten()


def _q8_0(raw: torch.Tensor) -> torch.Tensor:
    """32 values in 34 bytes: scale in float16, then 32 signed bytes."""
    blocks = raw.view(-1, 34)
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return blocks[:, 2:].view(torch.int8).float().mul_(scale).flatten()
