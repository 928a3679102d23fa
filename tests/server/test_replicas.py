"""Several engines behind one door: who gets a request, and what happens when one of them dies."""

import asyncio
import contextlib
import functools
import gc
import re
import time
import weakref
from dataclasses import dataclass, field, replace

import pytest

from blockdraft.engine.describe import engine_info
from blockdraft.engine.engine import Engine
from blockdraft.engine.info import Fingerprint
from blockdraft.engine.request import ANYONE, Delta, Deltas, Metrics, SamplingParams, TokenLogprobs
from blockdraft.engine.streams import EngineStopped, EventLoopOutlet, Stream
from blockdraft.errors import ModelError
from blockdraft.grammar.structured_output import StructuredOutputs
from blockdraft.server.app import make_app
from blockdraft.server.engine_link import live_request as live_request_module
from blockdraft.server.engine_link import replicas as replicas_module
from blockdraft.server.engine_link.live_request import LiveRequest
from blockdraft.server.engine_link.outbox import packed
from blockdraft.server.engine_link.prompt_pages import SeenPages, page_hashes, tree_hashes
from blockdraft.server.engine_link.replica import Neighbours, difference
from blockdraft.server.options import ServerOptions
from tests.grammar import json_tokens
from tests.server.asking import ask
from tests.server.pair import models, plan
from tests.server.remote import remote_engine, remote_engines

FINGERPRINT = Fingerprint.of({"device": "a"})
PAGE = 16


def made(step_s=0.0, fingerprint=FINGERPRINT, models=models, **changes):
    """What makes an engine; a step takes `step_s` longer."""

    def make(startup):
        engine = Engine(models(), replace(plan(), **{"max_queue": 64, **changes}))
        engine.fingerprint = fingerprint
        step = engine.step

        def slow():
            time.sleep(step_s)
            return step()

        engine.step = slow
        return engine

    return make


@dataclass
class Answer:
    """All of one choice, however it was cut into deltas."""

    text: str = ""
    token_ids: tuple = ()
    logprobs: tuple = ()
    prompt_logprobs: tuple = ()
    ends: list = field(default_factory=list)
    seeds: list = field(default_factory=list)


async def collect(remote, prompt, sampling, on_delta=lambda: None, on_end=lambda _: None):
    answers = [Answer() for _ in range(sampling.n)]
    with contextlib.closing(await remote.submit(prompt, sampling)) as stream:
        async for delta in stream:
            one = answers[delta.index]
            one.text += delta.text
            one.token_ids += delta.token_ids
            one.logprobs += delta.logprobs
            one.prompt_logprobs += delta.prompt_logprobs or ()
            if delta.finish_reason is not None:
                one.ends.append((delta.finish_reason, delta.stop_reason))
                one.seeds.append(delta.metrics.seed)
                on_end(delta.index)
                assert delta.metrics.num_tokens == len(one.token_ids)
                assert 0 <= delta.metrics.queue_s <= delta.metrics.first_token_s <= delta.metrics.seconds
            on_delta()
    return answers


def requests():
    """Every kind of request whose answer can be cut in the middle; most have no seed of their own."""
    long = {"max_tokens": 60, "ignore_eos": True}
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "n": 3},
        {"temperature": 1.0, "n": 2, "logprobs": 2, "seed": 7},
        {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
        {"temperature": 0.8, "presence_penalty": 1.0, "width": 1},
        {"temperature": 1.0, "stop": [" t7 t8", "t99"]},
        {"temperature": 0.9, "top_k": 5, "include_stop_str_in_output": True, "stop": "t9 t1"},
    ]
    return [
        ([1 + (number + i) % 50 for i in range(3 + 9 * number)], SamplingParams(**long, **kind))
        for number, kind in enumerate(kinds)
    ]


async def answer_all(remote, asked, kill=None, after=20):
    """All answers; `kill` is called once, when so many deltas have come."""
    num_deltas = 0

    def count():
        nonlocal num_deltas
        num_deltas += 1
        if num_deltas == after and kill is not None:
            kill()

    return await asyncio.gather(*(collect(remote, prompt, one, count) for prompt, one in asked))


