"""Reads a checkpoint's headers: its configuration, and the size of every tensor. No weights are loaded.

Folders and GGUF files are read in place. For a hub id, only headers and small files are fetched, unless the
hub's cache has the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from blockdraft.checkpoints.fetch import SMOLLM2
from blockdraft.checkpoints.fit_file import FIT_FILE
from blockdraft.checkpoints.gguf_config import hugging_face_names, published_names, read_config
from blockdraft.checkpoints.gguf_header import GgufHeader
from blockdraft.checkpoints.model_folder import ModelFolder, TensorEntry, ids_in
from blockdraft.errors import FetchError
from blockdraft.planner.remote import read_remote
from blockdraft.settings.model_source import Source, find_source
from blockdraft.settings.settings import cache_dir

_FLOATS = ("F16", "BF16", "F32", "F64")
_LEFT_OUT = re.compile(
    r"(model\.)?(visual|vision_tower|embed_vision|multi_modal_projector|audio_tower|embed_audio|mtp)\..*"
)


class Size(NamedTuple):
    """The size of one stored tensor."""

    num_values: int  # as stored; a packed tensor has fewer values than weights
    num_bytes: int
    is_packed: bool  # not plain floats


@dataclass(frozen=True, slots=True)
class Stored:
    """One model's files."""

    name: str
    where: str  # for people: "folder", "GGUF file", ...
    config: Mapping[str, object]
    quant_file: Mapping[str, object] | None
    tensors: Mapping[str, Size] | None  # None: only the configuration was requested
    eos_ids: tuple[int, ...]
    fit_file: Mapping[str, object] = field(default_factory=dict)  # of a drafter of ours
    published_names: tuple[str, ...] = ()  # the model's names in a GGUF file's metadata
    ggml_type: str | None = None  # of most of a GGUF file

    @property
    def method(self) -> str | None:
        """Return how the file is quantised, or None if it is not."""
        own = None if self.quant_file is None else self.quant_file.get("quantization")
        algorithm = own.get("quant_algo") if isinstance(own, Mapping) else None
        for section in _quantization_sections(self.config):
            method = str(section.get("quant_method") or "modelopt")
            if not method.startswith("modelopt"):
                return method
            nested = section.get("quantization")
            inner = nested if isinstance(nested, Mapping) else section
            algorithm = inner.get("quant_algo") or algorithm
        if algorithm:
            return f"modelopt {algorithm}"
        is_gguf = self.where.startswith("GGUF") and self.tensors is not None
        return "GGUF" if is_gguf and any(size.is_packed for size in self.sizes.values()) else None

    @property
    def full_config(self) -> Mapping[str, object]:
        """Return config.json, with the quantisation of hf_quant_config.json if it has none itself."""
        own = None if self.quant_file is None else self.quant_file.get("quantization")
        if not isinstance(own, Mapping) or _quantization_sections(self.config):
            return self.config
        return {**self.config, "quantization_config": {"quant_method": "modelopt", **own}}

    @property
    def sizes(self) -> Mapping[str, Size]:
        return self.tensors or {}


def open_stored(source: str, *, needs_weights: bool, what: str = "model") -> Stored:
    """Open a checkpoint's headers, without weights. Raise ModelError or FetchError."""
    found = find_source(source, what)
    if found.kind == "hub":
        return _remote(found, needs_weights=needs_weights)
    if found.kind == "folder":
        assert found.path is not None
        folder = ModelFolder(found.path, name=found.name)
        return _folder(folder, "folder", needs_weights=needs_weights)
    path = found.path or cache_dir() / SMOLLM2.gguf
    if not path.exists():
        raise FetchError("the default model is not fetched yet: run 'blockdraft fetch', or name a model.")
    file = GgufHeader(path, name=found.name)
    config, names, published = read_config(file), hugging_face_names(file), published_names(file)
    main_type = file.main_type
    infos = {name: file.tensors[stored] for name, stored in names.items()}
    file.close()
    tensors = {
        name: Size(math.prod(info.shape), info.num_bytes, info.is_quantised) for name, info in infos.items()
    }
    eos_ids = tuple(ids_in(config.get("eos_token_id")))
    return Stored(
        found.name,
        "GGUF file",
        config,
        None,
        tensors,
        eos_ids,
        published_names=published,
        ggml_type=main_type,
    )


def _folder(folder: ModelFolder, where: str, *, needs_weights: bool) -> Stored:
    tensors = _sizes(folder.tensors()) if needs_weights else None
    eos_ids = tuple(folder.eos_ids())
    return Stored(
        folder.name, where, folder.config, folder.quant_file, tensors, eos_ids, folder.json(FIT_FILE)
    )


def _remote(source: Source, *, needs_weights: bool) -> Stored:
    path, tensors = read_remote(source.repo, revision=source.revision, needs_weights=needs_weights)
    folder = ModelFolder(path, name=source.name)
    if tensors is None:
        return _folder(folder, "the hub's cache", needs_weights=needs_weights)
    return Stored(
        source.name,
        "headers on the hub",
        folder.config,
        folder.quant_file,
        _sizes(tensors) if needs_weights else None,
        tuple(folder.eos_ids()),
    )


def _sizes(entries: Mapping[str, TensorEntry]) -> dict[str, Size]:
    return {
        name: Size(math.prod(entry.shape), entry.num_bytes, entry.dtype not in _FLOATS)
        for name, entry in entries.items()
    }


def _quantization_sections(config: Mapping[str, object]) -> list[Mapping[str, object]]:
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, Mapping) else None
    places = (config.get("quantization_config"), nested, config.get("compression_config"))
    return [section for section in places if isinstance(section, Mapping) and section]


@dataclass(frozen=True, slots=True)
class WeightParts:
    """The bytes of a checkpoint's tensors, by part of the model."""

    embedding: int = 0
    head: int = 0
    layers: int = 0
    experts: int = 0
    left_out: int = 0  # pictures, sound, multi-token prediction: not the text model

    @property
    def text(self) -> int:
        return self.embedding + self.head + self.layers + self.experts


def stored_parts(tensors: Mapping[str, Size], *, plain_bytes: int | None = None) -> WeightParts:
    """Return the tensors' bytes by part. `plain_bytes`: the size of each value that is not packed."""
    found = dict.fromkeys(("embedding", "head", "layers", "experts", "left_out"), 0)
    for name, size in tensors.items():
        is_cast = plain_bytes is not None and not size.is_packed and not _is_scale(name)
        num_bytes = size.num_values * (plain_bytes or 0) if is_cast else size.num_bytes
        found[_part(name)] += num_bytes
    return WeightParts(**found)


def _is_scale(name: str) -> bool:
    """Return whether a tensor holds the scales of a packed tensor, which stay as stored."""
    return "scale" in name.rpartition(".")[2] or name.endswith(("_zero_point", ".scales", ".qzeros"))


def _part(name: str) -> str:
    if _LEFT_OUT.fullmatch(name):
        return "left_out"
    if ".experts." in name:
        return "experts"
    if "lm_head" in name:
        return "head"
    return "embedding" if "embed_tokens" in name else "layers"
