"""EngineLoop over the real engine: what comes out, what an abort frees, and what a failure does."""

import asyncio
import contextlib
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from blockdraft.engine.engine import Engine
from blockdraft.engine.loop import EngineLoop, EngineStopped, StepFailed
from blockdraft.engine.request import SamplingParams, new_request_id
from blockdraft.engine.streams import Outlets, Stream
from blockdraft.errors import CapacityError, ModelError, RequestError
from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import load_models
from tests.grammar import json_tokens

PAIR = Path(__file__).parents[1] / "fixtures/pair"
PROMPT = [1, 2, 3]
SHORT = SamplingParams(temperature=0.0, max_tokens=4)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def models():
    settings = Settings(
        model=str(PAIR / "target"),
        draft=str(PAIR / "draft"),
        device="cpu",
        dtype="float64",
        max_num_seqs=4,
        max_queue=4,
    )
    return load_models(settings, lambda _: None)


@pytest.fixture
def engine(models):
    return Engine(*models)


class Streams:
    """The outlet of this module's loops: streams of several event loops."""

    def __init__(self):
        self.outlets, self.streams = Outlets(), {}

    def open(self, loop):
        stream = Stream(new_request_id(), self.outlets.here(), loop.abort)
        self.streams[stream.request_id] = stream
        return stream

    def send(self, deltas):
        mail = defaultdict(list)
        for delta in deltas:
            stream = self.streams[delta.request_id]
            mail[stream.outlet].append((stream, delta))
        for outlet, its_mail in mail.items():
            if not outlet.send(its_mail):
                for stream, _ in its_mail:
                    stream.close()
        return True

    def end(self, request_ids, reason):
        for stream in map(self.streams.get, request_ids):
            stream.outlet.send([(stream, reason)])


STREAMS = Streams()


@pytest.fixture
def loop(engine):
    loop = EngineLoop(lambda startup: engine, STREAMS).wait()
    yield loop
    loop.close()


class Gate:
    """Lets an engine's steps through one permit at a time, and records steps and aborts."""

    def __init__(self, engine, monkeypatch):
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.events = []
        step, abort = engine.step, engine.abort

        def gated_step():
            self.entered.release()
            self.permits.acquire()
            self.events.append("step")
            return step()

        def recorded_abort(request_id):
            self.events.append("abort")
            return abort(request_id)

        monkeypatch.setattr(engine, "step", gated_step)
        monkeypatch.setattr(engine, "abort", recorded_abort)

    async def until_in_step(self):
        assert await asyncio.to_thread(self.entered.acquire, timeout=30)


async def submit(loop, prompt, sampling):
    """Queue a prompt, and return its stream once the engine has it."""
    stream = STREAMS.open(loop)
    try:
        await asyncio.wrap_future(loop.add(prompt, sampling, stream.request_id))
    except asyncio.CancelledError:
        stream.close()
        raise
    return stream


async def collect(loop, sampling=SHORT, prompt=PROMPT):
    with contextlib.closing(await submit(loop, prompt, sampling)) as stream:
        return [delta async for delta in stream]


def ids_of(deltas, index=0):
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def test_an_idle_engine_prepares_what_later_steps_want(engine, monkeypatch):
    """One thing at a time, until there is nothing more, or it fails: that is left to the steps."""
    left, done = [True, True, False], threading.Event()

    def prepare():
        outcome = left.pop(0)
        if not left:
            done.set()
        return outcome

    monkeypatch.setattr(engine, "prepare", prepare)
    loop = EngineLoop(lambda startup: engine, STREAMS).wait()
    assert done.wait(30)
    deltas = asyncio.run(collect(loop))
    assert deltas[-1].finish_reason is not None
    assert left == []
    loop.close()


def test_a_failure_to_prepare_ends_nothing(engine, monkeypatch, caplog):
    failed = threading.Event()

    def prepare():
        assert not failed.is_set(), "it was tried again"
        failed.set()
        raise RuntimeError("no memory for a graph")

    monkeypatch.setattr(engine, "prepare", prepare)
    loop = EngineLoop(lambda startup: engine, STREAMS).wait()
    assert failed.wait(30)
    assert asyncio.run(collect(loop))[-1].finish_reason is not None
    assert loop.error is None
    assert "could not be prepared: no memory for a graph" in caplog.text
    loop.close()


