"""KVarN's scheme for keys and values (arXiv 2606.03458), as far as it is described: what ours is held to.

Tiles of 128 tokens and one head are rotated by a Hadamard matrix, their rows and columns are divided by
factors until both axes vary alike (16 rounds, in the logarithm), and the result is rounded between a least
and a largest value: of each channel for keys, of each token for values. Written from the description, not
from its authors' code: that keys are rounded by channel is our reading, and the rotation's signs are ours.
"""

import torch
from torch import Tensor

from blockdraft.kernels.kv_codec import rotate, rotate_back

TILE = 128  # tokens
ROUNDS = 16
FLOOR = 1e-6  # of a deviation
MAX_LOG = 8.0  # of a factor: float16 holds it


def keys_back(k: Tensor, *, bits: int) -> Tensor:
    """Keys [L, G, D] as they come back. An unfinished tile at the end is left as it is."""
    return _back(k, bits, axis=-2)


def values_back(v: Tensor, *, bits: int) -> Tensor:
    return _back(v, bits, axis=-1)


def bytes_per_token(head_dim: int, *, key_bits: int, value_bits: int) -> float:
    """Codes, and in float16: scale, zero and factor of keys by channel and token, of values the other way."""
    keys = TILE * head_dim * key_bits / 8 + head_dim * 4 + TILE * 2
    values = TILE * head_dim * value_bits / 8 + TILE * 4 + head_dim * 2
    return (keys + values) / TILE


def _back(x: Tensor, bits: int, axis: int) -> Tensor:
    whole = len(x) // TILE * TILE
    tiles = rotate(x[:whole].float()).unflatten(0, (-1, TILE)).transpose(1, 2)  # [tiles, G, T, D]
    normal, factors = _normalised(tiles)
    rounded = _rounded(normal, bits, axis) * factors
    return torch.cat((rotate_back(rounded.transpose(1, 2).flatten(0, 1)), x[whole:].float()))


def _normalised(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles whose tokens and channels all deviate alike, and what to multiply them by to have them back."""
    by_token = torch.zeros_like(tiles[..., :1])
    by_channel = torch.zeros_like(tiles[..., :1, :])
    for _ in range(ROUNDS):
        for logs, axis in ((by_token, -1), (by_channel, -2)):
            spread = (tiles * (-by_token - by_channel).exp()).std(dim=axis, keepdim=True).clamp(min=FLOOR)
            logs.add_(spread.log()).clamp_(-MAX_LOG, MAX_LOG)
    factors = by_token.exp().half().float() * by_channel.exp().half().float()
    return tiles / factors, factors


def _rounded(x: Tensor, bits: int, axis: int) -> Tensor:
    least, largest = x.amin(dim=axis, keepdim=True), x.amax(dim=axis, keepdim=True)
    step = ((largest - least) / (2**bits - 1)).half().float().clamp(min=FLOOR)
    zero = least.half().float()
    return ((x - zero) / step).round().clamp(0, 2**bits - 1) * step + zero
