"""The scheduler alone: no model, a clock that tests set, and outcomes that they write."""

import pickle
from types import SimpleNamespace

import pytest

from blockdraft.cache.rows import RowSampling
from blockdraft.engine.page_allocator import PageAllocator
from blockdraft.engine.request import ANYONE, Request, SamplingParams, Turn
from blockdraft.engine.scheduler import Outcome, Scheduler
from blockdraft.engine.sequence import Sequence
from blockdraft.errors import CapacityError, RequestError

PAGE, BLOCK = 4, 2


class Bench:
    """A scheduler over `num_pages` pages of 4 tokens, and the steps that it chose."""

    def __init__(self, *, num_pages=100, rows=2, queue=10, chunk=8, prefix_cache=False):
        self.now_s = 0.0
        self.pages = PageAllocator(num_pages=num_pages, first=0, page_size=PAGE)
        plan = SimpleNamespace(
            max_num_seqs=rows,
            max_queue=queue,
            max_prefill_tokens=chunk,
            prefix_cache=prefix_cache,
            block=BLOCK,
            width=BLOCK,
            tree=0,
            step_costs={},
        )
        self.scheduler = Scheduler(plan, self.pages, lambda: self.now_s)
        self.num_added = 0

    def add(self, num_prompt, *, first=None, max_tokens=50, width=BLOCK, choices=1, name=None, turn=ANYONE):
        """Queue a request whose prompt begins with the token `first` (None: one of its own)."""
        self.num_added += 1
        name = name or f"r{self.num_added}"
        begin = 100 * self.num_added if first is None else first
        prompt = tuple(range(begin, begin + num_prompt))
        request = Request(name, prompt, SamplingParams(n=choices), arrival_s=self.now_s, turn=turn)
        made = []
        for index in range(choices):
            leader = made[0] if made else None
            length = num_prompt + max_tokens
            made.append(Sequence(request, index, width, RowSampling(), frozenset(), length, None, leader))
        self.scheduler.add(made)
        return made[0] if choices == 1 else made

    def step(self, num_tokens=1):
        """Schedule a step, commit `num_tokens` for each row, and return its batch."""
        batch = self.scheduler.schedule()
        self.commit(batch, num_tokens)
        return batch

    def commit(self, batch, num_tokens=1):
        rows = batch.sequences if batch.kind == "decode" else ()
        deltas = self.scheduler.commit(batch, Outcome(tuple((7,) * num_tokens for _ in rows))).deltas
        self.pages.check(one.pages for one in self.scheduler.running)
        return deltas

    def run_until(self, is_done, limit=200):
        for _ in range(limit):
            if is_done():
                return
            self.step()
        raise AssertionError("it does not come to that")


def order_of(bench, num_tokens=1):
    """Run everything, and return the requests in the order in which they got their rows."""
    order = []
    while bench.scheduler.has_work:
        bench.step(num_tokens)
        bench.now_s += 1.0
        order += [one.request.id for one in bench.scheduler.running if one.request.id not in order]
    return order


def test_one_request_waits_for_one_answer_not_for_all_that_another_client_has_queued():
    bench = Bench(rows=2, queue=30)
    for number in range(20):
        bench.add(4, max_tokens=3, name=f"many{number}", turn=Turn(client=("", "1.2.3.4")))
    bench.step()
    bench.add(4, max_tokens=3, name="one", turn=Turn(client=("", "5.6.7.8")))
    order = order_of(bench)
    assert order[2] == "one"
    order.remove("one")
    assert order == [f"many{number}" for number in range(20)]


def test_keys_take_turns_and_addresses_among_those_of_a_key():
    bench = Bench(rows=1, queue=30)
    for key, address in ("aa", "aa", "ab", "bc", "bc", "bd"):
        bench.add(4, max_tokens=1, name=f"{key}{address}{bench.num_added}", turn=Turn(client=(key, address)))
        bench.now_s += 0.01
    # When the only row gets free, nobody has another: those go first who had theirs longest ago.
    assert order_of(bench) == ["aa0", "bc3", "ab2", "bd5", "aa1", "bc4"]
    bench = Bench(rows=4, queue=30)
    for key, address in (*(["aa"] * 4), "ab", "ab", "bc", "bc"):
        bench.add(4, max_tokens=9, name=f"{key}{address}{bench.num_added}", turn=Turn(client=(key, address)))
        bench.now_s += 0.01
    bench.scheduler.schedule()
    assert [one.request.id for one in bench.scheduler.running] == ["aa0", "bc6", "ab4", "bc7"]


def test_a_lower_priority_number_goes_first_whoever_asks():
    bench = Bench(rows=1, queue=30)
    for name, priority in (("late", 1), ("usual", 0), ("first", -5), ("second", -5)):
        bench.add(4, max_tokens=1, name=name, turn=Turn(priority, client=(name,)))
        bench.now_s += 0.01
    assert order_of(bench) == ["first", "second", "usual", "late"]