def undisturbed(asked, models=models):
    with remote_engine(made(models=models)) as alone:
        return asyncio.run(answer_all(alone, asked))


@functools.cache
def expected_answers():
    """Those to `requests()`, which several tests disturb."""
    return undisturbed(requests())


def wait_until(condition, patience_s=30):
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.005)


def states(remote):
    return [one["state"] for one in remote.status()]


# ---- deaths


@pytest.mark.parametrize(("after", "victim"), [(1, 0), (90, 1)])
def test_answers_of_a_replica_that_dies_go_on_as_if_nothing_had_happened(after, victim):
    asked, expected = requests(), expected_answers()
    with remote_engines(made(0.003), made(0.003)) as remote:
        dying = remote.engines[victim]
        found = asyncio.run(answer_all(remote, asked, dying.kill, after))
        assert remote.num_repeated > 0
        assert [one for pair in found for one in pair] == [one for pair in expected for one in pair]
        assert remote.num_live == 0
        wait_until(lambda: states(remote) == ["ready", "ready"])
        assert [one["restarts"] for one in remote.status()] == [1 - victim, victim]
        assert "killed" in remote.status()[victim]["error"]
        # The new one serves, too, and so does the door, whose state was never in doubt.
        again = asyncio.run(answer_all(remote, asked))
        assert [len(one.token_ids) for one in again[0]] == [60]
        assert dying not in remote.engines
        assert remote.error is None


def test_answers_survive_the_death_of_every_replica_in_turn_and_of_all_at_once():
    asked = requests() * 2
    expected = undisturbed(asked)

    async def kill_often(remote, done):
        num_killed = 0
        while not done.is_set() and num_killed < 5:
            await asyncio.sleep(0.1)
            ready = [engine for engine in remote.engines if engine.is_ready and engine.num_live]
            for engine in ready if num_killed == 2 else ready[:1]:
                engine.kill()
                num_killed += 1
        return num_killed

    async def run(remote):
        done = asyncio.Event()
        killing = asyncio.ensure_future(kill_often(remote, done))
        found = await answer_all(remote, asked)
        done.set()
        return found, await killing

    with remote_engines(made(0.01), made(0.01), made(0.01)) as remote:
        found, num_killed = asyncio.run(run(remote))
        assert num_killed >= 4
        assert found == expected
        assert remote.num_live == 0


def test_choices_that_had_ended_before_are_not_sent_again():
    """The engine computes them once more, and the request is over when the others are."""
    several = SamplingParams(n=6, temperature=3.0, max_tokens=60, stop=[" t9", " t1", "t20"], ignore_eos=True)
    asked = [([1, 2, 3], replace(several, seed=seed)) for seed in range(3)]
    expected = undisturbed(asked)
    assert len({len(choice.token_ids) for one in expected for choice in one}) > 4

    async def run(remote):
        all_asked = [asyncio.ensure_future(collect(remote, *one, on_end=ended.append)) for one in asked]
        while len(ended) < 6:
            await asyncio.sleep(0.001)
        for engine in remote.engines:
            engine.kill()
        found = await asyncio.wait_for(asyncio.gather(*all_asked), 30)
        while any(one is None or one.num_running for one in await remote.snapshots()):
            await asyncio.sleep(0.01)
        return found

    ended = []
    with remote_engines(made(0.005), made(0.005)) as remote:
        assert asyncio.run(run(remote)) == expected
        assert remote.num_repeated >= 2


def live_request(num_choices=1):
    """A request whose deltas are taken by hand."""
    stream = Stream("r", EventLoopOutlet(None), lambda _: None)
    return LiveRequest(stream, b"", num_choices=num_choices, num_prompt=3)


def delta(token_ids, index=0, **fields):
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in token_ids)
    text = "".join(f" t{token}" for token in token_ids)
    return Delta("r", index, text, tuple(token_ids), logprobs, **fields)


