"""Bytes as odd clients send them, on a real port: every whole request gets its answer."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from blockdraft.server.http.auth_limits import AuthLimits
from blockdraft.server.http.connection import MAX_PIPELINED
from blockdraft.server.http.exchange import exchange_of
from blockdraft.server.options import ServerOptions, default_hosts
from tests.server.asking import listening

OPTIONS = ServerOptions(
    keep_alive_s=1, idle_timeout_s=2, allowed_hosts=default_hosts("127.0.0.1", has_keys=False)
)
GET = b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = (
    b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
)
SLOW = POST.replace(b"/echo", b"/slow")
EVENTS = POST.replace(b"/echo", b"/events")
STALLED = POST.replace(b"/echo", b"/stalled")
OK = b"HTTP/1.1 200 OK"


class App:
    """Answers at once, or on a sign of the test."""

    def __init__(self):
        self.entered, self.release, self.ended = threading.Event(), threading.Event(), threading.Event()
        routes = [
            Route("/echo", self.echo, methods=["GET", "POST"]),
            Route("/slow", self.slow, methods=["POST"]),
            Route("/events", self.events, methods=["POST"]),
            Route("/stalled", self.stalled, methods=["POST"]),
        ]
        self.asgi = AuthLimits(Starlette(routes=routes), OPTIONS)

    async def echo(self, request):
        return JSONResponse({"length": len(await request.body()), "query": request.url.query})

    async def slow(self, request):
        self.entered.set()
        try:
            await exchange_of(request.scope).while_connected(self._wait())
        finally:
            self.ended.set()
        return JSONResponse({"slow": True})

    async def events(self, request):
        return StreamingResponse(self._events())

    async def _events(self):
        try:
            yield "first"
            while not self.release.is_set():
                await asyncio.sleep(0.005)
                yield "."
            yield "last"
        finally:
            self.ended.set()

    async def stalled(self, request):
        return StreamingResponse(self._stalled(), media_type="text/event-stream")

    async def _stalled(self):
        try:
            yield "data: first\n\n"
            await self._wait()
            yield "data: last\n\n"
        finally:
            self.ended.set()

    async def _wait(self):
        while not self.release.is_set():
            await asyncio.sleep(0.005)


@pytest.fixture
def app():
    return App()


@pytest.fixture
def address(app):
    with listening(app.asgi, OPTIONS, flush_s=1) as address:
        yield address
        app.release.set()


def received(client, num_answers=None):
    """All that comes until the server ends the connection, or has sent so many answers."""
    client.settimeout(10)
    found = b""
    while data := client.recv(1 << 16):
        found += data
        if found.count(OK) == num_answers and found.endswith(b"}"):
            break
    return found


def sent(address, *parts, is_half_closed=False, num_answers=None):
    with socket.create_connection(address) as client:
        for part in parts:
            client.sendall(part)
            if len(parts) > 1:
                time.sleep(0.02)
        if is_half_closed:
            client.shutdown(socket.SHUT_WR)
        return received(client, num_answers)


# ---- requests that ask for another protocol


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize(
    "connection", [b"Upgrade", b"Upgrade, close", b"close, upgrade", b"keep-alive, Upgrade"]
)
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("head", [GET, POST], ids=["get", "post"])
def test_a_request_that_wants_another_protocol_is_answered_in_this_one(
    address, head, protocol, connection, version
):
    upgrade = b"host: localhost\r\nconnection: %b\r\nupgrade: %b\r\n" % (connection, protocol)
    head = head.replace(b"host: localhost\r\n", upgrade).replace(b"HTTP/1.1", b"HTTP/" + version)
    found = sent(address, head, num_answers=1)
    assert found.count(OK) == 1
    assert (b'"length":2' in found) == head.startswith(b"POST")


def test_a_connection_goes_on_behind_an_upgrade_that_was_not_made(address):
    upgrade = GET.replace(b"\r\n\r\n", b"\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n")
    assert sent(address, upgrade + POST + upgrade + GET, num_answers=4).count(OK) == 4
    closed = upgrade.replace(b"connection: Upgrade", b"connection: Upgrade, close")
    assert sent(address, closed + GET).count(OK) == 1


# ---- clients that have said all that they want to say


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_closes_its_half_gets_its_answers(address, app, version, count):
    asked = SLOW.replace(b"HTTP/1.1", b"HTTP/" + version)
    with socket.create_connection(address) as client:
        client.sendall(asked + (count - 1) * POST)
        client.shutdown(socket.SHUT_WR)
        assert app.entered.wait(10)
        time.sleep(0.2)  # it is asked whether it is there
        app.release.set()
        found = received(client)
    num_answers = 1 if version == b"1.0" else count  # HTTP/1.0 has one request per connection
    assert found.count(OK) == num_answers
    assert b'"slow":true' in found


def test_a_client_that_closes_its_half_and_then_goes_is_noticed(address, app):
    with socket.create_connection(address) as client:
        client.sendall(SLOW)
        client.shutdown(socket.SHUT_WR)
        assert app.entered.wait(10)
        time.sleep(0.1)
    assert app.ended.wait(5)


@contextlib.contextmanager
def half_closed_in_its_answer(address, request):
    """A client that has read the beginning of a stream, and closed its half."""
    with socket.create_connection(address) as client:
        client.sendall(request)
        found = b""
        while b"first" not in found:
            found += client.recv(1 << 16)
        client.shutdown(socket.SHUT_WR)
        yield client


@pytest.mark.parametrize(
    ("request_", "last"),
    [(EVENTS, [b"last\r\n0\r\n\r\n"]), (STALLED, [b"data: last\n\n", b"\r\n:\n\n\r\n"])],
    ids=["pieces", "between two events"],
)
def test_a_client_that_closes_its_half_in_its_answer_gets_the_rest(address, app, request_, last):
    """Between two events a comment asks whether it is there."""
    with half_closed_in_its_answer(address, request_) as client:
        time.sleep(0.2)
        app.release.set()
        found = received(client)
    assert [part for part in last if part not in found] == []


@pytest.mark.parametrize("request_", [EVENTS, STALLED], ids=["pieces", "between two events"])
def test_a_client_that_closes_its_half_in_its_answer_and_then_goes_is_noticed(address, app, request_):
    with half_closed_in_its_answer(address, request_):
        time.sleep(0.1)
        assert not app.ended.is_set()
    assert app.ended.wait(5)


def test_a_body_that_ends_too_soon_gets_no_answer(address, app):
    assert sent(address, SLOW[:-1], is_half_closed=True) == b""
    assert not app.entered.is_set()


# ---- more than was asked for


def test_pipelined_requests_past_the_limit_do_not_spoil_the_others(address):
    found = sent(address, (MAX_PIPELINED + 800) * GET)
    assert MAX_PIPELINED <= found.count(OK) <= MAX_PIPELINED + 800
    assert found.count(b"HTTP/1.1 ") == found.count(OK)
    assert found.count(b"connection: close") == 1  # in the last one: the rest is to be asked again
    assert b"connection: close" in found[found.rindex(OK) :]


@pytest.mark.parametrize(
    "garbage",
    [
        b"no HTTP at all\r\n\r\n",
        b"\0\1\2",
        b"GET / HTTP/1.1\r\n\r\n",  # without a host
        POST.replace(b"content-length: 2", b"transfer-encoding: chunked") + b"zz\r\n",
        b"GET /" + b"a" * 40_000,
    ],
    ids=["text", "bytes", "no host", "broken chunk", "endless"],
)
def test_garbage_behind_a_request_does_not_spoil_its_answer(address, app, garbage):
    with socket.create_connection(address) as client:
        client.sendall(SLOW + GET + garbage)
        assert app.entered.wait(10)
        client.sendall(garbage)
        time.sleep(0.05)
        app.release.set()
        found = received(client)
    assert found.count(OK) == 2
    assert b"HTTP/1.1 4" not in found[: found.rindex(OK)]  # behind the answers one may come
    assert b'"slow":true' in found


def test_garbage_in_the_body_of_a_request_is_its_own_400(address):
    broken = POST.replace(
        b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n"
    )
    found = sent(address, GET + GET, broken)
    assert (found.count(OK), found.count(b"HTTP/1.1 400")) == (2, 1)


# ---- what HTTP allows and few clients do


@pytest.mark.parametrize("target", [b"http://localhost/echo?a=1", b"HTTP://LOCALHOST:80/echo?a=1"])
def test_an_address_may_be_given_whole(address, target):
    found = sent(address, GET.replace(b"/echo", target), num_answers=1)
    assert found.count(OK) == 1
    assert b'"query":"a=1"' in found


def test_the_name_in_a_whole_address_is_the_one_that_counts(address):
    assert b" 421 " in sent(address, GET.replace(b"/echo", b"http://evil.example/echo"))
    other = GET.replace(b"host: localhost", b"host: evil.example")
    assert OK in sent(address, other.replace(b"/echo", b"http://localhost/echo"), num_answers=1)


@pytest.mark.parametrize(
    "body",
    [
        b"2\r\n{}\r\n0\r\n\r\n",
        b'1;a=b;c="d"\r\n{\r\n1\r\n}\r\n0\r\nx-trailer: 1\r\n\r\n',
        b"0002\r\n{}\r\n000\r\n\r\n",
    ],
    ids=["plain", "extensions and trailers", "zeros"],
)
def test_chunked_bodies_are_read(address, body):
    chunked = POST.replace(b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n" + body)
    found = sent(address, chunked + GET, num_answers=2)
    assert found.count(OK) == 2
    assert b'"length":2' in found


@pytest.mark.parametrize(("version", "is_told"), [(b"1.1", True), (b"1.0", False)])
def test_who_waits_for_a_sign_to_send_its_body_gets_one(address, version, is_told):
    head, body = POST[:-2], POST[-2:]
    head = head.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n").replace(b"1.1", version)
    found = sent(address, head, body, num_answers=1)
    assert found.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200") == is_told
    assert found.count(OK) == 1


def test_http_1_0_is_answered_and_told_that_the_connection_ends(address):
    for more in (b"", b"\r\nconnection: keep-alive"):
        found = sent(address, GET.replace(b"1.1", b"1.0").replace(b"\r\n\r\n", more + b"\r\n\r\n"))
        assert found.count(OK) == 1
        assert b"connection: close" in found


def test_connect_is_refused(address):
    assert b"HTTP/1.1 4" in sent(address, b"CONNECT localhost:443 HTTP/1.1\r\nhost: localhost\r\n\r\n")


def test_a_refusal_arrives_even_if_the_body_is_long_and_unread(address):
    size = 8 << 20
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(address) as client:
        client.sendall(head % size)
        with contextlib.suppress(ConnectionError):
            for _ in range(size >> 16):
                client.sendall(b"x" * (1 << 16))
        assert b"HTTP/1.1 415" in received(client)


def test_a_refusal_does_not_reset_the_connection_while_the_body_still_comes(address):
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\ncontent-length: 9\r\n\r\n"
    with socket.create_connection(address) as client:
        client.sendall(head)
        assert b"HTTP/1.1 415" in received(client)
        for _ in range(2):  # a reset is seen with the second
            client.sendall(b"x")
            time.sleep(0.05)


# ---- other protocols on this port


@pytest.mark.parametrize(
    ("opening", "name"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), b"HTTP/2"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), b"TLS"),
    ],
)
def test_bytes_of_another_protocol_are_told_which_one_this_is(address, opening, name):
    found = sent(address, opening)
    assert found.startswith(b"HTTP/1.1 400")
    assert name in found
    assert b"HTTP/1.1" in found.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"Host"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"Host"),
        (b"GET /" + b"a" * 40_000, b"larger than"),
        (b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", b"HTTP"),
        (POST.replace(b"content-length", b"transfer-encoding: chunked\r\ncontent-length"), b"HTTP"),
    ],
    ids=["no host", "two hosts", "large", "not ASCII", "two lengths"],
)
def test_a_request_that_is_none_is_told_why(address, data, why):
    found = sent(address, data)
    assert found.startswith(b"HTTP/1.1 400")
    assert why in found.partition(b"\r\n\r\n")[2]
