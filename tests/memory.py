"""The memory that reading a checkpoint takes, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import sys
from pathlib import Path
from {module} import {name}

def peak_kb():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

before = peak_kb()
checkpoint = {name}(Path(sys.argv[1]), name="big")
num_rows = checkpoint.tensors()[{tensor!r}].shape[0]
for begin in range(0, num_rows, 1000):
    checkpoint.read({tensor!r}, begin, min(begin + 1000, num_rows)).sum()
print((peak_kb() - before) // 1000)
"""


def peak_growth_mb(checkpoint_type: type, path: Path, *, tensor: str) -> int:
    """Return the growth of peak resident memory while a tensor is read, 1000 rows at a time."""
    if sys.platform != "linux":
        pytest.skip("the peak is read from /proc")
    script = _SCRIPT.format(module=checkpoint_type.__module__, name=checkpoint_type.__name__, tensor=tensor)
    command = [sys.executable, "-c", script, str(path)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
