"""Weights that stay in the blocks of a GGUF file.

PyTorch unpacks common types here, on the device of the bytes; gguf-py unpacks all others on the CPU. Every
unpacker multiplies in gguf-py's order, so the bits are equal. Unpackers of the default model's types, Q4_1
and Q8_0, write each value once and scale in place: its tensors take 0.4 s, against 1.5 to 2.9 s with gguf-py
(one thread, Neoverse-N1, 2026-11).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from blockdraft.models.packed import Buffered

_SUPER = 256  # values in a block of a K-quant
_SLICE = 1 << 14  # blocks whose scales are checked at a time, so that copies take no memory worth naming


class GgufPacked(Buffered):
    """A weight as raw bytes [..., rows, row bytes], blocks of one ggml type (gguf.GGMLQuantizationType)."""

    raw: Tensor

    def __init__(self, raw: Tensor, quantization: int) -> None:
        length, num_bytes = block_size(quantization)
        columns = raw.shape[-1] // num_bytes * length  # whole blocks: gguf_header.py checks them
        super().__init__((*raw.shape[:-1], columns), {"raw": raw})
        self.quantization = quantization

    def format(self) -> tuple[object, ...]:
        return (type(self), self.quantization)

    @property
    def type_name(self) -> str:
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(self.quantization).name)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        return unpack(self.raw, self.quantization).view(self.shape).to(dtype)


def block_size(quantization: int) -> tuple[int, int]:
    """Return the number of values and the number of bytes in a block of this ggml type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    length, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(quantization)]
    return length, num_bytes


def unpack(raw: Tensor, quantization: int) -> Tensor:
    """Unpack whole blocks of bytes into flat float32 values."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(quantization)
    num_bytes = block_size(quantization)[1]
    blocks = raw.reshape(raw.numel() // num_bytes, num_bytes)
    if len(blocks) == 0:
        return torch.empty(0, dtype=torch.float32, device=raw.device)
    if kind.name in _UNPACKERS:
        return _UNPACKERS[kind.name](blocks).flatten()
    values = dequantize(blocks.cpu().numpy(), kind)
    return torch.from_numpy(np.asarray(values, np.float32)).flatten().to(raw.device)


# ---- the parts of blocks of 32 values, for kernels that read them in another order

Q4_0, Q4_1, Q8_0 = 2, 3, 8  # ggml's numbers
# Bytes of a block, and of its float16 numbers, which come first.
_BYTES = {Q4_0: (18, 2), Q4_1: (20, 4), Q8_0: (34, 2)}


def has_finite_scales(raw: Tensor, quantization: int) -> bool:
    """Return whether scales and minimums on a CPU are numbers; True for other types than these three."""
    if quantization not in _BYTES:
        return True
    num_bytes, begin = _BYTES[quantization]
    blocks = raw.reshape(-1, num_bytes).numpy()
    slices = (blocks[i : i + _SLICE, :begin] for i in range(0, len(blocks), _SLICE))
    return all(bool(np.isfinite(np.ascontiguousarray(one).view(np.float16)).all()) for one in slices)


def gguf_parts(raw: Tensor, quantization: int) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [rows, columns], and float16 numbers [rows, columns / 32, 1 or 2] of raw blocks.

    Codes of Q8_0 are 128 more than the stored ones. The numbers are a scale, and in Q4_1 a minimum.
    """
    num_bytes, begin = _BYTES[quantization]
    blocks = raw.reshape(raw.shape[0], -1, num_bytes)
    numbers, stored = blocks[..., :begin].contiguous().view(torch.float16), blocks[..., begin:]
    codes = stored ^ 0x80 if quantization == Q8_0 else torch.cat((stored & 15, stored >> 4), dim=-1)
    return codes.flatten(1), numbers


def gguf_blocks(codes: Tensor, numbers: Tensor, quantization: int) -> GgufPacked:
    """Return the weight of these parts; the inverse of `gguf_parts`."""
    blocks = codes.view(codes.shape[0], -1, 32)
    stored = blocks ^ 0x80 if quantization == Q8_0 else blocks[..., :16] | blocks[..., 16:] << 4
    raw = torch.cat((numbers.contiguous().view(torch.uint8), stored), dim=-1)
    return GgufPacked(raw.flatten(1), quantization)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.flatten().view(dtype).to(torch.float32, copy=True)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at byte `start` of every block as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack [blocks, n] bytes to float32 [blocks, 2 n]: all low halves, then all high halves."""
    values = torch.empty(len(packed), 2, packed.shape[1], dtype=torch.float32, device=packed.device)
    values[:, 0] = packed & 0x0F
    values[:, 1] = packed >> 4
    return values.flatten(1)


def _bits(packed: Tensor) -> Tensor:
    """Unpack [blocks, n] bytes to [blocks, 8 n] bits, the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(-2)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]).add_(_bits(blocks[:, 2:6]) << 4)
    return codes.sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]).add_(_bits(blocks[:, 4:8]) << 4)
    return codes.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 12 bytes to 8 scales and 8 minimums of 6 bits; four of each are split into two pieces."""
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = torch.cat((first & 0x3F, (rest & 0x0F) | (first >> 2 & 0x30)), dim=-1)
    minimum = torch.cat((second & 0x3F, (rest >> 4) | (second >> 2 & 0x30)), dim=-1)
    return scale.float(), minimum.float()


def _k_affine(blocks: Tensor, codes: Tensor) -> Tensor:
    """Unpack Q4_K or Q5_K from codes [blocks, 8, 32] and the blocks' eight scales and minimums."""
    scale, minimum = _k_scales(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0) * scale, _half(blocks, 2) * minimum
    return scale.unsqueeze(-1) * codes.float() - minimum.unsqueeze(-1)


def _k_nibbles(packed: Tensor) -> Tensor:
    """Unpack 128 bytes to [blocks, 8, 32]: 32 low halves, then the 32 high halves of the same bytes."""
    quarters = packed.reshape(-1, 4, 1, 32)
    return torch.cat((quarters & 0x0F, quarters >> 4), dim=2).flatten(1, 2)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k_affine(blocks, _k_nibbles(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = blocks[:, 16:48].unsqueeze(1) >> shifts & 1  # bit g of byte i belongs to value i of group g
    return _k_affine(blocks, _k_nibbles(blocks[:, 48:]) | high << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    """Unpack Q6_K: two halves of 128 values, each 64 bytes of low nibbles and 32 of high bit pairs."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 0x0F, low >> 4), dim=2).reshape(len(blocks), 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> shifts & 3
    codes = (low | high << 4).reshape(len(blocks), 16, 16).float() - 32
    scale = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return (scale.unsqueeze(-1) * codes).reshape(-1, _SUPER)


_UNPACKERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
