"""When a stream begins, as a client on a real port sees it: with its first token, or with an error."""

import asyncio
import json
import socket
import threading

import httpx
import pytest

from blockdraft.engine.engine import Engine
from blockdraft.engine.request import Delta
from blockdraft.engine.streams import EngineStopped, EventLoopOutlet, Stream
from blockdraft.errors import CapacityError, RequestError
from blockdraft.server.api.chat.answers import ChatAnswer
from blockdraft.server.api.chat.fields import ChatRequest
from blockdraft.server.api.chat.prepare import find_dialect, prepare_chat
from blockdraft.server.api.fields import parse
from blockdraft.server.api.streaming import EventSource, respond
from blockdraft.server.app import make_app
from blockdraft.server.options import ServerOptions
from tests.server import pair
from tests.server.asking import listening
from tests.server.remote import remote_engine

HELLO = {"messages": [{"role": "user", "content": "t1 t2 t3"}], "temperature": 0, "max_tokens": 5}
CHAT = "/v1/chat/completions"
ROLE = {"role": "assistant", "content": ""}


class Gate:
    """An engine whose steps wait until it is opened."""

    def __init__(self):
        self.engine = Engine(pair.models(), pair.plan())
        self.opened = threading.Event()
        self._step = self.engine.step
        self.engine.step = self.step

    def step(self):
        assert self.opened.wait(30)
        return self._step()


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def loop(gate):
    with remote_engine(lambda startup: gate.engine) as loop:
        yield loop
        gate.opened.set()


def served(loop, **options):
    options = ServerOptions(**options)
    return listening(make_app(loop, name="pair", options=options), options)


def ask(client, path, body):
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: test", "content-type: application/json"]
    client.sendall("\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content)


def first_write(client):
    """The head, and the events that came in the first chunk of the body."""
    received = b""
    while received.count(b"\r\n\r\n") < 1 or not received.partition(b"\r\n\r\n")[2].count(b"\r\n") >= 2:
        received += client.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    size, _, rest = body.partition(b"\r\n")
    events = rest[: int(size, 16)].decode().split("\n\n")
    values = [event.removeprefix("data: ") for event in events if event]
    return head.decode(), [json.loads(value) for value in values if value != "[DONE]"]  # on a busy machine


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, HELLO), ("/v1/completions", {"prompt": "t1 t2 t3", "temperature": 0})]
)
def test_nothing_is_sent_before_the_first_token(loop, gate, path, body):
    with served(loop) as address, socket.create_connection(address) as client:
        ask(client, path, {**body, "stream": True})
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(30)
        gate.opened.set()
        head, events = first_write(client)
        assert head.startswith("HTTP/1.1 200")
        if path == CHAT:
            assert events.pop(0)["choices"][0]["delta"] == ROLE
            assert events[0]["choices"][0]["delta"]["content"] == " t4"
        else:
            assert events[0]["choices"][0]["text"] == " t4"


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_has_not_begun_in_time_is_a_504_and_leaves_the_queue(loop, gate, is_stream):
    with served(loop, request_timeout_s=0.3) as (host, port):
        response = httpx.post(f"http://{host}:{port}{CHAT}", json={**HELLO, "stream": is_stream}, timeout=30)
        assert response.status_code == 504, response.text
        assert response.json()["error"]["code"] == "timeout"
        assert response.headers["content-type"] == "application/json"
    gate.opened.set()
    with served(loop) as (host, port):  # an answer may take longer than that on a busy machine
        again = httpx.post(f"http://{host}:{port}{CHAT}", json=HELLO, timeout=30)
        assert again.status_code == 200
    assert not gate.engine.scheduler.has_work


def test_a_stream_that_has_begun_ends_with_the_error_as_an_event(loop, gate, monkeypatch):
    step, num_steps = gate.engine.step, iter(range(100))
    monkeypatch.setattr(gate.engine, "step", lambda: step() if next(num_steps) < 3 else 1 / 0)
    gate.opened.set()
    with served(loop) as (host, port):
        body = {**HELLO, "max_tokens": 400, "ignore_eos": True, "stream": True}
        response = httpx.post(f"http://{host}:{port}{CHAT}", json=body, timeout=30)
    assert response.status_code == 200
    events = response.text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["type"] == "server_error"
    assert events[-2:] == ["data: [DONE]", ""]


def chat_answer(**fields):
    asked = parse(ChatRequest, json.dumps({**HELLO, "stream": True, **fields}).encode())
    head = {"id": "chatcmpl-1", "created": 0, "model": "pair", "system_fingerprint": "bd-1"}
    return ChatAnswer(prepare_chat(asked, find_dialect(pair.models().tokenizer), {}), head=head)


