"""Scheduler: gives sequences rows and pages, chooses each step's batch, and applies its outcome.

A step is all prefill or all decode. While both have work they alternate; `chunks.py` chooses how often. All
rows decode together, each with a width of its own. When pages run out, one sequence loses its row, and is
later prefilled again from its tokens: sampling noise is keyed by position, so its text stays the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from blockdraft.engine.chunks import Chunks
from blockdraft.engine.exact_pages import NO_PAGE, ExactPages
from blockdraft.engine.page_allocator import OutOfPages, PageAllocator
from blockdraft.engine.queue_wait import QueueWait, retry_after_s
from blockdraft.engine.request import Delta, Deltas, TokenLogprobs
from blockdraft.engine.saved_states import SavedStates
from blockdraft.engine.sequence import Sequence
from blockdraft.engine.tree_choice import TreeChoice
from blockdraft.engine.waiting import WaitingQueue, last_to_run
from blockdraft.engine.width_controller import ChosenStep, WidthController, always
from blockdraft.errors import CapacityError, RequestError
from blockdraft.kernels.tree_size import MAX_ROWS
from blockdraft.planner.plan import Plan
from blockdraft.step.step_sizes import Means, StepSize

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences and sizes of one step."""

    kind: Literal["prefill", "decode"]
    sequences: tuple[Sequence, ...]
    starts: tuple[int, ...]  # each row's length before the step, as the host knows it
    counts: tuple[int, ...]  # prefill: prompt tokens of each row; decode: its width; 1 is plain decoding
    tree: int = 0  # the tokens of each row's tree of drafts; 0: drafts are chains


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step, on the host. A prefill has no tokens, only prompt logprobs if requested."""

    token_ids: tuple[tuple[int, ...], ...] = ()  # per row, committed tokens only
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # per row, one per token
    chains: tuple[tuple[int, int], ...] = ()  # per row, of trees: a chain's width, what it would commit
    tried: tuple[int, ...] = ()  # per row, of trees: how many columns were tried


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step has added to the answers that still had a row. A prefill adds nothing."""

    sequences: Items[Sequence] = ()
    widths: Items[int] = ()
    num_committed: Items[int] = ()
    num_kept: list[int] = field(default_factory=list)  # of the committed tokens, those before the end
    deltas: Deltas = field(default_factory=Deltas)
    ended: list[tuple[Sequence, Delta]] = field(default_factory=list)


