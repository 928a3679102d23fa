"""Lists and removes downloaded models in the hub's cache, and the default model in our cache.

Nothing outside these two folders is listed or removed. No hub client is needed: a repository is a folder
`models--org--name` with its files in blobs/ (in snapshots/ on systems without symbolic links).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.errors import ModelError
from blockdraft.settings.settings import cache_dir, cache_dirs, suggestion

_PREFIX = "models--"
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One downloaded model; `name` can be passed to --model."""

    name: str
    path: Path
    num_bytes: int
    has_weights: bool = True


def stored_models() -> list[StoredModel]:
    """Return the default model, then the hub's models by name."""
    gguf, hub = cache_dir() / SMOLLM2.gguf, cache_dirs()["hub"]
    found = [StoredModel("default", gguf, _size(gguf))] if gguf.is_file() else []
    folders = [path for path in hub.glob(f"{_PREFIX}*--*") if path.is_dir() and not path.is_symlink()]
    for folder in sorted(folders, key=lambda path: path.name.lower()):
        name = folder.name.removeprefix(_PREFIX).replace("--", "/", 1)
        files = (folder / "snapshots").rglob("*")
        has_weights = any(path.suffix in _WEIGHTS and path.exists() for path in files)
        found.append(StoredModel(name, folder, folder_bytes(folder), has_weights))
    return found


def other_bytes() -> int:
    """Return the size of all other files in our cache: kernels, packed weights, records of checks."""
    return sum(
        folder_bytes(path) if path.is_dir() else _size(path)
        for path in (cache_dir().iterdir() if cache_dir().is_dir() else ())
        if path.name != SMOLLM2.gguf
    )


def find_stored(name: str) -> StoredModel:
    """Return the stored model with this name. Raise ModelError if it is in neither cache."""
    stored = {model.name: model for model in stored_models()}
    if name in stored:
        return stored[name]
    if os.path.exists(os.path.expanduser(name)):
        raise ModelError(f"'{name}' is your own file or folder, not in a cache: remove it yourself.")
    hint = suggestion(name, list(stored)) or ": `blockdraft models` lists the models that are."
    raise ModelError(f"'{name}' is not on this disk{hint}")


def remove(model: StoredModel) -> None:
    """Delete the model, but no link targets outside the cache. Raise ModelError if this fails."""
    cache = cache_dir() if model.name == "default" else cache_dirs()["hub"]
    assert model.path.parent == cache, "what is removed is in a cache"
    try:
        if model.name == "default":
            model.path.unlink()
            model.path.with_name(model.path.name + ".sha256").unlink(missing_ok=True)
        else:
            shutil.rmtree(model.path)
            shutil.rmtree(cache / ".locks" / model.path.name, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"'{model.name}' cannot be removed: {error.strerror}: {error.filename}.") from None


def folder_bytes(folder: Path) -> int:
    """Return the size of the files in `folder`, without symbolic links."""
    return sum(_size(path) for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # the file was just removed
        return 0
