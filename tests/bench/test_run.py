"""The run against a stub: which requests it makes, in which order, and what it makes of the answers."""

import asyncio
import io
import itertools
import re
import time
from collections import Counter

import pytest
from rich.console import Console

from blockdraft.bench.client import Client
from blockdraft.bench.endpoint import probe
from blockdraft.bench.load import poisson
from blockdraft.bench.progress import ProgressView
from blockdraft.bench.records import PLAIN, SPECULATIVE, Answer, Ask, Group, OfferedLoad, Prompt, Workload
from blockdraft.bench.report import build
from blockdraft.bench.run import Grid, LoadPoint, Runner, Server, Watcher
from tests.bench.answers import facts
from tests.bench.stub import OWN_ROUTES, Script, Stub

BOTH = (SPECULATIVE, PLAIN)
pytestmark = pytest.mark.usefixtures("quick_blocks")


def workload(name="w", num=3, turns=1, **fields):
    prompts = [
        Prompt(f"{name}{i}", name, tuple(f"turn {turn} of {name}{i}" for turn in range(turns)))
        for i in range(num)
    ]
    return Workload(name, tuple(prompts), "here", **fields)


def grid(*workloads, loads=None, **fields):
    return Grid(
        workloads or (workload(),),
        loads or (OfferedLoad(),),
        **{"num_requests": 4, "max_tokens": 8, **fields},
    )


def measure(url, asked, *, arms=BOTH, watcher=None, stop=None):
    """`stop` is set by the watcher, which gets it."""
    start_s = time.perf_counter()

    def clock():
        return time.perf_counter() - start_s

    async def run():
        event = asyncio.Event()
        if stop is not None:
            stop.append(event)
        endpoint = await probe(url)
        client = Client(url, endpoint.model, clock=clock, timeout_s=20, switches=endpoint.switches)
        async with client:
            servers = dict.fromkeys(arms, Server(client, endpoint))
            return await Runner(asked, servers, watcher=watcher, stop=event).run()

    return asyncio.run(run())


class OnAnswer(Watcher):
    """Calls `act` when so many measured answers are in."""

    def __init__(self, num, act):
        self._left, self._act, self._is_measuring = num, act, False

    def begin(self, point, num_conversations):
        self._is_measuring = True

    def take(self, answer):
        self._left -= self._is_measuring
        if self._left == 0:
            self._act()


@pytest.fixture
def stub():
    """One whose requests can do without speculation."""
    stub = Stub(owner="blockdraft", routes=dict(OWN_ROUTES))
    with stub.running():
        yield stub


def text_of(body):
    return body["messages"][0]["content"] if "messages" in body else body["prompt"]


def arm_of(body):
    return SPECULATIVE if body.get("speculative", True) else PLAIN


def measured(stub, outcome):
    """The bodies of what was measured."""
    return stub.bodies[len(outcome.cold) + len(outcome.warm) :]


# ---- order


def test_every_cell_of_the_grid_is_measured_once(stub):
    loads = OfferedLoad(1), OfferedLoad(3)
    asked = grid(workload("a"), workload("b"), loads=loads, depths=(0, 64), temperatures=(0.0, 0.7))
    outcome = measure(stub.url, asked, arms=(SPECULATIVE,))
    keys = [
        (
            group.key["workload"],
            OfferedLoad(group.key["concurrency"]),
            group.key["depth"],
            group.key["temperature"],
        )
        for group in outcome.groups
    ]
    assert keys == list(itertools.product("ab", loads, (0, 64), (0.0, 0.7)))
    assert {len(group.answers) for group in outcome.groups if group.key["concurrency"] == 1} == {4}
    assert {len(group.answers) for group in outcome.groups if group.key["concurrency"] == 3} == {12}
    sent = Counter((body["temperature"], body.get("seed")) for body in measured(stub, outcome))
    assert sent == {(0.0, None): 64, (0.7, 0): 64}
    assert outcome.trouble is None


