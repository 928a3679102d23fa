"""Reads the header of a safetensors shard and checks it against the shard's size. No torch here.

A header is a u64 length and JSON of that length, with each tensor's dtype, shape and byte offsets behind it.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from io import FileIO
from typing import NamedTuple

from blockdraft.errors import ModelError
from blockdraft.machine.file_parts import bytes_at

DTYPES = {  # the format's name -> torch's, and the bytes of a value
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
    "I8": ("int8", 1),
    "I16": ("int16", 2),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
_HEADER_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class Damaged(Exception):
    """A defect of a shard; the caller adds its name."""


class TensorEntry(NamedTuple):
    """The description of one tensor in a shard's header."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    begin: int  # bytes from the end of the header
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def read_header(file: FileIO, *, owner: str) -> tuple[dict[str, TensorEntry], int]:
    """Return all tensors of an open shard and the byte where they begin. Raises Damaged and ModelError."""
    header, data_start = _read_json(file)
    entries = _entries(header, owner=owner)
    _check_layout(entries, num_bytes=os.fstat(file.fileno()).st_size - data_start)
    return entries, data_start


def _read(file: FileIO, num_bytes: int, *, offset: int) -> bytes:
    data = bytes_at(file, num_bytes, offset)
    if len(data) != num_bytes:
        raise Damaged(f"it ends at byte {offset + len(data)}, inside its header")
    return data


def _read_json(file: FileIO) -> tuple[dict[str, object], int]:
    """Return the header's JSON object and the byte where the tensors begin."""
    file_bytes = os.fstat(file.fileno()).st_size
    if file_bytes < _HEADER_LENGTH.size:
        raise Damaged(f"it has {file_bytes} bytes")
    (num_bytes,) = _HEADER_LENGTH.unpack(_read(file, _HEADER_LENGTH.size, offset=0))
    if num_bytes > min(_MAX_HEADER_BYTES, file_bytes - _HEADER_LENGTH.size):
        raise Damaged(f"it has {file_bytes} bytes and claims a header of {num_bytes}")
    text = _read(file, num_bytes, offset=_HEADER_LENGTH.size)
    try:
        header = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise Damaged("its header is not a JSON object")
    return header, _HEADER_LENGTH.size + num_bytes


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("a key appears twice")
    return keys


def _entries(header: Mapping[str, object], *, owner: str) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for tensor, fields in header.items():
        if tensor == "__metadata__":
            continue
        if not isinstance(fields, dict):
            raise Damaged(f"{tensor!r} is described by {str(fields)[:40]!r}")
        dtype_name = fields.get("dtype")
        if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
            raise ModelError(
                f"{owner}: tensor {tensor!r} is of type {str(dtype_name)[:40]!r}, which is not supported. "
                "See docs/models.md."
            )
        shape = _sizes(tensor, fields.get("shape"))
        offsets = _sizes(tensor, fields.get("data_offsets"))
        num_bytes = math.prod(shape) * DTYPES[dtype_name][1]
        if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
            raise Damaged(f"{tensor!r} has {num_bytes} bytes, but the offsets {list(offsets)}")
        entries[tensor] = TensorEntry(dtype_name, shape, *offsets)
    return entries


def _sizes(tensor: str, value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [None]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
        raise Damaged(f"{tensor!r} has the shape or offsets {str(value)[:40]}")
    return tuple(values)


def _check_layout(entries: Mapping[str, TensorEntry], *, num_bytes: int) -> None:
    """Check that the tensors fill `num_bytes` exactly, without holes or overlaps."""
    position = 0
    for tensor, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise Damaged(f"{tensor!r} begins at byte {entry.begin} instead of {position}")
        position = entry.end
    if position != num_bytes:
        raise Damaged(f"its tensors end at byte {position} of {num_bytes}")
