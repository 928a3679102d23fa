"""Int8 weights: measured column factors of known checkpoints, and a cache of packed matrices on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from mmap import ACCESS_READ, mmap
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from blockdraft.kernels.int8 import Int8Weight, rotated_columns
from blockdraft.models.packed_int8 import Int8Matrix
from blockdraft.settings.cache_files import keep
from blockdraft.settings.settings import cache_dir

FOLDER = Path(__file__).with_name("column_factors")
_PIECE = 8 << 20  # bytes
_FORMAT = "3"  # version of the file's layout and values
_PARTS = ("packed", "sums", "scale", "factors")


def column_factors(checkpoint: str) -> Mapping[str, Tensor]:
    """Return column factors, float32 [columns] by module path, or {} if this checkpoint was not measured.

    The factors are powers of two that scale the columns of activations before these are rounded to int8.
    `python -m scripts.make_column_factors` measures the factors: 2**-n for a column whose largest values are
    4**n times the usual ones. Any factors give correct products; good factors reduce the rounding error.
    """
    file = FOLDER / f"{Path(checkpoint).name}.safetensors"
    if not file.is_file():
        return {}
    return {path: torch.exp2(exponent.float()) for path, exponent in load_file(file).items()}


class Int8Cache:
    """A disk cache of one model's packed matrices, by module path. Packing takes seconds; reading is faster.

    The key is a hash of every byte of the source files. File sizes and times are not enough: `cp -p`, `rsync
    -t` and reproducible images can replace weights without changing name or time.
    """

    def __init__(self, sources: Iterable[Path], factors: Mapping[str, Tensor]) -> None:
        digest = hashlib.sha256(_FORMAT.encode())
        for source in sources:
            digest.update(_file_digest(source).encode())
        for path, values in sorted(factors.items()):
            digest.update(path.encode() + values.numpy().tobytes())
        self._file = cache_dir() / "packed" / f"{digest.hexdigest()[:32]}.safetensors"

    def read(self) -> dict[str, Int8Matrix]:
        """Return the cached matrices, or {} if there is no valid cache."""
        try:
            expected = self._file.with_suffix(".sha256").read_text(encoding="utf-8")
            is_whole = _file_digest(self._file) == expected
        except (OSError, ValueError):  # an empty file cannot be mapped
            return {}
        if not is_whole:
            return {}
        with safe_open(self._file, framework="pt") as file:  # mapped: nothing is copied
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        paths = dict.fromkeys(name.rpartition(":")[0] for name in tensors)
        return {path: _matrix(path, tensors) for path in paths}

    def write(self, matrices: Mapping[str, Int8Matrix]) -> None:
        tensors: dict[str, Tensor] = {}
        for path, matrix in matrices.items():
            tensors |= {f"{path}:{part}": getattr(matrix, part) for part in _PARTS}
            tensors[f"{path}:rows"] = torch.tensor([matrix.shape[0]])
        content = save(tensors)
        keep(self._file, content)
        keep(self._file.with_suffix(".sha256"), _digest(memoryview(content)).encode())


def _file_digest(path: Path) -> str:
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        return _digest(memoryview(content))


def _digest(content: memoryview) -> str:
    """Return a hash of the hashes of pieces, computed on all cores because every start waits for it."""
    pieces = [content[start : start + _PIECE] for start in range(0, len(content), _PIECE)]
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda piece: hashlib.sha256(piece).digest(), pieces)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _matrix(path: str, tensors: Mapping[str, Tensor]) -> Int8Matrix:
    packed, sums, scale, factors, rows = (tensors[f"{path}:{part}"] for part in (*_PARTS, "rows"))
    columns = factors.shape[0]
    weight = Int8Weight(packed, sums, scale, factors, int(rows[0]), columns, rotated_columns(columns))
    return Int8Matrix(weight)
