"""Fills a model with random weights, to measure the speed of a shape without its checkpoint.

Weights are drawn on the device, each parameter from its own seed, so they are equal at every start on one
kind of device. Matrices have a standard deviation of 1 / sqrt(inputs), norms are 1, and other values are in
_CONSTANTS.

All layers of a target together add about as much to the residual stream as the embedding. Rounding errors
then stay small at any depth, so the checks at the start work. A drafter proposes different tokens in a block,
as real drafters do: sixteen equal tokens would read only a quarter of the experts that sixteen different
tokens read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from blockdraft.checkpoints.checkpoint import own_memory
from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.checkpoints.weights import (
    QUANTISERS,
    Loaded,
    Quantiser,
    Slot,
    join_slices,
    row_slices,
    slots_of,
)
from blockdraft.models.config import Storage
from blockdraft.models.decoder import Decoder
from blockdraft.models.dflash import DFlashLayer
from blockdraft.models.gemma4 import GemmaAttention, GemmaRouter
from blockdraft.models.layers import Linear, RMSNorm
from blockdraft.models.moe import ExpertLinear
from blockdraft.models.packed import Packed, join_rows
from blockdraft.models.packed_int8 import Int8Matrix
from blockdraft.models.packed_words import Words, for_kernel

_SLICE_BYTES = 64 << 20  # float32 bytes that are drawn and quantised at a time; arbitrary
_CONSTANTS = {
    "bias": 0.0,
    "router_bias": 0.0,
    "sinks": 0.0,
    "scale": 1.0,
    "expert_scale": 1.0,
    "decay_log": 0.0,
    "base_kernel": 0.5,  # averages each column with the one before
    "gate_bias": -2.0,  # with decay_log: the state of a delta layer decays by an eighth per token
}
_INTO_STREAM = ("out", "down", "mixer_after", "after")  # the last parameter before the residual stream
_SHARPNESS = 8.0  # scale of a drafter's queries: columns differ only by what they attend to
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def fill(
    model: Loaded,
    *,
    storage: Storage,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fill a model that was built on the meta device; quantise its weights as `storage` says.

    "both" is int4 beside its values.
    """
    assert storage != "keep", "there is no file with a format to keep"
    paths = {id(module): path for path, module in model.named_modules()}
    slots = slots_of(model, {})
    share = _share(model)
    for index, slot in enumerate(slots):
        path = paths[id(slot.module)]
        generator = torch.Generator(device)
        generator.manual_seed(_seed(f"{type(model).__name__}.{path}.{slot.attribute}"))
        draw = _Draw(generator, share if path.rpartition(".")[2] in _INTO_STREAM else 1.0)
        may_quantise = slot.may_be_quantised and slot.module is not model.head
        quantiser = QUANTISERS.get("int4" if storage == "both" else storage) if may_quantise else None
        if slot.uses_int8_matrix(storage, device):
            slot.put(Int8Matrix.of([draw.dense(slot)], slot.parameter.shape))
        elif quantiser is not None:
            value = draw.packed(slot, quantiser)
            if isinstance(slot.module, Linear):
                value = for_kernel(value, slot.parameter.dtype, device)
            if storage == "both" and isinstance(value, Words):
                value = value.with_values(slot.parameter.dtype)
            slot.put(value)
        else:
            slot.put(nn.Parameter(draw.dense(slot), requires_grad=False))
        progress(index + 1, len(slots))
    for module in model.modules():
        _adjust(module)


def _adjust(module: nn.Module) -> None:
    """Set the norms and scales of `module` that must not be 1."""
    if isinstance(module, GemmaAttention):  # its scores are not scaled and would be too large
        module.q_norm.weight.fill_(module.head_dim**-0.5)
    elif isinstance(module, GemmaRouter):  # it scales its logits down, which would make experts nearly equal
        module.scale.fill_(len(module.scale) ** 0.5)
    elif isinstance(module, DFlashLayer):
        module.q_norm.weight.fill_(_SHARPNESS)


def _share(model: Loaded) -> float:
    """Return the scale of the outputs that mixers and feed-forward parts add to the residual stream."""
    if not isinstance(model, Decoder):  # a DFlash's outweigh the mask's embedding, with which columns begin
        return 1.0
    config = model.config
    return config.embedding_scale / math.sqrt(config.hidden_size * 2 * config.num_layers)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


@dataclass(frozen=True, slots=True)
class _Draw:
    """Draws the values of one parameter, multiplied by `factor`."""

    generator: torch.Generator
    factor: float

    def dense(self, slot: Slot) -> Tensor:
        meta = slot.parameter
        value = own_memory(meta.shape, meta.dtype, self.generator.device)
        if isinstance(slot.module, RMSNorm):
            return value.fill_(self.factor)
        if slot.attribute in _CONSTANTS:
            return value.fill_(_CONSTANTS[slot.attribute])
        return self._normal(value)

    def packed(self, slot: Slot, quantiser: Quantiser) -> Packed:
        """Draw and quantise each projection separately, as the loader does."""
        assert isinstance(slot.module, Linear | ExpertLinear)
        *experts, _, inputs = slot.parameter.shape
        parts = [self._scaled((*experts, rows, inputs), quantiser) for rows in slot.module.parts]
        return join_rows(parts)

    def _scaled(self, shape: tuple[int, ...], quantiser: Quantiser) -> Packed:
        """Draw and quantise a slice of rows at a time."""
        device, flat = self.generator.device, (math.prod(shape[:-1]), shape[-1])
        sizes = (end - begin for begin, end in row_slices(flat, _SLICE_BYTES))
        parts = (quantiser(self._normal(torch.empty(size, shape[-1], device=device))) for size in sizes)
        return join_slices(parts, shape, device)

    def _normal(self, value: Tensor) -> Tensor:
        return value.normal_(0.0, self.factor * value.shape[-1] ** -0.5, generator=self.generator)


def vocab_map(draft_vocab_size: int, vocab_size: int, device: torch.device) -> Tensor | None:
    """Return target token ids for the rows of a drafter's reduced head, or None if the head is complete."""
    if draft_vocab_size == vocab_size:
        return None
    return torch.arange(draft_vocab_size, device=device) * vocab_size // draft_vocab_size


def byte_tokenizer(vocab_size: int) -> TokenizerParts:
    """Build a tokenizer for a folder without one: one token per byte; larger ids decode to numbers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    vocabulary |= {f"Ġ{index}": index for index in range(len(alphabet), vocab_size)}  # Ġ: a space
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerParts(
        tokenizer=tokenizer, chat_template=_CHAT_TEMPLATE, bos_token=None, eos_token=None, eos_ids=()
    )
