"""Sequence: the host's state of one choice of one request, and the rules that end it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from blockdraft.cache.rows import RowSampling
from blockdraft.engine.histogram import at_least
from blockdraft.engine.request import (
    Delta,
    FinishReason,
    Metrics,
    Piece,
    Request,
    TokenLogprobs,
    counted_width,
)
from blockdraft.engine.saved_states import SavedState
from blockdraft.engine.width_controller import DraftRecord
from blockdraft.grammar.guide import Guide
from blockdraft.text.detokenizer import TextStream


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. Its tokens [0, length) are in the cache once the step in flight has run.

    While decoding, `length == len(token_ids) - 1`: the last token is the anchor.
    """

    request: Request
    index: int  # which of the request's n choices
    width: int
    sampling: RowSampling
    end_ids: frozenset[int]  # token ids that end the text
    max_length: int  # tokens, prompt included
    stream: TextStream | None  # None: no tokenizer, no text
    leader: Sequence | None  # the choice whose prompt pages this one will share
    guide: Guide | None = None  # of its structured output
    may_change_width: bool = False  # the request set no width: it may change from step to step

    token_ids: list[int] = field(default_factory=list)
    length: int = 0
    row: int | None = None
    pages: list[int] = field(default_factory=list)
    num_placed_pages: int | None = None  # pages written to the device's row; None: the row is not set up
    exact_pages: list[int] = field(default_factory=list)  # if layers compress; NO_PAGE where not held
    num_placed_exact: int = 0  # exact pages written to the device's row
    first_exact: int = 0  # exact pages before it are not held, except the first tile's
    branch: int | None = None  # length of a cached prefix that had no tail: keep one when prefill gets there
    num_remembered_pages: int = 0
    saves: dict[int, int] = field(default_factory=dict)  # reserved slots, by the length of the state to save
    unplaced_saves: list[tuple[int, int]] = field(default_factory=list)  # those the device's row lacks
    restored: SavedState | None = None  # to be copied to the device's row
    last_saved: SavedState | None = None  # the longest saved state of this sequence
    barred_at: int | None = None  # PageAllocator.num_forgotten when another page stored its next prefix
    num_in_flight: int = 0  # tokens that steps not yet committed may add
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    tally: Tally = field(default_factory=lambda: Tally())
    plain_end: int = 0  # of the tokens before it, only those in `end_ids` may end the answer; 0: ask `accept`

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)
        self.forget_partial_prompt_logprobs()

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_to_prefill(self) -> int:
        return len(self.token_ids) - 1 - self.length

    @property
    def is_decoding(self) -> bool:
        return self.row is not None and self.length >= len(self.token_ids) - 1

    @property
    def may_have_tree(self) -> bool:
        """Say if its drafts may be a tree: nothing that the answer asks for is made for chains alone."""
        return self.may_change_width and self.guide is None and self.request.sampling.logprobs is None

    @property
    def is_touched(self) -> bool:
        """Say if a waiting sequence was interrupted while it got a row, lost one, or ended."""
        has_pages = bool(self.pages or self.exact_pages or self.restored)
        return self.row is not None or has_pages or self.finish_reason is not None

    def leave_row(self) -> None:
        """Forget the row and its pages, which the caller releases."""
        self.row = None
        self.pages = []
        self.num_placed_pages = None
        self.exact_pages, self.num_placed_exact, self.first_exact = [], 0, 0
        self.num_remembered_pages = 0
        self.saves, self.unplaced_saves = {}, []
        self.restored = self.last_saved = None
        self.barred_at = None
        self.num_in_flight = 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Say if requested prompt logprobs are missing: then the model must run on the whole prompt."""
        is_asked = self.request.sampling.prompt_logprobs is not None
        return is_asked and len(self.prompt_logprobs) < self.num_prompt

    def forget_partial_prompt_logprobs(self) -> None:
        """Restart an incomplete list at the first token, which has no logprob. Keep a complete list."""
        if len(self.prompt_logprobs) < self.num_prompt:
            self.prompt_logprobs = [None]

    def accept(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], now_s: float, width: int
    ) -> Delta:
        """Append the tokens of a step up to the first stop, and return the answer's next delta."""
        if self.guide is not None and self.guide.error is not None:
            self.tally.blocks[width, len(token_ids), 0] += 1
            self.finish_reason, self.stop_reason = "abort", f"the structured output: {self.guide.error}"
            return self.delta((), (), now_s)
        tally, num_kept = self.tally, self._read(token_ids)
        tally.blocks[width, len(token_ids), num_kept] += 1
        kept = token_ids[:num_kept]
        self.token_ids += kept
        self.length = len(self.token_ids) - 1
        if self.guide is not None and self.finish_reason is None:
            self.guide.advance(kept)
        if tally.first_token_s is None:
            tally.first_token_s = now_s
            self.plain_end = self.max_length if self._is_plain else 0
        return self.delta(kept, logprobs[:num_kept], now_s)

    @property
    def _is_plain(self) -> bool:
        """Say if only a token may end the answer, and nothing else is said of tokens."""
        has_stops = self.stream is None or self.stream.has_stops
        return self.guide is None and not has_stops and self.request.sampling.logprobs is None

    def go_on(self, token_ids: tuple[int, ...], width: int) -> Piece | None:
        """Do what `accept` does, in half the time, if the answer goes on behind all these tokens.

        Else change nothing and return None. It goes on in nearly every step but its first and last.
        """
        count = len(token_ids)
        end = len(self.token_ids) + count
        if end >= self.plain_end or not self.end_ids.isdisjoint(token_ids):
            return None
        assert self.stream is not None
        self.tally.blocks[width, count, count] += 1
        self.token_ids += token_ids
        self.length = end - 1
        return self.request.id, self.index, self.stream.push_plain(token_ids), token_ids

    def _read(self, token_ids: tuple[int, ...]) -> int:
        """Return how many of the tokens belong to the answer. Set the finish reasons if it ends here.

        An end token, a stop string or the length limit ends the answer, whichever comes first. The limit
        yields to the other two if they come with the last token.
        """
        num_known = len(self.token_ids)
        num_room = self.max_length - num_known
        num_protected = self.sampling.min_end - 1 - num_known  # tokens that may not end it
        text_ids, end = token_ids[:num_room], None
        if not self.end_ids.isdisjoint(text_ids):
            first = max(num_protected, 0)
            ends = (at for at, token in enumerate(text_ids[first:], first) if token in self.end_ids)
            end = next(ends, None)
            text_ids = text_ids[:end]
        num_read = len(text_ids)
        if self.stream is not None:
            num_read = self.stream.push(text_ids, num_protected)
            if self.stream.stop_reason is not None:
                self.finish_reason, self.stop_reason = "stop", self.stream.stop_reason
                return num_read
        if end is not None:
            self._end_with(token_ids[end])
            return end + 1
        if num_read == num_room:
            self.finish_reason = "length"
        return num_read

    def _end_with(self, token: int) -> None:
        params = self.request.sampling
        self.finish_reason = "stop"
        self.stop_reason = token if token in params.stop_token_ids else None
        if params.include_stop_str_in_output and self.stream is not None:
            self.stream.push((token,), num_protected=1)

    def delta(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], now_s: float) -> Delta:
        """Return the delta to stream, with metrics if it is the last."""
        is_last, text, request = self.finish_reason is not None, "", self.request
        if self.stream is not None:
            if is_last:
                self.stream.finish()
            text = self.stream.take()
        delta = Delta(request.id, self.index, text, token_ids, logprobs)
        if request.sampling.prompt_logprobs is not None and self.num_output == len(token_ids):
            delta.prompt_logprobs = tuple(self.prompt_logprobs)  # with the first piece
        if is_last:
            delta.finish_reason, delta.stop_reason = self.finish_reason, self.stop_reason
            delta.metrics = self.metrics(now_s)
        return delta

    def metrics(self, now_s: float) -> Metrics:
        tally, arrival_s = self.tally, self.request.arrival_s
        start_s = now_s if tally.start_s is None else tally.start_s
        first_s = now_s if tally.first_token_s is None else tally.first_token_s
        return Metrics(
            num_tokens=self.num_output,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=tally.num_cached_tokens,
            steps=tally.steps,
            drafted=tally.drafted,
            accepted=tally.accepted,
            reached=tally.reached,
            is_cut=tally.is_cut,
            seed=self.sampling.seed,
            preemptions=tally.preemptions,
            queue_s=start_s - arrival_s,
            first_token_s=first_s - arrival_s,
            seconds=now_s - arrival_s,
        )