def test_a_repeat_is_cut_where_the_client_is():
    live = live_request()
    assert live.take(delta([4, 5, 6], prompt_logprobs=(None,))).prompt_logprobs == (None,)
    for _ in range(2):
        live.begin_repeat()
        assert live.take(delta([4, 5], prompt_logprobs=(None,))) is None
    rest = live.take(delta([6, 7, 8], prompt_logprobs=(None,)))
    assert (rest.text, rest.token_ids, rest.prompt_logprobs) == (" t7 t8", (7, 8), None)
    assert [one.token_id for one in rest.logprobs] == [7, 8]
    end = live.take(delta([], finish_reason="length"))
    assert (end.text, end.ends_request) == ("", True)
    assert live.take(delta([9])) is None


def test_a_repeat_ends_in_the_engine_when_the_choices_that_are_left_have_ended():
    two = SamplingParams(n=2, temperature=3.0, max_tokens=200, stop=[" t9", " t1"], ignore_eos=True)
    asked = [([1, 2, 3], replace(two, seed=seed)) for seed in range(20)]
    lengths = [[len(one.token_ids) for one in answer] for answer in undisturbed(asked)]
    seed = next(seed for seed, (first, second) in enumerate(lengths) if second > first + 20)

    async def run(remote):
        stream = Stream("r", EventLoopOutlet(asyncio.get_running_loop()), remote.abort)
        message = packed(("add", "r", [1, 2, 3], two, ANYONE, seed))
        live = LiveRequest(stream, message, num_choices=2, num_prompt=3)
        live.take(delta([4], index=1, finish_reason="stop"))
        live.begin_repeat()
        remote.engines[0].send(live)
        found = [one async for one in stream]
        assert remote.num_live == 0
        return found, await remote.snapshot()

    with remote_engine(made(0.003)) as remote:
        found, counts = asyncio.run(run(remote))
    assert {one.index for one in found} == {0}
    assert sum(len(one.token_ids) for one in found) == lengths[seed][0]
    assert counts.generation_tokens < sum(lengths[seed])


def test_the_times_of_a_repeat_count_from_the_request(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(live_request_module.time, "monotonic", lambda: now_s[0])
    counts = {"num_tokens": 3, "num_prompt_tokens": 3, "num_cached_tokens": 0, "steps": 3, "drafted": 0}
    again = Metrics(**counts, accepted=(), preemptions=0, queue_s=1.0, first_token_s=2.0, seconds=5.0)
    live, waiting = live_request(), live_request()
    now_s[0] = 103.0
    live.take(delta([4]))
    now_s[0] = 110.0
    live.begin_repeat()
    waiting.begin_repeat()
    now_s[0] = 115.0
    found = live.take(delta([4, 5, 6], finish_reason="length", metrics=again)).metrics
    assert (found.queue_s, found.first_token_s, found.seconds) == (3.0, 3.0, 15.0)
    found = waiting.take(delta([4, 5, 6], finish_reason="length", metrics=again)).metrics
    assert (found.queue_s, found.first_token_s, found.seconds) == (11.0, 12.0, 15.0)


def test_a_structured_output_goes_on_inside_its_form():
    def with_json():
        return replace(models(), tokenizer=json_tokens.tokenizer())

    form = StructuredOutputs(regex="(true|false|null)( (true|false|null)){12}")
    asked = [
        ([1, 2, 3], SamplingParams(temperature=1.0, structured_outputs=form, seed=seed)) for seed in range(3)
    ]
    expected = undisturbed(asked, with_json)
    with remote_engines(made(0.003, models=with_json), made(0.003, models=with_json)) as remote:
        found = asyncio.run(answer_all(remote, asked, remote.engines[0].kill, after=12))
        assert remote.num_repeated > 0
        assert found == expected


def test_without_equal_bits_an_answer_that_has_begun_ends_with_an_error_and_others_are_repeated():
    unequal = Fingerprint(reason="answers may depend on who else is served: a test")
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)

    async def begin_and_kill(remote):
        stream = await remote.submit([1, 2, 3], long)
        await anext(stream)
        remote.engines[0].kill()
        with pytest.raises(EngineStopped, match="lost while it answered"):
            async for _ in stream:
                pass

    with remote_engines(made(0.01, unequal), made(0.01, unequal)) as remote:
        asyncio.run(begin_and_kill(remote))


