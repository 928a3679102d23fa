"""A Hugging Face model folder: config.json, safetensors shards, and tokenizer files if it has any.

Opening a folder opens every shard, which checks the shard's header against its size, so that a
download cut short is found before anything runs. Only safetensors are read: a pickled file (.bin,
.pt, .pth) can run code when it is opened, and never is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from blockdraft.errors import ModelError
from blockdraft.models.checkpoint import TokenizerParts

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth")


class _Shard(Protocol):
    """What safetensors' safe_open offers; its own signatures are untyped."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...


class FolderCheckpoint:
    """One model folder with its shards mapped."""

    def __init__(self, folder: Path, *, name: str) -> None:
        self.name = name
        self._folder = folder
        self.config: Mapping[str, object] = self._json("config.json", is_required=True)
        self._shards: dict[str, _Shard] = {}  # tensor name -> the shard that holds it
        self._shapes: dict[str, tuple[int, ...]] = {}
        weight_map = self._weight_map()
        for shard in self._shard_names(weight_map):
            self._open_shard(shard)
        for tensor, shard in weight_map.items():
            if tensor not in self._shards:
                raise ModelError(
                    f"'{self.name}': {shard} lacks '{tensor}', which {_INDEX} promises. Download it again."
                )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        shard = self._shards.get(name)
        if shard is None:
            raise ModelError(
                f"'{self.name}' has no tensor '{name}': the folder does not match its config.json."
            )
        try:
            return shard.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"'{self.name}': tensor '{name}' cannot be read ({error}).") from None

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
        self._shards.clear()

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
        path = self._folder / shard
        try:
            handle: _Shard = safe_open(str(path), framework="pt")
        except FileNotFoundError:
            raise ModelError(f"'{self.name}' lacks its shard {shard}. Download it again.") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"'{self.name}': {shard} is damaged or truncated ({error}). Download it again."
            ) from None
        for tensor in handle.keys():  # noqa: SIM118 - not a dict: it cannot be iterated
            if tensor in self._shards:
                raise ModelError(f"'{self.name}': tensor '{tensor}' is in {shard} and in another shard too.")
            self._shards[tensor] = handle
            self._shapes[tensor] = tuple(handle.get_slice(tensor).get_shape())

    def _tokenizer(self) -> Tokenizer:
        path = self._folder / "tokenizer.json"
        if not path.exists():
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


def _ids(value: object) -> list[int]:
    """Token ids from a field that may hold one, several or none."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
