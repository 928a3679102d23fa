"""Allocates memory that becomes resident page by page, as it is written."""

from __future__ import annotations

import mmap
import sys


def private_memory(num_bytes: int, *, has_huge_pages: bool) -> mmap.mmap:
    """Return zeroed private memory (copy-on-write after a fork); only Linux has `has_huge_pages`."""
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE if has_huge_pages else mmap.MADV_NOHUGEPAGE)
    return memory
