"""What the user asked for, and the only place where the environment is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeVar

from blockdraft.acceptance_profile import read_profile
from blockdraft.errors import SettingsError

Auto = Literal["auto"]
T = TypeVar("T")
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "keep", "none", "fp8", "int8")
LOAD_FORMATS = ("auto", "dummy")


def _setting(default: T, help_text: str) -> T:
    """A field whose help text is also its row in --help."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One engine, as asked. "auto" is resolved by plan.make_plan; the device's before it, by asking torch."""

    model: str = _setting("default", "target: folder, hub id, GGUF file, or 'default'")
    draft: str | None = _setting(None, "drafter: folder or hub id, or 'none'")
    width: int | Auto = _setting("auto", "tokens verified per step, anchor included; 1 is plain decoding")
    device: str = _setting("auto", "torch device; auto is cuda where torch finds one, else cpu")
    dtype: str = _setting("auto", f"one of {', '.join(DTYPES)}")
    quantization: str = _setting(
        "auto",
        "the target's weights: keep as stored, none (unpacked), or fp8 or int8 made while loading; "
        "auto unpacks what fits easily",
    )
    draft_quantization: str = _setting("auto", "the same for the drafter's weights")
    load_format: str = _setting(
        "auto",
        "dummy: random weights, for timing only; of a folder or hub id config.json is enough",
    )
    synthetic_acceptance: str | None = _setting(
        None,
        "for timing only: accept drafts by chance, with these probabilities by position (0.9,0.8,0.6) or "
        "for this many tokens per step (mean:4.5)",
    )
    max_context: int | Auto = _setting("auto", "longest prompt and answer together, in tokens")
    max_rows: int | Auto = _setting("auto", "sequences that run at once")
    max_queue: int = _setting(1024, "sequences that may wait; more are refused")
    page_size: int = _setting(16, "tokens per cache page")
    cache_bytes: int | Auto = _setting("auto", "memory for the KV cache, in bytes")
    gpu_memory_utilization: float = _setting(
        0.9,
        "share of the GPU's memory that may be in use, by us and by others; the cache takes what is left",
    )
    chunk: int | Auto = _setting("auto", "prompt tokens per prefill step")
    max_stall_ms: int | None = _setting(
        None, "longest that a prefill step may hold up decoding, in milliseconds; cuts the chunk"
    )
    prefix_cache: bool = _setting(True, "reuse the cache of common prompt beginnings")
    overlap: bool | Auto = _setting(
        "auto", "launch the next step before reading the last one's result; auto: on a GPU"
    )
    graphs: bool = _setting(True, "on a GPU, run each decode step as one CUDA graph")
    verify: bool = _setting(True, "check kernels, model and drafter before serving")
    seed: int = _setting(0, "where requests without a seed draw theirs from")

    def __post_init__(self) -> None:
        for name, low in _MINIMUM.items():
            value = getattr(self, name)
            if value == "auto" or (value is None and name == "max_stall_ms"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise SettingsError(f"{name} = {value!r} is not a whole number of at least {low}.")
        share = self.gpu_memory_utilization
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise SettingsError(
                f"gpu_memory_utilization = {share!r} is not a share: give 0.9 for nine tenths."
            )
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise SettingsError(f"{name} '{value}' is unknown: use one of {', '.join(known)}.")
        if self.synthetic_acceptance is not None:
            read_profile(self.synthetic_acceptance)
            if self.draft in (None, "none"):
                raise SettingsError(
                    f"synthetic_acceptance = {self.synthetic_acceptance!r}, but there is no drafter whose "
                    "drafts could be accepted: add --draft."
                )

    @property
    def suffix(self) -> str:
        """What the model's name ends with where answers are for timing only; empty where they are real."""
        dummy = "+dummy" if self.load_format == "dummy" else ""
        return dummy + ("+synthetic" if self.synthetic_acceptance is not None else "")


CHOICES = {
    "dtype": DTYPES,
    "quantization": QUANTIZATIONS,
    "draft_quantization": QUANTIZATIONS,
    "load_format": LOAD_FORMATS,
}

_MINIMUM = {
    "width": 1,
    "max_context": 2,
    "max_rows": 1,
    "max_queue": 1,
    "page_size": 1,
    "cache_bytes": 1,
    "chunk": 1,
    "max_stall_ms": 1,
    "seed": -(2**63),
}

SETTING_NAMES = tuple(item.name for item in fields(Settings))


def cache_dir() -> Path:
    """Where downloads are kept: $BLOCKDRAFT_CACHE, or blockdraft/ in the user's cache folder."""
    chosen = os.environ.get("BLOCKDRAFT_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "blockdraft"


def environment_api_key() -> str | None:
    """$BLOCKDRAFT_API_KEY: what clients of the server must send; None when unset or empty."""
    return os.environ.get("BLOCKDRAFT_API_KEY") or None


def pin_threads() -> None:
    """Bind OpenMP's threads to cores, one each; takes effect only before torch is imported.

    Unbound, the kernel may pack them on one core: a small model was 2.5 times slower (2 x Neoverse-N1,
    2026-11). Whoever set any of these variables has decided, and nothing is changed.
    """
    chosen = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
    if not any(name in os.environ for name in chosen):
        os.environ.update(OMP_PROC_BIND="true", OMP_PLACES="cores")