def test_the_highest_priority_number_gives_up_its_row_first():
    bench = Bench(num_pages=6, rows=3)
    for name, priority in (("old", 0), ("batch", 3), ("young", 0)):
        bench.add(4, max_tokens=30, name=name, turn=Turn(priority))
    bench.run_until(lambda: bench.scheduler.num_preemptions == 1)
    assert [one.request.id for one in bench.scheduler.waiting] == ["batch"]
    assert [one.request.id for one in bench.scheduler.running] == ["old", "young"]


def test_the_expected_wait_follows_from_how_long_answers_keep_their_rows():
    bench = Bench(rows=2)
    assert bench.scheduler.expected_wait_s == 0
    for _ in range(2):
        bench.add(4, max_tokens=1)
    while bench.scheduler.has_work:
        bench.now_s += 2.0
        bench.step()
    row_s = bench.now_s - 2.0  # both got their rows before the first step
    bench.add(4)
    assert bench.scheduler.expected_wait_s == 0  # a row is free
    for _ in range(4):
        bench.add(4)
    bench.scheduler.schedule()
    # Three wait, and a new request would be the fourth: one of two rows gets free twice in `row_s`.
    assert bench.scheduler.expected_wait_s == 4 * row_s / 2


def test_a_request_that_would_wait_too_long_is_refused_with_the_time_to_come_back():
    bench = Bench(rows=1, queue=10)
    bench.scheduler.check_wait(0.5)  # nothing is known yet
    bench.add(4, max_tokens=1)
    bench.scheduler.schedule()
    bench.now_s += 3.0
    bench.run_until(lambda: not bench.scheduler.has_work)
    for _ in range(3):
        bench.add(4)
    bench.scheduler.schedule()
    wait_s = bench.scheduler.expected_wait_s
    assert wait_s == 9.0
    bench.scheduler.check_wait(9.0)
    with pytest.raises(CapacityError, match=r"about 9 s, with 2 waiting.* longer than 2\.5 s") as caught:
        bench.scheduler.check_wait(2.5)
    assert caught.value.retry_after_s == 7
    assert bench.scheduler.num_refused_wait == 1
    assert pickle.loads(pickle.dumps(caught.value)).retry_after_s == 7  # on its way to the server


def test_a_full_queue_says_when_a_tenth_of_it_has_moved_on():
    bench = Bench(rows=1, queue=3)
    bench.add(4, max_tokens=1)
    bench.scheduler.schedule()
    bench.now_s += 5.0
    bench.run_until(lambda: not bench.scheduler.has_work)
    bench.add(4)
    bench.scheduler.schedule()
    for _ in range(3):
        bench.add(4)
    with pytest.raises(CapacityError) as caught:
        bench.add(4)
    assert caught.value.retry_after_s == 2
    assert bench.scheduler.num_refused_full == 1


def names(batch):
    return [one.request.id for one in batch.sequences]


# ---- order and admission


def test_first_come_first_served_and_a_row_that_is_left_goes_to_the_next():
    bench = Bench(rows=2)
    first, second, third = (bench.add(3, max_tokens=tokens) for tokens in (2, 9, 9))
    assert names(bench.step()) == ["r1", "r2"]
    assert bench.scheduler.running == [first, second]
    bench.run_until(lambda: first.finish_reason == "length")
    bench.step()
    assert bench.scheduler.running == [second, third]


def test_nobody_overtakes_a_request_that_waits_for_pages():
    bench = Bench(num_pages=6, rows=3)
    bench.add(10, max_tokens=4)  # 3 pages
    large, small = bench.add(18), bench.add(2)  # 5 pages, then 1
    bench.step()
    assert bench.scheduler.running[1:] == []
    assert list(bench.scheduler.waiting) == [large, small]
    bench.run_until(lambda: large.row is not None)
    assert bench.scheduler.running[0] is large


def test_a_full_queue_refuses_a_request_and_one_with_too_many_choices():
    bench = Bench(queue=2)
    bench.add(3, choices=2)
    with pytest.raises(CapacityError, match=r"the queue is full \(2 of 2 waiting\)"):
        bench.add(3)
    with pytest.raises(RequestError, match="n = 3 choices, but the queue holds 2"):
        bench.add(3, choices=3)
    assert len(bench.scheduler.waiting) == 2


def test_the_clock_tells_how_long_a_request_waited():
    bench = Bench(rows=1)
    bench.add(3, max_tokens=1)
    second = bench.add(3, max_tokens=1)
    for bench.now_s in (1.0, 2.0, 3.0, 4.0):
        bench.step()
    metrics = second.metrics(bench.now_s)
    assert (metrics.queue_s, metrics.first_token_s, metrics.seconds) == (3.0, 4.0, 4.0)


# ---- prefill in chunks


