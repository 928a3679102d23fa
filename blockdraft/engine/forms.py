"""Steps in which some answers have a form: draft, forward and settle apart, the host's word between them.

What a form forces takes the place of drafts before the target reads them, and the masks are made while it
does. They follow from what was committed, so such a step is launched when the one before it has been read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from blockdraft.grammar.guide import Guide, fill_forms
from blockdraft.kernels.sampling import Allowed
from blockdraft.step.decode import run_through
from blockdraft.step.graphs import PartsOfStep, pack
from blockdraft.step.verify import Verdict


class FormMasks:
    """The masks of one step: on the host, where they are made, and on the device."""

    def __init__(self, *, max_rows: int, block: int, num_words: int, device: torch.device) -> None:
        self._num_words = num_words
        self._words = torch.zeros(max_rows * block * num_words, dtype=torch.int32, device=device)
        self._counts = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._host_words, self._host_counts = self._words, self._counts

    def allowed(self, num_rows: int, width: int) -> Allowed:
        """Those of a step of so many rows, at an address that never changes."""
        return self._view(self._words, self._counts, num_rows, width)

    def _view(self, words: Tensor, counts: Tensor, num_rows: int, width: int) -> Allowed:
        size = num_rows * width * self._num_words
        return Allowed(words[:size].view(num_rows, width, self._num_words), counts[:num_rows])

    def set(self, guides: Items[Guide | None], drafts: Items[Items[int]], num_rows: int, width: int) -> None:
        """Make the masks of a step whose blocks hold these drafts, and send them to the device."""
        here = self._view(*self._on_host(), num_rows, width)
        words, forms = here.words.numpy(), []
        here.counts.zero_()
        for row, guide in enumerate(guides):
            if guide is not None:
                here.counts[row] = 1 + len(drafts[row])
                form = guide.fill(words[row], drafts[row])
                if form is not None:
                    forms.append((row, form))
        if forms:
            fill_forms(forms, words)
        for guide in guides:
            if guide is not None:
                guide.look_for_error()
        bound = [row for row, guide in enumerate(guides) if guide is not None]
        self._send(here, slice(bound[0], bound[-1] + 1), num_rows, width)

    def _on_host(self) -> tuple[Tensor, Tensor]:
        if self._words.is_cuda and self._host_words.is_cuda:
            self._host_words = torch.zeros(self._words.shape, dtype=torch.int32, pin_memory=True)
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
    width = parts.block.shape[1]
    drafts = _correct(parts.block, guides) if width > 1 else [[]] * len(guides)
    parts.forward()
    masks.set(guides, drafts, parts.num_rows, width)
    return parts.settle()


def _correct(block: Tensor, guides: Items[Guide | None]) -> list[list[int]]:
    """Put what is forced into block [R, B]; the drafts of each row up to the first that is forbidden."""
    rows: list[list[int]] = block[: len(guides)].tolist()
    found = [
        row[1:] if guide is None else guide.correct(row[1:]) for row, guide in zip(rows, guides, strict=True)
    ]
    changed = [[row[0], *its, *row[1 + len(its) :]] for row, its in zip(rows, found, strict=True)]
    if changed != rows:
        block[: len(guides)].copy_(torch.tensor(changed, dtype=block.dtype))
    return found
