"""What a start has found out, kept for the next one: each thing is a file of its own in the cache folder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def keep(file: Path, content: bytes) -> None:
    """As a whole or not at all; where the folder cannot be written, the next start finds out again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}")
        own.write_bytes(content)
        own.replace(file)