def chunks_of(written):
    """The objects of what is written at once."""
    events = (written or "").split("\n\n")[:-1]
    return [json.loads(one.removeprefix("data: ")) for one in events]


def deltas_of(written):
    return [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in chunks_of(written)]


def test_each_choice_says_its_role_with_its_first_token_and_once():
    answer = chat_answer(n=2)
    written = [answer.event(0, Delta("r", index, f"t{n}", (n,))) for n, index in enumerate((1, 0, 1))]
    assert [deltas_of(one) for one in written] == [
        [(1, ROLE), (1, {"content": "t0"})],
        [(0, ROLE), (0, {"content": "t1"})],
        [(1, {"content": "t2"})],
    ]


def test_a_choice_that_ends_without_a_word_has_a_role_too():
    written = chat_answer().event(0, Delta("r", 0, "", (), finish_reason="stop"))
    assert deltas_of(written) == [(0, ROLE), (0, {})]
    assert chunks_of(written)[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_first_token_that_shows_nothing_yet_lets_the_role_go():
    """The client's clock for the first token stops at the first event, whatever is in it."""
    answer = chat_answer()
    assert deltas_of(answer.event(0, Delta("r", 0, "", (7,)))) == [(0, ROLE)]
    assert deltas_of(answer.event(0, Delta("r", 0, "", (8,)))) == []


def test_what_has_piled_up_is_written_at_once():
    """As many events as deltas, in fewer pieces: the first as soon as it is there, the end with the last."""

    async def pieces():
        stream = Stream("r", EventLoopOutlet(asyncio.get_running_loop()), lambda request_id: None)
        events = respond(chat_answer(), [stream], is_stream=True)
        stream.put(Delta("r", 0, " t1", (1,)))
        response = await events
        for number in (2, 3):
            stream.put(Delta("r", 0, f" t{number}", (number,)))
        stream.put(Delta("r", 0, " t4", (4,), finish_reason="length", ends_request=True))
        return response.events.first, response.events.take()

    first, rest = asyncio.run(pieces())
    assert [first.count("data: "), rest.count("data: ")] == [2, 4], "the role and a token; three and DONE"
    assert rest.endswith("data: [DONE]\n\n")


class Line:
    """An exchange, as the writer of an answer sees it."""

    def __init__(self):
        self.is_write_paused = self.is_gone = False
        self.on_gone = self.on_resume = None
        self.written = []

    def write(self, data):
        self.written.append(data.decode())

    end = write


def written_to(line, act):
    """`act` gets a stream whose events go to `line`; returns when writing has ended."""

    async def run():
        outlet = EventLoopOutlet(asyncio.get_running_loop())
        stream = Stream("r", outlet, lambda request_id: None)
        done = EventSource(chat_answer(), [stream]).write_to(line)
        act(stream)
        await asyncio.wait_for(done, 10)

    asyncio.run(run())


def test_nothing_is_written_to_a_client_that_does_not_read_until_it_does():
    line = Line()

    def act(stream):
        stream.put(Delta("r", 0, " t1", (1,)))
        line.is_write_paused = True
        for number in (2, 3):
            stream.put(Delta("r", 0, f" t{number}", (number,)))
        assert len(line.written) == 1
        line.is_write_paused = False
        line.on_resume()
        assert line.written[1].count("data: ") == 2
        stream.put(Delta("r", 0, "", (), finish_reason="stop", ends_request=True))

    written_to(line, act)
    assert line.written[-1].endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("has_read", [True, False])
def test_who_has_gone_ends_the_writing(has_read):
    line = Line()

    def act(stream):
        line.is_write_paused = not has_read
        line.is_gone = True
        line.on_gone()

    written_to(line, act)
    assert line.written == []


def test_a_bug_in_an_answer_is_raised_where_it_is_waited_for():
    with pytest.raises(IndexError):
        written_to(Line(), lambda stream: stream.put(Delta("r", 7, " t1", (1,))))


@pytest.mark.parametrize(
    "error", [CapacityError("full."), RequestError("cannot be."), EngineStopped("lost.")]
)
def test_what_goes_wrong_behind_the_first_event_is_the_last_one(error):
    """As a prompt of several that finds the queue full."""
    line = Line()

    def act(stream):
        stream.put(Delta("r", 0, " t1", (1,)))
        stream.put(error)

    written_to(line, act)
    events = "".join(line.written).split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["message"] == str(error)
    assert events[-2] == "data: [DONE]"
