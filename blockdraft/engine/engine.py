"""Engine: takes requests and returns deltas, one step at a time. One thread owns it."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import time
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.engine.allocation import make_cache, make_rows, make_scheduler
from blockdraft.engine.info import Fingerprint
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.new_sequence import new_sequence
from blockdraft.engine.prefix_disk import PrefixDisk, Restored
from blockdraft.engine.request import (
    ANYONE,
    MAX_LOGPROBS,
    Delta,
    Deltas,
    Request,
    SamplingParams,
    TokenLogprobs,
    Turn,
    check_limits,
    check_vocabulary,
)
from blockdraft.engine.scheduler import Batch, Outcome
from blockdraft.engine.seeds import mix
from blockdraft.engine.sequence import Sequence
from blockdraft.engine.stats import Load, Snapshot, Stats
from blockdraft.engine.structured_steps import StepInParts, TokenMasks, run_in_parts
from blockdraft.engine.width_controller import always
from blockdraft.errors import RequestError
from blockdraft.grammar.guide import Guide
from blockdraft.grammar.vocabulary import Vocabulary
from blockdraft.kernels.sampling import Allowed
from blockdraft.kernels.sampling_tables import MAX_LISTED
from blockdraft.kernels.transfer import to_device
from blockdraft.kernels.tree_size import tree_size
from blockdraft.planner.plan import Plan
from blockdraft.step.captures import capturing
from blockdraft.step.decode import decode_parts, run_all_parts
from blockdraft.step.dflash import DFlashDrafter
from blockdraft.step.graphs import Reading, StepGraphs, pack
from blockdraft.step.prefill import prefill_step, prompt_logprobs
from blockdraft.step.prefill_graphs import PrefillGraphs
from blockdraft.step.row_sizes import Place
from blockdraft.step.step_sizes import EVEN, Filled, StepSize, fill, tight
from blockdraft.step.tree import decode_tree
from blockdraft.step.tree_graphs import TreeGraphs
from blockdraft.step.verify import Logprobs, Verdict


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched step, which may still run: a prefill, or a decode step whose verdict the host will read."""

    begun_s: float
    is_usual: bool = True  # its time is representative of such steps
    is_in_parts: bool = False  # it reads masks that the next step in parts overwrites
    size: StepSize | None = None  # of a decode step
    end: torch.cuda.Event | None = None  # the end of a prefill on a GPU
    outcome: Outcome | None = None
    reading: Reading | None = None
    logprobs: Logprobs | None = None


def ignore(sequence: Sequence) -> None:
    """Do nothing."""


