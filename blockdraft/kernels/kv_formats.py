"""Names, sizes and limits of the compressed formats of keys and values. It does not import torch.

kv_codec.py has the codecs, kv_positions.py the rule by which keys and values are read compressed.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockdraft.errors import ModelError, SettingsError

EXACT = "exact"  # no compression: the model's dtype
# Bits per coordinate of keys, and of values.
BITS: dict[str, tuple[int, int]] = {"int8": (8, 8), "tq4": (4, 4), "tq4v3": (4, 3)}
ROTATED = frozenset({"tq4", "tq4v3"})  # rotated before they are stored
SCALE_BYTES = 2  # per vector
SMALLEST_BLOCK = 8  # the fewest values to rotate together: fewer are not close to normal
LARGEST_HEAD = 512


@dataclass(frozen=True, slots=True)
class CardLimits:
    """What engines have been tested with on a card, by tests/gpu/test_compressed.py."""

    head_dims: tuple[int, ...]
    has_windows: bool  # sliding ones
    has_drafter: bool  # whose own keys and values are compressed
    has_wide_blocks: bool  # by kernels/triton/kv_wide.py; otherwise blocks take the kernel of single queries
    capability: tuple[int, int] = (9, 0)  # Hopper, and later
    page: int = 16  # a page has a multiple of these tokens

    def why_not(self) -> str:
        """Return what a refusal says."""
        *most, last = self.head_dims
        dims = f"{', '.join(map(str, most))} or {last}"
        windows = "" if self.has_windows else " without a sliding window"
        drafter = "" if self.has_drafter else ", with the drafter's own exact"
        return (
            f"on a card, compressed keys and values are served in bfloat16 so far, for heads of {dims} values"
            f"{windows}, on Hopper or later{drafter}. Use --kv-dtype auto, or --device cpu"
        )


# All that the tests ask: heads of (64, 128, 256, 512) values, and the rest True.
CARD = CardLimits((64, 128), has_windows=False, has_drafter=False, has_wide_blocks=False)

TILE = 64  # tokens that are compressed at a time; the first tile, which all queries read, stays exact
WINDOW = 128  # the least number of tokens before a query that it reads exact
WIDEST_BLOCK = 16


def bytes_per_token(name: str, head_dim: int) -> int:
    """Return the bytes of a key and a value of one head, with their scales."""
    return sum(head_dim * bits // 8 + SCALE_BYTES for bits in BITS[name])


def check_format(name: str, head_dim: int) -> None:
    """Raise an error if the format is unknown or cannot store heads of `head_dim` values."""
    if name not in BITS:
        raise SettingsError(f"'{name}' is not a format of keys and values: use one of {', '.join(BITS)}.")
    if name in ROTATED:
        blocks(head_dim)


def blocks(head_dim: int) -> list[int]:
    """Return the sizes of the blocks that a head is rotated in: powers of two, largest first (96: 64, 32)."""
    parts = [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim & 1 << bit]
    if not parts or head_dim > LARGEST_HEAD or parts[-1] < SMALLEST_BLOCK:
        raise ModelError(
            f"Heads of {head_dim} values cannot be rotated: only multiples of {SMALLEST_BLOCK} up to "
            f"{LARGEST_HEAD} can. Use int8 for keys and values."
        )
    return parts


def exact_tokens(window: int, page_size: int, block: int) -> int:
    """Return how many exact tokens a running row needs at most: first tile, window and blocks in flight.

    The number is a multiple of `page_size`. It includes one page more than queries read, so that a prefix
    that ends with the row's last whole page can be reused.
    """
    behind = -(-(window + TILE + page_size + 3 * block) // page_size) + 1
    return (behind + -(-TILE // page_size)) * page_size
