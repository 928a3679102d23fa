"""Guide: follows one answer through its grammar, and masks the tokens at each column of a block.

A mask depends only on the tokens before its column: the committed tokens and the drafts. So a position is
sampled under the same mask whether it is the first column of a step or the last column of a block.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from blockdraft.grammar.compiling import TOO_LONG, error_of, forces_too_much
from blockdraft.grammar.structured_output import Thinking

if TYPE_CHECKING:  # imported with the first structured output, as most servers never see one
    from llguidance import LLExecutor, LLMatcher

# CPU seconds to parse the tokens of one step. All answers wait for it, and for the masks, which take longer.
# Ordinary grammars need a hundredth of it; ambiguous rules need more with each token.
MAX_STEP_S = 0.05
TOO_SLOW = f"it takes more than {1000 * MAX_STEP_S:g} ms of a step: write rules that have one meaning."

Mask = np.ndarray  # [words] int32: bit i of word w is token 32 w + i
Masks = np.ndarray  # [columns, words]


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The position of an answer in its thoughts, which come before its grammar."""

    is_open: bool = False
    num_matched: int = 0  # the answer ends with this many tokens of the opening or closing sequence
    num_tokens: int = 0  # tokens of the thoughts, without a partial closing sequence


class Guide:
    """Follows one answer through its thoughts and its grammar. One thread uses it."""

    def __init__(
        self,
        matcher: LLMatcher | None,
        thinking: Thinking | None,
        *,
        end_ids: Items[int],
        num_words: int,
        may_roll_back: bool = True,
    ) -> None:
        """`matcher`: None if there is no grammar, only a limit on the thoughts.

        `may_roll_back`: the matcher can take back tokens; else tokens are tried on copies, which is slower.
        """
        self.error: str | None = None  # why the grammar cannot be followed any longer
        self._matcher = matcher
        self._thinking = thinking
        self._end_ids = tuple(end_ids)
        self._num_words = num_words
        self._may_roll_back = may_roll_back
        # None: the thoughts are over, or there are none
        self._thoughts = None if thinking is None else Thoughts(is_open=not thinking.open_ids)

    def copy(self) -> Guide:
        """Return a guide for another choice of the same request."""
        matcher = None if self._matcher is None else self._matcher.deep_copy()
        return Guide(
            matcher,
            self._thinking,
            end_ids=self._end_ids,
            num_words=self._num_words,
            may_roll_back=self._may_roll_back,
        )

    @property
    def is_binding(self) -> bool:
        """Say if the guide still restricts the answer: it has a grammar, or its thoughts are not over."""
        return self._matcher is not None or self._thoughts is not None

    def advance(self, token_ids: Items[int]) -> None:
        """Record the committed tokens. Set `error` if the grammar fails or takes too long."""
        at = 0
        while self._thoughts is not None and at < len(token_ids):
            self._thoughts, is_taken = self._after(self._thoughts, token_ids[at])
            at += is_taken
        rest = list(token_ids[at:])
        if rest and self._matcher is not None:
            begun_s = time.thread_time()
            self._matcher.consume_tokens(rest)
            self._note_time(time.thread_time() - begun_s)
            self.look_for_error()
            if self.error is None and forces_too_much(self._matcher):
                self.error = TOO_LONG

    def look_for_error(self) -> None:
        """Set `error` if the matcher has failed, for example at a limit of time."""
        if self._matcher is not None and self._matcher.is_error():
            self.error = error_of(self._matcher)

    def _note_time(self, seconds: float) -> None:
        if seconds > MAX_STEP_S:
            self.error = TOO_SLOW

    # ---- thoughts

    def _after(self, thoughts: Thoughts, token_id: int) -> tuple[Thoughts | None, bool]:
        """Return the state after a token (None: the grammar begins), and if the token was a thought."""
        assert self._thinking is not None
        if not thoughts.is_open:
            opening = self._thinking.open_ids
            if token_id != opening[thoughts.num_matched]:
                return None, False
            if thoughts.num_matched + 1 < len(opening):
                return Thoughts(num_matched=thoughts.num_matched + 1), True
            return Thoughts(is_open=True), True
        num_matched = _num_matched(self._thinking.close_ids, thoughts.num_matched, token_id)
        if num_matched == len(self._thinking.close_ids):
            return None, True
        num_tokens = thoughts.num_tokens + thoughts.num_matched + 1 - num_matched
        return Thoughts(is_open=True, num_matched=num_matched, num_tokens=num_tokens), True

    def _forced_by(self, thoughts: Thoughts) -> int | None:
        """Return the token that must come next in the thoughts, or None if any may."""
        assert self._thinking is not None
        if not thoughts.is_open:
            return self._thinking.open_ids[thoughts.num_matched] if thoughts.num_matched else None
        budget = self._thinking.max_tokens
        is_over = budget is not None and thoughts.num_tokens + thoughts.num_matched >= budget
        return self._thinking.close_ids[thoughts.num_matched] if is_over else None

    def _mask_of(self, thoughts: Thoughts) -> Mask:
        forced = self._forced_by(thoughts)
        if forced is not None:
            return _only(forced, self._num_words)
        if self._matcher is None:
            return _all_but((), self._num_words)
        if thoughts.is_open:  # an answer must not end inside its thoughts
            return _all_but(self._end_ids, self._num_words)
        masks = np.zeros((1, 1, self._num_words), dtype=np.int32)
        fill_masks([(0, self._bound(0, []))], masks)
        mask: Mask = masks[0, 0]
        return mask

    # ---- a block

    def correct(self, drafts: list[int]) -> list[int]:
        """Return the drafts with forced tokens in place, up to the first forbidden draft."""
        found: list[int] = []
        thoughts = self._thoughts
        while thoughts is not None and len(found) < len(drafts):
            forced = self._forced_by(thoughts)
            token_id = drafts[len(found)] if forced is None else forced
            thoughts, is_taken = self._after(thoughts, token_id)
            if is_taken:
                found.append(token_id)
        if self._matcher is None:
            return found + drafts[len(found) :]
        matcher = self._matcher if self._may_roll_back else self._matcher.deep_copy()
        rest, seconds = _corrected(matcher, drafts[len(found) :], self._end_ids)
        self._note_time(seconds)
        if self._may_roll_back:
            matcher.rollback(len(rest))
        return found + rest

    def forced(self) -> list[int]:
        """Return the tokens that must come next, whatever the drafts are."""
        if self._thoughts is not None:
            token_id = self._forced_by(self._thoughts)
            return [] if token_id is None else [token_id]
        return [] if self._matcher is None else _forced(self._matcher, self._end_ids)

    def fill(self, masks: Masks, drafts: Items[int]) -> BoundColumns | None:
        """Write the masks of the columns in the thoughts, and return the grammar's columns, if any.

        There is a column before each of `drafts`, and one after the last. `fill_masks` writes the masks of
        the grammar's columns, for many rows at once.
        """
        thoughts, column = self._thoughts, 0
        while thoughts is not None:
            before, (thoughts, is_taken) = thoughts, self._next(thoughts, drafts, column)
            if not is_taken:
                break  # the grammar begins at this very column
            masks[column] = self._mask_of(before)
            if column == len(drafts):
                return None
            column += 1
        if self._matcher is None:
            masks[column : len(drafts) + 1] = -1
            return None
        return self._bound(column, list(drafts[column:]))

    def _next(self, thoughts: Thoughts, drafts: Items[int], column: int) -> tuple[Thoughts | None, bool]:
        """Return the state after a column's draft. The last column has none: the grammar may begin there."""
        if column < len(drafts):
            return self._after(thoughts, drafts[column])
        return (thoughts, True) if thoughts.is_open or thoughts.num_matched else (None, False)

    def _bound(self, column: int, drafts: list[int]) -> BoundColumns:
        """Return the grammar's columns. The first token of an answer may also open the thoughts."""
        assert self._matcher is not None
        may_think = column == 0 and self._thoughts is not None and not self._thoughts.is_open
        also = self._thinking.open_ids[0] if may_think and self._thinking is not None else None
        return BoundColumns(self._matcher, column, drafts, also, self._may_roll_back)


