"""Loads a checkpoint into a model. Every shape and dtype is checked, and unknown tensors raise an error.

The model is built on the meta device, without memory. `match_tensors` finds the tensors that fill each
parameter. The tensors are read one by one, in slices, into a plain parameter or a Packed weight, which keeps
the file's format or is quantised here. Memory holds the weights read so far, and one slice or one layer's
packed experts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from blockdraft.checkpoints.checkpoint import Checkpoint, TensorInfo, own_memory
from blockdraft.checkpoints.folder_checkpoint import FolderCheckpoint
from blockdraft.checkpoints.gguf_checkpoint import GgufCheckpoint
from blockdraft.checkpoints.int8_weights import Int8Cache, column_factors
from blockdraft.checkpoints.names import (
    DRAFT_LAYER,
    MTP_PREFIXES,
    PREFIXES,
    ExpertNames,
    Names,
    copied_rows,
    draft_head_names,
    draft_skipped,
    layer_names,
    mtp_prefix,
    mtp_skipped,
    skipped,
)
from blockdraft.checkpoints.quantization import read_quantization
from blockdraft.checkpoints.schemes import Quantization, Scheme, TensorSpec, is_router
from blockdraft.errors import ModelError
from blockdraft.kernels.cpu import why_no_llvm
from blockdraft.models.config import Storage
from blockdraft.models.decoder import Decoder
from blockdraft.models.dflash import DFlash
from blockdraft.models.layers import Embedding, Linear, PlainLinear, RMSNorm
from blockdraft.models.moe import ExpertLinear
from blockdraft.models.mtp import MtpHead
from blockdraft.models.packed import Dense, Packed, Scaled, join_rows, quantise_fp8, quantise_int8, stack_each
from blockdraft.models.packed_gguf import GgufPacked
from blockdraft.models.packed_groups import IntGroups, quantise_int4
from blockdraft.models.packed_int8 import Int8Matrix
from blockdraft.models.packed_words import Words, for_kernel, why_no_words
from blockdraft.settings.model_source import known_name

_SLICE_BYTES = 4 << 20  # float32 bytes read and converted at a time; arbitrary, but small
_WORK_BYTES = 1 << 20  # as _SLICE_BYTES, for conversions that need several copies
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Loaded: TypeAlias = Decoder | DFlash | MtpHead
Quantiser: TypeAlias = Callable[[Tensor], Packed]  # quantises row by row
QUANTISERS: Mapping[str, Quantiser] = {
    "fp8": quantise_fp8,
    "int8": quantise_int8,
    "int4": quantise_int4,
}


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """One projection of the checkpoint, and the part of a parameter that the projection fills."""

    source: str  # the module's path, to look up its quantisation
    tensor: str  # the tensor's name if it is not quantised
    shape: tuple[int, ...]
    expert: int | None = None  # None: all experts at once, or not an expert
    begin: int = 0  # first row in the parameter
    is_transposed: bool = False
    is_interleaved: bool = False  # rows [E, 2 x n] alternate between two parts that we stack
    scheme: Scheme | None = None  # the quantisation in the file

    def stored(self) -> Mapping[str, TensorSpec]:
        """Return the specifications of the piece's tensors in the file."""
        if self.scheme is not None:
            return {self.source + suffix: spec for suffix, spec in self.scheme.tensors(self.shape).items()}
        shape = self.shape
        if self.is_transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return {self.tensor: TensorSpec(shape, _FLOATS)}


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter and the pieces that fill it."""

    module: nn.Module
    attribute: str
    pieces: tuple[TensorPiece, ...]

    @property
    def parameter(self) -> Tensor:
        parameter = getattr(self.module, self.attribute)
        assert isinstance(parameter, Tensor)
        return parameter

    @property
    def is_projection(self) -> bool:
        return self.attribute == "weight" and isinstance(self.module, Linear | ExpertLinear)

    @property
    def may_be_quantised(self) -> bool:
        """Return whether this is a projection, but no router or gate: these are tiny and decide what runs."""
        is_plain = isinstance(self.module, PlainLinear) or any(is_router(one.source) for one in self.pieces)
        return self.is_projection and not is_plain

    def uses_int8_matrix(self, storage: Storage, device: torch.device) -> bool:
        """Return whether the weight becomes an Int8Matrix (on a CPU with int8 kernels, heads included)."""
        if storage != "int8" or self.parameter.dtype != torch.float32:
            return False
        is_matrix = self.may_be_quantised and isinstance(self.module, Linear)
        is_matrix |= isinstance(self.module, Embedding)
        return is_matrix and why_no_llvm(torch.float32, device) is None

    def put(self, value: nn.Parameter | Packed) -> None:
        delattr(self.module, self.attribute)  # a module cannot replace a parameter by assignment
        setattr(self.module, self.attribute, value)


def load_checkpoint(
    model: Loaded,
    checkpoint: Checkpoint,
    *,
    storage: Storage,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fill a model that was built on the meta device. `progress` gets (parameters done, all parameters)."""
    has_factors = storage == "int8" and not isinstance(model, MtpHead)
    factors = column_factors(known_name(checkpoint.name)) if has_factors else {}
    kept = None
    # A target in a folder is not cached, because it may be large and slow to hash.
    is_cached = isinstance(model, DFlash) or isinstance(checkpoint, GgufCheckpoint)
    if is_cached and storage == "int8" and why_no_llvm(torch.float32, device) is None:
        assert isinstance(checkpoint, FolderCheckpoint | GgufCheckpoint)
        kept = Int8Cache(checkpoint.files, factors)
    reader = _Reader(checkpoint, checkpoint.tensors(), storage, device, factors, kept)
    slots = reader.load(model, progress)
    if isinstance(model, Decoder) and model.head is None:
        (embedding,) = next(slot.pieces for slot in slots if slot.module is model.embedding)
        _check_tied(checkpoint, embedding.tensor, f"{_head_name(reader.tensors)}.weight")