@pytest.mark.parametrize(
    ("names", "num_requests", "expected"),
    [
        ("w", 20, [(SPECULATIVE, 8), (PLAIN, 16), (SPECULATIVE, 12), (PLAIN, 4)]),
        ("ab", 5, [*zip(BOTH * 3, (3, 5, 2, 3, 5, 2), strict=True)]),
    ],
)
def test_blocks_and_cells_alternate_which_arm_goes_first(stub, names, num_requests, expected):
    """A block has eight conversations, and a cell two blocks at least."""
    outcome = measure(stub.url, grid(*map(workload, names), num_requests=num_requests))
    arms = [(arm, len(list(run))) for arm, run in itertools.groupby(map(arm_of, measured(stub, outcome)))]
    assert arms == expected


def test_the_arms_never_run_at_the_same_time_and_keep_the_concurrency(stub):
    stub.script = Script(ttft_s=0.02, num_chunks=1)
    outcome = measure(stub.url, grid(loads=(OfferedLoad(4),), num_requests=16))
    assert stub.max_running == 4
    spans = []
    for group in outcome.groups:
        for block in (group.answers[:8], group.answers[8:]):
            spans.append((min(a.sent_s for a in block), max(a.end_s for a in block)))
        assert group.busy_s == pytest.approx(sum(end - begin for begin, end in spans[-2:]))
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_arrivals_are_poisson_and_the_same_for_both_arms(stub):
    stub.script = Script(ttft_s=0.15, num_chunks=1)
    outcome = measure(stub.url, grid(loads=(OfferedLoad(rate=40.0),), num_requests=12, seed=5))
    for group in outcome.groups:
        for number, block in enumerate((group.answers[:6], group.answers[6:])):
            times = [answer.planned_s - block[0].planned_s for answer in block]
            expected = poisson(6, 40.0, 5 + number)
            assert times == pytest.approx([at_s - expected[0] for at_s in expected])
            assert all(0 <= answer.sent_s - answer.planned_s < 0.15 for answer in block)
    assert stub.max_running > 2  # nobody waits for an answer
    assert poisson(6, 40.0, 5) != poisson(6, 40.0, 6)


# ---- what is asked


def test_both_arms_get_the_same_words_under_other_salts(stub):
    outcome = measure(stub.url, grid(num_requests=8))
    bodies = measured(stub, outcome)
    by_arm = {arm: [text_of(body) for body in bodies if arm_of(body) == arm] for arm in BOTH}
    assert by_arm[SPECULATIVE] == by_arm[PLAIN] == [f"turn 0 of w{i % 3}" for i in range(8)]
    assert len({body["cache_salt"] for body in stub.bodies}) == len(stub.bodies)
    assert not any(answer.cached_tokens for group in outcome.groups for answer in group.answers)


def test_words_are_salted_where_no_field_of_a_request_keeps_caches_out():
    """Two runs share no text then, and yet asked the same."""
    stub = Stub(owner="somebody")
    with stub.running():
        outcomes = [measure(stub.url, grid(num_requests=8), arms=(SPECULATIVE,)) for _ in range(2)]
    texts = [text_of(body) for body in stub.bodies]
    assert len(set(texts)) == len(texts)  # prompts that are repeated differ as well
    assert all(text.startswith("[run ") for text in texts)
    assert not any("cache_salt" in body for body in stub.bodies)
    hashes = {build(one.groups, **facts())["cells"][0]["asked"]["prompts_hash"] for one in outcomes}
    assert len(hashes) == 1


def test_cached_prompts_are_sent_as_they_are(stub):
    outcome = measure(stub.url, grid(num_requests=6, is_cached=True), arms=(SPECULATIVE,))
    assert [text_of(body) for body in measured(stub, outcome)] == [f"turn 0 of w{i}" for i in (0, 1, 2) * 2]
    assert not any("cache_salt" in body for body in measured(stub, outcome))
    assert sum(answer.cached_tokens for answer in outcome.groups[0].answers) > 0


def test_conversations_and_raw_texts(stub):
    asked = grid(workload("chat", turns=2), workload("raw", is_raw=True), thinking=False, ignores_eos=True)
    outcome = measure(stub.url, asked, arms=(SPECULATIVE,))
    chat, raw = outcome.groups
    assert [answer.turn for answer in chat.answers] == [0, 1] * 4
    assert len(raw.answers) == 4
    assert ["prompt" in body for body in measured(stub, outcome)] == [False] * 8 + [True] * 4
    for body in measured(stub, outcome):
        assert body["ignore_eos"] is True
        assert body["max_tokens"] == 8
        assert ("prompt" in body) != (body.get("chat_template_kwargs") == {"enable_thinking": False})