def test_a_long_prompt_is_read_in_chunks_up_to_its_last_token():
    bench = Bench(chunk=8)
    sequence = bench.add(20)
    batches = [bench.step() for _ in range(4)]
    assert [batch.kind for batch in batches] == ["prefill"] * 3 + ["decode"]
    assert [batch.starts for batch in batches] == [(0,), (8,), (16,), (19,)]
    assert [batch.counts for batch in batches] == [(8,), (8,), (3,), (BLOCK,)]
    assert sequence.token_ids[20:] == [7]


def test_chunks_and_decode_steps_take_turns():
    bench = Bench(chunk=8)
    bench.add(2)
    bench.step()
    bench.add(30)
    assert [bench.step().kind for _ in range(6)] == ["decode", "prefill"] * 3


# ---- decode


def test_rows_of_all_widths_run_together():
    bench = Bench(rows=4)
    sequences = [bench.add(1, width=width) for width in (2, 1, 3)]
    batch = bench.scheduler.schedule()
    assert (batch.counts, names(batch)) == ((2, 1, 3), ["r1", "r2", "r3"])
    assert [sequence.num_in_flight for sequence in sequences] == [2, 1, 3]
    bench.commit(batch, 1)
    assert [sequence.num_in_flight for sequence in sequences] == [0, 0, 0]


def test_a_row_has_pages_for_the_step_in_flight_and_the_next():
    bench = Bench()
    sequence = bench.add(3)
    bench.step()
    first, second = bench.scheduler.schedule(), bench.scheduler.schedule()
    assert (first.starts, second.starts) == ((2,), (2,))  # the host does not know yet
    assert len(sequence.pages) * PAGE >= 2 + 3 * BLOCK
    bench.commit(first, 2)
    bench.commit(second, 1)
    assert (sequence.length, sequence.num_in_flight) == (5, 0)


def test_without_pages_the_youngest_starts_again_later_with_its_tokens():
    bench = Bench(num_pages=6, rows=2)
    old, young, late = bench.add(6), bench.add(6), bench.add(2)
    bench.run_until(lambda: bench.scheduler.num_preemptions)
    assert bench.scheduler.running == [old]
    assert list(bench.scheduler.waiting) == [young, late], "it is the first to come back"
    known = list(young.token_ids)
    assert len(known) > 6, "it had answered something"
    assert (young.length, young.pages, young.tally.preemptions) == (0, [], 1)
    bench.scheduler.abort("r1")
    bench.run_until(lambda: young.num_output > len(known))
    assert young.token_ids[: len(known)] == known


def test_a_preempted_sequence_finds_its_own_pages_again():
    bench = Bench(num_pages=6, prefix_cache=True)
    bench.add(6)
    young = bench.add(6)
    bench.run_until(lambda: bench.scheduler.num_preemptions)
    bench.scheduler.abort("r1")
    batch = bench.step()
    assert names(batch) == ["r2"]
    assert batch.starts[0] >= PAGE
    assert young.tally.num_cached_tokens == 0, "what it computed itself is not counted as cached"


def test_choices_wait_for_the_first_ones_prompt_and_share_its_pages():
    bench = Bench(rows=3, prefix_cache=True)
    leader, other = bench.add(9, choices=2)
    assert names(bench.step()) == ["r1"]
    bench.step()
    bench.step()
    assert other.row is not None
    assert other.pages[:2] == leader.pages[:2]
    assert other.pages[2:] != leader.pages[2:]


# ---- the end


def test_an_abort_frees_row_and_pages_at_once_and_the_step_in_flight_is_not_looked_at():
    bench = Bench(rows=1)
    running, waiting = bench.add(9), bench.add(9)
    bench.step()
    in_flight = bench.scheduler.schedule()
    assert (in_flight.kind, names(in_flight)) == ("decode", ["r1"])
    for name in ("r1", "r2", "unknown"):
        bench.scheduler.abort(name)
    assert bench.pages.num_free == bench.pages.num_pages
    assert bench.scheduler.has_work is False
    assert {running.finish_reason, waiting.finish_reason} == {"abort"}
    assert not bench.commit(in_flight)
    assert running.num_output == 0


def test_after_an_interrupt_rows_end_and_who_waits_is_served():
    bench = Bench(rows=1)
    running, waiting = bench.add(9), bench.add(9)
    bench.step()
    bench.scheduler.begin()
    bench.scheduler.schedule()
    assert bench.scheduler.recover() == [running]
    assert running.finish_reason == "abort"
    assert bench.pages.num_free == bench.pages.num_pages
    bench.step()
    assert bench.scheduler.running == [waiting]


def test_a_page_of_an_answer_is_offered_to_others_in_the_step_that_fills_it():
    bench = Bench(prefix_cache=True)
    sequence = bench.add(6)
    for _ in range(12):
        bench.step()
        assert sequence.num_remembered_pages == sequence.length // PAGE
    assert sequence.num_remembered_pages > 2
