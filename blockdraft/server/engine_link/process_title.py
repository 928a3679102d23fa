"""Takes secrets out of the command line that `ps` shows of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path


def hide(secrets: Iterable[str]) -> bool:
    """Overwrite `secrets` in /proc/self/cmdline. False where that cannot be done: not on Linux.

    The kernel shows the memory the arguments were passed in, and says where it lies; Python has its own
    copy, so nothing reads that memory again. What ran before the call could be seen.
    """
    try:
        # The name in parentheses may hold spaces. proc(5): arg_start is field 48, the state is field 3.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        arguments = Path("/proc/self/cmdline").read_bytes()
        start = int(fields[48 - 3])
    except (OSError, IndexError, ValueError):
        return False
    if not start:
        return False
    for secret in filter(None, map(str.encode, secrets)):
        place = arguments.find(secret)
        while place >= 0:
            ctypes.memset(start + place, ord("*"), len(secret))
            place = arguments.find(secret, place + len(secret))
    return True
