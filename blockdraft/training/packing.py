"""Packs documents into rows of equal length, and draws batches with new anchors each time.

A row holds several documents one after another. Positions count from the beginning of each document, and
attention never crosses documents. Free places at the end of a row hold token 0 and form a document without
anchors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockdraft.kernels.transfer import to_device
from blockdraft.training.answers import Document

SHORT = 0.25  # share of a row; shorter documents are not sorted
FLOOR = 0.05  # least weight of a place: as the drafter changes, a step may begin there again
BELIEF = 0.5  # weight of the latest block in the probability of a place
MIN_ANSWER = 2  # tokens of an answer that must fit; a shorter answer has nothing to draft


@dataclass(frozen=True, slots=True)
class PackedRows:
    """All documents, packed. Every tensor is [rows, length], with length below 2^15."""

    tokens: Tensor  # int32
    starts: Tensor  # int16: where the document of this place begins in its row
    ends: Tensor  # int16: where it ends
    is_anchor: Tensor  # bool: the last prompt token and every answer token but the last
    spans: tuple[tuple[tuple[int, int], ...], ...]  # (begin, end) of each document, by row

    def to(self, device: torch.device) -> PackedRows:
        tokens, starts, ends = self.tokens.to(device), self.starts.to(device), self.ends.to(device)
        return PackedRows(tokens, starts, ends, self.is_anchor.to(device), self.spans)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """R rows of L tokens with A blocks each. Anchors [R, A] are places in their row, ascending."""

    tokens: Tensor  # [R, L] int64
    starts: Tensor  # [R, L] int64
    positions: Tensor  # [R, L] int64: in the document
    anchors: Tensor  # [R, A] int64
    is_real: Tensor  # [R, A]: False where a row has fewer than A anchors (place 0, ignored)
    block_starts: Tensor  # [R, A]: where the anchor's document begins
    labels: Tensor  # [R, A, B - 1] int64; -1 past the document's end
    first_column: int = 1  # the forward's column of the first label

    @property
    def block(self) -> int:
        return self.labels.shape[2] + 1

    @property
    def num_columns(self) -> int:
        """Return C, the number of columns in a drafter's forward over a block."""
        return self.labels.shape[2] + self.first_column

    def block_positions(self) -> Tensor:
        """Return the position of each block token in its document, [R * A * C]."""
        offset = torch.arange(self.num_columns, device=self.anchors.device)
        return ((self.anchors - self.block_starts)[..., None] + offset).flatten()

    def tokens_before(self) -> Tensor:
        """Return the true token before each label, [R * A, B - 1]; 0 past the document's end."""
        anchor = self.tokens.gather(1, self.anchors)[..., None]
        return torch.cat((anchor, self.labels[..., :-1]), dim=2).flatten(0, 1).clamp(min=0)

    def block_ids(self, mask_id: int) -> Tensor:
        """Return the input tokens of the blocks, [R, A, C]: the anchor, then masks."""
        anchor = self.tokens.gather(1, self.anchors)[..., None]
        masks = anchor.new_full((*self.anchors.shape, self.num_columns - 1), mask_id)
        return torch.cat((anchor, masks), dim=2)


@dataclass(frozen=True, slots=True)
class DocumentPlace:
    """The row and the first place of a document."""

    document: int
    row: int
    begin: int


def pack(
    documents: Sequence[Document], length: int, *, is_shared: bool = True
) -> tuple[PackedRows, list[DocumentPlace]]:
    """Pack each document into the fullest row with enough space, or into its own row if not `is_shared`.

    Long documents are packed first. Documents shorter than a quarter of a row keep their order, so that a row
    has documents of many sizes. A document longer than a row loses the end of its answer; it is left out if
    fewer than MIN_ANSWER tokens of the answer remain.
    """
    sizes = [min(len(one.prompt_ids) + len(one.answer_ids), length) for one in documents]
    usable = [
        index
        for index, one in enumerate(documents)
        if sizes[index] - len(one.prompt_ids) >= MIN_ANSWER and one.prompt_ids
    ]
    if is_shared:
        order = sorted(usable, key=lambda index: -sizes[index] if sizes[index] > SHORT * length else 0)
        places = _fit(order, sizes, length)
    else:
        places = [DocumentPlace(document, row, 0) for row, document in enumerate(usable)]
    num_rows = max((place.row for place in places), default=-1) + 1
    tokens = np.zeros((num_rows, length), dtype=np.int32)
    starts, ends = np.full((2, num_rows, length), length, np.int16)
    is_anchor = np.zeros((num_rows, length), dtype=bool)
    spans: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]
    for place in places:
        one, end = documents[place.document], place.begin + sizes[place.document]
        spans[place.row].append((place.begin, end))
        span = (place.row, slice(place.begin, end))
        tokens[span] = (*one.prompt_ids, *one.answer_ids)[: sizes[place.document]]
        starts[span], ends[span] = place.begin, end
        is_anchor[place.row, place.begin + len(one.prompt_ids) - 1 : end - 1] = True
    _start_rest(starts, length)
    tensor = torch.from_numpy
    spans_of_rows = tuple(tuple(row) for row in spans)
    return PackedRows(tensor(tokens), tensor(starts), tensor(ends), tensor(is_anchor), spans_of_rows), places


