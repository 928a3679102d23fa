"""An engine in a process of its own answers as one in this process does, and its end is heard of."""

import asyncio
import contextlib
import ctypes
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import Pipe

import pytest

from blockdraft.engine.describe import engine_info
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import Deltas, SamplingParams
from blockdraft.engine.streams import EngineStopped
from blockdraft.errors import CapacityError, ModelError, RequestError
from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.phases import StartProgress, StartState
from blockdraft.server.app import make_app
from blockdraft.server.engine_link import outbox
from blockdraft.server.engine_link import remote_engine as remote_engine_module
from blockdraft.server.engine_link.outbox import Inbox
from blockdraft.server.engine_link.replica import ReplicaPlace
from blockdraft.server.engine_link.replicas import Replicas, start_replicas
from blockdraft.server.options import ServerOptions
from tests.grammar import json_tokens
from tests.server.asking import connected
from tests.server.pair import models, plan
from tests.server.remote import PATIENCE_S, remote_engine

PROMPT = [1, 2, 3]
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def engine():
    return Engine(models(), plan())


@pytest.fixture
def remote(engine):
    with remote_engine(lambda startup: engine) as remote:
        yield remote


async def collect(loop, sampling, prompt=PROMPT):
    with contextlib.closing(await loop.submit(prompt, sampling)) as stream:
        return [delta async for delta in stream]


def bare(deltas):
    """Without what a clock has written."""
    return [
        (d.index, d.text, d.token_ids, d.logprobs, d.prompt_logprobs, d.finish_reason, d.stop_reason)
        for d in deltas
    ]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, max_tokens=12),
        SamplingParams(temperature=1.0, seed=3, max_tokens=9, n=3),
        SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=30, stop=" t7"),
    ],
    ids=["plain", "choices", "logprobs", "stop"],
)
def test_it_answers_as_an_engine_in_this_process_does(remote, sampling):
    engine, expected = Engine(models(), plan()), []
    engine.add(PROMPT, sampling)
    while engine.has_work:
        expected += engine.step()
    found = asyncio.run(collect(remote, sampling))
    assert sorted(bare(found), key=repr) == sorted(bare(expected), key=repr)
    assert sum(d.metrics is not None for d in found) == sampling.n
    assert remote.num_live == 0


def test_what_is_wrong_with_a_request_arrives_with_its_field(remote):
    with pytest.raises(RequestError) as raised:
        asyncio.run(collect(remote, LONG, [10**6]))
    assert raised.value.field == "prompt"
    with pytest.raises(RequestError) as raised:
        asyncio.run(collect(remote, LONG, [1] * 600))
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(CapacityError, match="queue is full"):
        asyncio.run(many(remote, 40))
    assert remote.num_live == 0


async def many(remote, count):
    asked = [asyncio.ensure_future(collect(remote, LONG)) for _ in range(count)]
    try:
        await asyncio.gather(*asked)
    finally:
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        while remote.num_live:
            await asyncio.sleep(0.01)


def test_counters_and_what_runs_are_known(remote, engine):
    asyncio.run(collect(remote, SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)))
    assert asyncio.run(remote.snapshot()).generation_tokens == engine.snapshot().generation_tokens == 7
    assert remote.engine_info.max_model_len == 512
    assert remote.tokenizer.encode("t1 t2") == engine.models.tokenizer.encode("t1 t2")
    assert remote.startup.state == "ready"


def test_a_closed_stream_ends_its_request(remote, engine):
    async def begin_and_close():
        stream = await remote.submit(PROMPT, LONG)
        await anext(stream)
        stream.close()
        while remote.num_live:
            await asyncio.sleep(0.01)

    asyncio.run(begin_and_close())
    assert asyncio.run(remote.snapshot()).num_running == 0


def test_an_abort_while_a_form_is_compiled_ends_the_stream(monkeypatch):
    engine, may_compile = (
        Engine(replace(models(), tokenizer=json_tokens.tokenizer()), plan()),
        threading.Event(),
    )
    guide_of = engine.guide_of

    def slow(sampling):
        may_compile.wait(30)
        return guide_of(sampling)

    async def begin_and_abort(remote, num_choices):
        form = StructuredOutputs(choice=["true"])
        stream = await remote.submit(PROMPT, SamplingParams(structured_outputs=form, n=num_choices))
        remote.abort(stream.request_id)
        async with asyncio.timeout(10):
            return [delta.finish_reason async for delta in stream]

    with remote_engine(lambda startup: engine) as remote:
        monkeypatch.setattr(engine, "guide_of", slow)
        assert asyncio.run(begin_and_abort(remote, 2)) == ["abort"] * 2
        assert remote.num_live == 0
        may_compile.set()


