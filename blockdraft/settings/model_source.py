"""What the text after --model or --draft means: the default model, a folder, a GGUF file, or a hub id.

A mount that is not there must not become a download: a path is never taken for a hub id where that can be
told from its first part. No torch here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blockdraft.errors import ModelError

# Not "./name" and not "a/b/c": those can only be paths.
HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
# Where people keep or mount models; no organisation of the hub that publishes models has these names.
MOUNTS = re.compile(
    r"app|cache|data|home|media|mnt|models?|opt|root|srv|tmp|volumes?|weights|workspace", re.IGNORECASE
)
_OWN_WORDS = {"model": "or 'default'", "drafter": "'dflash2', 'ngram', or 'none'"}
DEFAULT_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what the hub calls the default model


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model is."""

    kind: Literal["default", "folder", "gguf", "hub"]
    name: str  # as the user wrote it, for messages
    path: Path | None = None  # of a folder or a GGUF file
    repo: str = ""
    revision: str | None = None


def find_source(source: str | Path, what: str = "model") -> Source:
    """Raises ModelError for a path that is not there, which is a `what`. Looks at this machine only."""
    name = str(source)
    if name == "default":
        return Source("default", name)
    # os.path, not Path: its tests answer False for any text, where Path's raise on some.
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return Source("folder", name, path=Path(path))
    if os.path.exists(path):
        if not path.endswith(".gguf"):
            raise ModelError(
                f"{what} '{name}' is a file but not a .gguf one: give its folder, or a .gguf file."
            )
        return Source("gguf", name, path=Path(path))
    hub_id = HUB_ID.fullmatch(name)
    if hub_id is None or isinstance(source, Path) or name.endswith(".gguf"):
        raise ModelError(
            f"{what} '{name}' does not exist: give a folder, a .gguf file, a hub id (org/name or "
            f"org/name@revision), {_OWN_WORDS[what]}.{_mount_hint(name)}"
        )
    if MOUNTS.fullmatch(name.partition("/")[0]):
        raise ModelError(
            f"{what} '{name}' looks like a path, not a hub id, and there is no such folder here: "
            f"{_meant(name)}"
        )
    return Source("hub", name, repo=hub_id["repo"], revision=hub_id["revision"])


def public_id(name: str) -> str:
    """What others know a model by: its id on the hub, or the path as the user wrote it."""
    if name == "default":
        return DEFAULT_ID
    hub_id = HUB_ID.fullmatch(name)
    return name if hub_id is None else hub_id["repo"]


def _mount_hint(name: str) -> str:
    if not name.startswith(("/", "~", "./", "../")) or name.endswith(".gguf"):
        return ""
    parent = os.path.dirname(os.path.expanduser(name).rstrip("/"))
    if os.path.isdir(parent) and os.path.dirname(parent) != parent:
        return ""  # only the last part is wrong: no mount is missing
    return " In a container, is the volume mounted?"


def _meant(name: str) -> str:
    """What to give instead of a relative path that is not there."""
    if os.path.isdir(f"/{name}"):
        return f"use /{name}, which exists."
    return f"give its full path (/{name}?), and in a container check that the volume is mounted."
