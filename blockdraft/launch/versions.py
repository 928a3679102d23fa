"""Versions of the engines we start: which we know, how they compare, and which changes a build carries."""

from __future__ import annotations

import re
from dataclasses import dataclass

from blockdraft.errors import SettingsError

NEWEST = {"vllm": "0.32.0", "sglang": "0.5.23"}  # read in their wheels, 2026-11
OLDEST = {"vllm": (0, 19, 0), "sglang": (0, 5, 23)}
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}

_VERSION = re.compile(
    r"v?(?P<release>\d+(\.\d+){1,2})(?P<pre>[.-]?(a|b|rc|post)\d*)?(?P<nightly>\.?dev\d*)?(\+(?P<label>[\w.]+))?"
)
_RANGE = re.compile(r"(<=|>=|<|>|==)(\d+(?:\.\d+)*)")

Release = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Version:
    """One version of an engine, as its own package writes it: 0.32.0, 0.19.2rc1.dev21, 0.32.0+pr41703."""

    engine: str
    text: str
    release: Release
    is_nightly: bool = False  # built between releases: newer than the release before it
    carried: frozenset[int] = frozenset()  # pull requests that were merged into this build by hand

    def __str__(self) -> str:
        return f"{TITLES[self.engine]} {self.text}"

    def within(self, text: str) -> bool:
        """Whether the release is in a range such as ">=0.20.0,<0.24.0"; "" holds all."""
        return all(_holds(self.release, *_bound(part)) for part in text.split(",") if part)


def read_version(engine: str, text: str | None) -> Version:
    """The version that was asked for, or the newest we know. Raises SettingsError for one that is too old."""
    text = NEWEST[engine] if text is None else text.strip()
    found = _VERSION.fullmatch(text)
    if not found:
        raise SettingsError(
            f"engine_version '{text}' is not a version: give one such as {NEWEST[engine]}, or leave it out."
        )
    release = _release(found["release"])
    if release < OLDEST[engine]:
        oldest = ".".join(map(str, OLDEST[engine]))
        raise SettingsError(
            f"engine_version '{text}' of {TITLES[engine]} is older than what we can write flags for: "
            f"use {oldest} or newer; {NEWEST[engine]} is known best."
        )
    carried = frozenset(int(number) for number in re.findall(r"pr(\d+)", found["label"] or ""))
    return Version(engine, text.removeprefix("v"), release, found["nightly"] is not None, carried)


def _release(text: str) -> Release:
    major, minor, patch = (*map(int, text.split(".")), 0)[:3]
    return major, minor, patch


def _bound(text: str) -> tuple[str, Release]:
    found = _RANGE.fullmatch(text.strip())
    assert found, f"{text!r} is not a bound on a version"
    return found[1], _release(found[2])


def _holds(release: Release, comparison: str, bound: Release) -> bool:
    return {
        "<": release < bound,
        "<=": release <= bound,
        ">": release > bound,
        ">=": release >= bound,
        "==": release == bound,
    }[comparison]