def match_tensors(model: Loaded, checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> list[Slot]:
    """Return every parameter with its tensors and their schemes.

    Raise ModelError if a tensor is missing or unknown, or has the wrong shape or dtype. GPTQ exporters write
    a bias of zeros for every projection; such biases are checked and ignored.
    """
    name = checkpoint.name
    slots = slots_of(model, tensors)
    quantization = read_quantization(checkpoint.config, checkpoint.quant_file, name=name)
    if quantization is not None:
        slots = [
            replace(slot, pieces=tuple(_with_scheme(one, quantization, tensors, name) for one in slot.pieces))
            if slot.is_projection
            else slot
            for slot in slots
        ]
    _check(checkpoint, tensors, slots, re.compile("|".join(_skips(model))))
    if isinstance(model, DFlash) and model.config.copies_head:
        for tensor, num_rows in copied_rows(model.config).items():
            if tensor in tensors:
                spec = TensorSpec((num_rows, model.config.hidden_size), _FLOATS)
                _check_tensor(name, tensors, tensor, spec, scheme=None)
    return slots


def _skips(model: Loaded) -> list[str]:
    if isinstance(model, MtpHead):
        return mtp_skipped()
    return draft_skipped(model.config) if isinstance(model, DFlash) else skipped(model.config)


# ---- which tensors fill which parameter


def slots_of(model: Loaded, tensors: Mapping[str, TensorInfo]) -> list[Slot]:
    """Return every parameter of `model`, with its pieces in a checkpoint that has these `tensors`."""
    heads: Names = {}
    if isinstance(model, DFlash):
        prefix, tables, heads = "", [DRAFT_LAYER] * len(model.layers), draft_head_names(tensors)
    elif isinstance(model, MtpHead):
        prefix = mtp_prefix(tensors) or MTP_PREFIXES[0]
        tables = [layer_names(model.config.shape, model.config.layer_index)]
    else:
        prefix = next((one for one in PREFIXES if f"{one}embed_tokens.weight" in tensors), PREFIXES[0])
        tables = [layer_names(model.config, index) for index in range(model.config.num_layers)]
    top = {"embedding": f"{prefix}embed_tokens", "head": _head_name(tensors)}
    slots = []
    for path, module in model.named_modules():
        in_layer = re.fullmatch(r"layers\.(\d+)\.?(.*)", path)
        for attribute, parameter in module.named_parameters(recurse=False):
            if path in heads or f"{path}.{attribute}" in heads:
                pieces = _pieces(module, (path, attribute), parameter, heads, "", tensors)
            elif in_layer is None:
                pieces = _stacked(module, attribute, parameter, (top.get(path, f"{prefix}{path}"),))
            else:
                base, table = f"{prefix}layers.{in_layer[1]}.", tables[int(in_layer[1])]
                pieces = _pieces(module, (in_layer[2], attribute), parameter, table, base, tensors)
            slots.append(Slot(module, attribute, pieces))
    return slots


def _head_name(tensors: Mapping[str, TensorInfo]) -> str:
    nested = "language_model.lm_head"
    return nested if any(name.startswith(nested) for name in tensors) else "lm_head"


def _pieces(
    module: nn.Module,
    location: tuple[str, str],
    parameter: Tensor,
    table: Names,
    base: str,
    tensors: Mapping[str, TensorInfo],
) -> tuple[TensorPiece, ...]:
    """Return the pieces of the parameter at `location`: (path inside a layer, attribute)."""
    path, attribute = location
    whole = f"{path}.{attribute}".lstrip(".")
    if whole in table:
        (name,) = table[whole]  # type: ignore[misc]
        return (TensorPiece(base + name, base + name, tuple(parameter.shape)),)
    sources = table[path]
    if isinstance(sources, ExpertNames):
        assert isinstance(module, ExpertLinear)
        return _expert_pieces(module, attribute, parameter, sources, base, tensors)
    return _stacked(module, attribute, parameter, tuple(base + source for source in sources))


def _stacked(
    module: nn.Module, attribute: str, parameter: Tensor, sources: tuple[str, ...]
) -> tuple[TensorPiece, ...]:
    """Return one piece for each projection that is stacked along the rows."""
    parts = module.parts if isinstance(module, Linear) else (parameter.shape[0],)
    pieces, begin = [], 0
    for source, rows in zip(sources, parts, strict=True):
        shape = (rows, *parameter.shape[1:])
        pieces.append(TensorPiece(source, f"{source}.{attribute}", shape, begin=begin))
        begin += rows
    return tuple(pieces)


def _expert_pieces(
    module: ExpertLinear,
    attribute: str,
    parameter: Tensor,
    names: ExpertNames,
    base: str,
    tensors: Mapping[str, TensorInfo],
) -> tuple[TensorPiece, ...]:
    """Return the pieces of experts. A file stores experts fused, fused by projection, or one by one."""
    num_experts, inner = parameter.shape[0], tuple(parameter.shape[2:])
    suffix = "" if attribute == "weight" else f"_{attribute}"
    fused = f"{base}{names.base}.{names.fused}"
    # In GGUF, "down_proj" is a part, not the fused tensor of that name, which may be transposed.
    is_by_part = f"{base}{names.base}.gate_proj" in tensors
    if not is_by_part and any(f"{fused}{end}" in tensors for end in ("", "_blocks")):
        is_transposed = names.is_transposed and attribute == "weight"
        piece = TensorPiece(fused, f"{fused}{suffix}", tuple(parameter.shape), is_transposed=is_transposed)
        return (replace(piece, is_interleaved=names.is_interleaved),)
    pieces, begin = [], 0
    for part, rows in zip(names.parts, module.parts, strict=True):
        if is_by_part:
            source = f"{base}{names.base}.{part}"
            pieces.append(TensorPiece(source, f"{source}{suffix}", (num_experts, rows, *inner), begin=begin))
        for expert in () if is_by_part else range(num_experts):
            source = f"{base}{names.base}.{expert}.{part}"
            pieces.append(TensorPiece(source, f"{source}.{attribute}", (rows, *inner), expert, begin))
        begin += rows
    return tuple(pieces)


def _with_scheme(
    piece: TensorPiece, quantization: Quantization, tensors: Mapping[str, TensorInfo], name: str
) -> TensorPiece:
    """Add the scheme, unless the tensor is plain: exporters do not list all unquantised projections."""
    scheme = quantization.scheme(piece.source)
    if scheme is None:
        return piece
    packed = replace(piece, scheme=scheme)
    info = tensors.get(piece.tensor)
    is_float = info is not None and info.dtype in _FLOATS
    try:
        extra = set(packed.stored()) - {piece.tensor}
    except ModelError as error:
        if is_float:
            return piece  # a shape that the scheme cannot hold
        raise _named(name, piece, error) from None
    return piece if is_float and not any(name in tensors for name in extra) else packed


def _named(name: str, piece: TensorPiece, error: ModelError) -> ModelError:
    return ModelError(f"'{name}': '{piece.source}': {error}")


# ---- checks before anything is read


def _check(
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorInfo],
    slots: list[Slot],
    skipped: re.Pattern[str],
) -> None:
    known: set[str] = set()
    biases = {piece.tensor for slot in slots if slot.attribute == "bias" for piece in slot.pieces}
    for piece in (piece for slot in slots for piece in slot.pieces):
        for tensor, spec in piece.stored().items():
            if not spec.is_optional or tensor in tensors:
                _check_tensor(checkpoint.name, tensors, tensor, spec, piece.scheme)
                known.add(tensor)
        if piece.scheme is not None:
            known |= {piece.source + suffix for suffix in piece.scheme.ignored}
            bias = f"{piece.source}.bias"
            if bias in tensors and bias not in biases and not checkpoint.read(bias).any():
                known.add(bias)
    unknown = sorted(tensor for tensor in tensors.keys() - known if not skipped.fullmatch(tensor))
    if unknown:
        raise ModelError(
            f"'{checkpoint.name}': the file has {len(unknown)} tensors that this architecture does not use, "
            f"'{unknown[0]}' first. Without them it would be another model. See docs/models.md."
        )


