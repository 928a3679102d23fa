"""Gumbel noise keyed by (seed, position, token id), equal in all implementations and in any order of calls.

The generator is Philox-4x32 with 10 rounds (Salmon et al., SC 2011): key = the seed's two halves, counter =
(token id // 4, position low, position high, 0); the four words of an output belong to four consecutive token
ids. A word w becomes u = (w // 512 + 0.5) / 2**23, which float32 represents exactly and which is never 0 or
1. Kernels that follow these steps draw equal noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Return noise [R, C, V] for seeds [R] and positions [R, C], both int64."""
    counter = torch.arange((vocab_size + 3) // 4, device=seeds.device)  # four ids each
    return _gumbel(_words(seeds, positions, counter).flatten(-2)[..., :vocab_size], dtype)


def gumbel_at(seeds: Tensor, positions: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the noise [R, C, K] of `gumbel`, only for tokens [R, C, K]."""
    lane = (token_ids % 4)[..., None]
    return _gumbel(_words(seeds, positions, token_ids // 4).gather(-1, lane).squeeze(-1), dtype)


def _words(seeds: Tensor, positions: Tensor, counter: Tensor) -> Tensor:
    """Return the four Philox words [R, C, counters, 4] of each counter."""
    positions, seeds = positions[..., None], seeds[:, None, None]
    inputs = (counter, positions & _WORD, positions >> 32, torch.zeros_like(counter))
    return torch.stack(philox(inputs, key=(seeds & _WORD, (seeds >> 32) & _WORD)), dim=-1)


def _gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
    uniform = ((words >> 9).to(dtype) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Philox-4x32-10 of broadcastable int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(word: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low half of a 32 x 32 bit product, in int64 without overflow into the sign."""
    low = word * (constant & 0xFFFF)  # < 2**48
    high = word * (constant >> 16)  # < 2**48
    middle = (low >> 16) + (high & 0xFFFF)  # < 2**33
    return (high >> 16) + (middle >> 16), ((middle << 16) | (low & 0xFFFF)) & _WORD