class Engine:
    """Continuous batching over one target and one drafter."""

    def __init__(self, models: LoadedPair, plan: Plan, clock: Callable[[], float] = time.monotonic) -> None:
        assert not plan.tree or (isinstance(models.drafter, DFlashDrafter) and models.drafter.grows_trees)
        assert models.rates is None or len(models.rates) >= plan.block - 1, "a rate for each draft"
        self.models = models
        self.plan = plan
        self.clock = clock
        self.cache = make_cache(models, plan)
        self.rows = make_rows(models, plan)
        self.scheduler = make_scheduler(models, plan, clock)
        self._check_prefixes()
        self.stats = Stats(clock, plan.max_model_len)
        self.vocabulary = Vocabulary(models.tokenizer, models.config.vocab_size)
        self.masks = TokenMasks(
            max_num_seqs=plan.max_num_seqs,
            block=plan.block,
            num_words=self.vocabulary.num_words,
            device=models.device,
        )
        self.graphs: StepGraphs | None = None  # None: steps run kernel by kernel
        self.prefill_graphs: PrefillGraphs | None = None
        self.tree_graphs: TreeGraphs | None = None
        self.target_checksum: str | None = None  # of all weight bytes, if a check has read them
        self.fingerprint = Fingerprint(reason="the start has not taken it")
        self.prefix_disk: PrefixDisk | None = None  # None: prefixes end with this process
        self.restored = Restored()  # from the prefix disk
        self.on_end: Callable[[Sequence], None] = ignore  # called with every choice that has ended
        self._pending: tuple[Batch, Launched] | None = None
        self._is_broken = False  # a change of rows and pages was interrupted
        self._collected_s = clock()  # when the last result arrived
        self._is_disturbed = False  # the last launch was so slow that the step before is read late
        self._ids = itertools.count()
        self._rates = None if models.rates is None else torch.tensor(models.rates, device=models.device)

    def replan(self, plan: Plan) -> None:
        """Use another plan, made from measurements of this engine, which must be idle. Keep its memory."""
        assert not self.has_work, "the requests under way were scheduled by another plan"
        self.plan = plan
        self.scheduler.follow(plan)
        self._check_prefixes()

    def _check_prefixes(self) -> None:
        lacks_states = self.models.config.is_hybrid and self.scheduler.states is None
        assert not (self.plan.prefix_cache and lacks_states), "a prefix without its state would go on wrongly"

    def open_prefix_disk(self, disk: PrefixDisk) -> None:
        """Read the folder's prefixes, and write this engine's to it at the end. Raise PrefixesRefused."""
        self.prefix_disk = disk
        self.restored = disk.read(self.cache, self.scheduler)

    def keep_prefixes(self) -> str:
        """Write the prefixes for the next start, when all requests have ended; return a line for the log."""
        assert self.prefix_disk is not None
        assert not self.scheduler.has_work, "rows hold pages"
        self._repair()
        self.wait()
        return self.prefix_disk.write(self.cache, self.scheduler)

    # ---- requests

    def add(
        self,
        prompt_ids: Items[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        guide: Guide | None = None,
        seed: int | None = None,
        turn: Turn = ANYONE,
    ) -> str:
        """Queue a prompt and return the request's id.

        Raise RequestError if the request can never run, CapacityError if the queue is full.

        `guide`: the result of `guide_of(sampling)`, if another thread has computed it. `seed`: the one to use
        if `sampling` has none; if it is None, too, one is drawn from the engine's seed.
        """
        self._repair()
        number = next(self._ids)
        request = Request(
            id=request_id if request_id is not None else f"request-{number}",
            prompt_ids=_as_ints(prompt_ids),
            sampling=sampling,
            arrival_s=self.clock(),
            turn=turn,
        )
        self._check(request)
        if any(sequence.request.id == request.id for sequence in self.scheduler.live):
            raise RequestError(f"request id '{request.id}' is in use: choose another.")
        drawn = mix(self.plan.seed, number) if seed is None else seed
        seed = drawn if sampling.seed is None else sampling.seed
        guide = guide or self.guide_of(sampling)
        sequences: list[Sequence] = []
        for index in range(sampling.n):
            leader = sequences[0] if sequences else None
            its_seed = seed if index == 0 else mix(seed, index)
            one = new_sequence(request, index, its_seed, leader, models=self.models, plan=self.plan)
            one.guide = guide if guide is None or index == 0 else guide.copy()
            sequences.append(one)
        self.scheduler.add(sequences)
        return request.id

    def guide_of(self, sampling: SamplingParams) -> Guide | None:
        """Return the guide of an answer, or None if it needs none. Any thread may call this; it may be slow.

        A guide enforces the structured output and the limit on thinking tokens.
        """
        output, thinking = sampling.structured_outputs, sampling.thinking
        if output is None and (thinking is None or thinking.max_tokens is None):
            return None
        matcher, may_roll_back = (None, True) if output is None else self.vocabulary.matcher(output)
        return Guide(
            matcher,
            thinking,
            end_ids=self.vocabulary.end_ids,
            num_words=self.vocabulary.num_words,
            may_roll_back=may_roll_back,
        )

    def abort(self, request_id: str) -> list[Delta]:
        """End a request now. Ignore unknown ids: the request may have ended before the abort arrived."""
        return self._whole(lambda: self._abort(request_id)).others

    def _abort(self, request_id: str) -> Deltas:
        deltas = self.scheduler.abort(request_id)
        self.stats.count_aborted(deltas)
        return Deltas(others=deltas)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._pending is not None

    @property
    def live_ids(self) -> set[str]:
        return {sequence.request.id for sequence in self.scheduler.live}

    def _check(self, request: Request) -> None:
        plan, sampling = self.plan, request.sampling
        check_limits(
            len(request.prompt_ids),
            sampling,
            max_model_len=plan.max_model_len,
            most_context=self.models.most_context(plan),
            block=plan.block,
        )
        check_vocabulary(request.prompt_ids, sampling, self.models.config.vocab_size)
        num_stops = len({*sampling.stop_token_ids, *self.models.tokenizer.eos_ids})
        for name, count in (("logit_bias", len(sampling.logit_bias)), ("stop_token_ids", num_stops)):
            if count > MAX_LISTED:
                counted = " with the end-of-sequence tokens" if name == "stop_token_ids" else ""
                raise RequestError(f"{name} has {count} entries{counted}; at most {MAX_LISTED}.")

    # ---- steps

    def step(self) -> Deltas:
        """Run one step and return what it adds to each answer.

        With overlap, the next step is launched before the last step's result is read. So the engine sees a
        stop one step late, and drops the result of the extra step.

        After an interrupted step (Ctrl-C, no memory) the host's state may differ from the device's. So every
        request that has a row ends: its answer would continue wrongly. Waiting requests are served later.
        """
        return self._whole(self._step)

    def _whole(self, run: Callable[[], Deltas]) -> Deltas:
        """Call `run`, which changes rows and pages. Recover if it is interrupted."""
        try:
            self._repair()
            self.scheduler.begin()
            self._is_broken = True
            deltas = run()
            self._is_broken = False
            return deltas
        except BaseException:
            self.recover()
            raise

    def recover(self) -> None:
        """End all sequences that have a row and free their pages, after an interrupt at any line."""
        self._is_broken = True
        self._pending = None
        self.stats.count_lost(self.scheduler.recover())
        self._is_broken = False

    def _repair(self) -> None:
        """Recover again if a second Ctrl-C interrupted `recover`."""
        if self._is_broken:
            self.recover()

    def _step(self) -> Deltas:
        deltas = Deltas()
        pending = self._pending
        # The masks depend on the committed tokens.
        if pending is not None and (pending[1].is_in_parts or self.scheduler.has_structured_outputs):
            self._pending = None
            deltas = self._collect(*pending)
        batch = self.scheduler.schedule()
        launched = None if batch is None else (batch, self._launch(batch))
        if self.plan.overlap:
            launched, self._pending = self._pending, launched
        return deltas if launched is None else self._collect(*launched)

    def capture(
        self,
        sizes: Items[int],
        widths: Items[int],
        now: Items[Place] | None = None,
        *,
        uneven: Items[StepSize] = (),
    ) -> None:
        """Capture the decode step for these numbers of rows and widths; other steps run kernel by kernel.

        `now`: the pairs to capture at once; the others are captured when first used, or by `prepare`.
        `uneven`: sizes of steps whose rows have widths of their own.
        """
        # On a card, padding is assumed to take less time than launching kernels one by one: not timed.
        padding = math.inf if self.models.device.type == "cuda" else 2.0
        self.graphs = StepGraphs(self.decode, self.rows, capturing(self.models.device), most_padding=padding)
        self.graphs.capture(sizes, widths, now, uneven=uneven)
        self.scheduler.is_ready = self.graphs.is_cheap
        if self.cache.reads_offsets and self.models.device.type == "cuda":
            most = min(self.plan.max_prefill_tokens, self.plan.max_model_len)
            self.prefill_graphs = PrefillGraphs(self.prefill, self.rows, max_tokens=most, steps=self.graphs)
        if self.plan.tree and self.models.device.type == "cuda":
            # A graph cannot hold the references.
            has_kernels = self.models.target.kernels.available.has_triton("trees")
            places = itertools.product(self.plan.tree_rows, self.plan.trees if has_kernels else ())
            self.tree_graphs = TreeGraphs(self.decode_tree, self.rows, self.graphs, list(places))
            self.scheduler.is_tree_ready = self.tree_graphs.is_cheap

    def drop_graphs(self) -> None:
        """Free the graphs, which hold the engine and its cache."""
        self.graphs = self.prefill_graphs = self.tree_graphs = None
        self.scheduler.is_ready = self.scheduler.is_tree_ready = always

    def prepare(self) -> bool:
        """Capture one graph that later steps may use. Return False if none is left. The engine is idle."""
        if self.graphs is not None and self.graphs.capture_next(
            place for place in self.graphs.places if self.scheduler.is_likely(place)
        ):
            return True
        if self.tree_graphs is not None and self.tree_graphs.capture_next():
            return True
        return self.prefill_graphs is not None and self.prefill_graphs.capture_next()

    def _launch(self, batch: Batch) -> Launched:
        if batch.kind == "prefill":
            return self._launch_prefill(batch)
        if batch.tree:
            return self._launch_tree(batch)
        special = [
            one
            for one in batch.sequences
            if one.guide is not None or one.request.sampling.logprobs is not None
        ]
        num_logprobs = _num_top(one.request.sampling.logprobs for one in special)
        wanted = tight(batch.counts)
        if any(s.guide is not None and s.guide.is_binding for s in special):
            return self._launch_in_parts(batch, num_logprobs)
        if self.graphs is not None and num_logprobs is None:
            is_usual = self.graphs.has(*wanted)
            graph = self.graphs.find(*wanted)
            if graph is not None:
                self._is_disturbed = not is_usual
                self._place_decode(batch, graph.size)
                begun_s = self.clock()
                return Launched(begun_s, is_usual, size=graph.size, reading=Reading(graph.replay()))
        size = self._size_without_graph(wanted)
        self._place_decode(batch, size)
        begun_s = self.clock()
        verdict = self.decode(size.width, size.tokens, num_logprobs)
        reading, logprobs = Reading(pack(verdict)), verdict.logprobs
        return Launched(begun_s, num_logprobs is None, size=size, reading=reading, logprobs=logprobs)

    def _launch_tree(self, batch: Batch) -> Launched:
        """Launch a decode step with trees of drafts."""
        num_rows = len(batch.sequences)
        is_usual = self.tree_graphs is not None and self.tree_graphs.has(num_rows, batch.tree)
        graph = None if self.tree_graphs is None else self.tree_graphs.find(num_rows, batch.tree)
        self._is_disturbed = graph is not None and not is_usual
        self._place(batch)
        begun_s = self.clock()
        packed = pack(self.decode_tree(batch.tree)) if graph is None else graph.replay()
        return Launched(begun_s, is_usual or self.tree_graphs is None, reading=Reading(packed))

    def _launch_in_parts(self, batch: Batch, num_logprobs: int | None) -> Launched:
        """Launch a decode step with structured outputs. Its time is not representative of other steps."""
        wanted, parts = tight(batch.counts), None
        if self.graphs is not None and num_logprobs is None:
            parts = self.graphs.find_parts(wanted, self._in_parts)
        eager = self._in_parts(self._size_without_graph(wanted), num_logprobs)
        step = eager if parts is None else parts
        self._place_decode(batch, step.size)
        packed = run_in_parts(step, _guides(batch), batch.counts, self.masks)
        return Launched(
            self.clock(),
            is_usual=False,
            is_in_parts=True,
            size=step.size,
            reading=Reading(packed),
            logprobs=eager.verdict.logprobs if parts is None else None,
        )

    def _size_without_graph(self, wanted: StepSize) -> StepSize:
        """Return what a graph would run, as the arithmetic may depend on the number of rows."""
        return (None if self.graphs is None else self.graphs.size(*wanted)) or wanted

    def _in_parts(self, size: StepSize, num_logprobs: int | None = None) -> StepInParts:
        allowed = self.masks.allowed(size.rows, size.width)
        begin = functools.partial(
            self._parts, size.width, size.tokens, allowed=allowed, num_logprobs=num_logprobs
        )
        return StepInParts(begin, size)

    def _mark(self) -> torch.cuda.Event | None:
        """Record and return an event on the device's stream. Return None on a CPU, which is synchronous."""
        if self.models.device.type != "cuda":
            return None
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    def wait(self) -> None:
        """Wait until the device has done all launched work."""
        if self.models.device.type == "cuda":
            torch.cuda.synchronize(self.models.device)

    def decode(self, width: int, num_tokens: int | None = None, num_logprobs: int | None = None) -> Verdict:
        """Run one decode step of the active rows; see decode_parts."""
        return run_all_parts(self._parts(width, num_tokens, num_logprobs=num_logprobs, rates=self._rates))

    def decode_tree(self, num_nodes: int) -> Verdict:
        """Run one decode step of the active rows with trees of drafts; see decode_tree."""
        drafter = self.models.drafter
        assert isinstance(drafter, DFlashDrafter)
        return decode_tree(
            target=self.models.target,
            drafter=drafter,
            cache=self.cache,
            rows=self.rows,
            size=tree_size(num_nodes, self.plan.block),
        )

    def _parts(
        self,
        width: int,
        num_tokens: int | None = None,
        *,
        allowed: Allowed | None = None,
        num_logprobs: int | None = None,
        rates: Tensor | None = None,
    ) -> Generator[Tensor, None, Verdict]:
        return decode_parts(
            target=self.models.target,
            drafter=self.models.drafter,
            cache=self.cache,
            rows=self.rows,
            width=width,
            num_tokens=num_tokens,
            allowed=allowed,
            num_logprobs=num_logprobs,
            rates=rates,
        )

    def _place_decode(self, batch: Batch, size: StepSize) -> None:
        """Do `_place` for a decode step, whose rows fill `size`."""
        self._place(batch, size.rows, fill(batch.counts, size))

    def _place(self, batch: Batch, num_rows: int | None = None, filled: Filled = EVEN) -> None:
        """Write new sequences and pages to the rows, and activate the batch's rows, padded to `num_rows`."""
        entries: list[tuple[int, int, list[int]]] = []
        exact: list[tuple[int, int, list[int]]] = []
        new = []
        changed = [
            (one, start)
            for one, start in zip(batch.sequences, batch.starts, strict=True)
            if one.num_placed_pages != len(one.pages) or one.num_placed_exact != len(one.exact_pages)
        ]
        for sequence, start in changed:
            assert sequence.row is not None
            if sequence.num_placed_pages is None:
                new.append((sequence.row, sequence.token_ids, start, sequence.sampling))
                sequence.num_placed_pages = 0
            if len(sequence.pages) > sequence.num_placed_pages:
                fresh = sequence.pages[sequence.num_placed_pages :]
                entries.append((sequence.row, sequence.num_placed_pages, fresh))
                sequence.num_placed_pages = len(sequence.pages)
            if len(sequence.exact_pages) > sequence.num_placed_exact:
                fresh = sequence.exact_pages[sequence.num_placed_exact :]
                exact.append((sequence.row, sequence.num_placed_exact, fresh))
                sequence.num_placed_exact = len(sequence.exact_pages)
        self.rows.place_all(new)
        self.rows.set_pages(entries)
        self._place_states(batch)
        if exact:
            self.rows.set_exact_pages(exact)
        row_ids = [s.row for s in batch.sequences if s.row is not None]
        self.rows.activate(row_ids, num_rows, widths=filled.widths, limits=filled.limits)

    def _place_states(self, batch: Batch) -> None:
        """Copy saved states to rows that continue from them, and write where rows save theirs."""
        states, grid = self.scheduler.states, self.plan.state_grid
        if states is None:
            return
        entries = []
        for sequence in batch.sequences:
            assert sequence.row is not None
            if sequence.restored is not None:
                self.cache.restore(sequence.restored.slot, sequence.row)
                states.release(sequence.restored)  # a later step may overwrite it
                sequence.restored = None
            entries += [(sequence.row, at // grid - 1, [slot]) for at, slot in sequence.unplaced_saves]
            sequence.unplaced_saves = []
        if entries:  # the context may be too short for a state to be saved
            self.rows.set_saves(entries)

    def prefill(
        self, token_ids: Tensor, next_ids: Tensor, counts: tuple[int, ...], offsets: Tensor | None = None
    ) -> Tensor:
        return prefill_step(
            target=self.models.target,
            drafter=self.models.drafter,
            cache=self.cache,
            rows=self.rows,
            token_ids=token_ids,
            next_ids=next_ids,
            counts=counts,
            offsets=offsets,
        )

    def _launch_prefill(self, batch: Batch) -> Launched:
        stream, next_ids = _chunks(batch, 0), _chunks(batch, 1)
        wants_logprobs = any(sequence.wants_prompt_logprobs for sequence in batch.sequences)
        if self.prefill_graphs is not None and not wants_logprobs:
            is_usual = self.prefill_graphs.has(len(stream), len(batch.sequences))
            graph = self.prefill_graphs.find(len(stream), len(batch.sequences))
            if graph is not None:
                self._is_disturbed = not is_usual
                self._place(batch, graph.num_rows)
                begun_s = self.clock()
                graph.replay(stream, next_ids, batch.counts)
                return Launched(begun_s, is_usual, end=self._mark(), outcome=Outcome())
        self._is_disturbed = True
        begun_s = self.clock()
        self._place(batch)
        device = self.models.device
        hidden = self.prefill(to_device(stream, device), to_device(next_ids, device), batch.counts)
        outcome = Outcome()
        if wants_logprobs:
            pieces = torch.split(hidden, list(batch.counts))
            rows = zip(batch.sequences, batch.starts, batch.counts, pieces, strict=True)
            outcome = Outcome(logprobs=tuple(self._prompt_logprobs(*row) for row in rows))
        return Launched(begun_s, end=self._mark(), outcome=outcome)

    def _prompt_logprobs(
        self, sequence: Sequence, start: int, count: int, hidden: Tensor
    ) -> tuple[TokenLogprobs, ...]:
        if not sequence.wants_prompt_logprobs:
            return ()
        asked = sequence.request.sampling.prompt_logprobs or 0
        token_ids = sequence.token_ids[start + 1 : start + count + 1]
        next_ids = torch.tensor(token_ids, device=hidden.device)
        found = prompt_logprobs(self.models.target, hidden, next_ids, _num_top([asked]) or 0)
        return _to_host(found, token_ids, asked)

    def _collect(self, batch: Batch, launched: Launched) -> Deltas:
        """Read a step's result and apply it. Nothing else in a step waits for the device."""
        outcome = self._outcome(batch, launched)
        seconds = self._seconds(launched)
        committed = self.scheduler.commit(batch, outcome, seconds, launched.size)
        self.stats.count(batch, committed, self.scheduler.num_plain(batch, launched.size))
        for sequence, _ in committed.ended:
            self.on_end(sequence)
        return committed.deltas

    def _seconds(self, launched: Launched) -> float | None:
        """Return the time of the step just read, or None if it is not representative of other steps.

        The step ran from its launch, or from the end of the step before, until its result arrived.
        """
        now_s, is_disturbed = self.clock(), self._is_disturbed and self.plan.overlap
        seconds = now_s - max(launched.begun_s, self._collected_s)
        self._collected_s, self._is_disturbed = now_s, False
        return None if is_disturbed or not launched.is_usual else seconds

    def _outcome(self, batch: Batch, launched: Launched) -> Outcome:
        if launched.outcome is not None:
            if launched.end is not None:
                launched.end.synchronize()  # else the host would launch every chunk of a long prompt at once
            return launched.outcome
        assert launched.reading is not None
        token_ids = tuple(launched.reading.token_ids()[: len(batch.sequences)])  # the others were scratch
        if batch.tree:
            widths, counts, tried = zip(*launched.reading.chains()[: len(batch.sequences)], strict=True)
            return Outcome(token_ids, chains=tuple(zip(widths, counts, strict=True)), tried=tried)
        if launched.logprobs is None:
            return Outcome(token_ids)
        logprobs = []
        for row, sequence in enumerate(batch.sequences):
            num_top = sequence.request.sampling.logprobs
            part = launched.logprobs
            mine = Logprobs(part.chosen[row], part.top_ids[row], part.top_values[row])
            logprobs.append(() if num_top is None else _to_host(mine, token_ids[row], num_top))
        return Outcome(token_ids, tuple(logprobs))

    def snapshot(self) -> Snapshot:
        """Return all counters. Any thread may call this, also during a step."""
        return self.stats.snapshot(self._load())

    def _load(self) -> Load:
        # Another thread may run a step now: each number is right, but they may belong to different moments.
        scheduler, chosen = self.scheduler, self.scheduler.chosen_step
        return Load(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_pages=scheduler.pages.num_pages,
            num_pages_used=scheduler.pages.num_pages - scheduler.pages.num_free,
            num_preemptions=scheduler.num_preemptions,
            num_refused_full=scheduler.num_refused_full,
            num_refused_wait=scheduler.num_refused_wait,
            expected_wait_s=scheduler.expected_wait_s,
            num_states=0 if scheduler.states is None else scheduler.states.num_slots,
            num_states_saved=0 if scheduler.states is None else scheduler.states.num_saved,
            num_states_evicted=0 if scheduler.states is None else scheduler.states.num_evicted,
            num_pages_restored=self.restored.num_pages,
            num_pages_damaged=self.restored.num_refused,
            chosen_rows=chosen.num_rows,
            chosen_tokens=chosen.num_tokens,
        )

    def check(self) -> None:
        """Assert that pages are neither leaked nor shared wrongly."""
        self._repair()
        running = self.scheduler.running
        self.scheduler.pages.check(sequence.pages for sequence in running)
        if self.scheduler.exact is not None:
            self.scheduler.exact.check(sequence.exact_pages for sequence in running)
        if self.scheduler.states is not None:
            reserved = itertools.chain.from_iterable(one.saves.values() for one in running)
            self.scheduler.states.check(reserved, [one.restored for one in running if one.restored])


def _chunks(batch: Batch, later: int) -> list[int]:
    """Return the tokens of a prefill, or those that are `later` positions behind them."""
    starts = (start + later for start in batch.starts)
    places = zip(batch.sequences, starts, batch.counts, strict=True)
    return [token for one, start, count in places for token in one.token_ids[start : start + count]]


def _guides(batch: Batch) -> list[Guide | None]:
    """Return each row's guide, or None where it restricts nothing now."""
    guides = [sequence.guide for sequence in batch.sequences]
    return [guide if guide is not None and guide.is_binding else None for guide in guides]


def _num_top(asked: Iterable[int | None]) -> int | None:
    """Return how many of the likeliest tokens a step lists: MAX_LOGPROBS if any row requests some.

    0 means only the chosen tokens; None means that no row requests log-probabilities.
    """
    wanted = {count for count in asked if count is not None}
    if not wanted:
        return None
    return MAX_LOGPROBS if any(wanted) else 0


def _to_host(logprobs: Logprobs, token_ids: Items[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    chosen = logprobs.chosen.tolist()
    ids, values = logprobs.top_ids.tolist(), logprobs.top_values.tolist()
    return tuple(
        TokenLogprobs(token, chosen[i], tuple(zip(ids[i][:num_top], values[i][:num_top], strict=True)))
        for i, token in enumerate(token_ids)
    )


def _as_ints(token_ids: Items[int]) -> tuple[int, ...]:
    """Return token ids of any integer type as Python ints. Raise RequestError for other types."""
    try:
        if bool in map(type, token_ids):
            raise TypeError("a boolean")
        return tuple(map(operator.index, token_ids))
    except TypeError as error:
        raise RequestError(f"a prompt must be a list of integer token ids ({error}).") from None
