"""Steps with structured outputs run in three parts: draft, forward and settle. The host acts between them.

The host overwrites drafts with forced tokens before the target reads them, and makes the masks during the
forward. Both depend on the committed tokens, so such a step is launched after the last step's result is read.
A column after a forbidden draft is never committed, so its mask may be left over from an earlier step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor

from blockdraft.grammar.guide import Guide, fill_masks
from blockdraft.kernels.sampling import Allowed
from blockdraft.kernels.transfer import to_device
from blockdraft.step.decode import run_all_parts
from blockdraft.step.graphs import PartsOfStep, Reading, pack
from blockdraft.step.step_sizes import StepSize
from blockdraft.step.verify import Verdict


class TokenMasks:
    """The masks of one step, on the host and on the device.

    Memory is allocated with the first structured output, because many engines never get one.
    """

    def __init__(self, *, max_num_seqs: int, block: int, num_words: int, device: torch.device) -> None:
        self._max_rows = max_num_seqs
        self._block = block
        self._num_words = num_words
        self._device = device

    @functools.cached_property
    def _there(self) -> Allowed:
        return self._allocated(device=self._device)

    @functools.cached_property
    def _here(self) -> Allowed:
        return self._allocated(pin_memory=True) if self._device.type == "cuda" else self._there

    @torch.inference_mode(False)  # the host writes to them later, in or out of inference mode
    def _allocated(self, **where: Any) -> Allowed:  # noqa: ANN401
        size = self._max_rows * self._block * self._num_words
        words = torch.full((size,), -1, dtype=torch.int32, **where)
        return Allowed(words, torch.zeros(self._max_rows, dtype=torch.int32, **where))

    def allowed(self, num_rows: int, width: int) -> Allowed:
        """Return the device's masks for a step of `num_rows` rows. Their address never changes."""
        return self._view(self._there, num_rows, width)

    def _view(self, whole: Allowed, num_rows: int, width: int) -> Allowed:
        words = whole.words[: num_rows * width * self._num_words]
        return Allowed(words.view(num_rows, width, self._num_words), whole.counts[:num_rows])

    def set(
        self, guides: Items[Guide | None], blocks: Items[Items[int]], widths: Items[int], size: StepSize
    ) -> None:
        """Make the masks of a step and send them to the device. Each of `blocks` begins with the anchor.

        Row r commits at most widths[r] tokens.
        """
        num_rows, width = size.rows, size.width
        here = self._view(self._here, num_rows, width)
        words, counts, columns = here.words.numpy(), here.counts.numpy(), []
        bound = [row for row, guide in enumerate(guides) if guide is not None]
        counts[:] = 0
        counts[bound] = width
        for row in bound:
            guide = guides[row]
            assert guide is not None
            found = guide.fill(words[row], blocks[row][1 : widths[row]])
            if found is not None:
                columns.append((row, found))
        if columns:
            fill_masks(columns, words)
        for guide in guides:
            if guide is not None:
                guide.look_for_error()
        self._send(here, slice(bound[0], bound[-1] + 1), num_rows, width)

    def _send(self, here: Allowed, part: slice, num_rows: int, width: int) -> None:
        there = self.allowed(num_rows, width)
        if there.words.is_cuda:
            there.words[part].copy_(here.words[part], non_blocking=True)
            there.counts.copy_(here.counts, non_blocking=True)


class StepInParts:
    """A step in three parts that runs kernel by kernel, without graphs."""

    block: Tensor
    verdict: Verdict

    def __init__(self, begin: Callable[[], Generator[Tensor, None, Verdict]], size: StepSize) -> None:
        self.size = size
        self._begin = begin

    def draft(self) -> None:
        self._parts = self._begin()
        self.block = next(self._parts)

    def forward(self) -> None:
        next(self._parts)

    def settle(self) -> Tensor:
        self.verdict = run_all_parts(self._parts)
        return pack(self.verdict)


@torch.inference_mode()
def run_in_parts(
    parts: PartsOfStep, guides: Items[Guide | None], widths: Items[int], masks: TokenMasks
) -> Tensor:
    """Run a step whose rows are placed, with its rows' `guides` and widths. Return the packed verdict."""
    parts.draft()
    block = parts.block
    if block.shape[1] > 1:
        (_force if block.is_cuda else _correct)(block, guides)
    drafted = Reading(block)
    parts.forward()
    masks.set(guides, drafted.rows(), widths, parts.size)
    return parts.settle()


def _force(block: Tensor, guides: Items[Guide | None]) -> None:
    """Overwrite the first drafts of block [R, B] with forced tokens, without waiting for the device."""
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
    """Overwrite drafts of block [R, B] wherever a token is forced. This reads the drafts on the host."""
    rows: list[list[int]] = block[: len(guides)].tolist()
    for row, guide in enumerate(guides):
        if guide is not None:
            found = guide.correct(rows[row][1:])
            if found != rows[row][1 : 1 + len(found)]:
                block[row, 1 : 1 + len(found)] = torch.tensor(found, dtype=block.dtype)
