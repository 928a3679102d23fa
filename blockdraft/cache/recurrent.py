"""RecurrentStates: the states of gated delta layers for each row, and the tape of the block being verified.

A verify forward reads the committed state and records on a tape how each token of the block would change it.
Commit folds the first `num_committed` entries with the same operations in the same order as the scan, so the
state has the same bits as after decoding token by token. A sequence needs memory for one state and one tape.

At length 0 a row's state counts as zero, whatever the row held before.

States at multiples of a grid can be saved for later prompts that begin with the same tokens. A saved state
has a slot: an index of `state` and `tail` past those of the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.cache.spec import STATE_GRID, Recurrent
from blockdraft.kernels.gated_delta import (
    DeltaWeights,
    RowStates,
    RowTape,
    Saves,
    SaveTable,
    Tape,
    empty_states,
    gates,
    slots_at,
)
from blockdraft.kernels.kernels import REFERENCE, Kernels
from blockdraft.kernels.sampling import Places


class Scan(NamedTuple):
    """The rows of one forward: `counts[r]` tokens of row `rows[r]`, from position `starts[r]` on."""

    rows: Tensor  # [R]
    starts: Tensor  # [R]
    counts: tuple[int, ...] | None  # None: only `offsets` gives the counts, or `places` if they differ
    is_known: bool  # tokens of a prompt, or blocks of one token: committed at once, without a tape
    offsets: Tensor | None = None  # [R + 1] where each row's tokens begin in the stream; for a GPU
    max_count: int = 0  # upper limit of tokens per row; with `offsets`
    saves: SaveTable | None = None
    places: Places | None = None  # of the tokens of a block to verify, if its rows' widths differ


class _Saving(NamedTuple):
    """What a commit saves on its way, the same in every layer."""

    slots: Tensor  # [R, T] for the states after each token; 0: not saved
    tails: list[tuple[Tensor, Tensor]]  # slots [R], scratch if there is none, and the tokens [R] before each


class _Block(NamedTuple):
    """What commit needs from a forward in one layer."""

    inputs: Tensor  # [R, T, C] of the convolution
    tape: Tape
    saves: SaveTable | None


class _BlockInPlace(NamedTuple):
    """What commit needs from a verify forward in all layers, if states are scanned in place."""

    where: Scan
    tape: RowTape
    layers: set[int]  # layers that have scanned so far


class RecurrentStates:
    """All layers of one spec: states [L, rows + slots, H, K, V] in float32 or wider, and the last inputs of
    convolutions.

    If there are slots for saved states, the last one is scratch.
    """

    def __init__(
        self,
        spec: Recurrent,
        *,
        num_layers: int,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels = REFERENCE,
        num_slots: int = 0,
    ) -> None:
        self._kernels = kernels
        self.spec = spec
        self.num_layers = num_layers
        wide = torch.promote_types(dtype, torch.float32)
        size = num_rows + num_slots
        shape = (num_layers, size, spec.num_heads, spec.key_dim, spec.value_dim)
        self.state = empty_states(shape, wide, device)
        tail = (num_layers, size, spec.conv_width - 1, spec.conv_channels)
        self.tail = torch.zeros(tail, dtype=dtype, device=device)
        self._no_saves = SaveTable(torch.zeros(size, 0, dtype=torch.int64, device=device), STATE_GRID)
        self._block: dict[int, _Block] = {}  # by layer
        self._block_in_place: _BlockInPlace | None = None

    def scan(
        self, layer: int, x: Tensor, beta: Tensor, gate: Tensor, weights: DeltaWeights, where: Scan
    ) -> Tensor:
        """Scan x [N, C], in row order, with logits beta and gate [N, H]; return the reads [N, H, V]."""
        if where.is_known:  # a block that was not committed until now never is
            self._block, self._block_in_place = {}, None
        in_place = self._kernels.scan_in_place
        if in_place is not None:
            tape = None if where.is_known else self._tape(layer, where, num_tokens=x.shape[0])
            at = self._at(where.rows, where.starts, where)
            return in_place.scan(x, beta, gate, weights, at, layer=layer, tape=tape)
        beta, gate = gates(beta, gate, weights)
        conv = weights.conv
        if where.places is not None:
            return self._scan_box(layer, x, conv, gate, beta, where)
        assert where.counts is not None, "without scan_in_place, counts must be known"
        if len(set(where.counts)) == 1:
            return self._scan_even(layer, x, conv, gate, beta, where)
        assert where.is_known, "a block to verify has one width, or places"
        parts = []
        pieces = zip(*(torch.split(tensor, list(where.counts)) for tensor in (x, gate, beta)), strict=True)
        for row, (x_row, gate_row, beta_row) in enumerate(pieces):
            one = slice(row, row + 1)
            alone = where._replace(rows=where.rows[one], starts=where.starts[one], counts=where.counts[one])
            parts.append(self._scan_even(layer, x_row, conv, gate_row, beta_row, alone))
        return torch.cat(parts)

    def _tape(self, layer: int, where: Scan, *, num_tokens: int) -> RowTape:
        """Return the tape of all layers; the first layer of a forward creates it."""
        block = self._block_in_place
        if block is None or block.where is not where:
            block = self._block_in_place = _BlockInPlace(where, self._empty_tape(num_tokens), set())
        block.layers.add(layer)
        return block.tape

    def _empty_tape(self, num_tokens: int) -> RowTape:
        spec, lead = self.spec, (self.num_layers, num_tokens)
        return RowTape(
            decay=self.state.new_empty(*lead, spec.num_heads),
            key=self.state.new_empty(*lead, spec.num_key_heads, spec.key_dim),
            delta=self.state.new_empty(*lead, spec.num_heads, spec.value_dim),
            inputs=self.tail.new_empty(*lead, spec.conv_channels),
        )

    def _at(self, rows: Tensor, starts: Tensor, where: Scan) -> RowStates:
        assert where.offsets is not None, "scan_in_place needs offsets"
        saves = self._no_saves if where.saves is None else where.saves
        return RowStates(self.state, self.tail, rows, starts, where.offsets, where.max_count, saves)

    def _scan_box(
        self, layer: int, x: Tensor, conv: Tensor, gate: Tensor, beta: Tensor, where: Scan
    ) -> Tensor:
        """Scan rows of different widths as rows of the widest: past a row's width, all is zero and unread."""
        assert where.places is not None
        places = where.places
        x, gate, beta = (places.put(one).flatten(0, 1) for one in (x, gate, beta))
        read = self._scan_even(layer, x, conv, gate, beta, where)
        return places.take(read.view(len(where.rows), -1, *read.shape[1:]))

    def _scan_even(
        self, layer: int, x: Tensor, conv: Tensor, gate: Tensor, beta: Tensor, where: Scan
    ) -> Tensor:
        spec, num_rows = self.spec, len(where.rows)
        x, gate, beta = (tensor.reshape(num_rows, -1, tensor.shape[1]) for tensor in (x, gate, beta))
        state, tail = self._committed(layer, where.rows, where.starts)
        mixed = self._kernels.convolve(x, tail, conv)  # [R, T, C]
        keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
        q, k, v = torch.split(mixed, [keys, keys, values], dim=2)
        q, k = (part.reshape(*part.shape[:2], spec.num_key_heads, spec.key_dim) for part in (q, k))
        v = v.reshape(*v.shape[:2], spec.num_heads, spec.value_dim)
        read, tape = self._kernels.scan(q, k, v, gate, beta, state)
        if where.is_known:
            counts = torch.full_like(where.starts, x.shape[1])
            block = _Block(x, tape, where.saves)
            saving = self._saving(block, where.rows, where.starts, counts)
            self._fold(layer, block, where.rows, state, tail, counts, saving)
        else:
            # A view of a wider projection would keep all of it alive until commit.
            self._block[layer] = _Block(x.contiguous(), tape, where.saves)
        return read.flatten(0, 1)

    def commit(self, rows: Tensor, starts: Tensor, num_committed: Tensor) -> None:
        """Fold the first `num_committed` [R] tokens of the last block into the states of `rows` [R].

        If they were scanned as known tokens, there is nothing left to do.
        """
        in_place = self._kernels.scan_in_place
        if in_place is not None:
            whole, self._block_in_place = self._block_in_place, None
            if whole is None:
                return
            assert len(whole.layers) == self.num_layers, "every layer has scanned the block"
            in_place.fold(whole.tape, self._at(rows, starts, whole.where), num_committed)
            return
        block, self._block = self._block, {}
        if not block:
            return
        assert len(block) == self.num_layers, "every layer has scanned the block"
        saving = self._saving(block[0], rows, starts, num_committed)
        for layer, part in block.items():
            state, tail = self._committed(layer, rows, starts)
            self._fold(layer, part, rows, state, tail, num_committed, saving)

    def restore(self, slot: int, row: int) -> None:
        """Copy a saved state to a row."""
        self.state[:, row].copy_(self.state[:, slot])  # without temporary memory, which a full card lacks
        self.tail[:, row].copy_(self.tail[:, slot])

    def _committed(self, layer: int, rows: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the rows' states and tails: zeros for rows without committed tokens."""
        is_new = starts == 0
        state = self.state[layer][rows].masked_fill_(is_new[:, None, None, None], 0)
        return state, self.tail[layer][rows].masked_fill_(is_new[:, None, None], 0)

    def _fold(
        self,
        layer: int,
        block: _Block,
        rows: Tensor,
        state: Tensor,
        tail: Tensor,
        counts: Tensor,
        saving: _Saving | None,
    ) -> None:
        saves = None if saving is None else Saves(self.state[layer], saving.slots)
        self._kernels.fold(state, block.tape, counts, saves)
        self.state[layer][rows] = state
        seen = torch.cat((tail, block.inputs), dim=1)  # [R, W - 1 + T, C]
        self.tail[layer][rows] = _tail_after(counts, seen, tail.shape[1])
        for slots, num_before in () if saving is None else saving.tails:
            self.tail[layer][slots] = _tail_after(num_before, seen, tail.shape[1])

    def _saving(self, block: _Block, rows: Tensor, starts: Tensor, counts: Tensor) -> _Saving | None:
        """Return what a commit of `counts` [R] tokens saves; None: nothing is ever saved."""
        if block.saves is None:
            return None
        num_tokens, grid, scratch = block.inputs.shape[1], block.saves.grid, self.state.shape[1] - 1
        is_committed = torch.arange(num_tokens, device=counts.device) < counts[:, None]
        slots = slots_at(block.saves, rows, starts, num_tokens) * is_committed
        tails = []
        for first, part in enumerate(torch.split(slots, grid, dim=1)):  # a row has at most one slot in each
            slot, at = part.max(dim=1)
            tails.append((torch.where(slot > 0, slot, scratch), first * grid + at + 1))
        return _Saving(slots, tails)


def _tail_after(counts: Tensor, seen: Tensor, size: int) -> Tensor:
    """Return the last inputs [R, size, C] before the token counts[r] of each row; seen [R, size + T, C]."""
    last = counts[:, None] + torch.arange(size, device=counts.device)
    return seen.gather(1, last[..., None].expand(-1, -1, seen.shape[2]))


class RecurrentState:
    """One layer of RecurrentStates."""

    def __init__(self, states: RecurrentStates, layer: int) -> None:
        self.spec = states.spec
        self.state = states.state[layer]  # [rows, H, K, V]
        self.tail = states.tail[layer]  # [rows, W - 1, C]
        self._states = states
        self._layer = layer

    def scan(self, x: Tensor, beta: Tensor, gate: Tensor, weights: DeltaWeights, where: Scan) -> Tensor:
        return self._states.scan(self._layer, x, beta, gate, weights, where)

    @property
    def num_bytes(self) -> int:
        """The size of state and tail; the tape lives only from verify to commit."""
        return self.state.nbytes + self.tail.nbytes