def test_a_request_that_kills_every_engine_is_given_up(monkeypatch):
    monkeypatch.setattr(replicas_module, "MAX_REPEATS", 2)
    long = SamplingParams(max_tokens=400, ignore_eos=True)

    async def run(remote):
        deadly = asyncio.ensure_future(collect(remote, [13], long))
        while not deadly.done():
            for engine in remote.engines:
                if engine.num_live:
                    engine.kill()
            await asyncio.sleep(0.005)
        with pytest.raises(EngineStopped, match="lost while it answered"):
            await deadly
        return await collect(remote, [1, 2], SamplingParams(max_tokens=2, ignore_eos=True))

    with remote_engines(made(0.01), made(0.01)) as remote:
        assert len(asyncio.run(run(remote))[0].token_ids) == 2


def test_an_engine_that_fails_or_hangs_is_replaced():
    asked, expected = requests()[:4], expected_answers()[:4]
    hung = []

    def failing(number):
        def make(startup):
            engine = made(0.003)(startup)
            if not hung:
                hung.append(number)
                engine.step = (lambda: 1 / 0) if number else (lambda: time.sleep(3) or Deltas())
            return engine

        return make

    for number in (0, 1):
        hung.clear()
        with remote_engines(failing(number), made(0.003), step_timeout_s=0.3) as remote:
            assert asyncio.run(answer_all(remote, asked)) == expected
            assert remote.num_repeated > 0
            assert remote.error is None
            assert not remote.is_hanging


def test_a_closed_stream_is_forgotten_wherever_its_request_is():
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)

    async def run(remote):
        streams = [await remote.submit([1, 2, 3], long) for _ in range(6)]
        await anext(streams[0])
        for engine in remote.engines:
            engine.kill()
        await asyncio.sleep(0.01)
        for stream in streams:
            stream.close()
        await asyncio.to_thread(wait_until, lambda: states(remote) == ["ready", "ready"])
        late = live_request()
        late.message = packed(("add", late.id, [1, 2, 3], long, ANYONE, 0))
        late.stream.outlet = EventLoopOutlet(asyncio.get_running_loop())
        late.stream.is_over = True  # closed while no engine had it
        before, *_ = await remote.snapshots()
        remote.engines[0].send(late)
        while remote.num_live:
            await asyncio.sleep(0.01)
        after, *_ = await remote.snapshots()
        assert after.finished["abort"] == before.finished.get("abort", 0) + 1
        while any(one is not None and one.num_running for one in await remote.snapshots()):
            await asyncio.sleep(0.01)

    with remote_engines(made(0.005), made(0.005)) as remote:
        asyncio.run(asyncio.wait_for(run(remote), 30))


def test_a_full_queue_does_not_refuse_answers_that_have_begun():
    """The survivor has no room for them for a while."""
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    asked = [([1 + i, 2, 3], long) for i in range(12)]
    small = {"max_num_seqs": 2, "max_queue": 6}
    expected = undisturbed(asked)
    with remote_engines(made(0.003, **small), made(0.003, **small)) as remote:
        found = asyncio.run(answer_all(remote, asked, remote.engines[0].kill, 10))
        assert found == expected


def test_a_lost_engine_leaves_nothing_behind_for_the_garbage_collector():
    """It has the tokenizer and the requests' bytes; a server may lose many in its life."""
    with remote_engines(made(), made()) as remote:
        gone, tokenizer = weakref.ref(remote.engines[0]), remote.tokenizer
        gc.disable()
        try:
            remote.engines[0].kill()
            wait_until(lambda: states(remote) == ["ready", "ready"] and remote.status()[0]["restarts"])
            wait_until(lambda: gone() is None)
        finally:
            gc.enable()
        assert remote.tokenizer is tokenizer is not None
        assert [engine.tokenizer for engine in remote.engines] == [None, None]


# ---- who gets a request


def test_a_prompt_goes_to_the_replica_that_has_its_beginning():
    """By the engines' own counters of tokens found in their caches."""
    beginnings = [[1 + (7 * number + i) % 50 for i in range(6 * PAGE)] for number in range(3)]
    once = SamplingParams(temperature=0.0, max_tokens=1)

    async def one_by_one(remote):
        for turn in range(5):
            for number, beginning in enumerate(beginnings):
                await collect(remote, [*beginning, 3 + turn, number + 5], once)
        return await remote.snapshots()

    with remote_engines(made(), made()) as remote:
        snapshots = asyncio.run(one_by_one(remote))
    assert sum(one.num_cached_tokens for one in snapshots) == 4 * 3 * 6 * PAGE  # every turn but the first
    each = 5 * (6 * PAGE + 2)
    assert [one.prompt_tokens for one in snapshots] == [2 * each, each]  # not in turns