@dataclass(frozen=True, slots=True)
class BoundColumns:
    """The columns of a block from `column` on, which the grammar restricts, and the drafts after `column`."""

    matcher: LLMatcher
    column: int
    drafts: list[int]
    also: int | None = None  # a further token that is allowed at the first column
    may_roll_back: bool = True  # the matcher can take back tokens


@functools.cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()


def fill_masks(bound: Items[tuple[int, BoundColumns]], masks: np.ndarray) -> None:
    """Fill the masks [R, W, words] of the bound columns of all rows at once."""
    from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

    width, num_words = masks.shape[1:]
    flat, places = masks.reshape(-1, num_words), [(row * width + one.column, one) for row, one in bound]
    alone = [(one.matcher, place) for place, one in places if not one.drafts]
    drafted = [(one.matcher, place, one.drafts) for place, one in places if one.drafts and one.may_roll_back]
    if alone:
        fill_next_token_bitmask_par(_executor(), alone, flat)
    if drafted:
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), drafted, flat)
    for place, one in places:
        if one.drafts and not one.may_roll_back:
            _fill_one_by_one(one, flat[place:])
    for row, one in bound:
        if one.also is not None:
            masks[row, one.column] |= _only(one.also, num_words)


def _fill_one_by_one(bound: BoundColumns, masks: Masks) -> None:
    from llguidance.numpy import fill_next_token_bitmask

    matcher = bound.matcher.deep_copy()
    for column, token_id in enumerate(bound.drafts):
        fill_next_token_bitmask(matcher, masks, column)
        if not matcher.consume_token(token_id):
            return  # no token after a forbidden draft is committed
    fill_next_token_bitmask(matcher, masks, len(bound.drafts))


