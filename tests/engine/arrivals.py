"""Requests that arrive by chance, served by the real scheduler on a machine that is only a list of costs."""

import itertools
import random
from dataclasses import dataclass, replace

from blockdraft.cache.rows import RowSampling
from blockdraft.engine.chunks import Chunks
from blockdraft.engine.page_allocator import PageAllocator
from blockdraft.engine.request import Request, SamplingParams
from blockdraft.engine.scheduler import Outcome, Scheduler
from blockdraft.engine.sequence import Sequence
from tests import tiny

PAGE_SIZE = 16


@dataclass(frozen=True)
class Costs:
    """About an H200 with an 8B model."""

    token_s: float = 0.035e-3
    least_prefill_s: float = 5e-3
    one_row_s: float = 6e-3
    many_rows_s: float = 16e-3  # of 64

    def of(self, batch):
        if batch.kind == "prefill":
            return max(self.least_prefill_s, self.token_s * sum(batch.counts))
        more = (len(batch.sequences) - 1) / 63
        return self.one_row_s + more * (self.many_rows_s - self.one_row_s)


class Arrivals:
    """A scheduler with steps in flight as on a card: the next is launched before the last one is read."""

    def __init__(
        self,
        costs,
        *,
        chunks=Chunks,
        max_prefill_tokens=8192,
        max_num_seqs=64,
        overlap=True,
        committed=4.5,
        seed=0,
    ):
        self.costs, self.now_s, self.free_s, self.overlap = costs, 0.0, 0.0, overlap
        plan = replace(
            tiny.plan("float64"),
            max_prefill_tokens=max_prefill_tokens,
            max_num_seqs=max_num_seqs,
            page_size=PAGE_SIZE,
            num_pages=1 << 18,
            max_queue=1 << 20,
            prefix_cache=False,
            width=16,
            block=16,
        )
        pages = PageAllocator(num_pages=plan.num_pages, first=0, page_size=PAGE_SIZE)
        self.scheduler = Scheduler(plan, pages, lambda: self.now_s)
        self.scheduler.chunks = chunks(max_prefill_tokens)
        self.again = 1 - 1 / committed  # the chance of one token more
        self.random = random.Random(seed)
        self.pending, self.collected_s, self.num_added = None, 0.0, 0
        self.token_times = {}  # of each request: when each of its steps ended, and how many tokens it had
        self.arrived = {}
        self.batches = []  # with how long they took

    def add(self, num_prompt, num_answer=200, arrival_s=None):
        name, self.num_added = str(self.num_added), self.num_added + 1
        arrival_s = self.now_s if arrival_s is None else arrival_s
        request = Request(name, (1,) * num_prompt, SamplingParams(max_tokens=num_answer), arrival_s)
        self.arrived[name], self.token_times[name] = arrival_s, []
        self.scheduler.add(
            [
                Sequence(
                    request=request,
                    index=0,
                    width=16,
                    sampling=RowSampling(),
                    end_ids=frozenset(),
                    max_length=num_prompt + num_answer,
                    stream=None,
                    leader=None,
                )
            ]
        )
        return name

    def step(self):
        """As Engine.step. False: there was nothing to do."""
        batch, launched = self.scheduler.schedule(), None
        if batch is not None:
            seconds = self.costs.of(batch)
            begun_s, self.free_s = self.now_s, max(self.now_s, self.free_s) + seconds
            launched = batch, begun_s, self.free_s
            self.batches.append((batch, seconds))
        if self.overlap:
            launched, self.pending = self.pending, launched
        if launched is not None:
            self._collect(*launched)
        return batch is not None or launched is not None

    def _collect(self, batch, begun_s, end_s):
        self.now_s = max(self.now_s, end_s)
        seconds, self.collected_s = self.now_s - max(begun_s, self.collected_s), self.now_s
        tokens = () if batch.kind == "prefill" else tuple(self._tokens() for _ in batch.sequences)
        for delta in self.scheduler.commit(batch, Outcome(tokens), seconds).deltas:
            self.token_times[delta.request_id].append((self.now_s, len(delta.token_ids)))

    def _tokens(self):
        count = 1
        while count < 16 and self.random.random() < self.again:
            count += 1
        return (1,) * count

    def serve(self, arrivals):
        """(seconds, prompt tokens, answer tokens) of each request, in order; until all have ended."""
        coming = list(reversed(arrivals))
        while coming or self.scheduler.has_work or self.pending:
            while coming and coming[-1][0] <= self.now_s:
                arrival_s, num_prompt, num_answer = coming.pop()
                self.add(num_prompt, num_answer, arrival_s)
            if not self.step() and coming:
                self.now_s = coming[-1][0]
        return self

    # ---- what came of it

    def first_token_s(self):
        return [times[0][0] - self.arrived[name] for name, times in self.token_times.items()]

    def per_token_s(self):
        """Return each answer's mean, without its first step."""
        found = []
        for times in self.token_times.values():
            tokens = sum(count for _, count in times) - 1
            found.append((times[-1][0] - times[0][0]) / tokens)
        return found

    def gaps_s(self):
        """Between two steps of an answer."""
        each = [[at for at, _ in times] for times in self.token_times.values()]
        return [after - before for times in each for before, after in itertools.pairwise(times)]


def poisson(rate, seconds, *, num_prompt=1000, num_answer=200, seed=1):
    chance, at_s, found = random.Random(seed), 0.0, []
    while (at_s := at_s + chance.expovariate(rate)) < seconds:
        found.append((at_s, num_prompt, num_answer))
    return found


def capacity(costs, *, num_requests=400, max_num_seqs=64, **ways):
    """Requests per second where as many as there are rows are always there; begin and end are left out."""
    run = Arrivals(costs, max_num_seqs=max_num_seqs, **ways)
    run.serve([(0.0, 1000, 200)] * num_requests)
    ends = sorted(times[-1][0] for times in run.token_times.values())
    return (num_requests - 3 * max_num_seqs) / (ends[-max_num_seqs - 1] - ends[2 * max_num_seqs - 1])


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]
