"""Keeps results of a start in the cache folder for the next start."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def keep(file: Path, content: bytes) -> None:
    """Write a whole file or nothing. If writing fails, ignore it: the next start repeats the work."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}")
        own.write_bytes(content)
        own.replace(file)
