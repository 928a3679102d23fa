"""Compressed keys and values in numbers: which formats there are, what they take, what they cannot store.

The codecs themselves are in kv_codec.py, the rule by which they are read in kv_positions.py.
"""

from __future__ import annotations

from blockdraft.errors import ModelError, SettingsError

EXACT = "exact"  # no compression: the model's own dtype
# Bits of each value of a key, and of a value.
BITS: dict[str, tuple[int, int]] = {"int8": (8, 8), "fp8": (8, 8), "tq4": (4, 4), "tq4v3": (4, 3)}
TURNED = frozenset({"tq4", "tq4v3"})  # rotated before they are stored
SCALE_BYTES = 2  # of each vector
SMALLEST_BLOCK = 8  # values turned together, at least: fewer do not look normal
LARGEST_HEAD = 512

TILE = 64  # tokens that are compressed at a time; the first of them, which all queries look at, never are
WINDOW = 128  # tokens behind a query that it reads exact, at least
WIDEST_BLOCK = 16


def bytes_per_token(name: str, head_dim: int) -> int:
    """Of one key/value head: key, value and their scales."""
    return sum(head_dim * bits // 8 + SCALE_BYTES for bits in BITS[name])


def check_format(name: str, head_dim: int) -> None:
    """Raises where heads of that size cannot be stored so."""
    if name not in BITS:
        raise SettingsError(f"'{name}' is no format of keys and values: use one of {', '.join(BITS)}.")
    if name in TURNED:
        blocks(head_dim)


def blocks(head_dim: int) -> list[int]:
    """The powers of two that a head is rotated by, largest first: 96 = 64 + 32."""
    parts = [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim & 1 << bit]
    if not parts or head_dim > LARGEST_HEAD or parts[-1] < SMALLEST_BLOCK:
        raise ModelError(
            f"Heads of {head_dim} values cannot be rotated: only multiples of {SMALLEST_BLOCK} up to "
            f"{LARGEST_HEAD} can. Use int8 or fp8 for keys and values."
        )
    return parts


def exact_tokens(window: int, page_size: int, block: int) -> int:
    """Tokens that a running row keeps exact at most, in whole pages: first tile, window, blocks in flight.

    A page more is kept than queries read: a prefix that ends with the row's last whole page can be found.
    """
    behind = -(-(window + TILE + page_size + 3 * block) // page_size) + 1
    return (behind + -(-TILE // page_size)) * page_size
