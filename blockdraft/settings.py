"""What the user asked for, and the only place where the environment is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeVar

from blockdraft.errors import SettingsError

Auto = Literal["auto"]
T = TypeVar("T")
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "keep", "none", "fp8", "int8")


def _setting(default: T, help_text: str) -> T:
    """A field whose help text is also its row in --help."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One engine, as asked. "auto" is resolved by plan.make_plan and nowhere else."""

    model: str = _setting("default", "target: folder, hub id, GGUF file, or 'default'")
    draft: str | None = _setting(None, "drafter: folder or hub id, or 'none'")
    width: int | Auto = _setting("auto", "tokens verified per step, anchor included; 1 is plain decoding")
    device: str = _setting("cpu", "torch device")
    dtype: str = _setting("auto", f"one of {', '.join(DTYPES)}")
    quantization: str = _setting(
        "auto",
        "the target's weights: keep as stored, none (unpacked), or fp8 or int8 made while loading; "
        "auto unpacks what fits easily",
    )
    draft_quantization: str = _setting("auto", "the same for the drafter's weights")
    max_context: int | Auto = _setting("auto", "longest prompt and answer together, in tokens")
    max_rows: int | Auto = _setting("auto", "sequences that run at once")
    max_queue: int = _setting(1024, "sequences that may wait; more are refused")
    page_size: int = _setting(16, "tokens per cache page")
    cache_bytes: int | Auto = _setting("auto", "memory for the KV cache, in bytes")
    chunk: int | Auto = _setting("auto", "prompt tokens per prefill step")
    prefix_cache: bool = _setting(True, "reuse the cache of common prompt beginnings")
    overlap: bool = _setting(False, "launch the next step before reading the last one's result")
    verify: bool = _setting(True, "check kernels, model and drafter before serving")
    seed: int = _setting(0, "where requests without a seed draw theirs from")

    def __post_init__(self) -> None:
        for name, low in _MINIMUM.items():
            value = getattr(self, name)
            if value == "auto":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise SettingsError(f"{name} = {value!r} is not a whole number of at least {low}.")
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise SettingsError(f"{name} '{value}' is unknown: use one of {', '.join(known)}.")


CHOICES = {"dtype": DTYPES, "quantization": QUANTIZATIONS, "draft_quantization": QUANTIZATIONS}

_MINIMUM = {
    "width": 1,
    "max_context": 2,
    "max_rows": 1,
    "max_queue": 1,
    "page_size": 1,
    "cache_bytes": 1,
    "chunk": 1,
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
