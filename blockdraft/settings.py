"""What the user asked for, and the only place where the environment is read."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where downloads are kept: $BLOCKDRAFT_CACHE, or blockdraft/ in the user's cache folder."""
    chosen = os.environ.get("BLOCKDRAFT_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "blockdraft"
