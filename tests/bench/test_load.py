"""Blocks of conversations: how many at a time, when, and what becomes of them when the server dies."""

import asyncio
import os
import signal
import statistics
import time
from itertools import pairwise

import pytest

from blockdraft.bench.client import Client
from blockdraft.bench.fleet import Fleet, measure_headroom, num_processes
from blockdraft.bench.load import poisson, run_in_loop, send_block
from blockdraft.bench.records import NOT_SENT, SPECULATIVE, Ask, OfferedLoad, Prompt
from blockdraft.errors import BenchError
from tests.bench.stub import MODEL, Script, Stub

pytestmark = pytest.mark.usefixtures("quick_blocks")


def asks(num, times=None, turns=("hello",)):
    return [
        Ask(
            prompt=Prompt(id=str(i), category="c", turns=turns),
            arm=SPECULATIVE,
            max_tokens=8,
            at_s=None if times is None else times[i],
        )
        for i in range(num)
    ]


def run(url, asked, load, **options):
    async def work():
        async with Client(url, MODEL, clock=time.perf_counter, timeout_s=20) as client:
            stop = options.pop("stop_after_s", None)
            event = asyncio.Event()
            if stop is not None:
                asyncio.get_running_loop().call_later(stop, event.set)
            return (await send_block(client, asked, load, stop=event, **options)).all_answers()

    return asyncio.run(work())


@pytest.fixture
def stub():
    stub = Stub()
    with stub.running():
        yield stub


def test_a_closed_loop_keeps_so_many_running_and_no_more(stub):
    stub.script = Script(ttft_s=0.1, num_chunks=1)
    answers = run(stub.url, asks(12), OfferedLoad(concurrency=4))
    assert stub.max_running == 4
    assert answers[-1].end_s - answers[0].planned_s == pytest.approx(0.3, abs=0.09)
    assert [answer.ask.prompt.id for answer in answers] == [str(i) for i in range(12)]
    assert all(answer.is_ok for answer in answers)


def test_the_next_begins_the_moment_one_ends(stub):
    stub.script = Script(ttft_s=0.02, num_chunks=1)
    answers = run(stub.url, asks(6), OfferedLoad(concurrency=1))
    waits = [later.sent_s - earlier.end_s for earlier, later in pairwise(answers)]
    assert min(waits) >= 0
    assert statistics.median(waits) < 0.015


def test_results_keep_the_order_of_the_asks_whoever_ends_first(stub):
    stub.script = lambda number, body: Script(ttft_s=0.2 if number == 0 else 0.0)
    seen = []
    answers = run(stub.url, asks(3), OfferedLoad(concurrency=3), on_answer=seen.append)
    assert [answer.ask.prompt.id for answer in answers] == ["0", "1", "2"]
    assert seen[-1].ask.prompt.id == "0"


def test_an_open_loop_sends_at_the_planned_times_whatever_is_running(stub):
    stub.script = Script(ttft_s=0.3, num_chunks=1)
    times = [0.03 * i for i in range(8)]
    answers = run(stub.url, asks(8, times), OfferedLoad(rate=30.0))
    assert stub.max_running == 8
    for answer, at_s in zip(answers, times, strict=True):
        assert answer.planned_s - answers[0].planned_s == pytest.approx(at_s)
        assert 0 <= answer.sent_s - answer.planned_s < 0.1
    assert statistics.median(answer.sent_s - answer.planned_s for answer in answers) < 0.02


def test_all_turns_of_all_conversations_are_there(stub):
    answers = run(stub.url, asks(3, turns=("a", "b")), OfferedLoad(concurrency=2))
    assert [(answer.ask.prompt.id, answer.turn) for answer in answers] == [
        (str(i), turn) for i in range(3) for turn in range(2)
    ]


def test_failures_are_counted_and_stop_nothing(stub):
    stub.script = lambda number, body: Script(status=503, error={}) if number % 3 == 0 else Script()
    answers = run(stub.url, asks(9), OfferedLoad(concurrency=1))
    assert [answer.is_ok for answer in answers] == [False, True, True] * 3


def test_a_server_that_dies_midway_leaves_what_it_answered_and_errors_for_the_rest(stub):
    stub.script = Script(ttft_s=0.02, num_chunks=2)
    done = []

    def on_answer(answer):
        done.append(answer)
        if len(done) == 5:
            stub.die()

    start_s = time.perf_counter()
    answers = run(stub.url, asks(200), OfferedLoad(concurrency=2), on_answer=on_answer)
    assert time.perf_counter() - start_s < 5
    assert len(answers) == len(done) == 200
    assert all(answer.is_ok for answer in answers[:5])
    errors = [answer.error for answer in answers[5:]]
    assert None not in errors[2:]
    refused = [error for error in errors if error and error.startswith("cannot connect")]
    assert 3 <= len(refused) <= 4  # the other stream may have asked as well
    assert errors[-1].startswith(NOT_SENT)
    assert "refused 3 connections in a row" in errors[-1]


def test_an_open_loop_gives_up_on_a_server_that_is_not_there():
    answers = run("http://127.0.0.1:1", asks(50, [0.1 * i for i in range(50)]), OfferedLoad(rate=10.0))
    assert answers[-1].end_s - answers[0].planned_s < 2
    assert len(answers) == 50
    assert sum(not answer.error.startswith(NOT_SENT) for answer in answers) < 10


