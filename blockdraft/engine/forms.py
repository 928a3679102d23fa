"""Steps in which some answers have a form: draft, forward and settle apart, the host's word between them.

What a form forces takes the place of drafts before the target reads them, and the masks are made while it
does. They follow from what was committed, so such a step is launched when the one before it has been read.
A column behind a draft that is forbidden is never committed: its mask is that of some step before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from blockdraft.grammar.guide import Guide, fill_forms
from blockdraft.kernels.sampling import Allowed
from blockdraft.kernels.transfer import to_device
from blockdraft.step.decode import run_through
from blockdraft.step.graphs import PartsOfStep, Reading, pack
from blockdraft.step.verify import Verdict


class FormMasks:
    """The masks of one step: on the host, where they are made, and on the device."""

    def __init__(self, *, max_rows: int, block: int, num_words: int, device: torch.device) -> None:
        self._num_words = num_words
        self._words = torch.full((max_rows * block * num_words,), -1, dtype=torch.int32, device=device)
        self._counts = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._host_words, self._host_counts = self._words, self._counts

    def allowed(self, num_rows: int, width: int) -> Allowed:
        """Those of a step of so many rows, at an address that never changes."""
        return self._view(self._words, self._counts, num_rows, width)

    def _view(self, words: Tensor, counts: Tensor, num_rows: int, width: int) -> Allowed:
        size = num_rows * width * self._num_words
        return Allowed(words[:size].view(num_rows, width, self._num_words), counts[:num_rows])

    def set(self, guides: Items[Guide | None], blocks: Items[Items[int]], num_rows: int, width: int) -> None:
        """Make the masks of a step whose blocks, the anchor first, are these; send them to the device."""
        here = self._view(*self._on_host(), num_rows, width)
        words, counts, forms = here.words.numpy(), here.counts.numpy(), []
        bound = [row for row, guide in enumerate(guides) if guide is not None]
        counts[:] = 0
        counts[bound] = width
        for row in bound:
            guide = guides[row]
            assert guide is not None
            form = guide.fill(words[row], blocks[row][1:])
            if form is not None:
                forms.append((row, form))
        if forms:
            fill_forms(forms, words)
        for guide in guides:
            if guide is not None:
                guide.look_for_error()
        self._send(here, slice(bound[0], bound[-1] + 1), num_rows, width)

    def _on_host(self) -> tuple[Tensor, Tensor]:
        if self._words.is_cuda and self._host_words.is_cuda:
            self._host_words = torch.full(self._words.shape, -1, dtype=torch.int32, pin_memory=True)
            self._host_counts = torch.zeros(self._counts.shape, dtype=torch.int32, pin_memory=True)
        return self._host_words, self._host_counts

    def _send(self, here: Allowed, part: slice, num_rows: int, width: int) -> None:
        there = self.allowed(num_rows, width)
        if there.words.is_cuda:
            there.words[part].copy_(here.words[part], non_blocking=True)
            there.counts.copy_(here.counts, non_blocking=True)


class StepInParts:
    """The parts of a step, kernel by kernel."""

    block: Tensor
    verdict: Verdict

    def __init__(self, begin: Callable[[], Generator[Tensor, None, Verdict]], num_rows: int) -> None:
        self.num_rows = num_rows
        self._begin = begin

    def draft(self) -> None:
        self._parts = self._begin()
        self.block = next(self._parts)

    def forward(self) -> None:
        next(self._parts)

    def settle(self) -> Tensor:
        self.verdict = run_through(self._parts)
        return pack(self.verdict)


@torch.inference_mode()
def run_in_parts(parts: PartsOfStep, guides: Items[Guide | None], masks: FormMasks) -> Tensor:
    """Run a step whose rows are placed; `guides` are those of its rows. Returns the packed verdict."""
    parts.draft()
    block = parts.block
    if block.shape[1] > 1:
        (_force if block.is_cuda else _correct)(block, guides)
    drafted = Reading(block)
    parts.forward()
    masks.set(guides, drafted.rows(), parts.num_rows, block.shape[1])
    return parts.settle()


def _force(block: Tensor, guides: Items[Guide | None]) -> None:
    """Put what is forced in front of the drafts in block [R, B]; the device does not wait for the host."""
    width = block.shape[1]
    places: list[int] = []
    forced: list[int] = []
    for row, guide in enumerate(guides):
        if guide is not None:
            its = guide.forced()[: width - 1]
            places += range(row * width + 1, row * width + 1 + len(its))
            forced += its
    if places:
        where, tokens = to_device([*places, *forced], block.device, block.dtype).chunk(2)
        block.view(-1)[where] = tokens


def _correct(block: Tensor, guides: Items[Guide | None]) -> None:
    """Put what is forced into block [R, B] wherever it is; for that the host has to read the drafts first."""
    rows: list[list[int]] = block[: len(guides)].tolist()
    for row, guide in enumerate(guides):
        if guide is not None:
            found = guide.correct(rows[row][1:])
            if found != rows[row][1 : 1 + len(found)]:
                block[row, 1 : 1 + len(found)] = torch.tensor(found, dtype=block.dtype)