def _fit(order: list[int], sizes: list[int], length: int) -> list[DocumentPlace]:
    places: list[DocumentPlace] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    num_rows = 0
    for document in order:
        at = bisect_left(room, (sizes[document], -1))
        if at == len(room):
            free, row = length, num_rows
            num_rows += 1
        else:
            free, row = room.pop(at)
        places.append(DocumentPlace(document, row, length - free))
        insort(room, (free - sizes[document], row))
    return places


def _start_rest(starts: np.ndarray, length: int) -> None:
    """Set `starts` for the free places at the end of each row, as if these were one more document."""
    is_rest = starts == length
    first = length - is_rest.sum(axis=1, keepdims=True)
    np.copyto(starts, first.astype(starts.dtype), where=is_rest)


def draw(
    rows: PackedRows,
    chosen: Sequence[int],
    num_anchors: int,
    block: int,
    generator: torch.Generator,
    weights: Tensor | None = None,
) -> TrainingBatch:
    """Return a batch of the rows `chosen` with random anchors, in ascending order.

    With weights [R, L] above zero, places are drawn in proportion to the weights, without replacement.
    """
    is_anchor = rows.is_anchor[to_device(chosen, rows.tokens.device)]
    key = torch.rand(is_anchor.shape, generator=generator, device=is_anchor.device)
    if weights is not None:
        key = key.clamp(min=1e-9) ** (1 / weights)  # Efraimidis and Spirakis
    key = torch.where(is_anchor, key, -1.0)
    best, anchors = key.topk(min(num_anchors, key.shape[1]), dim=1)
    anchors = torch.where(best >= 0, anchors, key.shape[1]).sort(dim=1).values
    return with_anchors(rows, chosen, anchors, block)


def with_anchors(rows: PackedRows, chosen: Sequence[int], anchors: Tensor, block: int) -> TrainingBatch:
    """Return a batch with the given anchors [R, A]; anchors past the row's end are ignored."""
    index = to_device(chosen, rows.tokens.device)
    tokens, starts, ends = (part[index].long() for part in (rows.tokens, rows.starts, rows.ends))
    is_real = anchors < tokens.shape[1]
    anchors = torch.where(is_real, anchors, 0)
    offset = torch.arange(1, block, device=anchors.device)
    place = anchors[..., None] + offset  # [R, A, B - 1]
    inside = (place < ends.gather(1, anchors)[..., None]) & is_real[..., None]
    place = place.clamp(max=tokens.shape[1] - 1)
    labels = tokens.gather(1, place.flatten(1)).view(place.shape)
    return TrainingBatch(
        tokens=tokens,
        starts=starts,
        positions=torch.arange(tokens.shape[1], device=tokens.device) - starts,
        anchors=anchors,
        is_real=is_real,
        block_starts=starts.gather(1, anchors),
        labels=torch.where(inside, labels, -1),
    )


class Walk:
    """Estimates the probability that a step begins at each place [rows, length], from recent blocks.

    If the first n drafts of a block at anchor a are right, the next block begins at a + n + 1, and no block
    begins in between. So in the server, most blocks begin where drafting is hard. If anchors are drawn
    evenly, most blocks of a batch are too easy to learn from.
    """

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self.chance = torch.ones(shape, dtype=torch.float16, device=device)

    def weights(self, chosen: Sequence[int]) -> Tensor:
        index = to_device(chosen, self.chance.device)
        return self.chance[index].float().clamp(min=FLOOR)

    @torch.no_grad()
    def learn(self, chosen: Sequence[int], batch: TrainingBatch, matches: Tensor) -> None:
        """Update the probabilities from the blocks of the rows `chosen`; `matches` is [R * A, B - 1]."""
        num_rows, num_blocks = batch.anchors.shape
        matches = matches.view(num_rows, num_blocks, -1)
        reach = matches.long().cumprod(dim=2).sum(dim=2, keepdim=True)  # drafts that were right
        offset = torch.arange(matches.shape[2], device=reach.device)  # place a + 1 + offset
        is_known = (batch.labels >= 0) & (offset <= reach)
        place = (batch.anchors[..., None] + 1 + offset).clamp(max=self.chance.shape[1] - 1).flatten(1)
        # Blocks overlap: keep the largest value, so that the order of writes does not matter.
        begins = self._spread(place, (is_known & (offset == reach)).flatten(1))
        is_known = self._spread(place, is_known.flatten(1))
        index = to_device(chosen, self.chance.device)
        before = self.chance[index]
        after = torch.lerp(before, begins.to(before.dtype), BELIEF)
        self.chance[index] = torch.where(is_known > 0, after, before)

    def _spread(self, place: Tensor, values: Tensor) -> Tensor:
        out = torch.zeros(len(place), self.chance.shape[1], device=place.device)
        return out.scatter_reduce_(1, place, values.float(), reduce="amax")
