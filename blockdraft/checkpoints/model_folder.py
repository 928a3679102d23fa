"""Reads a Hugging Face model folder without torch: its JSON files, and the headers of its shards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from blockdraft.errors import ModelError

DTYPES = {  # the format's name -> torch's, and the bytes of a value
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
    "I8": ("int8", 1),
    "I16": ("int16", 2),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}

_INDEX = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
_SINGLE = "model.safetensors"
_ABOVE = f"../{_SINGLE}"  # the body of a drafter head, in the parent folder
_QUANT_FILE = "hf_quant_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")


class TensorEntry(NamedTuple):
    """The description of one tensor in a shard's header."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the tensors' data
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


class ModelFolder:
    """One model folder. Error messages use the name that the user wrote."""

    def __init__(self, path: Path, *, name: str) -> None:
        self.path = path
        self.name = name
        self.config: Mapping[str, object] = self.json("config.json", is_required=True)
        has_quant_file = (path / _QUANT_FILE).exists()
        self.quant_file: Mapping[str, object] | None = self.json(_QUANT_FILE) if has_quant_file else None

    def tensors(self) -> dict[str, TensorEntry]:
        return {name: entry for _, entries in self.shards() for name, entry in entries.items()}

    def shards(self) -> Iterator[tuple[str, Mapping[str, TensorEntry]]]:
        """Yield each shard's name and tensors. Raise ModelError if a tensor is missing or in two shards."""
        weight_map = self._weight_map()
        found: set[str] = set()
        for name in self._shard_names(weight_map):
            entries = self._read_header(name)
            yield name, entries
            for tensor in found & entries.keys():
                raise ModelError(
                    f"'{self.name}': tensor '{tensor}' is in {name} and in another shard. Download it again."
                )
            found |= entries.keys()
        for tensor, name in weight_map.items():
            if tensor not in found:
                raise ModelError(
                    f"'{self.name}': {_INDEX} lists '{tensor}' in {name}, which does not contain it. "
                    "Download it again."
                )

    def eos_ids(self) -> list[int]:
        """Return the token ids that end a turn, from generation_config.json and config.json."""
        generation = self.json(GENERATION_FILE).get("eos_token_id")
        return ids_in(generation) + ids_in(self.config.get("eos_token_id"))

    @property
    def has_body_above(self) -> bool:
        """Return whether the folder holds only a drafter head, and its parent folder the other weights."""
        return _ABOVE in self._weight_map().values()

    def _weight_map(self) -> dict[str, str]:
        """Return the shard of each tensor from the index, or {} for a model in one file."""
        if (self.path / _SINGLE).exists():
            return {}
        weight_map = self.json(_INDEX).get("weight_map", {})
        if not isinstance(weight_map, dict):
            raise ModelError(f"'{self.name}': weight_map in {_INDEX} is not an object. Download it again.")
        for shard in weight_map.values():
            if not isinstance(shard, str) or (Path(shard).name != shard and shard != _ABOVE):
                raise ModelError(
                    f"'{self.name}': {_INDEX} names {shard!r}, which is not a file of this folder."
                )
        return weight_map

    def _shard_names(self, weight_map: Mapping[str, str]) -> list[str]:
        if weight_map:
            return sorted(set(weight_map.values()))
        if (self.path / _SINGLE).exists():
            return [_SINGLE]
        found = sorted(path.name for path in self.path.glob("*.safetensors"))
        if len(found) == 1:
            return found
        if found:
            raise ModelError(
                f"'{self.name}' has {len(found)} .safetensors files but no {_INDEX}. Download it too."
            )
        pickles = sorted(path.name for pattern in _PICKLES for path in self.path.glob(pattern))
        if pickles:
            raise ModelError(
                f"'{self.name}' has only pickled weights ({pickles[0]}). Pickles can run code and are never "
                "opened: convert them to safetensors."
            )
        raise ModelError(f"'{self.name}' has no .safetensors file in {self.path}. Download the weights.")

    def _read_header(self, shard: str) -> dict[str, TensorEntry]:
        """Return a shard's tensors. The library checks that these fill the rest of the file exactly."""
        entries: dict[str, TensorEntry] = {}
        try:
            with safe_open(self.path / shard, framework="numpy") as file:
                begin = 0
                for tensor in file.offset_keys():
                    described = file.get_slice(tensor)
                    dtype, shape = described.get_dtype(), tuple(described.get_shape())
                    if dtype not in DTYPES:
                        raise ModelError(
                            f"'{self.name}': {shard}: tensor {tensor!r} is of type {dtype!r}, which is not "
                            "supported. See docs/models.md."
                        )
                    end = begin + math.prod(shape) * DTYPES[dtype][1]
                    entries[tensor] = TensorEntry(dtype, shape, begin, end)
                    begin = end
        except FileNotFoundError:
            raise ModelError(f"'{self.name}' lacks its shard {shard}. Download it again.") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"'{self.name}': {shard} is damaged or truncated ({error}). Download it again."
            ) from None
        return entries

    def json(self, file: str, *, is_required: bool = False) -> dict[str, object]:
        """Read a JSON object; an absent optional file reads as empty."""
        if not is_required and not (self.path / file).exists():
            return {}
        try:
            value = json.loads(self.text(file))
        except (ValueError, RecursionError) as error:
            raise ModelError(
                f"'{self.name}': {file} is not valid JSON ({error}). Download it again."
            ) from None
        if not isinstance(value, dict):
            raise ModelError(f"'{self.name}': {file} must hold a JSON object, not a {type(value).__name__}.")
        return value

    def text(self, file: str) -> str:
        try:
            return (self.path / file).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ModelError(
                f"'{self.name}' has no {file} in {self.path}: it is not a model folder."
            ) from None
        except OSError as error:
            raise ModelError(f"'{self.name}': {file} cannot be read ({error.strerror}).") from None
        except UnicodeDecodeError:
            raise ModelError(f"'{self.name}': {file} is not UTF-8 text. Download it again.") from None


def ids_in(value: object) -> list[int]:
    """Return the token ids in a field that holds one id, a list of ids, or something else."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
