"""A Hugging Face model folder: config.json, safetensors shards, and optional tokenizer files.

Opening a folder checks the header of every shard against the shard's size, so an incomplete download is
found before anything runs. Only safetensors are read: a pickled file (.bin, .pt, .pth) could run code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from blockdraft.checkpoints.checkpoint import TensorInfo, read_bytes
from blockdraft.checkpoints.fit_file import FIT_FILE
from blockdraft.checkpoints.model_folder import DTYPES, GENERATION_FILE, ModelFolder, ids_in
from blockdraft.checkpoints.tokenizer_parts import TokenizerParts, refusing
from blockdraft.errors import ModelError

_TOKENIZER = "tokenizer.json"


class _Place(NamedTuple):
    """The location of one tensor."""

    info: TensorInfo
    shard: str
    file: FileIO
    offset: int  # bytes from the start of the file


class FolderCheckpoint:
    """One model folder with open shards. With needs_weights=False, no shards are opened."""

    def __init__(self, folder: Path, *, name: str, needs_weights: bool = True) -> None:
        self.name = name
        self._folder = ModelFolder(folder, name=name)
        self._files: list[FileIO] = []
        self._places: dict[str, _Place] = {}
        self.config = self._folder.config
        self.quant_file = self._folder.quant_file
        self.fit_file: Mapping[str, object] = self._folder.json(FIT_FILE)
        self.generation_file: Mapping[str, object] = self._folder.json(GENERATION_FILE)
        try:
            if needs_weights:
                self._open_shards()
        except ModelError:
            self.close()
            raise

    @property
    def files(self) -> list[Path]:
        return [Path(str(file.name)) for file in self._files]

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: place.info for name, place in self._places.items()}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        place = self._places.get(name)
        if place is None:
            raise ModelError(
                f"'{self.name}' has no tensor '{name}': its weights do not match its config.json."
            )
        shape, dtype = place.info
        if end is None:
            end = shape[0] if shape else 1
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

    def read_packed(self, name: str) -> torch.Tensor:
        raise AssertionError(f"'{self.name}' is a folder: its tensor '{name}' has no GGUF blocks")

    @property
    def has_tokenizer(self) -> bool:
        return (self._folder.path / _TOKENIZER).exists()

    def tokenizer_parts(self) -> TokenizerParts:
        tokenizer = self._tokenizer()
        bos_token, eos_token = self._special_token("bos_token"), self._special_token("eos_token")
        eos_ids = [*self._folder.eos_ids(), *ids_in(eos_token and tokenizer.token_to_id(eos_token))]
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
        for shard, entries in self._folder.shards():
            file = FileIO(self._folder.path / shard)
            self._files.append(file)
            num_bytes = sum(entry.num_bytes for entry in entries.values())
            data_start = os.fstat(file.fileno()).st_size - num_bytes
            for tensor, entry in entries.items():
                info = TensorInfo(entry.shape, getattr(torch, DTYPES[entry.dtype][0]))
                self._places[tensor] = _Place(info, shard, file, data_start + entry.begin)

    def _tokenizer(self) -> Tokenizer:
        path = self._folder.path / _TOKENIZER
        if not self.has_tokenizer:
            raise ModelError(
                f"'{self.name}' has no tokenizer.json, which is needed to read and write text. Add the file."
            )
        with refusing(f"'{self.name}': tokenizer.json cannot be read", "Download it again."):
            return Tokenizer.from_file(str(path))

    def _chat_template(self) -> str | None:
        if (self._folder.path / "chat_template.jinja").exists():
            return self._folder.text("chat_template.jinja")
        settings = self._folder.json("chat_template.json") or self._folder.json("tokenizer_config.json")
        template = settings.get("chat_template")
        if isinstance(template, list):  # [{"name": ..., "template": ...}, ...]
            named = {
                entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
            }
            template = named.get("default")
        return template if isinstance(template, str) else None

    def _special_token(self, role: str) -> str | None:
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            token = self._folder.json(file).get(role)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                return token
        return None
