"""Reads a hub model without its weights: small files through the hub's cache, headers by range requests."""

from __future__ import annotations

import json
from pathlib import Path

from blockdraft.checkpoints.fetch import hub_error
from blockdraft.checkpoints.model_folder import TensorEntry
from blockdraft.errors import BlockdraftError, FetchError, ModelError

_TIMEOUT_S = 10.0
_OPTIONAL = ("generation_config.json", "hf_quant_config.json")


def read_remote(
    repo: str, *, revision: str | None, needs_weights: bool
) -> tuple[Path, dict[str, TensorEntry] | None]:
    """Read a model from the hub's cache if it is complete there, else from the hub.

    Return the folder of the small files, and the shards' headers, or None if the folder has the shards too.
    """
    import huggingface_hub

    from blockdraft.checkpoints.hub import HUB_ERRORS

    cached = _cached(repo, revision, needs_weights=needs_weights)
    if cached is not None:
        return cached, None
    try:
        # One request without a download's retries: an unreachable hub is reported at once.
        url = huggingface_hub.hf_hub_url(repo, "config.json", revision=revision)
        huggingface_hub.get_hf_file_metadata(url, timeout=_TIMEOUT_S)
        config = Path(huggingface_hub.hf_hub_download(repo, "config.json", revision=revision))
        for name in _OPTIONAL:
            _download_if_there(repo, name, revision)
        tensors = _headers(repo, revision) if needs_weights else {}
    except HUB_ERRORS as error:
        raise _planning_error(error, repo, revision) from error
    return config.parent, tensors


def _cached(repo: str, revision: str | None, *, needs_weights: bool) -> Path | None:
    """Return the folder of the cached snapshot, or None if a needed file is missing."""
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    shards = list(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    is_whole = bool(shards) and (not index.exists() or _has_all(index, folder))
    return folder if is_whole or not needs_weights else None


def _has_all(index: Path, folder: Path) -> bool:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
        return all((folder / name).exists() for name in set(weight_map.values()))
    except (ValueError, AttributeError, TypeError):
        return False


def _download_if_there(repo: str, name: str, revision: str | None) -> None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        huggingface_hub.hf_hub_download(repo, name, revision=revision)
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        return


def _headers(repo: str, revision: str | None) -> dict[str, TensorEntry]:
    import huggingface_hub

    metadata = huggingface_hub.get_safetensors_metadata(repo, revision=revision)
    return {
        name: TensorEntry(tensor.dtype, tuple(tensor.shape), *tensor.data_offsets)
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }


def _planning_error(error: Exception, repo: str, revision: str | None) -> BlockdraftError:
    from huggingface_hub import errors

    if isinstance(error, errors.NotASafetensorsRepoError):
        return ModelError(
            f"'{repo}' has no safetensors files on the hub: give one that has, or a .gguf file."
        )
    is_answer = isinstance(error, errors.HfHubHTTPError | errors.HFValidationError)
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return ModelError(f"'{repo}' on the hub has no config.json: it is not a model that can be planned.")
    if not is_answer or isinstance(error, errors.LocalEntryNotFoundError):
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return FetchError(
            f"the hub cannot be reached for '{repo}' ({reason}): check the network, HF_ENDPOINT and "
            "HF_HUB_OFFLINE, or give a folder."
        )
    return hub_error(error, repo, revision)