def test_the_depth_is_put_in_front_in_the_servers_own_tokens(stub):
    def script(number, body):
        return Script(prompt_tokens=round(30 + 1.7 * len(text_of(body).split())))

    stub.script = script
    outcome = measure(stub.url, grid(depths=(0, 300, 2000)), arms=(SPECULATIVE,))
    shallow, middle, deep = (group.answers[0].prompt_tokens for group in outcome.groups)
    assert middle - shallow == pytest.approx(300, rel=0.03)
    assert deep - shallow == pytest.approx(2000, rel=0.03)
    texts = [text_of(body) for body in measured(stub, outcome)]
    assert all(text.endswith("of w0") for text in (texts[0], texts[4], texts[8]))
    assert texts[8][:3000] != texts[9][:3000]


# ---- what counts


def test_cold_and_warm_requests_are_in_no_figure(stub):
    def script(number, body):
        if number == 0:
            return Script(ttft_s=0.3, num_chunks=2)
        return Script(ttft_s=0.2) if number < 12 else Script()

    stub.script = script
    outcome = measure(stub.url, grid(loads=(OfferedLoad(5),), num_warmups=3))
    assert outcome.cold[SPECULATIVE].ttft_s == pytest.approx(0.3, abs=0.08)
    assert len(outcome.warm) == 10  # five to each arm: the concurrency is more than the three
    assert [arm_of(body) for body in stub.bodies[:12]] == [*BOTH, *[SPECULATIVE] * 5, *[PLAIN] * 5]
    assert stub.max_running == 5
    assert [len(group.answers) for group in outcome.groups] == [20, 20]
    report = build(outcome.groups, **facts(warmup=[*outcome.cold.values(), *outcome.warm]))
    for cell in report["cells"]:
        assert cell["num_requests"] == 20
        assert cell["ttft_s"]["p99"] < 0.15
    assert report["warmup"]["num_requests"] == 12
    assert report["warmup"]["first_ttft_s"] == pytest.approx(0.3, abs=0.08)


def test_a_failed_warm_up_fails_nothing_else(stub):
    stub.script = lambda number, body: Script(status=500, error={}) if number < 6 else Script()
    outcome = measure(stub.url, grid())
    assert not any(answer.is_ok for answer in (*outcome.cold.values(), *outcome.warm))
    assert all(answer.is_ok for group in outcome.groups for answer in group.answers)


def counters(steps, accepted):
    lines = [
        f"vllm:spec_decode_num_drafts_total {steps}",
        f"vllm:spec_decode_num_draft_tokens_total {2 * steps}",
        f"vllm:spec_decode_num_accepted_tokens_total {sum(accepted)}",
        *(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {count}'
            for i, count in enumerate(accepted)
        ),
    ]
    return "\n".join(lines)


def test_drafts_are_metered_block_by_block_where_answers_do_not_tell(stub):
    """Each answer with speculation adds 6 steps to /metrics; what others do counts as ours."""
    stub.routes["/metrics"] = counters(0, (0, 0))

    def script(number, body):
        num = sum(arm_of(one) == SPECULATIVE for one in [*stub.bodies, body])
        stub.routes["/metrics"] = counters(6 * num, (5 * num, 3 * num))
        return Script()

    stub.script = script
    outcome = measure(stub.url, grid(num_requests=12))
    speculative, plain = outcome.groups
    assert (speculative.metered.steps, speculative.metered.drafted) == (72, 144)
    assert speculative.metered.accepted == (60, 36)
    assert plain.metered.steps == 0
    cell, baseline = build(outcome.groups, **facts())["cells"]
    assert cell["speculation"]["acceptance"] == "metered"
    assert cell["speculation"]["committed_per_step"]["value"] == pytest.approx(1 + 96 / 72)
    assert baseline["speculation"]["acceptance"] == "none"


# ---- early ends


