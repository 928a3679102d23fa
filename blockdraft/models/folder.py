"""A Hugging Face model folder: config.json, safetensors shards, and tokenizer files if it has any.

Opening a folder reads the header of every shard and checks it against the shard's size, so that a
download cut short is found before anything runs. A header is a u64 length and that much JSON, which
gives each tensor's dtype, shape and place in the bytes that follow. Only safetensors are read: a pickled
file (.bin, .pt, .pth) can run code when it is opened, and never is.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from blockdraft.errors import ModelError
from blockdraft.models.checkpoint import TensorInfo, TokenizerParts, read_bytes, row_range

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_QUANT_FILE = "hf_quant_config.json"
_TOKENIZER = "tokenizer.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_HEADER_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class _Damaged(Exception):
    """What is wrong with a shard; FolderCheckpoint adds its name."""


class _Entry(NamedTuple):
    """One tensor as a shard's header describes it."""

    info: TensorInfo
    begin: int  # bytes from the end of the header
    end: int


class _Place(NamedTuple):
    """Where one tensor is."""

    info: TensorInfo
    shard: str
    file: FileIO
    offset: int  # bytes from the start of the file


class FolderCheckpoint:
    """One model folder with its shards open, or without any tensors where no weights are needed."""

    def __init__(self, folder: Path, *, name: str, needs_weights: bool = True) -> None:
        self.name = name
        self._folder = folder
        self._files: list[FileIO] = []
        self._places: dict[str, _Place] = {}
        self.config: Mapping[str, object] = self._json("config.json", is_required=True)
        has_quant_file = (folder / _QUANT_FILE).exists()
        self.quant_file: Mapping[str, object] | None = self._json(_QUANT_FILE) if has_quant_file else None
        try:
            if needs_weights:
                self._open_shards()
        except ModelError:
            self.close()
            raise

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: place.info for name, place in self._places.items()}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        place = self._places.get(name)
        if place is None:
            raise ModelError(
                f"'{self.name}' has no tensor '{name}': the folder does not match its config.json."
            )
        shape, dtype = place.info
        begin, end = row_range(shape, begin, end)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        raw = read_bytes(
            place.file,
            offset=place.offset + begin * row_bytes,
            num_bytes=(end - begin) * row_bytes,
            owner=f"'{self.name}': {place.shard}",
        )
        return raw.view(dtype).view((end - begin, *shape[1:]) if shape else ())

    def ggml_type(self, name: str) -> int | None:
        return None

    def read_packed(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        raise ModelError(f"'{self.name}' is a folder: its tensor '{name}' has no GGUF blocks to read.")

    @property
    def has_tokenizer(self) -> bool:
        return (self._folder / _TOKENIZER).exists()

    def tokenizer_parts(self) -> TokenizerParts:
        tokenizer = self._tokenizer()
        bos_token, eos_token = self._special_token("bos_token"), self._special_token("eos_token")
        eos_ids = [
            *_ids(self._json("generation_config.json").get("eos_token_id")),
            *_ids(self.config.get("eos_token_id")),
            *_ids(eos_token and tokenizer.token_to_id(eos_token)),
        ]
        return TokenizerParts(
            tokenizer=tokenizer,
            chat_template=self._chat_template(),
            bos_token=bos_token,
            eos_token=eos_token,
            eos_ids=tuple(dict.fromkeys(eos_ids)),
        )

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._places.clear()

    def _open_shards(self) -> None:
        weight_map = self._weight_map()
        for shard in self._shard_names(weight_map):
            self._open_shard(shard)
        for tensor, shard in weight_map.items():
            if tensor not in self._places:
                raise ModelError(
                    f"'{self.name}': {shard} lacks '{tensor}', which {_INDEX} promises. Download it again."
                )

    def _weight_map(self) -> dict[str, str]:
        """Tensor name -> shard, from the index; empty for a model in one file."""
        if (self._folder / _SINGLE).exists():
            return {}
        weight_map = self._json(_INDEX).get("weight_map", {})
        if not isinstance(weight_map, dict):
            raise ModelError(f"'{self.name}': weight_map in {_INDEX} is not an object. Download it again.")
        for shard in weight_map.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ModelError(
                    f"'{self.name}': {_INDEX} names {shard!r}, which is not a file of this folder."
                )
        return weight_map

    def _shard_names(self, weight_map: Mapping[str, str]) -> list[str]:
        if weight_map:
            return sorted(set(weight_map.values()))
        if (self._folder / _SINGLE).exists():
            return [_SINGLE]
        found = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if len(found) == 1:
            return found
        if found:
            raise ModelError(
                f"'{self.name}' has {len(found)} .safetensors files but no {_INDEX}. Download it too."
            )
        pickles = sorted(path.name for pattern in _PICKLES for path in self._folder.glob(pattern))
        if pickles:
            raise ModelError(
                f"'{self.name}' has only pickled weights ({pickles[0]}), which can run code and "
                "are never opened: "
                "convert them to safetensors."
            )
        raise ModelError(f"'{self.name}' has no .safetensors file in {self._folder}. Download the weights.")

    def _open_shard(self, shard: str) -> None:
        owner = f"'{self.name}': {shard}"
        try:
            file = FileIO(self._folder / shard)
            self._files.append(file)
            header, data_start = _read_header(file, owner=owner)
            entries = _tensor_entries(header, owner=owner)
            _check_layout(entries, num_bytes=os.fstat(file.fileno()).st_size - data_start)
        except FileNotFoundError:
            raise ModelError(f"'{self.name}' lacks its shard {shard}. Download it again.") from None
        except (_Damaged, OSError) as error:
            raise ModelError(f"{owner} is damaged or truncated ({error}). Download it again.") from None
        for tensor, entry in entries.items():
            if tensor in self._places:
                raise ModelError(f"'{self.name}': tensor '{tensor}' is in {shard} and in another shard too.")
            self._places[tensor] = _Place(entry.info, shard, file, data_start + entry.begin)

    def _tokenizer(self) -> Tokenizer:
        path = self._folder / _TOKENIZER
        if not self.has_tokenizer:
            raise ModelError(
                f"'{self.name}' has no tokenizer.json, so it cannot read or write text. Add the file."
            )
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise ModelError(
                f"'{self.name}': tokenizer.json cannot be read ({error}). Download it again."
            ) from error

    def _chat_template(self) -> str | None:
        if (self._folder / "chat_template.jinja").exists():
            return self._text("chat_template.jinja")
        settings = self._json("chat_template.json") or self._json("tokenizer_config.json")
        template = settings.get("chat_template")
        if isinstance(template, list):  # [{"name": ..., "template": ...}, ...]
            named = {
                entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
            }
            template = named.get("default")
        return template if isinstance(template, str) else None

    def _special_token(self, role: str) -> str | None:
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            token = self._json(file).get(role)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                return token
        return None

    def _json(self, file: str, *, is_required: bool = False) -> dict[str, object]:
        """The object in a JSON file; an empty one when an optional file is absent."""
        if not is_required and not (self._folder / file).exists():
            return {}
        try:
            value = json.loads(self._text(file))
        except (ValueError, RecursionError) as error:
            raise ModelError(
                f"'{self.name}': {file} is not valid JSON ({error}). Download it again."
            ) from None
        if not isinstance(value, dict):
            raise ModelError(f"'{self.name}': {file} must hold a JSON object, not a {type(value).__name__}.")
        return value

    def _text(self, file: str) -> str:
        try:
            return (self._folder / file).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ModelError(
                f"'{self.name}' has no {file} in {self._folder}: it is not a model folder."
            ) from None
        except OSError as error:
            raise ModelError(f"'{self.name}': {file} cannot be read ({error.strerror}).") from None
        except UnicodeDecodeError:
            raise ModelError(f"'{self.name}': {file} is not UTF-8 text. Download it again.") from None


def _read_header(file: FileIO, *, owner: str) -> tuple[dict[str, object], int]:
    """The header's JSON object, and the byte where the tensors begin."""
    file_bytes = os.fstat(file.fileno()).st_size
    if file_bytes < _HEADER_LENGTH.size:
        raise _Damaged(f"it has {file_bytes} bytes")
    length_field = read_bytes(file, offset=0, num_bytes=_HEADER_LENGTH.size, owner=owner)
    (num_bytes,) = _HEADER_LENGTH.unpack(length_field.numpy().data)
    if num_bytes > min(_MAX_HEADER_BYTES, file_bytes - _HEADER_LENGTH.size):
        raise _Damaged(f"it has {file_bytes} bytes and claims a header of {num_bytes}")
    text = read_bytes(file, offset=_HEADER_LENGTH.size, num_bytes=num_bytes, owner=owner)
    try:
        header = json.loads(text.numpy().tobytes(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"its header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise _Damaged("its header is not a JSON object")
    return header, _HEADER_LENGTH.size + num_bytes


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("a key appears twice")
    return keys


def _tensor_entries(header: Mapping[str, object], *, owner: str) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for tensor, fields in header.items():
        if tensor == "__metadata__":
            continue
        if not isinstance(fields, dict):
            raise _Damaged(f"{tensor!r} is described by {str(fields)[:40]!r}")
        dtype_name = fields.get("dtype")
        dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
        if dtype is None:
            raise ModelError(
                f"{owner}: tensor {tensor!r} is of type {str(dtype_name)[:40]!r}, which is not supported. "
                "See docs/models.md."
            )
        shape = _sizes(tensor, fields.get("shape"))
        offsets = _sizes(tensor, fields.get("data_offsets"))
        num_bytes = math.prod(shape) * dtype.itemsize
        if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
            raise _Damaged(f"{tensor!r} has {num_bytes} bytes and the place {list(offsets)}")
        entries[tensor] = _Entry(TensorInfo(shape, dtype), *offsets)
    return entries


def _sizes(tensor: str, value: object) -> tuple[int, ...]:
    """A list of sizes from the header."""
    values = value if isinstance(value, list) else [None]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
        raise _Damaged(f"{tensor!r} has the shape or place {str(value)[:40]}")
    return tuple(values)


def _check_layout(entries: Mapping[str, _Entry], *, num_bytes: int) -> None:
    """The tensors fill the shard's `num_bytes`: no holes, no overlaps, nothing behind."""
    position = 0
    for tensor, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise _Damaged(f"{tensor!r} begins at byte {entry.begin} instead of {position}")
        position = entry.end
    if position != num_bytes:
        raise _Damaged(f"its tensors end at byte {position} of {num_bytes}")


def _ids(value: object) -> list[int]:
    """Token ids from a field that may hold one, several or none."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
