"""A checksum over every byte of a model's weights, fast enough for every start.

Of each tensor, 64 bits at a time: every word is multiplied by a random odd number of its own place, and the
products are added, modulo 2**64. The place makes swapped values count; an odd factor loses no bit of a word.
Before that, a word's upper bits are added to its lower ones: where two words that differ in their first bit
alone are swapped, the factors' difference, which is even, would hide it.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

# Words at a time: on a CPU few enough to stay in its cache, on a card enough to keep it busy.
CPU_WORDS, CARD_WORDS = 1 << 15, 1 << 24
FOLD = 29  # bits by which a word is shifted before it is added to itself


@torch.inference_mode()
def checksum(model: nn.Module) -> str:
    """16 hex digits of the model's weights: names, shapes, dtypes and all bytes."""
    digest, sums = hashlib.sha256(), []
    adders: dict[torch.device, _Adder] = {}
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device not in adders:
            adders[tensor.device] = _Adder(tensor.device)
        sums += adders[tensor.device].sums(tensor)
    if sums:  # one wait for the device
        digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class _Adder:
    """The factors of each place, and memory for the products: fresh memory takes longer than adding."""

    def __init__(self, device: torch.device) -> None:
        self._size = CPU_WORDS if device.type == "cpu" else CARD_WORDS
        place = torch.arange(1, self._size + 1, dtype=torch.int64, device=device)
        mixed = place * -7046029254386353131  # SplitMix64's mix of a number
        mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
        mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
        self._factors = mixed | 1
        self._products = torch.empty_like(mixed)

    def sums(self, tensor: Tensor) -> list[Tensor]:
        """A number for each piece of a tensor."""
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        if len(raw) % 8 or raw.storage_offset() % 8:
            raw = torch.cat((raw, raw.new_zeros(-len(raw) % 8)))
        words = raw.view(torch.int64)
        return [self._sum(words[at : at + self._size]) for at in range(0, len(words), self._size)]

    def _sum(self, words: Tensor) -> Tensor:
        products = torch.bitwise_right_shift(words, FOLD, out=self._products[: len(words)])
        return products.add_(words).mul_(self._factors[: len(words)]).sum()