def test_a_server_that_dies_leaves_what_it_answered(stub):
    asked = grid(workload("a"), workload("b"), workload("c"), num_requests=2)
    num = 4 * 2 + 1  # workload c is in its first block
    outcome = measure(stub.url.replace("//", "//user:secret@"), asked, watcher=OnAnswer(num, stub.die))
    host = stub.url.removeprefix("http://")
    assert outcome.trouble.startswith(f"the server at {host} has gone: ")
    assert "secret" not in outcome.trouble
    whole, last = outcome.groups[:4], outcome.groups[4:]
    assert all(answer.is_ok for group in whole for answer in group.answers)
    assert {group.key["workload"] for group in last} == {"c"}
    assert 0 < sum(answer.is_ok for group in last for answer in group.answers) <= 2
    assert any(not answer.is_ok for group in last for answer in group.answers)
    assert build(outcome.groups, **facts())["cells"][-1]["num_failed"] > 0


def test_a_server_that_is_gone_at_once_is_not_asked_on_and_on(stub):
    async def run():
        endpoint = await probe(stub.url)
        stub.die()
        async with Client(stub.url, endpoint.model, clock=time.perf_counter) as client:
            return await Runner(grid(), {SPECULATIVE: Server(client, endpoint)}).run()

    outcome = asyncio.run(run())
    assert "has gone: cannot connect to" in outcome.trouble
    assert (len(outcome.cold), outcome.warm, outcome.groups) == (1, [], [])
    assert build(outcome.groups, **facts())["cells"] == []


def test_a_stopped_run_keeps_what_it_has(stub):
    stop = []
    watcher = OnAnswer(3, lambda: stop[0].set())
    stub.script = Script(ttft_s=0.03, num_chunks=1)
    start_s = time.perf_counter()
    outcome = measure(stub.url, grid(num_requests=200), watcher=watcher, stop=stop)
    assert time.perf_counter() - start_s < 5
    assert outcome.trouble == "interrupted: these are the results so far."
    (group,) = outcome.groups  # of the plain arm there is nothing
    assert [answer.is_ok for answer in group.answers] == [True] * 3 + [False] * 5
    assert group.answers[-1].error == "not sent: the run was stopped."
    report = build(outcome.groups, **facts())
    cell = report["cells"][0]
    assert (cell["num_requests"], cell["num_failed"]) == (3, 0)
    assert cell["num_not_ended"] + cell["num_not_sent"] == 5
    assert report["pairs"] == []


def test_a_run_that_is_stopped_while_it_warms_up_measures_nothing(stub):
    stop = []

    def script(number, body):
        stop[0].set()
        return Script(ttft_s=0.3)

    stub.script = script
    outcome = measure(stub.url, grid(), stop=stop)
    assert (len(stub.bodies), outcome.groups) == (1, [])


# ---- what is shown meanwhile


def answered(tokens=10, turn=0, turns=1, error=None):
    ask = Ask(Prompt("p", "c", ("x",) * turns), SPECULATIVE, 8)
    return Answer(ask, turn, 0.0, 0.0, completion_tokens=tokens, error=error)


def test_a_terminal_shows_a_bar_and_a_pipe_a_line_per_cell():
    point = LoadPoint(workload("qa[/bold]"), OfferedLoad(4), 512, 0.7)
    groups = [
        Group(point.key, SPECULATIVE, [answered(30)], 2.0),
        Group(point.key, PLAIN, [answered(30), answered(9, error="x")], 3.0),
    ]
    shown = {}
    for is_terminal in (False, True):
        console = Console(file=io.StringIO(), width=120, force_terminal=is_terminal)
        with ProgressView(8, console) as watch:
            watch.take(answered())  # of the warm-up
            watch.begin(point, 4)
            watch.take(answered(turn=0, turns=2))
            watch.take(answered(turn=1, turns=2))
            watch.take(answered(tokens=None, turns=2, error="HTTP 500: no"))
            watch._bar.refresh()
            watch.end(groups)
        shown[is_terminal] = console.file.getvalue()
    line = "qa[/bold]  4 at a time depth 512 T 0.7  15.0 tok/s, 10.0 tok/s plain  1 failed\n"
    assert shown[False] == line
    assert line.strip() in shown[True]
    assert re.search(r"depth 512 T 0.7  [\d.]+ tok/s so far, 1 failed .*2/8.* conversations", shown[True])