def test_a_shared_beginning_does_not_keep_all_requests_on_one_replica():
    beginning = [1 + i % 50 for i in range(6 * PAGE)]
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)

    async def run(remote):
        await collect(remote, [*beginning, 1], SamplingParams(max_tokens=1))
        await asyncio.gather(*(collect(remote, [*beginning, 2 + i], long) for i in range(8)))
        return await remote.snapshots()

    with remote_engines(made(0.005), made(0.005)) as remote:
        first, second = asyncio.run(run(remote))
    assert first.finished["length"] == 5
    assert second.finished["length"] == 4


def test_pages_are_compared_from_the_beginning_and_with_the_salt():
    prompt = list(range(1, 50))
    hashes = page_hashes(prompt, PAGE)
    assert len(hashes) == 3
    assert len(page_hashes(prompt[:48], PAGE)) == 2  # its last token is always computed
    tree = [("salt", prompt[:16]), (None, prompt[:17]), (1, prompt[16:33]), (2, prompt[32:49])]
    assert tree_hashes(tree, PAGE) == [*page_hashes(prompt[:17], PAGE, "salt"), *hashes]
    seen = SeenPages(max_pages=4)
    seen.add(hashes)
    assert seen.match(page_hashes([*prompt[:40], 7, 7, 7, 7, 7, 7, 7, 7, 7, 7], PAGE)) == 2
    assert seen.match(page_hashes([9, *prompt[1:]], PAGE)) == 0
    assert seen.match(page_hashes(prompt, PAGE, "salt")) == 0
    seen.add(page_hashes([3] * 40, PAGE))
    assert len(seen) == 4
    assert seen.match(hashes) == 2  # the end of the oldest prompt is forgotten first


def test_a_replica_that_starts_anew_has_seen_nothing():
    prompt = [1 + i % 50 for i in range(100)]

    async def run(remote):
        await collect(remote, prompt, SamplingParams(max_tokens=1))
        remote.engines[0].kill()
        await asyncio.to_thread(
            wait_until, lambda: states(remote) == ["ready"] * 2 and remote.status()[0]["restarts"]
        )
        await collect(remote, prompt, SamplingParams(max_tokens=1))
        return await remote.snapshots()

    with remote_engines(made(), made()) as remote:
        first, second = asyncio.run(run(remote))
        assert first.num_cached_tokens == second.num_cached_tokens == 0
        assert second.prompt_tokens == 100  # the first had as little to do, and more requests before


# ---- readiness, metrics, refusals


def ready(remote):
    response = ask(make_app(remote, name="m", options=ServerOptions()), "GET", "/ready")
    return response.status_code, response.json()


def test_readiness_is_told_for_each_replica_and_the_server_is_ready_while_one_is():
    may_start = []

    def late(startup):
        with startup.phase("load"):
            wait_until(lambda: may_start)
        return made()(startup)

    with remote_engines(made(), late, waits=False) as remote:
        wait_until(lambda: "ready" in states(remote))
        code, body = ready(remote)
        assert (code, body["state"]) == (200, "ready")
        assert [one["state"] for one in body["replicas"]] == ["ready", "starting"]
        may_start.append(True)
        wait_until(lambda: states(remote) == ["ready", "ready"])
        may_start.clear()
        remote.engines[1].kill()
        wait_until(lambda: remote.status()[1]["restarts"] == 1)
        code, body = ready(remote)
        assert (code, body["replicas"][1]["state"]) == (200, "starting")
        assert "killed" in body["replicas"][1]["error"]
        may_start.append(True)
        wait_until(lambda: states(remote) == ["ready", "ready"])


