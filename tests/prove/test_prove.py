"""blockdraft prove: an honest server passes, and every planted fault is found in the way that shows it."""

import asyncio
import io
import json

import pytest
from aiohttp import web
from rich.console import Console

from blockdraft.bench.endpoint import probe
from blockdraft.errors import BenchError
from blockdraft.prove import asking, ways
from blockdraft.prove.asking import Asker, GivenAnswer, Token
from blockdraft.prove.findings import first_difference
from blockdraft.prove.progress import ProveProgress
from blockdraft.prove.questions import SEEDED, make_questions
from blockdraft.prove.report import ProveReport, total
from blockdraft.prove.ways import Gone, Prover
from tests.prove.faulty import FAULTS, FaultyServer

# The way that must show each fault; other ways may show it, too.
SHOWN_BY = {
    "one in a hundred": None,  # chance decides
    "no seeds": "again, without drafts",
    "one seed": "with another seed",
    "other seeds after a restart": "after a restart",
    "company": "in company",
    "company by chance": "in company",
    "drafts": "with drafts",
    "prefix": "with a prefix hit",
    "log-probabilities": "with log-probabilities",
    "streams": "streamed",
    "choices": "with n = 3",
    "own temperature": "with defaults left out",
    "keeps answers": "every answer is new",
}


async def asked(server, *, num_questions=8, restart=None):
    """Ask a server in every way, and return the prover."""
    async with serving(server) as endpoint, Asker(endpoint) as asker:

        async def restarted():
            server.restart()

        view = ProveProgress(Console(file=io.StringIO()))
        prover = Prover(make_questions(num_questions, 16), asker, declared=endpoint.sampling, watcher=view)
        await prover.run(restart or restarted)
        return prover


class serving:
    """A server on a free port; the context is its endpoint."""

    def __init__(self, server):
        self.server = server

    async def __aenter__(self):
        self.runner = web.AppRunner(self.server.app())
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        port = self.runner.addresses[0][1]
        return await probe(f"http://127.0.0.1:{port}")

    async def __aexit__(self, *_):
        await self.runner.cleanup()


def different(prover):
    return {finding.way for finding in prover.findings if finding.is_different}


def test_an_honest_server_gives_equal_answers_in_every_way():
    prover = asyncio.run(asked(FaultyServer()))
    assert not different(prover)
    assert all(finding.untested is None for finding in prover.findings), prover.findings
    assert total(prover.findings).num_equal > 8 * 2 * 7


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    expected = SHOWN_BY[fault]
    prover = asyncio.run(asked(FaultyServer(fault), num_questions=8 if expected is None else 3))
    assert different(prover) if expected is None else expected in different(prover)
    if fault in ("prefix", "log-probabilities", "streams", "choices", "own temperature"):
        assert different(prover) == {expected}, "no other way shows it"
    if fault == "company by chance":
        assert "with defaults left out" not in different(prover), "the defaults do not cause it"


def test_defaults_that_a_server_declares_are_no_difference():
    prover = asyncio.run(asked(FaultyServer(sampling={"temperature": 0.3})))
    assert not different(prover)
    assert "declares temperature 0.3" in prover.findings[-3].note


def test_differences_that_drafts_alone_explain_are_counted():
    prover = asyncio.run(asked(FaultyServer("drafts")))
    report = ProveReport(prover.findings, prover.asker.endpoint, machine={}, options={}, date="today")
    remarks = {row[0]: row[-1] for row in report.sheet().rows}
    assert remarks["in company"] == "different; 16 of 16 have the answer of 'with drafts'"
    assert remarks["with drafts"] == "different"


def test_ways_before_log_probabilities_say_how_close_a_tie_was():
    prover = asyncio.run(asked(FaultyServer("company"), num_questions=2))
    finding = next(one for one in prover.findings if one.way == "in company")
    assert {one.tie for one in finding.differences} == {0.25}


@pytest.mark.parametrize(
    ("num_cached", "untested", "note"),
    [
        ((0, 16), None, None),
        ((0, 0), "the server found no prefix", None),
        ((None, None), None, "the server does not say whether it found a prefix"),
    ],
)
def test_a_prefix_hit_that_is_not_reported_is_not_taken_for_granted(num_cached, untested, note):
    server = FaultyServer()
    server.num_cached = num_cached
    prover = asyncio.run(asked(server, num_questions=2))
    finding = next(one for one in prover.findings if one.way == "with a prefix hit")
    assert (finding.untested, finding.note) == (untested, note)


def test_a_busy_server_is_waited_for_and_a_failing_one_is_named(monkeypatch):
    server = FaultyServer()
    server.refuses = [429, 503, 429]
    assert not different(asyncio.run(asked(server, num_questions=2)))
    server.refuses = [400]
    prover = asyncio.run(asked(server, num_questions=2))
    errors = {error for finding in prover.findings for error in finding.errors}
    assert errors == {"HTTP 400: not now"}
    monkeypatch.setattr(asking, "PATIENCE_S", -1.0)
    server.refuses = [503]
    prover = asyncio.run(asked(server, num_questions=2))
    errors = {error for finding in prover.findings for error in finding.errors}
    assert errors == {"HTTP 503: not now; gave up after -1 s"}


