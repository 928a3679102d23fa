"""The files of a Hugging Face model folder: its JSON, and the headers of its shards. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from blockdraft.checkpoints.safetensors_header import Damaged, TensorEntry, read_header
from blockdraft.errors import ModelError

_INDEX = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
_SINGLE = "model.safetensors"
_ABOVE = f"../{_SINGLE}"  # where a drafter head keeps its body: in the drafter's folder around its own
_QUANT_FILE = "hf_quant_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")


class Shard(NamedTuple):
    """One open shard with its parsed header."""

    name: str
    file: FileIO
    entries: Mapping[str, TensorEntry]
    data_start: int  # byte of the file


class ModelFolder:
    """One model folder. Errors show its name as the user wrote it."""

    def __init__(self, path: Path, *, name: str) -> None:
        self.path = path
        self.name = name
        self.config: Mapping[str, object] = self.json("config.json", is_required=True)
        has_quant_file = (path / _QUANT_FILE).exists()
        self.quant_file: Mapping[str, object] | None = self.json(_QUANT_FILE) if has_quant_file else None

    def tensors(self) -> dict[str, TensorEntry]:
        found: dict[str, TensorEntry] = {}
        for shard in self.open_shards():
            shard.file.close()
            found |= shard.entries
        return found

    def open_shards(self) -> Iterator[Shard]:
        """Yield every shard; the caller closes its file. Each tensor is in exactly one shard."""
        weight_map = self._weight_map()
        found: set[str] = set()
        for name in self._shard_names(weight_map):
            shard = self._open_shard(name)
            yield shard
            for tensor in found & shard.entries.keys():
                raise ModelError(
                    f"'{self.name}': tensor '{tensor}' is in {name} and in another shard. Download it again."
                )
            found |= shard.entries.keys()
        for tensor, name in weight_map.items():
            if tensor not in found:
                raise ModelError(
                    f"'{self.name}': {_INDEX} lists '{tensor}' in {name}, which does not contain it. "
                    "Download it again."
                )

    def eos_ids(self) -> list[int]:
        """Token ids that end a turn, from generation_config.json and config.json."""
        generation = self.json(GENERATION_FILE).get("eos_token_id")
        return ids_in(generation) + ids_in(self.config.get("eos_token_id"))

    @property
    def has_body_above(self) -> bool:
        """Whether the folder holds only a drafter head, with its other weights in the parent folder."""
        return _ABOVE in self._weight_map().values()

    def _weight_map(self) -> dict[str, str]:
        """Tensor name -> shard, from the index; empty for a model in one file."""
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

    def _open_shard(self, name: str) -> Shard:
        owner = f"'{self.name}': {name}"
        with ExitStack() as stack:
            try:
                file = stack.enter_context(FileIO(self.path / name))
                entries, data_start = read_header(file, owner=owner)
            except FileNotFoundError:
                raise ModelError(f"'{self.name}' lacks its shard {name}. Download it again.") from None
            except (Damaged, OSError) as error:
                raise ModelError(f"{owner} is damaged or truncated ({error}). Download it again.") from None
            stack.pop_all()
        return Shard(name, file, entries, data_start)

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
    """Return the token ids of a field that holds one, several or none."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