class Scheduler:
    """Holds the queues, and hands out rows and pages."""

    def __init__(
        self,
        plan: Plan,
        pages: PageAllocator,
        clock: Callable[[], float],
        exact: ExactPages | None = None,
        states: SavedStates | None = None,
        *,
        means: Means | None = None,
    ) -> None:
        """`means`: rows may get widths of their own (WidthController)."""
        self.pages = pages
        self.exact = exact  # None: no layer compresses
        self.states = states  # None: no layer has a state, or none is saved
        self._has_more_than_pages = exact is not None or states is not None
        self.clock = clock
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self.num_refused_full = self.num_refused_wait = 0
        self._wait = QueueWait()
        self._free_rows = list(reversed(range(plan.max_num_seqs)))
        self._at_begin: tuple[Sequence, ...] = ()
        self.is_ready: Callable[..., bool] = always  # (rows, width, tokens): such a step can run at once
        self.is_tree_ready: Callable[[int, int], bool] = always  # (rows, tokens of a tree), likewise
        self.means = means
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Use `plan` from now on. It must have the same rows and pages as the previous plan."""
        self._plan = plan
        self.chunks = Chunks(plan.max_prefill_tokens)
        self._width_controller = WidthController.of(plan, self.means) if plan.step_costs else None
        self._tree_choice = None
        if self._width_controller is not None and plan.tree:
            self._tree_choice = TreeChoice(self._width_controller, plan.trees, plan.block)

    # ---- requests in and out

    def add(self, sequences: list[Sequence]) -> None:
        """Queue all choices of one request, or raise and queue none."""
        most = self._plan.max_queue
        if len(sequences) > most:
            raise RequestError(
                f"n = {len(sequences)} choices, but the queue holds {most}: raise --max-queue."
            )
        if not self.has_room(len(sequences)):
            self.num_refused_full += 1
            raise CapacityError(
                f"the queue is full ({len(self.waiting)} of {most} waiting): try again later, "
                "or raise --max-queue.",
                retry_after_s(self.expected_wait_s / 10),  # until a tenth of the queue has moved on
            )
        self.waiting.extend(sequences)

    def check_wait(self, limit_s: float) -> None:
        """Raise CapacityError if a new request would probably wait longer than `limit_s` for a row."""
        wait_s = self.expected_wait_s
        if wait_s > limit_s:
            self.num_refused_wait += 1
            raise CapacityError(
                f"the wait would be about {wait_s:.0f} s, with {len(self.waiting)} waiting, and the server "
                f"lets nobody wait longer than {limit_s:g} s: try again later.",
                retry_after_s(wait_s - limit_s),
            )

    @property
    def expected_wait_s(self) -> float:
        """Return how long a new request would wait for a row; 0 if that is not known."""
        return self._wait.expected_s(len(self.waiting) - len(self._free_rows), len(self.running))

    def abort(self, request_id: str) -> list[Delta]:
        """End every choice of a request now; its rows and pages are free at once."""
        ended = [s for s in self.live if s.request.id == request_id]
        for sequence in ended:
            sequence.finish_reason = "abort"
            if sequence.row is None:
                self.waiting.remove(sequence)
            else:
                self._retire(sequence)
        return [sequence.delta((), (), self.clock()) for sequence in ended]

    def has_room(self, num_sequences: int) -> bool:
        return len(self.waiting) + num_sequences <= self._plan.max_queue

    def begin(self) -> None:
        """Record the running sequences before a step: if it is interrupted, their results are lost."""
        self._at_begin = tuple(self.running)

    def recover(self) -> list[Sequence]:
        """Repair rows and pages after an interrupt at any line, and return the choices that end.

        A request ends if one of its choices has a row, had one when the step began, or was about to get or
        lose one. Then no sequence holds a page, so all counts restart at zero. The pages of the last step are
        not remembered: it may not have finished. Waiting requests have no state on the device to lose.
        """
        touched = {sequence.request.id for sequence in (*self._at_begin, *self.running)}
        touched |= {sequence.request.id for sequence in self.waiting if sequence.is_touched}
        ended = list(dict.fromkeys(s for s in self.live if s.request.id in touched))
        for sequence in ended:
            sequence.finish_reason = "abort"
            sequence.leave_row()
        self.pages.recover()
        if self.exact is not None:
            self.exact.recover()
        if self.states is not None:
            self.states.recover()
        self._free_rows = list(reversed(range(self._plan.max_num_seqs)))
        self.waiting = WaitingQueue(s for s in self.waiting if s.request.id not in touched)
        self.running = []
        return ended

    @property
    def live(self) -> list[Sequence]:
        """Return every sequence that has not ended."""
        return [*self.waiting, *self.running]

    @property
    def has_structured_outputs(self) -> bool:
        """Say if a structured output restricts a running answer now."""
        return any(one.guide is not None and one.guide.is_binding for one in self.running)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # ---- deciding

    def schedule(self) -> Batch | None:
        """Return the next step, with its rows and pages allocated, or None if no sequence can run."""
        self._admit()
        prefilling = [one for one in self.running if one.length < len(one.token_ids) - 1]
        decoding = [one for one in self.running if one.is_decoding] if prefilling else [*self.running]
        if prefilling and (self.chunks.is_due or not decoding):
            return self._prefill(prefilling, is_decoding=bool(decoding))
        if decoding:
            self.chunks.count_decode()
            return self._decode(decoding)
        return None

    def _admit(self) -> None:
        """Give waiting sequences, in turn, a row and pages for all known tokens and one block."""
        while self.waiting and self._free_rows:
            sequence = self.waiting.next(self.running)
            if self._waits_for_its_prompt(sequence) or not self._take_pages(sequence):
                return
            sequence.row = self._free_rows.pop()
            if sequence.tally.start_s is None:
                sequence.tally.start_s = self.clock()
            self.running.append(sequence)
            self.waiting.take(sequence)  # last: the sequence is always in one of the lists

    def _waits_for_its_prompt(self, sequence: Sequence) -> bool:
        """Say if another choice of the request is about to write the prompt to the cache."""
        leader = sequence.leader
        if leader is None or not self._may_share(sequence):
            return False
        return leader.finish_reason is None and not leader.is_decoding

    def _may_share(self, sequence: Sequence) -> bool:
        return self._plan.prefix_cache and not sequence.wants_prompt_logprobs

    def _take_pages(self, sequence: Sequence) -> bool:
        token_ids, salt = sequence.token_ids, sequence.request.sampling.cache_salt
        num_known = len(token_ids) - 1
        shared: list[int] = []
        if self._may_share(sequence):  # an MTP head needs the hidden state of the last known token
            shared = self.pages.match(token_ids, salt, num_known - self.pages.num_later)
        shared, length = self._resume(sequence, shared)
        missing = self._num_pages(num_known + self._plan.block) - len(shared)
        try:
            sequence.pages = shared + self.pages.allocate(missing)
        except OutOfPages:
            self.pages.release(shared)
            self._release_exact(sequence)
            self._release_states(sequence)
            return False
        if self.states is not None:
            self.states.count_prompt()
        sequence.num_remembered_pages = len(shared)
        sequence.length = length
        if sequence.tally.preemptions == 0:
            sequence.tally.num_cached_tokens = sequence.length
        return True

    # ---- exact pages, if layers compress: the plan has enough for every row and every chunk

    def _resume(self, sequence: Sequence, shared: list[int]) -> tuple[list[int], int]:
        """Return the pages to use of a cached prefix, and the length from which the sequence continues.

        That is the longest one whose state was saved, if layers have states, and whose tail was kept, if
        layers compress. With states, the pages after it are used, too: prefill writes the same bits to them.
        """
        size, num_pages, state = self.pages.page_size, len(shared), None
        nodes = [node for page in shared if (node := self.pages.node_of(page)) is not None]
        while num_pages:
            if self.states is not None:
                state = self.states.find(nodes[:num_pages])
                num_pages = 0 if state is None else state.length // size
            if self.exact is None:
                break
            tail = self.exact.find(nodes[:num_pages])
            if state is None or len(tail) == num_pages:
                sequence.exact_pages, num_pages = tail, len(tail)
                break
            self.exact.release(tail)
            assert self.states is not None
            self.states.release(state)
            num_pages, state = len(tail), None
        sequence.restored = sequence.last_saved = state
        sequence.branch = len(shared) * size if num_pages < len(shared) else None
        if self.exact is not None:
            sequence.first_exact = self.exact.first_needed(num_pages * size)
        if self.states is None:
            self.pages.release(shared[num_pages:])
            shared = shared[:num_pages]
        return shared, num_pages * size

    def _hold_exact(self, sequence: Sequence, end: int) -> None:
        """Allocate exact pages for the tokens before `end`, which are about to be written."""
        missing = self._num_pages(end) - len(sequence.exact_pages)
        if self.exact is not None and missing > 0:
            sequence.exact_pages += self.exact.allocate(missing)

    def _trim_exact(self, sequence: Sequence, length: int) -> None:
        """Release the exact pages that the row, which has `length` tokens, will not read again."""
        if self.exact is None:
            return
        first = min(self.exact.first_needed(length), len(sequence.exact_pages))
        behind = slice(sequence.first_exact, first)
        self.exact.release(sequence.exact_pages[behind])
        sequence.exact_pages[behind] = [NO_PAGE] * len(sequence.exact_pages[behind])
        sequence.first_exact = max(first, sequence.first_exact)

    def _keep_tail(self, sequence: Sequence, length: int) -> None:
        """Keep the tail of the first `length` tokens: other prompts can then continue from that prefix."""
        if self.exact is None or not self._plan.prefix_cache:
            return
        nodes = self.pages.nodes_of(sequence.token_ids, length, sequence.request.sampling.cache_salt)
        for index in self.exact.needed(len(nodes)):
            if sequence.exact_pages[index] != NO_PAGE:
                self.exact.keep(nodes[index], sequence.exact_pages[index])

    # ---- saved states, if layers have states

    def _reserve_states(self, sequence: Sequence, start: int, end: int, *, is_prompt: bool) -> None:
        """Reserve slots for the states that the sequence may pass while it grows from `start` to `end`."""
        if self.states is None or not self._plan.prefix_cache:
            return
        lengths: Items[int] = self.states.multiples(start, end)
        if is_prompt:
            lengths = self.states.on_the_way(start, end, len(sequence.token_ids) - 1, sequence.branch)
        for length in lengths:
            slot = None if length in sequence.saves else self.states.reserve()
            if slot is not None:
                sequence.saves[length] = slot
                sequence.unplaced_saves.append((length, slot))

    def _save_states(self, sequence: Sequence, length: int) -> None:
        """Offer the saved states up to `length` tokens to later prompts."""
        if self.states is None:
            return
        for at in sorted(one for one in sequence.saves if one <= length):
            node = self.pages.node_of(sequence.pages[at // self.pages.page_size - 1])
            slot = sequence.saves.pop(at)
            if node is None:  # another page stores this prefix
                self.states.free([slot])
                continue
            before = sequence.last_saved
            sequence.last_saved = self.states.save(slot, node, at, before)
            if before is not None and sequence.num_prompt <= before.length:
                self.states.thin(before, sequence.last_saved)
            self._keep_tail(sequence, at)

    def _release_states(self, sequence: Sequence) -> None:
        if self.states is None:
            return
        self.states.free(sequence.saves.values())
        if sequence.restored is not None:
            self.states.release(sequence.restored)
        sequence.saves, sequence.unplaced_saves = {}, []
        sequence.restored = sequence.last_saved = None

    def _release_exact(self, sequence: Sequence) -> None:
        if self.exact is not None:
            self.exact.release(sequence.exact_pages)
            sequence.exact_pages, sequence.num_placed_exact, sequence.first_exact = [], 0, 0

    # ---- steps

    def _prefill(self, sequences: list[Sequence], *, is_decoding: bool) -> Batch:
        """Schedule one chunk. Its outcome is certain, so update the lengths now."""
        taken = self.chunks.take([s.num_to_prefill for s in sequences], is_decoding=is_decoding)
        chosen = [(sequence, count) for sequence, count in zip(sequences, taken, strict=True) if count]
        starts = [sequence.length for sequence, _ in chosen]
        for sequence, count in chosen:
            sequence.length += count
            self._hold_exact(sequence, sequence.length)
            self._reserve_states(sequence, sequence.length - count, sequence.length, is_prompt=True)
        counts = tuple(count for _, count in chosen)
        return Batch("prefill", tuple(sequence for sequence, _ in chosen), tuple(starts), counts)

    def _decode(self, sequences: list[Sequence]) -> Batch | None:
        """Schedule one block of every row."""
        chosen, widths = sequences, self._widths(sequences)
        if (tree := self._tree(sequences)) > 0:
            widths = [self._plan.block] * len(sequences)
        if self._grow(sequences):
            left = [(one, width) for one, width in zip(sequences, widths, strict=True) if one.row is not None]
            if not left:
                return None
            chosen, widths = (list(each) for each in zip(*left, strict=True))
        for sequence in chosen if self._has_more_than_pages else ():
            end = sequence.length + sequence.num_in_flight + self._plan.block
            self._hold_exact(sequence, end)
            self._reserve_states(sequence, sequence.length, end, is_prompt=False)
        for sequence, width in zip(chosen, widths, strict=True):
            sequence.num_in_flight += width
        starts = tuple([sequence.length for sequence in chosen])
        return Batch("decode", tuple(chosen), starts, tuple(widths), tree)

    def _tree(self, sequences: list[Sequence]) -> int:
        """Return the tokens of each row's tree of drafts, or 0 for chains (of the widths just chosen)."""
        most = self._plan.tree
        if not most:
            return 0
        is_able = len(sequences) <= MAX_ROWS and all(one.may_have_tree for one in sequences)
        if self._tree_choice is None:
            return most if is_able and self.is_tree_ready(len(sequences), most) else 0
        if not is_able:
            self._tree_choice.last = None
            return 0
        return self._tree_choice.next_tree([one.tally.record for one in sequences], self.is_tree_ready)

    def _widths(self, sequences: list[Sequence]) -> list[int]:
        records = [sequence.tally.record for sequence in sequences if sequence.may_change_width]
        if self._width_controller is None or not records:
            return [sequence.width for sequence in sequences]
        if len(records) == len(sequences):
            return self._width_controller.next_widths(records, self.is_ready)
        others = [sequence.width for sequence in sequences if not sequence.may_change_width]
        chosen = self._width_controller.next_widths(records, self.is_ready, others)
        if not others:
            return chosen
        widths = iter(chosen)
        return [next(widths) if sequence.may_change_width else sequence.width for sequence in sequences]

    @property
    def chosen_step(self) -> ChosenStep:
        """Return the last step whose width was chosen."""
        if self._tree_choice is not None and self._tree_choice.last is not None:
            return self._tree_choice.last
        return ChosenStep() if self._width_controller is None else self._width_controller.last

    def num_plain(self, batch: Batch, size: StepSize | None) -> float | None:
        """Return how many plain steps of as many rows take as long as this step, or None if unknown."""
        controller, count = self._width_controller, len(batch.sequences)
        if batch.tree:
            return None if self._tree_choice is None else self._tree_choice.num_plain(count, batch.tree)
        if controller is None or size is None:
            return None
        return controller.costs.num_plain(count, controller.mean_of(size))

    def is_likely(self, size: StepSize) -> bool:
        """Say if a step of as many rows is likely to have this size."""
        planned = (
            self._plan.width
            if self._width_controller is None
            else self._width_controller.likely_width(size.rows)
        )
        is_dealt = self._width_controller is not None and self.means is not None
        return (size.is_even or is_dealt) and size.tokens in (size.rows, size.rows * planned)

    def _grow(self, sequences: list[Sequence]) -> bool:
        """Allocate pages for the coming block; preempt the youngest rows if needed. Say if any were."""
        before, block, page_size = self.num_preemptions, self._plan.block, self.pages.page_size
        for sequence in sequences:
            end = sequence.length + sequence.num_in_flight + block
            if end > len(sequence.pages) * page_size:
                self._extend(sequence, self._num_pages(end) - len(sequence.pages))
        return self.num_preemptions > before

    def _extend(self, sequence: Sequence, num_pages: int) -> None:
        while sequence.row is not None:
            try:
                sequence.pages += self.pages.allocate(num_pages)
                return
            except OutOfPages:
                self._preempt(last_to_run(self.running))

    def _preempt(self, sequence: Sequence) -> None:
        """Move a running sequence to the head of its queue; the prefix cache may keep its pages."""
        self.waiting.put_back(sequence)  # first: the sequence is always in one of the lists
        self._retire(sequence)
        sequence.length = 0
        sequence.forget_partial_prompt_logprobs()
        sequence.tally.preemptions += 1
        self.num_preemptions += 1

    def _retire(self, sequence: Sequence) -> None:
        """Free the row and pages. A step in flight may still write to them, but it runs before any reuse."""
        assert sequence.row is not None
        self._keep_tail(sequence, sequence.length)
        self._release_exact(sequence)
        self._release_states(sequence)
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        self.pages.release(sequence.pages)
        sequence.leave_row()

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pages.page_size)

    # ---- learning what happened

    def observe(self, batch: Batch, seconds: float) -> None:
        if batch.kind == "prefill":
            self.chunks.observe_prefill(sum(batch.counts), seconds)
        else:
            self.chunks.observe_decode(seconds)

    def commit(
        self,
        batch: Batch,
        outcome: Outcome,
        seconds: float | None = None,
        size: StepSize | None = None,
    ) -> Committed:
        """Apply a step's outcome to its sequences and return what it added to their answers.

        `Sequence.go_on` serves nearly every row; `accept` the first and last steps and all unusual requests.
        Drop the outcome of a sequence without a row: it ended or was preempted meanwhile.
        `seconds`: the time of the step, if known. `size`: what ran, if it was larger than the batch.
        """
        if seconds is not None:
            self.observe(batch, seconds)
        if batch.kind == "prefill":
            self._commit_prompts(batch, outcome)
            return Committed()
        now_s, page_size = self.clock(), self.pages.page_size
        drafted = self._learn(batch, outcome, seconds, size)
        sequences, widths, tried = batch.sequences, batch.counts, outcome.tried or batch.counts
        blocks, logprobs = outcome.token_ids, outcome.logprobs
        seen = [sequence.row is not None for sequence in sequences]
        if not all(seen):
            sequences, widths, tried = _only(seen, sequences), _only(seen, widths), _only(seen, tried)
            blocks, logprobs, drafted = _only(seen, blocks), _only(seen, logprobs), _only(seen, drafted)
        num_committed = [len(token_ids) for token_ids in blocks]
        found = Committed(sequences, tried, num_committed, [*num_committed])
        rows = zip(sequences, widths, tried, blocks, logprobs or ((),) * len(blocks), drafted, strict=True)
        for at, (sequence, width, num_tried, token_ids, its_logprobs, record) in enumerate(rows):
            sequence.num_in_flight -= width
            if self._width_controller is not None:
                sequence.tally.record.count(*record)
            piece = sequence.go_on(token_ids, num_tried)
            if piece is not None:
                found.deltas.pieces.append(piece)
            else:
                delta = sequence.accept(token_ids, its_logprobs, now_s, num_tried)
                found.deltas.others.append(delta)
                found.num_kept[at] = len(delta.token_ids)
            if sequence.length >= (sequence.num_remembered_pages + 1) * page_size:
                self._remember(sequence)
            if self._has_more_than_pages:
                self._save_states(sequence, sequence.length)
                self._trim_exact(sequence, sequence.length)
            if piece is None and sequence.finish_reason is not None:
                found.ended.append((sequence, delta))
                assert sequence.tally.start_s is not None
                self._wait.learn(now_s - sequence.tally.start_s)
                self._retire(sequence)
        return found

    def _learn(
        self, batch: Batch, outcome: Outcome, seconds: float | None, size: StepSize | None
    ) -> tuple[tuple[int, int], ...]:
        """Learn from a decode step. Return each row's chain of drafts: its width, and how many were right."""
        if not batch.tree:
            num_right = [len(token_ids) - 1 for token_ids in outcome.token_ids]
            if self._width_controller is not None:
                self._width_controller.observe(batch.counts, num_right, seconds, size)
            return tuple(zip(batch.counts, num_right, strict=True))
        chains = tuple([(width, count - 1) for width, count in outcome.chains])
        if self._tree_choice is not None:
            records = [sequence.tally.record for sequence in batch.sequences]
            committed = [len(token_ids) for token_ids in outcome.token_ids]
            self._tree_choice.observe(batch.tree, records, committed, seconds)
            self._tree_choice.count_chains(chains)
        return chains

    def _commit_prompts(self, batch: Batch, outcome: Outcome) -> None:
        for position, sequence in enumerate(batch.sequences):
            if sequence.row is None:
                continue
            if outcome.logprobs and sequence.wants_prompt_logprobs:
                sequence.prompt_logprobs.extend(outcome.logprobs[position])
            self._remember(sequence)
            end = batch.starts[position] + batch.counts[position]
            self._save_states(sequence, end)
            if sequence.branch is not None and sequence.branch <= end:
                self._keep_tail(sequence, sequence.branch)
                sequence.branch = None
            if sequence.is_decoding:  # another choice, or the same prompt again
                self._keep_tail(sequence, end)
            self._trim_exact(sequence, end)

    def _remember(self, sequence: Sequence) -> None:
        """Offer the committed full pages, with the drafter's context, to later prompts."""
        num_full = sequence.length // self.pages.page_size
        if num_full <= sequence.num_remembered_pages or not self._plan.prefix_cache:
            return
        if sequence.barred_at == self.pages.num_forgotten:
            return  # another page still holds the next prefix
        sequence.num_remembered_pages = self.pages.remember(
            sequence.token_ids,
            sequence.pages,
            sequence.num_remembered_pages,
            sequence.request.sampling.cache_salt,
            sequence.length,
        )
        is_barred = sequence.num_remembered_pages < num_full
        sequence.barred_at = self.pages.num_forgotten if is_barred else None


def _only(chosen: Items[bool], column: Items[T]) -> tuple[T, ...]:
    return tuple(itertools.compress(column, chosen))