@pytest.mark.parametrize("how", ["close", "kill"])
def test_an_end_is_heard_of_by_those_who_wait(engine, how):
    with remote_engine(lambda startup: engine) as remote:

        async def begin_and_end():
            stream = await remote.submit(PROMPT, LONG)
            await anext(stream)
            await asyncio.to_thread(getattr(remote, how))
            with pytest.raises(EngineStopped):
                async for _ in stream:
                    pass
            with pytest.raises(EngineStopped):
                await remote.submit(PROMPT, LONG)

        asyncio.run(begin_and_end())
        remote.close()
        assert remote.is_closed
        assert (remote.error is None) == (how == "close")
        assert remote.startup.state == ("ready" if how == "close" else "failed")
        assert "killed" in (remote.error or "killed")


def test_an_engine_that_writes_its_prefixes_is_not_taken_for_a_stuck_one(engine, monkeypatch):
    watched = []
    with remote_engine(lambda startup: engine) as remote:
        silence = remote.engines[0]._silence
        monkeypatch.setattr(engine, "prefix_disk", object())
        monkeypatch.setattr(engine, "keep_prefixes", lambda: watched.append(not silence._stop.is_set()))
        remote.close()
    assert watched == [False]


def test_a_start_that_fails_says_why():
    def fail(startup):
        with startup.phase("load"):
            raise ModelError("no such weights.")

    with remote_engine(fail) as remote:
        assert remote.error == "no such weights."
        assert remote.startup.snapshot()["phases"][1]["state"] == "failed"
        with pytest.raises(EngineStopped):
            asyncio.run(remote.submit(PROMPT, LONG))


def test_a_step_that_does_not_come_back_is_told(engine, monkeypatch):
    hung, release = threading.Event(), threading.Event()
    monkeypatch.setattr(engine, "step", lambda: release.wait(30) and Deltas())
    with remote_engine(lambda startup: engine, lambda remote: hung.set(), step_timeout_s=0.05) as remote:

        async def ask():
            asked = asyncio.ensure_future(collect(remote, LONG))
            assert await asyncio.to_thread(hung.wait, 30)
            assert remote.is_hanging
            asked.cancel()

        asyncio.run(ask())
        release.set()


def test_who_stops_waiting_for_the_counters_does_no_harm(remote, engine, monkeypatch):
    """A page that is closed, a scrape that is given up: the answer comes, and nobody wants it."""
    snapshot, release = engine.snapshot, threading.Event()
    monkeypatch.setattr(engine, "snapshot", lambda: release.wait(30) and snapshot())

    async def ask_and_leave():
        asked = asyncio.ensure_future(remote.snapshot())
        await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(ask_and_leave())
    release.set()
    assert asyncio.run(remote.snapshot()) is not None
    assert remote.error is None


def test_an_error_that_cannot_travel_is_told_in_words(remote, engine, monkeypatch):
    class Odd(Exception):
        def __init__(self, *, what):
            super().__init__(what)

    def fail(*_, **more):
        raise Odd(what="a bug of ours")

    monkeypatch.setattr(engine, "add", fail)
    with pytest.raises(RuntimeError, match="Odd: a bug of ours"):
        asyncio.run(collect(remote, LONG))
    monkeypatch.undo()
    assert asyncio.run(collect(remote, SamplingParams(temperature=0.0, max_tokens=2)))


# ---- an engine that does not read, or is stuck


class Unread:
    """A process that never reads what it is sent."""

    exitcode = -9
    pid = None

    def __init__(self, connection):
        self._connection = connection

    def kill(self):
        self._connection.close()

    def join(self):
        pass

    def close(self):
        pass


@contextlib.contextmanager
def unread_engine():
    """An engine that says it is ready, and then reads nothing until the test asks its connection."""
    ours, theirs = Pipe()
    place, child = ReplicaPlace("cpu", None), (ours, Unread(theirs))
    remote = Replicas([place], {0: child}, StartProgress(), lambda _: None, step_timeout_s=PATIENCE_S)
    theirs.send(("start", StartState({}, "ready")))
    while remote.startup.state != "ready":
        time.sleep(0.001)
    try:
        yield remote, theirs
    finally:
        remote.kill()
        remote.close()


def test_the_event_loop_never_waits_for_an_engine_that_does_not_read():
    async def ask_all(remote):
        slowest_s, streams = 0.0, []
        for _ in range(60):
            start_s = time.perf_counter()
            streams.append(await remote.submit([1_000_000] * 8000, LONG))
            remote.abort(streams[-1].request_id)
            await asyncio.sleep(0)
            slowest_s = max(slowest_s, time.perf_counter() - start_s)
        return streams, slowest_s

    with unread_engine() as (remote, theirs):
        streams, slowest_s = asyncio.run(ask_all(remote))
        assert slowest_s < 10  # nobody reads meanwhile: to wait would be to wait for ever
        heard = [theirs.recv()[:2] for _ in range(2 * len(streams))]  # all of it, in order
        assert heard == [(kind, stream.request_id) for stream in streams for kind in ("add", "abort")]


