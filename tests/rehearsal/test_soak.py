"""The soak notices what goes wrong: an answer that differs, a request that fails."""

import asyncio
import itertools
import json
import os

import httpx
import pytest

from benchmarks import soak
from benchmarks.soak import PHASES, Soak


def server(*, is_wrong=lambda number: False, fails=lambda number: False):
    """Answers every prompt with how long it is; `is_wrong` and `fails` get the number of the request."""
    bodies = []

    async def answer(request):
        await asyncio.sleep(0.001)
        body = json.loads(request.content)
        bodies.append(body)
        if fails(len(bodies)):
            return httpx.Response(503, text="full")
        text = f"{len(body['messages'][0]['content'])} letters" + ("!" if is_wrong(len(bodies)) else "")
        if not body.get("stream"):
            return httpx.Response(200, json={"choices": [{"message": {"content": text}}]})
        chunks = [{"choices": [{"delta": {"content": letter}}]} for letter in text] + [{"choices": []}]
        events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
        return httpx.Response(200, text="".join(f"data: {event}\n\n" for event in events))

    return answer, bodies


def soaked(answer, seconds=0.4):
    async def run():
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://x") as client:
            found = Soak(client, os.getpid())
            await found.run(seconds)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return found

    return asyncio.run(run())


def test_all_phases_are_gone_through_and_known_answers_compared(monkeypatch):
    monkeypatch.setattr(soak, "NUM_ROUNDS", 1)
    answer, bodies = server()
    found = soaked(answer)
    assert found.errors == []
    assert all(found.answers[phase.name] > 0 for phase in PHASES)
    assert found.num_compared > 20
    assert found.num_left > 0
    alone = bodies[: len(found.expected)]
    assert all(body["speculative"] is False for body in alone)
    assert {body["temperature"] for body in alone} == {0.0, 1.0}  # with a seed
    assert {body["temperature"] for body in bodies[len(alone) :]} == {0.0, 1.0}
    own = [body["speculative"]["width"] for body in bodies[len(alone) :] if "speculative" in body]
    assert own
    assert set(own) <= set(soak.WIDTHS)


def test_the_kinds_of_prompts_change_while_it_runs():
    turns = [soak.kinds_at(soak.TURN_S * number) for number in range(6)]
    assert turns[0] == turns[5] == soak.kinds_at(soak.TURN_S / 2)
    assert {kind for kinds in turns for kind in kinds} == {soak.WORDS, *soak.CLASSES}
    assert all(before != after for before, after in itertools.pairwise(turns))


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        ({"is_wrong": lambda number: number > 100}, "an answer differs"),
        ({"fails": lambda number: number == 100}, "status 503"),
    ],
)
def test_an_answer_that_differs_and_one_that_fails_are_noted(monkeypatch, trouble, error):
    monkeypatch.setattr(soak, "NUM_ROUNDS", 1)
    answer, _ = server(**trouble)
    assert error in soaked(answer).errors[0]