def test_a_later_block_tries_again(stub):
    async def work():
        async with Client(stub.url, MODEL, clock=time.perf_counter) as client:
            client.num_refused = 3
            return (await send_block(client, asks(2), OfferedLoad())).all_answers()

    assert all(answer.is_ok for answer in asyncio.run(work()))


def test_a_stopped_block_keeps_what_it_has(stub):
    stub.script = lambda number, body: Script(ttft_s=0.0 if number == 0 else 60.0)
    start_s = time.perf_counter()
    answers = run(stub.url, asks(4), OfferedLoad(concurrency=1), stop_after_s=0.5)
    assert time.perf_counter() - start_s < 20
    assert [answer.error for answer in answers] == [
        None,
        "not ended: the run was stopped.",
        *["not sent: the run was stopped."] * 2,
    ]


def test_poisson_arrivals_have_the_rate_and_are_the_same_again():
    times = poisson(4000, 50.0, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.08)  # as of an exponential distribution
    assert times == poisson(4000, 50.0, seed=3) != poisson(4000, 50.0, seed=4)


# ---- several processes


def test_processes_are_few_where_streams_are():
    closed = [num_processes(OfferedLoad(concurrency=streams), 8) for streams in (1, 32, 33, 128, 1000)]
    assert closed == [1, 1, 2, 4, 8]
    assert [num_processes(OfferedLoad(rate=rate), 8) for rate in (0.5, 32.0, 40.5)] == [1, 1, 2]


def run_fleet(*blocks, stop_after_s, on_answer):
    """Send blocks (address, asks, load) by two processes, the last one for a while; then measure headroom."""

    async def work():
        stop, found = asyncio.Event(), []
        async with Fleet([OfferedLoad(concurrency=33)], limit=2) as fleet:
            for url, asked, load in blocks:
                if asked is blocks[-1][1]:
                    asyncio.get_running_loop().call_later(stop_after_s, stop.set)
                async with Client(url, MODEL, timeout_s=20) as client:
                    answers = (await fleet.send_block(client, asked, load, on_answer, stop)).all_answers()
                    found.append((answers, client.num_refused))
            return *found, await measure_headroom(fleet, OfferedLoad(concurrency=33))

    return run_in_loop(work())


def test_two_processes_measure_as_one_does(stub):
    """A closed loop, an open one, a server that is gone, and a block that is stopped."""

    def script(number, body):
        if number < 99 + 80:
            return Script(ttft_s=0.1, num_chunks=3)
        return Script(ttft_s=0.0 if number < 99 + 80 + 5 else 60.0)

    stub.script = script
    load, times = OfferedLoad(concurrency=33), [0.01 * i for i in range(40)]
    seen = []
    start_s = time.monotonic()
    (closed, _), (opened, _), (gone, num_refused), (stopped, _), generator = run_fleet(
        (stub.url, asks(99), load),
        (stub.url, asks(40, times, ("a", "b")), OfferedLoad(rate=40.0)),
        ("http://127.0.0.1:1", asks(200), load),
        (stub.url, asks(50), load),
        stop_after_s=0.6,
        on_answer=seen.append,
    )
    assert [answer.ask.prompt.id for answer in closed] == [str(i) for i in range(99)]
    found = [(answer.text, answer.error, len(answer.gaps_s)) for answer in closed]
    assert found == [("w0 w1 w2 ", None, 2)] * 99
    assert all(start_s < answer.sent_s < answer.first_s < time.monotonic() for answer in closed)
    took_s = max(answer.end_s for answer in closed) - min(answer.sent_s for answer in closed)
    assert took_s < 1.0  # three rounds
    assert stub.max_running <= 33
    turns = [(str(i), turn) for i in range(40) for turn in range(2)]
    assert [(answer.ask.prompt.id, answer.turn) for answer in opened] == turns
    for answer, at_s in zip(opened[::2], times, strict=True):
        assert answer.planned_s - opened[0].planned_s == pytest.approx(at_s)
        assert 0 <= answer.sent_s - answer.planned_s < 0.2
    assert (len(gone), num_refused >= 6) == (200, True)
    assert gone[-1].error == "not sent: 127.0.0.1:1 refused 3 connections in a row."
    errors = [answer.error for answer in stopped]
    assert errors.count(None) == 5
    assert errors.count("not ended: the run was stopped.") == 33
    assert errors.count("not sent: the run was stopped.") == 12
    assert (generator["num_processes"], generator["events_per_s"] > 4000) == (2, True)
    assert sorted(map(id, seen)) == sorted(map(id, [*closed, *opened, *gone, *stopped]))


def test_a_process_that_dies_is_told_and_the_others_end(stub):
    stub.script = Script(ttft_s=60.0)
    children = []

    async def work():
        load = OfferedLoad(concurrency=33)
        async with Fleet([load], limit=2) as fleet, Client(stub.url, MODEL) as client:
            children.extend(worker.process.pid for worker in fleet._workers)
            asyncio.get_running_loop().call_later(0.3, os.kill, children[0], signal.SIGKILL)
            await fleet.send_block(client, asks(66), load)

    with pytest.raises(BenchError, match="a process of the load generator ended with code -9"):
        run_in_loop(work())
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