def test_requests_of_one_turn_of_the_event_loop_are_written_together(monkeypatch):
    async def ask(remote, theirs):
        for _ in range(5):
            await remote.submit(PROMPT, LONG)
        is_early = theirs.poll()
        await asyncio.sleep(0)  # a turn
        return is_early

    with unread_engine() as (remote, theirs):
        monkeypatch.setattr(outbox, "MAX_HOLD_S", PATIENCE_S)
        assert not asyncio.run(ask(remote, theirs))
        inbox = Inbox(theirs)
        assert inbox.recv()[0] == "add"
        assert not theirs.poll(), "one read has taken all five"
        assert [inbox.recv()[0] for _ in range(4)] == ["add"] * 4
        monkeypatch.setattr(outbox, "MAX_HOLD_S", -1.0)
        assert asyncio.run(ask(remote, theirs)), "in a long turn nobody waits"


def test_live_is_answered_while_the_engine_does_not_read(engine):
    body = {"prompt": [[1, 2] * 1500] * 4, "max_tokens": 1}

    async def ask_all(remote):
        app = make_app(remote, name="m", options=ServerOptions())
        async with connected(app) as client:
            asked = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(15)]
            while remote.num_live < 60:
                await asyncio.sleep(0.005)
            start_s = time.perf_counter()
            assert (await client.get("/live")).status_code == 200
            seconds = time.perf_counter() - start_s
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return seconds

    with unread_engine() as (remote, _):
        remote.tokenizer = engine.models.tokenizer
        remote.engine_info = replace(engine_info(engine), max_model_len=9000)
        assert asyncio.run(ask_all(remote)) < 10


def test_requests_past_the_limit_of_bytes_are_told_to_come_back(monkeypatch):
    async def ask(remote):
        await remote.submit([1_000_000] * 8000, LONG)
        with pytest.raises(CapacityError, match="try again later"):
            await remote.submit([1_000_000] * 8000, LONG)

    monkeypatch.setattr(remote_engine_module, "MAX_LIVE_BYTES", 60_000)
    with unread_engine() as (remote, _):
        asyncio.run(ask(remote))
        assert remote.num_live == 1


def test_what_has_ended_no_longer_counts(remote):
    for _ in range(3):
        asyncio.run(collect(remote, SamplingParams(temperature=0.0, max_tokens=2)))
    with pytest.raises(RequestError):
        asyncio.run(collect(remote, LONG, [10**6]))
    assert remote.engines[0]._num_live_bytes == remote.engines[0].work == 0


def test_counters_are_not_asked_of_an_engine_that_does_not_read():
    async def ask(remote):
        await remote.submit([1_000_000] * 200_000, LONG)
        for _ in range(3):
            assert await asyncio.wait_for(remote.snapshot(), 0.5) is None

    with unread_engine() as (remote, theirs):
        theirs.send(("info", None))
        asyncio.run(ask(remote))


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(remote):
    deep = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(RequestError, match="nests deeper"):
        asyncio.run(collect(remote, SamplingParams(structured_outputs=StructuredOutputs(json=deep))))
    assert remote.num_live == 0
    assert asyncio.run(collect(remote, SamplingParams(temperature=0.0, max_tokens=2)))


def hold_the_lock(_, connection):
    """An engine's process whose interpreter is stuck in a call that never gives its lock away."""
    connection.send(("info", None))
    ctypes.PyDLL(None).sleep(60)


@pytest.mark.skipif(sys.platform != "linux", reason="the process is forked")
def test_an_interpreter_that_is_stuck_is_seen_from_outside(monkeypatch):
    monkeypatch.setattr(remote_engine_module, "MIN_SILENCE_S", 0.2)
    hung = threading.Event()
    place = ReplicaPlace("cpu", hold_the_lock)
    remote = start_replicas([place], StartProgress(), lambda _: hung.set(), step_timeout_s=0.2)
    try:
        assert hung.wait(10)
        assert remote.is_silent
        assert remote.is_hanging
    finally:
        remote.kill()
        remote.close()


def test_an_idle_engine_is_heard_of(monkeypatch):
    monkeypatch.setattr(remote_engine_module, "MIN_SILENCE_S", 0.4)
    hung = threading.Event()
    with remote_engine(
        lambda startup: Engine(models(), plan()), lambda _: hung.set(), step_timeout_s=0.4
    ) as idle:
        assert not hung.wait(1.0)
        assert not idle.is_silent
