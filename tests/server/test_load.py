"""Two hundred clients at once, a third of which hang up: no answer changes and nothing is left behind."""

import asyncio
import json
import random
import time

import httpx
import pytest

from blockdraft.server.app import make_app
from blockdraft.server.options import ServerOptions
from tests import tiny
from tests.server.asking import listening
from tests.server.remote import remote_engine

CHAT = "/v1/chat/completions"
NUM_CLIENTS = 200
KEY = "sk-load"
HEADERS = {"authorization": f"Bearer {KEY}"}


def body_of(number, chance):
    """A request of its own: lengths, parameters, streamed or not; always with a seed."""
    words = [f"t{chance.randrange(1, 51)}" for _ in range(chance.choice((1, 5, 20, 50)))]
    if number % 4 == 0:
        words = [f"t{1 + i % 50}" for i in range(40)] + words  # a beginning that many share
    body = {
        "messages": [{"role": "user", "content": " ".join(words)}],
        "seed": number,
        "temperature": chance.choice((0, 0.5, 0.8, 1.2)),
        "max_tokens": chance.choice((1, 3, 8, 16, 32)),
        "ignore_eos": chance.random() < 0.7,
        "n": 2 if number % 8 == 1 else 1,
        "stream": chance.random() < 0.6,
    }
    extra = ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"stop": "t7"}, {"presence_penalty": 1.0})
    return body | chance.choice(extra)


def answer_of(text, is_stream):
    """{choice: (text, finish reason)}."""
    if not is_stream:
        choices = json.loads(text)["choices"]
        return {c["index"]: (c["message"]["content"], c["finish_reason"]) for c in choices}
    texts, reasons = {}, {}
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    for event in map(json.loads, events[:-1]):
        for choice in event.get("choices", []):
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["delta"].get("content", "")
            reasons[index] = choice["finish_reason"]
    return {index: (texts[index], reasons[index]) for index in texts}


async def stay(client, body):
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return answer_of(response.text, body["stream"])


async def leave(client, body, chance):
    """Hang up at a random moment: some time after asking, or after some pieces of the stream."""
    sent, num_pieces, patience_s = asyncio.Event(), chance.randrange(8), chance.random()

    async def note(event, _):
        if event == "http11.send_request_body.complete":
            sent.set()

    async def some_pieces():
        async with client.stream("POST", CHAT, json=body, extensions={"trace": note}) as response:
            pieces = response.aiter_lines()
            for _ in range(num_pieces):
                await anext(pieces, None)

    task = asyncio.create_task(some_pieces())
    if not body["stream"]:
        await sent.wait()
        await asyncio.sleep(patience_s)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.slow
def test_two_hundred_clients_get_the_answers_they_would_get_alone_and_leave_nothing_behind():
    chance = random.Random(4)
    bodies = [body_of(number, chance) for number in range(NUM_CLIENTS)]
    leaving = set(chance.sample(range(NUM_CLIENTS), NUM_CLIENTS // 3))
    engine = tiny.engine(width=tiny.BLOCK, max_num_seqs=16, num_pages=44, max_queue=1024)
    options = ServerOptions(api_keys=(KEY,))

    async def crowd(url):
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=120, limits=limits) as client:
            return await asyncio.gather(
                *(
                    leave(client, body, chance) if number in leaving else stay(client, body)
                    for number, body in enumerate(bodies)
                )
            )

    async def one_by_one(url):
        async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=120) as client:
            return [
                None if number in leaving else await stay(client, body) for number, body in enumerate(bodies)
            ]

    with remote_engine(lambda startup: engine) as remote:
        app = make_app(remote, name="pair", options=options)
        with listening(app, options) as (host, port):
            url = f"http://{host}:{port}"
            together = asyncio.run(crowd(url))
            end_s = time.monotonic() + 20
            while engine.has_work and time.monotonic() < end_s:
                time.sleep(0.01)
            assert not engine.has_work
            busy = engine.snapshot()
            alone = asyncio.run(one_by_one(url))
        assert remote.num_live == 0

    for number in sorted(set(range(NUM_CLIENTS)) - leaving):
        assert together[number] == alone[number], bodies[number]
    assert len({json.dumps(answer) for answer in alone if answer}) > 80  # the comparison means something
    assert busy.num_preemptions > 0
    assert busy.num_cached_tokens > 0
    assert busy.finished["abort"] > 10
    assert "error" not in busy.finished
    engine.check()
    pages = engine.scheduler.pages
    assert pages.num_free == pages.num_pages == 44
    assert len(engine.scheduler._free_rows) == 16
