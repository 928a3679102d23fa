"""What each layer needs remembered, as data: the model says it, the cache allocates it, the plan sums it."""

from __future__ import annotations

from dataclasses import dataclass


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

    Stored in full pages and masked: a ring of `window` slots would be overwritten by rejected drafts.
    """

    window: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A state of fixed size per row, plus a tape of the block that commit folds into it."""

    num_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_width: int

    def bytes_per_token(self, element_bytes: int) -> int:
        return 0

    def bytes_per_row(self, element_bytes: int, width: int) -> int:
        """State and tape; both accumulate in float32 or wider, the convolution's inputs do not."""
        state_bytes = max(element_bytes, 4)
        state = self.num_heads * self.key_dim * self.value_dim * state_bytes
        tail = (self.conv_width - 1) * self.conv_channels * element_bytes
        entry = self.num_heads * (self.key_dim + self.value_dim + 1) * state_bytes
        return state + tail + width * (entry + self.conv_channels * element_bytes)


@dataclass(frozen=True, slots=True)
class SharedWith:
    """No storage of its own: reads the keys and values that another layer wrote."""

    layer: int

    def bytes_per_token(self, element_bytes: int) -> int:
        return 0


LayerSpec = Paged | Windowed | Recurrent | SharedWith


def bytes_per_token(specs: tuple[LayerSpec, ...], element_bytes: int) -> int:
    """What one token costs in pages, over all layers of target and drafter."""
    return sum(spec.bytes_per_token(element_bytes) for spec in specs)
