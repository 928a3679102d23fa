"""Reads a part of an open file at an offset, so that several threads can share the file."""

from __future__ import annotations

import os
from io import FileIO
from threading import Lock

_moving = Lock()  # guards seek and read where there is no preadv


def read_at(file: FileIO, memory: memoryview, offset: int) -> int:
    """Fill `memory` from `offset` on; returns how many bytes came. Linux reads at most 2 GiB at once."""
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [memory], offset)
    with _moving:  # Windows, and older versions of macOS
        file.seek(offset)
        return file.readinto(memory) or 0


def bytes_at(file: FileIO, num_bytes: int, offset: int) -> bytes:
    """Read `num_bytes` from `offset`, fewer at the end of the file."""
    content, num_read = bytearray(num_bytes), 0
    while count := read_at(file, memoryview(content)[num_read:], offset + num_read):
        num_read += count
    return bytes(content[:num_read])
