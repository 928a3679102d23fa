"""Specs of what each layer stores; the cache allocates memory and the plan computes sizes from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from blockdraft.kernels import kv_formats
from blockdraft.kernels.sampling_tables import MAX_LISTED, Real, Whole

STATE_GRID = 64  # recurrent states are saved after multiples of so many tokens
NUM_RESERVED_SLOTS = 1  # of saved states: the last slot is scratch
NUM_RESERVED_PAGES = 2  # page 0 is never written, page 1 belongs to the scratch row


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values of every token, in pages."""

    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class Windowed(Paged):
    """Like Paged, but no query looks back `window` tokens or more.

    All tokens are stored and masked: rejected drafts would overwrite a ring of `window` slots.
    """

    window: int


@dataclass(frozen=True, slots=True)
class Newest(Windowed):
    """Like Windowed, but only what belongs to a row's newest token is read; never compressed."""

    window: int = 1


@dataclass(frozen=True, slots=True)
class Compressed(Paged):
    """Like Paged, but older keys and values are compressed (kernels/kv_positions.py).

    Exact keys and values have separate pages.
    """

    format: str  # one of kernels/kv_formats.py

    def bytes_per_token(self, element_bytes: int) -> int:
        return self.num_kv_heads * kv_formats.bytes_per_token(self.format, self.head_dim)

    def exact_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A state of fixed size per row, and a tape of the block, which commit folds into the state.

    The convolution's channels are queries, keys and values side by side.
    """

    num_key_heads: int
    num_heads: int  # of values, and of the state
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    def bytes_per_token(self, element_bytes: int) -> int:
        return 0

    def bytes_per_row(self, element_bytes: int, width: int) -> int:
        """Return the size of state and tape; all but the convolution's inputs are float32 or wider."""
        entry = self.num_key_heads * self.key_dim + self.num_heads * (self.value_dim + 1)
        tape = width * (entry * max(element_bytes, 4) + self.conv_channels * element_bytes)
        return self.state_bytes(element_bytes) + tape

    def state_bytes(self, element_bytes: int) -> int:
        """Return the size of a state and the convolution's last inputs."""
        state = self.num_heads * self.key_dim * self.value_dim * max(element_bytes, 4)
        return state + (self.conv_width - 1) * self.conv_channels * element_bytes


@dataclass(frozen=True, slots=True)
class SharedWith:
    """No storage: the layer reads keys and values that another layer wrote."""

    layer: int

    def bytes_per_token(self, element_bytes: int) -> int:
        return 0


LayerSpec = Paged | Windowed | Compressed | Recurrent | SharedWith


def is_compressible(spec: LayerSpec) -> TypeGuard[Paged]:
    return isinstance(spec, Paged) and not isinstance(spec, Newest)


def compressed(specs: tuple[LayerSpec, ...], format: str) -> tuple[LayerSpec, ...]:
    """Return the specs with keys and values stored in `format`."""
    if format == kv_formats.EXACT:
        return specs
    return tuple(
        Compressed(spec.num_kv_heads, spec.head_dim, format) if is_compressible(spec) else spec
        for spec in specs
    )


def exact_bytes_per_token(specs: tuple[LayerSpec, ...], element_bytes: int) -> int:
    """Return the bytes of one exact token in the layers that compress."""
    return sum(spec.exact_bytes_per_token(element_bytes) for spec in specs if isinstance(spec, Compressed))


def tree_bytes_per_token(specs: tuple[LayerSpec, ...], element_bytes: int) -> int:
    """Return the bytes of one token in the pages of trees' branches, which are not compressed."""
    paged = tuple(spec for spec in specs if not isinstance(spec, Compressed))
    return bytes_per_token(paged, element_bytes) + exact_bytes_per_token(specs, element_bytes)


def bytes_per_token(specs: tuple[LayerSpec, ...], element_bytes: int) -> int:
    """Return the bytes of one token in the pages of all layers of target and drafter."""
    return sum(spec.bytes_per_token(element_bytes) for spec in specs)


def bytes_per_row(specs: tuple[LayerSpec, ...], element_bytes: int, width: int) -> int:
    """Return the bytes of one running sequence besides its pages: states and the tape of a block."""
    return sum(spec.bytes_per_row(element_bytes, width) for spec in specs if isinstance(spec, Recurrent))


def state_bytes(specs: tuple[LayerSpec, ...], element_bytes: int) -> int:
    """Return the bytes of one saved state over all layers."""
    return sum(spec.state_bytes(element_bytes) for spec in specs if isinstance(spec, Recurrent))


def row_table_bytes(vocab_size: int, max_pages: int, history_size: int = 0) -> int:
    """Return the bytes of one row in `cache.rows.Rows`; max_pages counts the entries of all page tables."""
    eights = 3 + max_pages + len(Whole) + 2 * MAX_LISTED  # active, length, anchor; stop and bias ids
    fours = len(Real) + MAX_LISTED + vocab_size + history_size  # also bias values, counts of output tokens
    return 8 * eights + 4 * fours + vocab_size  # also a bool per token: is it in the prompt
