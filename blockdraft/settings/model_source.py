"""Finds the model that --model or --draft names: the default one, a folder, a GGUF file, or a hub id.

A name whose first part shows that it is a path is never a hub id, so that a missing mount does not cause a
download.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blockdraft.errors import ModelError

# Does not match "./name" and "a/b/c", which can only be paths.
HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
# Folders where people keep or mount models. No publisher of models on the hub has such a name.
MOUNTS = re.compile(
    r"app|cache|data|home|media|mnt|models?|opt|root|srv|tmp|volumes?|weights|workspace", re.IGNORECASE
)
_OWN_WORDS = {"model": "or 'default'", "drafter": "'dflash2', 'mtp', 'ngram', or 'none'"}
DEFAULT_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the default model's id on the hub
DEFAULT_BYTES = 98_362_432  # size of the default model's GGUF file
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True, slots=True)
class Source:
    """The place of a model."""

    kind: Literal["default", "folder", "gguf", "hub"]
    name: str  # the name as the user wrote it, for messages
    path: Path | None = None  # the folder or GGUF file; None for a hub id and the word "default"
    repo: str = ""
    revision: str | None = None


def find_source(source: str | Path, what: str = "model") -> Source:
    """Find a model on this machine or name its repository. Raise ModelError if a path does not exist."""
    name = str(source)
    if name == "default":
        return Source("default", name)
    # os.path returns False for any text; Path raises an error for some.
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return Source("folder", name, path=Path(path))
    if os.path.exists(path):
        if not path.endswith(".gguf"):
            raise ModelError(
                f"{what} '{name}' is a file but not a .gguf one: give its folder, or a .gguf file."
            )
        return Source("default" if _is_default_file(path) else "gguf", name, path=Path(path))
    hub_id = HUB_ID.fullmatch(name)
    if hub_id is None or isinstance(source, Path) or name.endswith(".gguf"):
        raise ModelError(
            f"{what} '{name}' does not exist: give a folder, a .gguf file, a hub id (org/name or "
            f"org/name@revision), {_OWN_WORDS[what]}.{_mount_hint(name)}"
        )
    if MOUNTS.fullmatch(name.partition("/")[0]):
        meant = f"give its full path (/{name}?), and in a container check that the volume is mounted."
        meant = f"use /{name}, which exists." if os.path.isdir(f"/{name}") else meant
        raise ModelError(f"{what} '{name}' looks like a path, but there is no such folder: {meant}")
    return Source("hub", name, repo=hub_id["repo"], revision=hub_id["revision"])


def known_name(model: str) -> str:
    """Return the key of a model's drafters and measurements: "default" also for the default model's file."""
    return "default" if _is_default_file(os.path.expanduser(model)) else model


def _is_default_file(path: str) -> bool:
    """Return whether a file is the default model's: compare its size, then its hash."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return False
    if state.st_size != DEFAULT_BYTES or not path.endswith(".gguf"):
        return False
    return _sha256(path, state.st_ino, state.st_mtime_ns, state.st_ctime_ns) == DEFAULT_SHA256


@functools.lru_cache(maxsize=8)
def _sha256(path: str, *state: int) -> str:
    """Return a file's hash. The result is cached: hashing takes 0.2 s. `state` changes with the file."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def public_id(name: str) -> str:
    """Return the model's id on the hub, or its path as the user wrote it."""
    if name == "default":
        return DEFAULT_ID
    hub_id = HUB_ID.fullmatch(name)
    return name if hub_id is None else hub_id["repo"]


def _mount_hint(name: str) -> str:
    if not name.startswith(("/", "~", "./", "../")) or name.endswith(".gguf"):
        return ""
    parent = os.path.dirname(os.path.expanduser(name).rstrip("/"))
    if os.path.isdir(parent) and os.path.dirname(parent) != parent:
        return ""  # only the last part of the path is wrong: the mount exists
    return " In a container, is the volume mounted?"