def test_metrics_have_a_label_for_each_replica():
    async def run(remote):
        for _ in range(3):
            await collect(remote, [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))

    with remote_engines(made(), made()) as remote:
        asyncio.run(run(remote))
        text = ask(make_app(remote, name="m", options=ServerOptions()), "GET", "/metrics").text
        together = asyncio.run(remote.snapshot())
    tokens = dict(
        re.findall(r'^vllm:generation_tokens_total\{engine="(\d)",model_name="m"\} (.*)$', text, re.M)
    )
    assert tokens == {"0": "8.0", "1": "4.0"}
    assert together.generation_tokens == 12
    assert together.histograms["request_generation_tokens"].count == 3
    assert sum(point.tokens for point in together.recent) <= 12
    for line in (
        'blockdraft:replica_ready{device="cpu",engine="1",model_name="m"} 1.0',
        'blockdraft:replica_restarts_total{device="cpu",engine="0",model_name="m"} 0.0',
        'blockdraft:repeated_requests_total{model_name="m"} 0.0',
    ):
        assert line in text
    assert text.count("# TYPE vllm:generation_tokens_total ") == 1


@pytest.mark.parametrize(
    ("odd", "error"),
    [
        ({"fingerprint": Fingerprint.of({"device": "b"})}, "device: b instead of a"),
        ({"max_model_len": 128}, "room for 128 tokens of prompt and answer, the others for 512: set --max-m"),
    ],
)
def test_a_replica_that_would_answer_differently_is_refused_and_the_others_serve(odd, error):
    may_start = []

    def second(startup):
        wait_until(lambda: may_start)
        return made(**odd)(startup)

    with remote_engines(made(), second, waits=False) as remote:
        wait_until(lambda: "ready" in states(remote))
        may_start.append(True)
        wait_until(lambda: states(remote) == ["ready", "refused"])
        code, body = ready(remote)
        assert code == 200
        assert any("replica 1 on cpu is not used: " in warning for warning in body["warnings"])
        assert error in body["replicas"][1]["error"]
        for _ in range(2):
            answer = asyncio.run(collect(remote, [1], SamplingParams(max_tokens=2, ignore_eos=True)))
            assert len(answer[0].token_ids) == 2
        assert remote.error is None


def test_replicas_of_one_card_start_one_after_the_other_and_hear_of_those_that_hold_its_memory():
    begun, may_start = [], []

    def slow(startup):
        begun.append(True)
        wait_until(lambda: may_start)
        return made()(startup)

    told = []
    card = {"device": "cuda:0", "on_start": lambda _, neighbours: told.append(neighbours), "waits": False}
    with remote_engines(slow, slow, slow, **card) as remote:
        wait_until(lambda: begun)
        time.sleep(3 * replicas_module.KEEP_S)  # the others could start now, but must not
        assert states(remote) == ["starting", "waiting", "waiting"]
        may_start.append(True)
        wait_until(lambda: states(remote) == ["ready"] * 3)
        assert told == [Neighbours(512, 1), Neighbours(512, 2)]
        assert [one["restarts"] for one in remote.status()] == [0, 0, 0]
        remote.engines[0].kill()
        wait_until(lambda: states(remote) == ["ready"] * 3 and remote.status()[0]["restarts"])
        assert told[2:] == [Neighbours(512, 2)]


def test_starts_that_all_fail_end_the_server_with_the_reason():
    def fail(startup):
        raise ModelError("no such weights.")

    with remote_engines(fail, fail) as remote:
        wait_until(lambda: remote.error is not None)
        assert remote.error == "no such weights."
        assert remote.startup.state == "failed"
        with pytest.raises(EngineStopped):
            asyncio.run(collect(remote, [1], SamplingParams()))


def test_a_start_that_fails_once_is_tried_again(monkeypatch):
    failed = []

    def fail_once(startup):
        if not failed:
            failed.append(True)
            raise ModelError("the card is full.")
        return made()(startup)

    with remote_engines(made(), fail_once, waits=False) as remote:
        wait_until(lambda: states(remote) == ["ready", "ready"])
        assert (remote.status()[1]["restarts"], remote.status()[1]["error"]) == (1, "the card is full.")


def test_replicas_may_differ_in_what_changes_no_answer():
    info = engine_info(made()(None))
    assert difference(info, replace(info, num_pages=3, width=2, device="cuda:1")) is None
