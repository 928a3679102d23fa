"""Versions of vLLM and SGLang: known versions, their order, and the pull requests in a build."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from packaging.version import InvalidVersion, Version

from blockdraft.errors import SettingsError
from blockdraft.machine.versions import is_in_range

NEWEST = {"vllm": "0.33.0", "sglang": "0.5.23"}  # as in their wheels, 2026-11
OLDEST = {"vllm": "0.19.0", "sglang": "0.5.23"}
PRECOMPILED = "precompiled"  # vLLM's word for a build with the kernels of a published build
# Adds capability 12.1 to vLLM's published builds: says that a build has those kernels, and is never merged.
SPARK_KERNELS = 38484
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """A version of an engine, as its package writes it: 0.33.0, 0.19.2rc1.dev21, 0.33.0+pr41703."""

    engine: str
    text: str
    release: tuple[int, int, int]
    is_nightly: bool = False  # built between two releases
    carried: frozenset[int] = frozenset()  # pull requests that were merged into this build

    def __str__(self) -> str:
        return f"{TITLES[self.engine]} {self.text}"

    @property
    def has_spark_kernels(self) -> bool:
        """Return whether the build is said to have kernels for capability 12.1 (GB10)."""
        return self.engine == "vllm" and SPARK_KERNELS in self.carried

    @property
    def source(self) -> str:
        """Return the version as container/install-vllm builds it: a release, and pull requests to merge."""
        release, _, local = self.text.partition("+")
        pulls = [word for word in _pull_words(local) if word != f"pr{SPARK_KERNELS}"]
        return f"{release}+{'.'.join(pulls)}" if pulls else release

    def with_spark_kernels(self) -> str:
        """Return the version's text for the same build with kernels for capability 12.1."""
        return f"{self.text}{'.' if '+' in self.text else '+'}pr{SPARK_KERNELS}"

    def within(self, text: str) -> bool:
        """Return whether the release is in a range such as ">=0.20.0,<0.24.0"."""
        return is_in_range(self.text, text)


@cache
def read_version(engine: str, text: str | None) -> EngineVersion:
    """Return the version that `text` names, or the newest known one. Raise SettingsError if it is too old."""
    text = NEWEST[engine] if text is None else text.strip().lower()
    try:
        read = Version(text)
    except InvalidVersion:
        raise SettingsError(
            f"engine_version '{text}' is not a version: give one such as {NEWEST[engine]}, with "
            f"+pr41703 after it for a build with that pull request, or leave it out."
        ) from None
    carried = _pull_requests(text, read.local or "")
    release = (read.major, read.minor, read.micro)
    found = EngineVersion(engine, text.removeprefix("v"), release, read.is_devrelease, carried)
    if not found.within(f">={OLDEST[engine]}"):
        raise SettingsError(
            f"engine_version '{text}' of {TITLES[engine]} is older than what we can write flags for: "
            f"use {OLDEST[engine]} or newer; {NEWEST[engine]} is known best."
        )
    return found


def _pull_requests(text: str, local: str) -> frozenset[int]:
    """Return the numbers of prNNN words after the "+"; ignore other words (g893611813, cu130)."""
    words = _pull_words(local)
    wrong = [word for word in words if not re.fullmatch(r"pr[1-9]\d*", word)]
    if wrong:
        why = f"names '{wrong[0]}', which is no pull request: write it as pr41703"
        raise SettingsError(f"engine_version '{text}' {why}.")
    return frozenset(int(word.removeprefix("pr")) for word in words)


def _pull_words(local: str) -> list[str]:
    return [word for word in local.split(".") if word.startswith("pr") and word != PRECOMPILED]