def _corrected(matcher: LLMatcher, drafts: list[int], end_ids: Items[int]) -> tuple[list[int], float]:
    """Let `matcher` consume forced tokens and allowed drafts. Return these tokens, and the CPU seconds."""
    found: list[int] = []
    seconds = 0.0
    while len(found) < len(drafts):
        forced = _forced(matcher, end_ids)
        tried = (forced or drafts[len(found) :])[: len(drafts) - len(found)]
        begun_s = time.thread_time()
        num_taken = matcher.try_consume_tokens(tried)
        seconds += time.thread_time() - begun_s
        found += tried[:num_taken]
        if num_taken == 0 or found[-1] in end_ids:
            break
    return found, seconds


def _forced(matcher: LLMatcher, end_ids: Items[int]) -> list[int]:
    return matcher.compute_ff_tokens() or (list(end_ids[:1]) if matcher.is_stopped() else [])


def _num_matched(sequence: Items[int], num_matched: int, token_id: int) -> int:
    """Return how many first tokens of `sequence` the answer ends with, after one more token."""
    seen = (*sequence[:num_matched], token_id)
    return next((n for n in range(len(seen), 0, -1) if seen[-n:] == tuple(sequence[:n])), 0)


def _only(token_id: int, num_words: int) -> Mask:
    mask = np.zeros(num_words, dtype=np.uint32)
    mask[token_id // 32] = np.uint32(1) << np.uint32(token_id % 32)
    return mask.view(np.int32)


def _all_but(token_ids: Items[int], num_words: int) -> Mask:
    mask = np.full(num_words, 0xFFFFFFFF, dtype=np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] &= ~(np.uint32(1) << np.uint32(token_id % 32))
    return mask.view(np.int32)