def _check_tied(checkpoint: Checkpoint, embedding: str, head: str) -> None:
    """Raise ModelError if the file has a head that differs from the embedding, although they are tied."""
    info = checkpoint.tensors().get(head)
    if info is None:
        return
    for begin, end in row_slices(info.shape, _SLICE_BYTES):
        if not torch.equal(checkpoint.read(head, begin, end), checkpoint.read(embedding, begin, end)):
            raise ModelError(
                f"'{checkpoint.name}': config.json says tie_word_embeddings = true, but '{head}' is not the "
                "embedding. If the head was trained, set tie_word_embeddings to false."
            )


def _check_tensor(
    name: str, tensors: Mapping[str, TensorInfo], tensor: str, spec: TensorSpec, scheme: Scheme | None
) -> None:
    info = tensors.get(tensor)
    if info is None:
        packing = "" if scheme is None else f" (packed as {scheme.name})"
        raise ModelError(
            f"'{name}' has no tensor '{tensor}'{packing}: the files and config.json do not belong "
            "together, or the download is incomplete. Fetch the checkpoint again."
        )
    is_right = info.shape == spec.shape if scheme is None else spec.accepts(info.shape)
    if not is_right:
        raise ModelError(
            f"'{name}': tensor '{tensor}' has shape {list(info.shape)}, but config.json "
            f"asks for {list(spec.shape)}. Check that the files belong together."
        )
    if info.dtype not in spec.dtypes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
        raise ModelError(
            f"'{name}': tensor '{tensor}' is stored as {str(info.dtype).removeprefix('torch.')}, expected "
            f"{expected}: config.json does not describe how the file is quantised. See docs/models.md."
        )