@dataclass(slots=True)
class Tally:
    """Counters of one sequence."""

    # Steps, by their width and by the tokens that they committed and that the answer kept.
    blocks: dict[tuple[int, int, int], int] = field(default_factory=lambda: defaultdict(int))
    record: DraftRecord = field(default_factory=DraftRecord)
    preemptions: int = 0
    num_cached_tokens: int = 0
    start_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def steps(self) -> int:
        return sum(self.blocks.values())

    @property
    def is_cut(self) -> bool:
        """Say if the answer ended inside its last block."""
        return any(num_kept < num_committed for _, num_committed, num_kept in self.blocks)

    @property
    def drafted(self) -> int:
        return sum(count * (counted_width(*block) - 1) for block, count in self.blocks.items())

    @property
    def accepted(self) -> tuple[int, ...]:
        """Return counts [i] of the steps in which draft i + 1 was accepted."""
        num_kept = [0] * (self._most_width + 1)
        for (_, _, kept), count in self.blocks.items():
            num_kept[kept] += count
        return at_least(num_kept)[2:]

    @property
    def reached(self) -> tuple[int, ...]:
        """Return counts [i] of the steps that tested draft i + 1, including the first wrong one."""
        num_reached = [0] * self._most_width
        for block, count in self.blocks.items():
            num_reached[min(block[2], counted_width(*block) - 1)] += count
        return at_least(num_reached)[1:]

    @property
    def _most_width(self) -> int:
        return max((width for width, _, _ in self.blocks), default=0)