def alone(models, sampling, prompt=PROMPT):
    engine = Engine(*models)
    engine.add(prompt, sampling)
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


@pytest.mark.parametrize("wishes", [{"temperature": 0.0}, {"n": 3, "seed": 5}], ids=str)
def test_a_stream_is_what_the_engine_gives_when_stepped_by_hand(models, loop, wishes):
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, **wishes)
    deltas, expected = asyncio.run(collect(loop, sampling)), alone(models, sampling)
    for index in range(sampling.n):
        mine, theirs = ([d for d in one if d.index == index] for one in (deltas, expected))
        assert [(d.text, d.token_ids) for d in mine] == [(d.text, d.token_ids) for d in theirs]
        assert (mine[-1].finish_reason, mine[-1].metrics.num_tokens) == ("length", 20)


def test_a_step_wakes_the_event_loop_once_for_all_its_deltas(engine, loop, monkeypatch):
    gate = Gate(engine, monkeypatch)

    async def count_wakes():
        tasks = [asyncio.create_task(submit(loop, PROMPT, LONG)) for _ in range(3)]
        await gate.until_in_step()
        gate.permits.release(1)  # the others enter behind the first step
        streams = await asyncio.gather(*tasks)
        event_loop, wakes = asyncio.get_running_loop(), []
        wake = event_loop.call_soon_threadsafe
        name = threading.get_ident()

        def counted(*args, **kwargs):
            if threading.get_ident() != name:
                wakes.append(len(gate.events))
            return wake(*args, **kwargs)

        monkeypatch.setattr(event_loop, "call_soon_threadsafe", counted)
        gate.permits.release(6)
        first = [await anext(stream) for stream in streams]
        assert len({delta.request_id for delta in first}) == 3
        for stream in streams:
            stream.close()
        gate.permits.release(1000)
        return wakes[:3]

    wakes = asyncio.run(count_wakes())
    assert len(set(wakes)) == len(wakes), "two wakes of one step"


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [([], SHORT, RequestError), (PROMPT, SamplingParams(n=5), RequestError)],
)
def test_what_the_engine_refuses_is_raised_at_the_caller(loop, prompt, sampling, error):
    with pytest.raises(error):
        asyncio.run(collect(loop, sampling, prompt))
    assert loop.error is None
    assert len(ids_of(asyncio.run(collect(loop)))) == 4


def test_closing_a_stream_aborts_its_request_within_one_step(engine, loop, monkeypatch):
    gate = Gate(engine, monkeypatch)

    async def leave_early():
        stream = await submit(loop, PROMPT, LONG)
        gate.permits.release(3)
        await anext(stream)
        for _ in range(4):
            await gate.until_in_step()  # the fourth step waits for its permit
        num_steps = len(gate.events)
        stream.close()
        gate.permits.release(1000)
        await collect(loop)
        return gate.events[num_steps:]

    events = asyncio.run(leave_early())
    assert events[:2] == ["step", "abort"]
    assert not engine.has_work
    engine.check()


def test_a_submission_cancelled_before_the_engine_sees_it_never_runs(engine, loop, monkeypatch):
    gate = Gate(engine, monkeypatch)

    async def cancel_second():
        first = await submit(loop, PROMPT, SHORT)
        await gate.until_in_step()
        second = asyncio.create_task(submit(loop, PROMPT, LONG))
        await asyncio.sleep(0)  # lets the task start; the engine is inside its step
        second.cancel()
        gate.permits.release(1000)
        with pytest.raises(asyncio.CancelledError):
            await second
        return [delta async for delta in first]

    assert len(ids_of(asyncio.run(cancel_second()))) == 4
    assert not engine.has_work
    assert loop.error is None