# ---- reading


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads a checkpoint into memory on `device`."""

    checkpoint: Checkpoint
    tensors: Mapping[str, TensorInfo]  # built only once, as a mixture has tens of thousands
    storage: Storage
    device: torch.device
    factors: Mapping[str, Tensor] = field(default_factory=dict)  # column factors by module path
    kept: Int8Cache | None = None  # the cache on disk; None: packed weights are not cached

    def load(
        self, model: Loaded, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[Slot]:
        slots = match_tensors(model, self.checkpoint, self.tensors)
        paths = {id(module): path for path, module in model.named_modules()}
        kept = {} if self.kept is None else self.kept.read()
        for index, slot in enumerate(slots):
            # The head decides between tokens and is never quantised here.
            may_quantise = slot.may_be_quantised and slot.module is not model.head
            path = paths[id(slot.module)]
            if slot.attribute == "weight" and path in kept:
                slot.put(kept[path])
            else:
                self.fill(slot, self.factors.get(path), may_quantise=may_quantise)
            progress(index + 1, len(slots))
        if self.kept is not None and not kept:
            weights = ((path, getattr(module, "weight", None)) for path, module in model.named_modules())
            self.kept.write({path: weight for path, weight in weights if isinstance(weight, Int8Matrix)})
        return slots

    def fill(self, slot: Slot, factors: Tensor | None, *, may_quantise: bool) -> None:
        is_packed = self.storage in ("keep", "both") and any(self._is_packed(piece) for piece in slot.pieces)
        kinds = (Linear,) if self.storage == "both" else (Linear, ExpertLinear, Embedding)
        is_packed &= isinstance(slot.module, kinds)
        is_packed &= slot.may_be_quantised or isinstance(slot.module, Embedding)
        quantiser = QUANTISERS.get(self.storage) if may_quantise else None
        value: nn.Parameter | Packed
        if slot.uses_int8_matrix(self.storage, self.device):
            value = Int8Matrix.of(self._slices(slot.pieces), slot.parameter.shape, factors)
        elif is_packed or quantiser is not None:
            value = self._packed(slot, quantiser).to(self.device)
            if isinstance(slot.module, Linear):
                value = for_kernel(value, slot.parameter.dtype, self.device)
            if self.storage == "both":
                value = self._both_forms(slot, value)
        else:
            value = nn.Parameter(self._dense(slot), requires_grad=False)
        slot.put(value)

    def _both_forms(self, slot: Slot, value: Packed) -> nn.Parameter | Packed:
        """Return a weight that holds its values beside its words; the values alone if it has no words."""
        if isinstance(value, Words):
            return value.with_values(slot.parameter.dtype)
        if isinstance(slot.module, Linear):
            slot.module.why_unpacked = why_no_words(value, slot.parameter.dtype, self.device)
        return nn.Parameter(self._dense(slot), requires_grad=False)

    def _is_packed(self, piece: TensorPiece) -> bool:
        return piece.scheme is not None or self.checkpoint.ggml_type(piece.tensor) is not None

    # ---- into a plain parameter

    def _dense(self, slot: Slot) -> Tensor:
        value = own_memory(slot.parameter.shape, slot.parameter.dtype, self.device)
        for piece in slot.pieces:
            self._copy(piece, _region(value, piece))
        if isinstance(slot.module, RMSNorm):
            value += slot.module.offset
        return value

    def _copy(self, piece: TensorPiece, region: Tensor) -> None:
        if piece.scheme is not None and region.ndim == 3:
            for expert, part in enumerate(region):
                _unpack(self._read_packed(piece, expert), part)
        elif piece.scheme is not None:
            _unpack(self._read_packed(piece), region)
        elif region.ndim == 0:
            region.copy_(self.checkpoint.read(piece.tensor))
        else:
            for begin, end in row_slices(piece.stored()[piece.tensor].shape, _SLICE_BYTES):
                region[begin:end].copy_(self._rows(piece, begin, end))

    def _rows(self, piece: TensorPiece, begin: int, end: int) -> Tensor:
        """Read rows (or experts) of an unquantised piece, and convert them to our layout."""
        rows = self.checkpoint.read(piece.tensor, begin, end)
        rows = rows.transpose(-1, -2) if piece.is_transposed else rows
        return _deinterleaved(rows) if piece.is_interleaved else rows

    # ---- into a Packed weight

    def _packed(self, slot: Slot, quantiser: Quantiser | None) -> Packed:
        dtype = slot.parameter.dtype
        if quantiser is not None and slot.parameter.dim() == 2:
            return self._quantised(slot.pieces, tuple(slot.parameter.shape), quantiser)
        parts: list[Packed] = []
        for _, group in itertools.groupby(slot.pieces, key=lambda piece: piece.begin):
            pieces = list(group)
            made = (self._piece(piece, dtype, quantiser) for piece in pieces)
            parts.append(
                next(made) if pieces[0].expert is None else stack_each(made, len(pieces), own_memory)
            )
        return join_rows(parts)

    def _quantised(
        self, pieces: Iterable[TensorPiece], shape: tuple[int, ...], quantiser: Quantiser
    ) -> Packed:
        """Read and quantise the pieces of a matrix slice by slice, and return one weight."""
        made = (self._made(one, rows, quantiser) for one in pieces for rows in self._slices([one]))
        return join_slices(made, shape)

    def _made(self, piece: TensorPiece, rows: Tensor, quantiser: Quantiser) -> Packed:
        try:
            return quantiser(rows)
        except ModelError as error:
            raise _named(self.checkpoint.name, piece, error) from None

    def _slices(self, pieces: Iterable[TensorPiece]) -> Iterable[Tensor]:
        for piece in pieces:
            for begin, end in row_slices(piece.shape, _WORK_BYTES):
                yield self._rows(piece, begin, end)

    def _piece(self, piece: TensorPiece, dtype: torch.dtype, quantiser: Quantiser | None) -> Packed:
        if self.storage in ("keep", "both") and self._is_packed(piece):
            if piece.scheme is None or len(piece.shape) < 3:
                return self._read_packed(piece)
            experts = (self._read_packed(piece, index) for index in range(piece.shape[0]))
            return stack_each(experts, piece.shape[0], own_memory)
        if quantiser is None:
            whole = own_memory(piece.shape, dtype)
            self._copy(piece, whole)
            return Dense(whole)
        if len(piece.shape) < 3:  # one expert
            return self._quantised((piece,), piece.shape, quantiser)
        each = (self._rows(piece, index, index + 1)[0] for index in range(piece.shape[0]))
        experts = (self._made(piece, rows, quantiser) for rows in each)
        return stack_each(experts, piece.shape[0], own_memory)

    def _read_packed(self, piece: TensorPiece, expert: int | None = None) -> Packed:
        """Read a piece in the file's format, or only one expert of a piece with several."""
        if piece.scheme is None:
            kind = self.checkpoint.ggml_type(piece.tensor)
            assert kind is not None
            return GgufPacked(self.checkpoint.read_packed(piece.tensor), kind)
        read = {}
        for name in piece.stored():
            if name not in self.tensors:
                continue  # optional, as _check has verified
            begin, end = (0, None) if expert is None else (expert, expert + 1)
            tensor = self.checkpoint.read(name, begin, end)
            tensor = _deinterleaved(tensor) if piece.is_interleaved else tensor
            read[name.removeprefix(piece.source)] = tensor if expert is None else tensor[0]
        try:
            return piece.scheme.pack(read, piece.shape if expert is None else piece.shape[1:])
        except ModelError as error:
            raise _named(self.checkpoint.name, piece, error) from None


