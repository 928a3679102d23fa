"""Draws seeds from seeds. This module does not import torch."""

from __future__ import annotations


def mix(seed: int, index: int) -> int:
    """Return a different seed for each (seed, index), as a signed 64-bit number (SplitMix64's finaliser).

    The mix is not additive, so that the choices of different requests never share noise.
    """
    mask = 2**64 - 1
    z = ((seed & mask) * 0xD1342543DE82EF95 + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z