def test_a_way_that_fails_is_not_called_equal():
    class NoLogprobs(FaultyServer):
        def answer(self, body, number):
            if body.get("logprobs"):
                raise web.HTTPBadRequest(text="no logprobs")
            return super().answer(body, number)

    async def ask():
        async with serving(NoLogprobs()) as endpoint, Asker(endpoint) as asker:
            prover = Prover(make_questions(2, 16), asker)
            await prover.run()
            return ProveReport(prover.findings, endpoint, machine={}, options={}, date="today")

    report = asyncio.run(ask())
    finding = next(one for one in report.findings if one.way == "with log-probabilities")
    assert finding.untested == "every request failed: HTTP 400: no logprobs"
    assert report.is_equal
    assert not report.is_whole
    assert report.verdict.startswith("No difference was found in 10 ways, but not all was tested:")
    assert report.verdict.endswith("and 4 requests failed.")


def test_refused_greedy_choices_are_not_failures():
    class OneGreedyChoice(FaultyServer):
        def answer(self, body, number):
            if body.get("n", 1) > 1 and body["temperature"] == 0:
                raise web.HTTPBadRequest(text="n must be 1")
            return super().answer(body, number)

    prover = asyncio.run(asked(OneGreedyChoice(), num_questions=2))
    finding = next(one for one in prover.findings if one.way == "with n = 3")
    assert finding.note == "not asked at T 0: HTTP 400: n must be 1"
    assert (finding.greedy.num_asked, finding.seeded.num_equal, finding.errors) == (0, 6, [])


def test_a_stream_that_breaks_off_is_an_error_and_no_difference():
    server = FaultyServer()
    server.breaks_streams = True
    prover = asyncio.run(asked(server, num_questions=2))
    streamed = next(finding for finding in prover.findings if finding.way == "streamed")
    assert set(streamed.errors) == {"the stream ended before its answer did."}
    assert not streamed.differences


def test_every_request_has_its_own_connection():
    """llama.cpp closes a connection after a stream, so the next request on it fails."""
    connections = []

    class Seen(FaultyServer):
        async def chat(self, request):
            connections.append(request.transport.get_extra_info("peername"))
            return await super().chat(request)

    asyncio.run(asked(Seen(), num_questions=1))
    assert len(set(connections)) == len(connections)


def test_a_server_that_is_gone_ends_the_questions():
    async def ask():
        server = FaultyServer()

        async def gone():
            server.refuses = [500] * 1000

        await asked(server, num_questions=8, restart=gone)

    with pytest.raises(Gone, match="answers in a row failed, the last one with: HTTP 500: not now"):
        asyncio.run(ask())


def test_questions_are_asked_greedily_and_with_a_seed():
    questions = make_questions(9, 16)
    assert [question.temperature for question in questions] == [0.0] * 9 + [SEEDED] * 9
    assert len({question.prompt for question in questions}) == 9
    with pytest.raises(BenchError, match="give 1 to"):
        make_questions(1000, 16)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("one two three", None),
        ("one six three", (4, "one ", "two three", "six three", 0.25)),
        ("one", (3, "one", " two three", "[end: stop]", 0.25)),
    ],
)
def test_the_first_difference_is_shown_with_the_texts_around_it(found, expected):
    whole = GivenAnswer("one two three", "stop")
    tokens = [Token(text, ((text, -0.5), ("other", -0.75))) for text in ("one", " two", " three")]
    difference = first_difference(3, "Count.", whole, GivenAnswer(found, "stop"), tokens)
    if expected is None:
        assert difference is None
        return
    at, before, theirs, ours, tie = expected
    assert (difference.at, difference.before) == (at, before)
    assert (difference.expected, difference.found, difference.tie) == (theirs, ours, tie)
    other = [Token("zwei", ()), *tokens]
    assert first_difference(3, "Count.", whole, GivenAnswer(found, "stop"), other).tie is None


def test_another_end_of_the_same_text_is_a_difference():
    assert first_difference(0, "", GivenAnswer("one", "stop"), GivenAnswer("one", "length")) is not None


def test_the_report_says_which_ways_differ():
    async def ask():
        server = FaultyServer("streams")
        async with serving(server) as endpoint, Asker(endpoint) as asker:
            prover = Prover(make_questions(2, 16), asker)
            await prover.run()
            return endpoint, prover.findings

    endpoint, findings = asyncio.run(ask())
    report = ProveReport(findings, endpoint, machine={"cpu": "<b>"}, options={"max_tokens": 16}, date="today")
    assert not report.is_equal
    assert report.verdict.startswith("Different answers in 1 of 11 ways:")
    assert any(line.startswith("streamed, question 0") and "wrong" in line for line in report.details())
    found = json.loads(report.to_json())
    assert [way["way"] for way in found["ways"] if way["greedy"]["differences"]] == ["streamed"]
    assert [way["untested"] for way in found["ways"] if way["way"] == "after a restart"] == [
        "give --restart COMMAND"
    ]
    page = report.to_html()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_no_more_questions_are_under_way_than_a_way_asks_at_once(monkeypatch):
    monkeypatch.setattr(ways, "WAYS", (ways.Way("in company", at_once=3),))
    most = []

    class Counting(FaultyServer):
        def answer(self, body, number):
            most.append(self.num_running)
            return super().answer(body, number)

    async def ask():
        async with serving(Counting()) as endpoint, Asker(endpoint) as asker:
            prover = Prover(make_questions(8, 16), asker)
            await prover._learn_baseline()
            assert max(most) == 1
            await prover._way(ways.WAYS[0])
            assert max(most) == 3
            most.clear()
            await prover._way(ways.Way("with a prefix hit", is_twice=True))
            assert max(most) == 1, "prompts computed in company may have other values"

    asyncio.run(ask())