def _unpack(packed: Packed, region: Tensor) -> None:
    """Dequantise one matrix into `region`, slice by slice."""
    for begin, end in row_slices(packed.shape, _WORK_BYTES):
        region[begin:end].copy_(packed[torch.arange(begin, end)].dequantise(region.dtype))


def join_slices(
    parts: Iterable[Packed], shape: tuple[int, ...], device: torch.device | None = None
) -> Packed:
    """Join slices of rows, each quantised row by row, into one weight; hold only one slice at a time."""
    num_rows, columns = math.prod(shape[:-1]), shape[-1]
    parts = iter(parts)
    first = next(parts)
    if isinstance(first, IntGroups):
        return _join_groups([first, *parts], shape)
    values: Tensor | None = None
    scales: list[Tensor] = []
    begin = 0
    for part in itertools.chain([first], parts):
        assert isinstance(part, Scaled)
        if values is None:
            values = own_memory((num_rows, columns), part.values.dtype, device)
        values[begin : begin + part.shape[0]] = part.values
        scales.append(part.scale)
        begin += part.shape[0]
    assert values is not None
    return Scaled(values.view(shape), torch.cat(scales).view(*shape[:-1], 1), block=(1, columns))


def _join_groups(parts: Iterable[Packed], shape: tuple[int, ...]) -> Packed:
    made = [part for part in parts if isinstance(part, IntGroups)]
    buffers = {
        "codes": torch.cat([part.codes for part in made]).view(*shape[:-1], -1),
        "scale": torch.cat([part.scale for part in made]).view(*shape[:-1], -1),
        "zero": None,
        "group_index": None,
    }
    return IntGroups(shape, buffers, bits=made[0].bits, group_size=made[0].group_size)


def _region(value: Tensor, piece: TensorPiece) -> Tensor:
    """Return the part of `value` that `piece` fills; the shapes differ in at most one dimension."""
    if piece.expert is not None:
        value = value[piece.expert]
    for axis, (have, want) in enumerate(zip(value.shape, piece.shape, strict=True)):
        if have != want:
            return value.narrow(axis, piece.begin, want)
    return value


def _deinterleaved(experts: Tensor) -> Tensor:
    """Reorder rows [E, 2 x n, ...]: first the even rows, then the odd rows."""
    return torch.cat((experts[:, 0::2], experts[:, 1::2]), dim=1)


def row_slices(shape: tuple[int, ...], num_bytes: int) -> Iterable[tuple[int, int]]:
    """Return ranges [begin, end) of rows, each of at most `num_bytes` in float32, but at least one row."""
    rows = max(1, num_bytes // (4 * math.prod(shape[1:])))
    return ((begin, min(begin + rows, shape[0])) for begin in range(0, shape[0], rows))
