"""Checks whether the kernels in `kernels/llvm` run on this processor, and which int8 instructions it has."""

from __future__ import annotations

import functools
import importlib.util
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.errors import SettingsError
from blockdraft.settings.cache_files import keep
from blockdraft.settings.settings import cache_dir, wanted_products

if TYPE_CHECKING:
    import torch

# Instructions for int8 products, the fastest first, with the processor features that they need: the names in
# /proc/cpuinfo, then those of LLVM.
_PATHS = {
    "aarch64": {"sdot": ({"asimddp"}, ("+dotprod",))},
    "x86_64": {
        "vnni": ({"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}, ("+avx512f,+avx512vnni",)),
        "avx2": ({"avx2", "fma"}, ("+avx2,+fma",)),
    },
}
_NEEDED = {"aarch64": {"asimd"}, "x86_64": {"avx2", "fma"}}  # without these, all kernels would be slow
_OF_APPLE = {"asimd", "asimddp"}  # in every ARM processor of a Mac
_TRIAL = (  # large enough for several threads
    "import torch; from blockdraft.kernels.llvm.linear import TileLinear; "
    "assert (TileLinear(torch.float32)(torch.ones(2, 64), torch.ones(4096, 64)) == 64).all()"
)
_TRIAL_S = 120.0


def why_no_llvm(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the PyTorch reference is used instead of the CPU kernels; None if they are used."""
    if device.type != "cpu":
        return f"the CPU kernels do not run on '{device.type}'"
    if str(dtype) not in ("torch.float32", "torch.float64"):
        return f"the CPU kernels compute in float32 or float64, not {dtype}"
    return why_not_here() or (None if sys.platform == "linux" else _why_not_tried())


@functools.cache
def why_not_here() -> str | None:
    """Return why this machine cannot run the CPU kernels, or None. The planner calls this without PyTorch."""
    machine = architecture()
    if sys.platform not in ("linux", "darwin"):
        return f"the CPU kernels were never tested on {platform.system()}"
    if machine not in _NEEDED:
        return f"the CPU kernels were never measured on {machine}"
    missing = _NEEDED[machine] - _features()
    if missing:
        return f"this processor has no {', '.join(sorted(missing))}"
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed (pip install llvmlite)"
    return None


@functools.cache
def _why_not_tried() -> str | None:
    """Run a kernel once in a subprocess, which may crash; return why it failed, or None."""
    torch_version = version("torch")
    tried = cache_dir() / "kernels" / f"tried-{torch_version}-{version('llvmlite')}"
    if tried.exists():
        return None
    try:
        subprocess.run([sys.executable, "-c", _TRIAL], check=True, capture_output=True, timeout=_TRIAL_S)
    except (OSError, subprocess.SubprocessError):
        return f"the CPU kernels do not run on this {platform.system()}: a trial failed"
    keep(tried, b"")
    return None


def architecture() -> str:
    """Return the processor's architecture by its Linux name: aarch64, not arm64 as on macOS."""
    machine = platform.machine()
    return "aarch64" if machine == "arm64" else machine


@functools.cache
def product_path() -> str:
    """Return the instructions for int8 products: the fastest, or those that BLOCKDRAFT_PRODUCTS names."""
    wanted = wanted_products()
    available = product_paths()
    if wanted and wanted not in available:
        raise SettingsError(
            f"BLOCKDRAFT_PRODUCTS is '{wanted}', which this processor does not have: use one of "
            f"{', '.join(available)}."
        )
    return wanted or available[0]


def product_paths() -> list[str]:
    """Return this processor's instructions for int8 products, fastest first; "generic" runs anywhere."""
    here = _PATHS.get(architecture(), {})
    return [*(path for path, (needed, _) in here.items() if needed <= _features()), "generic"]


def has_permute() -> bool:
    """Return whether this processor can look up 16 numbers in a table of 16 by one instruction."""
    return "avx512f" in _features()


def extra_features() -> tuple[str, ...]:
    """Return the processor features that LLVM may use but may not detect: on ARM it detects none."""
    here = _PATHS.get(architecture(), {})
    return tuple(name for needed, names in here.values() if needed <= _features() for name in names)


@functools.cache
def _features() -> set[str]:
    """Return this processor's features by their Linux names."""
    if sys.platform == "darwin":
        return _OF_APPLE if architecture() == "aarch64" else set()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    found = [line.partition(":")[2].split() for line in lines if line.startswith(("Features", "flags"))]
    return set(found[0]) if found else set()