def test_a_submission_cancelled_while_the_engine_takes_it_is_aborted(engine, loop, monkeypatch):
    entered, cancelled, add = threading.Event(), threading.Event(), engine.add

    def slow_add(*args, **more):
        entered.set()
        assert cancelled.wait(30)
        return add(*args, **more)

    async def cancel_inside():
        task = asyncio.create_task(submit(loop, PROMPT, LONG))
        assert await asyncio.to_thread(entered.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()
        await collect(loop)

    monkeypatch.setattr(engine, "add", slow_add)
    asyncio.run(cancel_inside())
    assert not engine.has_work
    engine.check()


def test_an_abort_from_elsewhere_ends_the_stream_with_its_reason(loop):
    async def abort_after_first():
        stream = await submit(loop, PROMPT, LONG)
        first = await anext(stream)
        loop.abort(stream.request_id)
        return [first] + [delta async for delta in stream]

    deltas = asyncio.run(abort_after_first())
    assert deltas[-1].finish_reason == "abort"
    assert len(ids_of(deltas)) < 400


def test_a_consumer_whose_event_loop_ended_does_not_hold_its_row(engine, loop):
    async def leave_without_a_word():
        await anext(await submit(loop, PROMPT, LONG))

    asyncio.run(leave_without_a_word())
    asyncio.run(collect(loop))
    assert not engine.has_work
    engine.check()


class Failing:
    """Lets the commits of an engine fail while `is_broken`."""

    def __init__(self, engine, monkeypatch):
        self.is_broken = True
        commit = engine.scheduler.commit
        monkeypatch.setattr(
            engine.scheduler, "commit", lambda *args: 1 / 0 if self.is_broken else commit(*args)
        )


def test_the_third_failing_step_in_a_row_is_the_last(engine, loop, monkeypatch, caplog):
    failing = Failing(engine, monkeypatch)

    async def fail(advice):
        with pytest.raises(EngineStopped, match=advice):
            await collect(loop)

    for _ in range(3):  # what succeeds in between starts the count again
        failing.is_broken = True
        asyncio.run(fail("ask again"))
        asyncio.run(fail("ask again"))
        assert loop.error is None
        failing.is_broken = False
        assert len(ids_of(asyncio.run(collect(loop)))) == 4
    failing.is_broken = True
    asyncio.run(fail("ask again"))
    asyncio.run(fail("ask again"))
    asyncio.run(fail("restart the server"))
    assert loop.error == "ZeroDivisionError: division by zero"
    assert loop.startup.snapshot()["state"] == "failed"
    asyncio.run(fail("has failed"))
    assert "ZeroDivisionError" in caplog.text


def test_a_failing_step_ends_those_on_a_row_and_serves_those_that_wait(models, engine, loop, monkeypatch):
    gate, failing = Gate(engine, monkeypatch), Failing(engine, monkeypatch)
    expected = ids_of(alone(models, SHORT))

    async def fail_the_first():
        touched = [await submit(loop, PROMPT, LONG)]
        await gate.until_in_step()  # it has been queued; the engine waits for its permit
        adding = [asyncio.create_task(submit(loop, PROMPT, s)) for s in (LONG, LONG, LONG, SHORT)]
        await asyncio.sleep(0)
        failing.is_broken = False
        gate.permits.release(1)
        touched += [await task for task in adding[:3]]
        waiting = await adding[3]  # four rows are taken
        await gate.until_in_step()
        failing.is_broken = True
        gate.permits.release(1)
        for stream in touched:
            with pytest.raises(StepFailed):
                [delta async for delta in stream]
        failing.is_broken = False
        gate.permits.release(1000)
        return [delta async for delta in waiting]

    try:
        assert ids_of(asyncio.run(fail_the_first())) == expected
    finally:
        gate.permits.release(1000)  # or the engine's thread would not end
    assert loop.error is None
    assert engine.snapshot().finished == {"error": 4, "length": 1}
    assert not loop._live
    engine.check()


def test_a_request_of_which_one_choice_has_a_row_ends_whole(models, monkeypatch):
    engine = Engine(models[0], replace(models[1], max_num_seqs=1))
    engine.add(PROMPT, SamplingParams(n=3, seed=1, max_tokens=4), "touched")
    engine.add(PROMPT, SHORT, "waiting")
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.live_ids == {"waiting"}
    engine.check()
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert ids_of(deltas) == ids_of(alone(models, SHORT))
    assert engine.snapshot().finished == {"error": 3, "length": 1}


def test_a_failed_page_check_ends_the_engine_at_once(engine, loop, monkeypatch):
    Failing(engine, monkeypatch)
    monkeypatch.setattr(engine, "check", lambda: 1 / 0)
    with pytest.raises(EngineStopped, match="restart"):
        asyncio.run(collect(loop))
    assert loop.error is not None


def test_a_start_that_fails_is_answered_with_its_reason():
    release = threading.Event()

    def make(startup):
        with startup.phase("load"):
            assert release.wait(30)
            raise ModelError("no such weights.")

    loop = EngineLoop(make, STREAMS)
    assert (loop.engine_info, loop.snapshot()) == (None, None)
    release.set()
    loop.wait()
    assert loop.error == "no such weights."
    with pytest.raises(EngineStopped, match="failed"):
        asyncio.run(collect(loop))
    loop.close()


def test_an_unexpected_error_in_add_is_its_callers_alone(engine, loop, monkeypatch):
    monkeypatch.setattr(engine, "add", lambda *_, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(collect(loop))
    monkeypatch.undo()
    assert loop.error is None
    assert len(ids_of(asyncio.run(collect(loop)))) == 4


def test_close_ends_live_requests_and_leaves_the_engine_clean(engine):
    loop = EngineLoop(lambda startup: engine, STREAMS).wait()

    async def close_while_running():
        stream = await submit(loop, PROMPT, LONG)
        await anext(stream)
        loop.close()
        with pytest.raises(EngineStopped):
            [delta async for delta in stream]
        with pytest.raises(EngineStopped):
            await submit(loop, PROMPT, SHORT)

    asyncio.run(close_while_running())
    assert not engine.has_work
    engine.check()


def test_without_work_the_thread_sleeps(models):
    class Counting(Engine):
        num_looks = 0

        @property
        def has_work(self):
            self.num_looks += 1
            return super().has_work

    engine = Counting(*models)
    loop = EngineLoop(lambda startup: engine, STREAMS).wait()
    asyncio.run(collect(loop))
    loop._thread.join(timeout=0.05)  # let it reach its queue
    before = engine.num_looks
    loop._thread.join(timeout=0.05)
    assert engine.num_looks == before
    loop.close()


TRUE = SamplingParams(structured_outputs=StructuredOutputs(choice=["true"]))


def test_an_output_is_compiled_while_the_engine_goes_on(models, monkeypatch):
    """Beside its thread; an invalid one is raised at the caller, and who gives up meanwhile is forgotten."""
    engine = Engine(replace(models[0], tokenizer=json_tokens.tokenizer()), models[1])
    loop, may_compile, guide_of = (
        EngineLoop(lambda startup: engine, STREAMS).wait(),
        threading.Event(),
        engine.guide_of,
    )

    def slow(sampling):
        if sampling.structured_outputs is not None:
            may_compile.wait()
        return guide_of(sampling)

    monkeypatch.setattr(engine, "guide_of", slow)

    async def run():
        bound = asyncio.ensure_future(collect(loop, TRUE))
        refused = asyncio.ensure_future(
            collect(loop, replace(TRUE, structured_outputs=StructuredOutputs(regex="(")))
        )
        assert len(await collect(loop)) > 0  # nobody waits for them
        given_up = asyncio.ensure_future(submit(loop, PROMPT, TRUE))
        await asyncio.sleep(0)
        given_up.cancel()
        may_compile.set()
        deltas = await bound
        assert "".join(delta.text for delta in deltas) == "true"
        with pytest.raises(RequestError, match="unclosed"):
            await refused
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert not loop._live

    asyncio.run(run())
    loop.close()


def test_a_request_that_would_wait_too_long_is_refused_before_it_waits(engine):
    engine.scheduler._wait.learn(100.0)  # seconds that an answer keeps its row
    loop = EngineLoop(lambda startup: engine, STREAMS, max_wait_s=20.0).wait()

    async def crowd():
        rows = [await submit(loop, PROMPT, LONG) for _ in range(4)]
        async for _ in rows[-1]:
            break  # all rows are taken
        with pytest.raises(CapacityError, match="about 25 s") as refused:
            await submit(loop, PROMPT, LONG)
        for stream in rows:
            stream.close()
        return refused.value.retry_after_s

    try:
        assert asyncio.run(crowd()) == 5
    finally:
        loop.close()
