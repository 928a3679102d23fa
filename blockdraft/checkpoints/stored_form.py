"""Describes a checkpoint for people: its name, the format of its files and their size."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from blockdraft.checkpoints.checkpoint import Checkpoint
from blockdraft.checkpoints.gguf_checkpoint import GgufCheckpoint
from blockdraft.settings.shipped import model_title


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
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors().values():
        sizes[str(info.dtype).removeprefix("torch.")] += math.prod(info.shape) * info.dtype.itemsize
    kind = method or max(sizes, key=lambda dtype: sizes[dtype], default="empty")
    return StoredForm(title, f"safetensors {kind}", sizes.total())
