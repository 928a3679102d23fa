"""Reads parts of an open file at offsets, so that several threads can share the file."""

from __future__ import annotations

import os
from io import FileIO
from threading import Lock

_moving = Lock()  # guards seek and read on systems without preadv


def read_at(file: FileIO, memory: memoryview, offset: int) -> int:
    """Read into `memory` from `offset` on; return how many bytes were read. Linux stops at 2 GiB."""
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [memory], offset)
    with _moving:  # Windows, and older versions of macOS
        file.seek(offset)
        return file.readinto(memory) or 0


def bytes_at(file: FileIO, num_bytes: int, offset: int) -> bytes:
    """Return `num_bytes` from `offset` on, or fewer if the file ends before."""
    content, num_read = bytearray(num_bytes), 0
    while count := read_at(file, memoryview(content)[num_read:], offset + num_read):
        num_read += count
    return bytes(content[:num_read])
