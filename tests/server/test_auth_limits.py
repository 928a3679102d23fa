"""Keys, limits, CORS and connections of the server."""

import asyncio
import contextlib
import hmac
import io
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from blockdraft.errors import SettingsError
from blockdraft.server.http import auth_limits as guard_module
from blockdraft.server.http.auth_limits import DRAIN_FACTOR, AuthLimits
from blockdraft.server.http.exchange import exchange_of
from blockdraft.server.http.lifetime import NUM_SPARE_CONNECTIONS, uvicorn_config
from blockdraft.server.http.logs import AccessRecord, JsonLines, LineHandler, TextLines
from blockdraft.server.options import MAX_HEAD_BYTES, ServerOptions, default_hosts, is_loopback, read_api_keys
from tests.server.asking import ask, connected, listening
from tests.server.test_life import wait_for

KEY, OTHER_KEY = "sk-right-7f3a", "sk-second-91bc"
CHAT = "/v1/chat/completions"
SITE = "https://chat.example.com"


async def echo(request):
    body = await request.body()
    return JSONResponse({"path": request.url.path, "length": len(body), "id": request.state.request_id})


async def page(request):
    return HTMLResponse("<p>hello")


async def broken(request):
    raise ValueError("the prompt was: " + (await request.body()).decode())


class Slow:
    """A handler that waits until it is cancelled or released."""

    def __init__(self):
        self.num_entered = 0
        self.num_cancelled = 0
        self.release = asyncio.Event()

    async def answer(self, request):
        self.num_entered += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return JSONResponse({})


def app_with(options, slow=None):
    routes = [
        Route("/", page),
        Route("/broken", broken, methods=["POST"]),
        Route("/slow", slow.answer if slow else page),
        Route("/{path:path}", echo, methods=["GET", "POST"]),
    ]
    return AuthLimits(Starlette(routes=routes), options)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def check_refusal(response, status, part):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert part in error["message"]


# ---- keys


@pytest.fixture
def locked():
    return app_with(ServerOptions(api_keys=(KEY, OTHER_KEY)))


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/models", "/tokenize", "/events", "/anything", "/page", "/healthy"]
)
def test_without_a_key_nothing_of_value_answers(locked, path):
    response = ask(locked, "GET", path)
    check_refusal(response, 401, "API key")
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    "path",
    ["/", "/live", "/health", "/ready", "/ping", "/metrics", "/server_info", "/openapi.json", "/page/x.js"],
)
def test_probes_metrics_and_the_page_need_no_key(locked, path):
    assert ask(locked, "GET", path).status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/../v1/models", "/page/a/../../v1/models", "//health", "/health/", "/HEALTH"]
)
def test_a_path_that_only_looks_open_is_not(locked, path):
    with listening(locked) as address:
        sent = f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
        assert all_that_comes(address, sent).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        bearer(OTHER_KEY),
        {"authorization": f"bearer  {KEY}"},
        {"x-api-key": KEY},  # as Anthropic's clients send it
        {"x-api-key": KEY, **bearer("of another service")},
    ],
)
def test_each_key_opens(locked, headers):
    assert ask(locked, "GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        bearer(KEY.upper()),
        {"authorization": "Bearer"},
        bearer(f"{KEY},{OTHER_KEY}"),
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"authorization": "Bearer \xff\xfe".encode("latin-1")},
        {"x-api-key": KEY[:-1]},
        {"x-api-key": ""},
        [("x-api-key", KEY), ("x-api-key", "wrong")],
        [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer wrong")],
        [("authorization", "Bearer wrong"), ("authorization", f"Bearer {KEY}")],
    ],
)
def test_no_other_header_opens(locked, headers):
    check_refusal(ask(locked, "GET", "/v1/models", headers=headers), 401, "API key")


def test_every_key_is_compared_whichever_matches(locked, monkeypatch):
    compared = []
    compare = hmac.compare_digest

    def counted(a, b):
        assert len(a) == len(b)
        compared.append(b)
        return compare(a, b)

    monkeypatch.setattr(guard_module.hmac, "compare_digest", counted)
    for key in (KEY, OTHER_KEY, "wrong", "a much longer key than all the others there are"):
        compared.clear()
        ask(locked, "GET", "/v1/models", headers=bearer(key))
        assert len(compared) == 2


def test_a_wrong_key_is_refused_before_the_body_comes(locked):
    head = POST.replace(b"host: x", b"host: x\r\nauthorization: Bearer wrong") % 9
    with listening(locked) as address:
        assert all_that_comes(address, head).startswith(b"HTTP/1.1 401")


# ---- where keys come from, and where they do not go


def test_keys_come_from_flags_environment_and_file_once_each(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n  {OTHER_KEY}  \r\n{KEY}\n")
    file.chmod(0o600)
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", " sk-env\n")
    assert read_api_keys([f" {KEY} "], file) == (KEY, "sk-env", OTHER_KEY)
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", "")
    assert read_api_keys() == ()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604])
def test_a_key_file_that_others_can_read_is_warned_about(tmp_path, caplog, mode):
    file = tmp_path / "keys"
    file.write_text(KEY)
    file.chmod(mode)
    assert read_api_keys((), file) == (KEY,)
    assert ("chmod 600" in caplog.text) == (mode != 0o600)
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "content", ["", "# only this\n", "good-one\nbad secret\n", "sch\xf6n-secret", "secret" * 200]
)
def test_a_key_file_that_cannot_be_used_is_refused_without_quoting_it(tmp_path, content):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(SettingsError) as error:
        read_api_keys((), file)
    assert str(file) in str(error.value)
    assert "secret" not in str(error.value)


def test_a_missing_key_file_and_empty_flags_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="cannot read"):
        read_api_keys((), tmp_path / "none")
    with pytest.raises(SettingsError, match="empty"):
        read_api_keys([" "])


def test_options_do_not_show_their_keys():
    options = ServerOptions(api_keys=(KEY,))
    assert KEY not in f"{options} {options!r} {[options]}"
    with pytest.raises(SettingsError) as error:
        ServerOptions(api_keys=("fine", "secret with spaces"))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_body_bytes": 0},
        {"max_connections": 1.5},
        {"max_connections": True},
        {"request_timeout_s": 0},
        {"idle_timeout_s": float("inf")},
        {"send_timeout_s": float("nan")},
        {"keep_alive_s": -1},
        {"cors_origins": ("*",)},
        {"cors_origins": ("chat.example.com",)},
        {"cors_origins": ("https://chat.example.com/",)},
        {"cors_origins": ("null",)},
        {"cors_origins": ("https://me@chat.example.com",)},
        {"allowed_hosts": ("Upper",)},
        {"allowed_hosts": ("*",)},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(SettingsError):
        ServerOptions(**wrong)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_key_given_as_a_flag_leaves_the_process_list():
    code = (
        "import sys\n"
        "from blockdraft.server.options import hide_in_process_list\n"
        "assert hide_in_process_list([sys.argv[2], 'absent'])\n"
        "print(sys.argv[2], open('/proc/self/cmdline').read())"
    )
    command = [sys.executable, "-c", code, "--api-key", KEY, "--port", "1"]
    own, seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(" ", 1)
    assert own == KEY
    assert KEY not in seen
    assert seen.rstrip("\n").endswith(f"--api-key\0{'*' * len(KEY)}\0--port\x001\0")


# ---- bodies


SMALL = ServerOptions(max_body_bytes=100)
JSON_TYPE = {"content-type": "application/json"}
POST = b"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


async def in_pieces(size, count):
    for _ in range(count):
        yield b" " * size


@pytest.mark.parametrize("size", [101, 100 * DRAIN_FACTOR + 1, 10**6])
def test_a_body_over_the_limit_is_refused_announced_or_not(size):
    app = app_with(SMALL)
    refusal = ask(app, "POST", CHAT, content=b" " * size, headers=JSON_TYPE)
    check_refusal(refusal, 413, "100 bytes")
    assert "server" not in refusal.headers
    check_refusal(ask(app, "POST", CHAT, content=in_pieces(size // 3 + 1, 3), headers=JSON_TYPE), 413, "100")


def test_a_body_at_the_limit_arrives_whole():
    for content in (b" " * 100, in_pieces(20, 5)):
        assert ask(app_with(SMALL), "POST", CHAT, content=content, headers=JSON_TYPE).json()["length"] == 100


def test_an_endless_body_is_not_read_for_ever():
    head = POST.replace(b"content-length: %d", b"transfer-encoding: chunked")
    with listening(app_with(SMALL)) as address, socket.create_connection(address) as client:
        client.sendall(head)
        for _ in range(2 * DRAIN_FACTOR + 2):
            client.sendall(b"32\r\n" + b" " * 50 + b"\r\n")
        client.settimeout(10)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("headers", "part"),
    [
        ({"content-type": "text/plain"}, "text/plain"),
        ({"content-type": "application/x-www-form-urlencoded"}, "urlencoded"),
        ({"content-type": "multipart/form-data; boundary=x"}, "multipart"),
        ({}, "application/json"),
        ({**JSON_TYPE, "content-encoding": "gzip"}, "compressed"),
    ],
)
def test_a_body_of_another_kind_is_refused(headers, part):
    check_refusal(ask(app_with(SMALL), "POST", CHAT, content=b"{}", headers=headers), 415, part)


def test_json_may_name_its_charset_and_a_post_may_be_empty():
    headers = {"content-type": "application/JSON; charset=utf-8"}
    assert ask(app_with(SMALL), "POST", CHAT, content=b"{}", headers=headers).status_code == 200
    assert ask(app_with(SMALL), "POST", CHAT).status_code == 200


def test_a_body_that_does_not_come_is_a_408():
    with listening(app_with(ServerOptions(idle_timeout_s=0.2))) as address:
        found = all_that_comes(address, POST % 9 + b"{")
    assert found.startswith(b"HTTP/1.1 408")
    assert b"0.2 s" in found


# ---- time and number


def test_an_answer_that_does_not_begin_is_a_504_and_its_work_is_cancelled():
    async def one():
        slow = Slow()
        async with connected(app_with(ServerOptions(request_timeout_s=0.1), slow)) as client:
            response = await client.get("/slow")
            check_refusal(response, 504, "0.1 s")
            assert (slow.num_entered, slow.num_cancelled) == (1, 1)

    asyncio.run(one())


def test_a_stream_that_has_begun_may_take_longer():
    async def stream(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})  # at once, however busy the machine is
        for _ in range(4):
            await asyncio.sleep(0.1)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body"})

    assert ask(AuthLimits(stream, ServerOptions(request_timeout_s=0.2)), "GET", "/").text == "xxxx"


def test_a_client_is_a_key_and_an_address():
    async def whose(request):
        return JSONResponse(request.state.client)

    def client(options, **headers):
        app = AuthLimits(Starlette(routes=[Route("/", whose), Route("/a", whose)]), options)
        return ask(app, "GET", "/a", headers=headers).json()

    keys = ServerOptions(api_keys=("one-key-of-two", "the-other-one-1"))
    (number, address), other = (
        client(keys, **bearer("one-key-of-two")),
        client(keys, **bearer("the-other-one-1")),
    )
    assert (number, other) == ("0", ["1", address])
    assert client(keys, **{"x-api-key": "the-other-one-1"}) == other
    assert client(ServerOptions(), **bearer("one-key-of-two")) == ["", address]
    assert address


def test_a_timeout_of_the_application_itself_is_no_504():
    async def late(scope, receive, send):
        raise TimeoutError("another one")

    assert ask(AuthLimits(late, ServerOptions()), "GET", "/").status_code == 500


def test_requests_over_the_limit_are_told_to_come_back_but_probes_are_answered():
    async def crowd():
        slow = Slow()
        async with connected(app_with(ServerOptions(max_connections=2), slow)) as client:
            first = [asyncio.create_task(client.get("/slow")) for _ in range(2)]
            while slow.num_entered < 2:
                await asyncio.sleep(0)
            refused = await client.get("/v1/models")
            check_refusal(refused, 503, "2 requests")
            assert int(refused.headers["retry-after"]) >= 1
            assert (await client.get("/health")).status_code == 200
            slow.release.set()
            assert [(await task).status_code for task in first] == [200, 200]
            assert (await client.get("/v1/models")).status_code == 200

    asyncio.run(crowd())


def test_a_request_that_fails_gives_its_place_back():
    async def again():
        async with connected(app_with(ServerOptions(max_connections=1))) as client:
            for _ in range(3):
                assert (await client.post("/broken", json={})).status_code == 500
            assert (await client.get("/v1/models")).status_code == 200

    asyncio.run(again())


# ---- browsers


def test_every_answer_says_how_browsers_must_treat_it(locked):
    for path, status in (("/", 200), ("/health", 200), ("/v1/models", 401)):
        response = ask(locked, "GET", path)
        assert response.status_code == status
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


def test_without_cors_no_page_of_another_origin_is_let_in():
    app = app_with(ServerOptions())
    assert not [
        name
        for name in ask(app, "GET", "/v1/models", headers={"origin": SITE}).headers
        if "control-allow" in name
    ]
    asked = {"origin": SITE, "access-control-request-method": "POST"}
    response = ask(app, "OPTIONS", CHAT, headers=asked)
    check_refusal(response, 403, "CORS is off")
    assert "--cors-origin" in response.text
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_preflight_is_answered_for_exactly_the_origins_named(is_locked):
    app = app_with(ServerOptions(cors_origins=(SITE,), api_keys=(KEY,) if is_locked else ()))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-own"}
    response = ask(app, "OPTIONS", CHAT, headers={**asked, "origin": SITE})
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == SITE
    assert response.headers["access-control-allow-headers"] == "authorization,x-own"
    assert "origin" in response.headers["vary"].lower()
    assert "access-control-allow-credentials" not in response.headers
    for origin in (
        "https://evil.example",
        SITE + ".evil.example",
        SITE + ":444",
        "http://chat.example.com",
        "null",
    ):
        response = ask(app, "OPTIONS", CHAT, headers={**asked, "origin": origin})
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers


def test_a_preflight_does_not_repeat_a_head_that_is_too_large():
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x" * MAX_HEAD_BYTES}
    app = app_with(ServerOptions(cors_origins=(SITE,)))
    check_refusal(ask(app, "OPTIONS", CHAT, headers={"origin": SITE, **asked}), 431, "larger")


def test_a_named_origin_can_read_answers_and_refusals():
    app = app_with(ServerOptions(cors_origins=(SITE,), api_keys=(KEY,)))
    for headers, status in ((bearer(KEY), 200), ({}, 401)):
        response = ask(app, "GET", "/v1/models", headers={**headers, "origin": SITE})
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, SITE)
        other = ask(app, "GET", "/v1/models", headers={**headers, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        assert "origin" in other.headers["vary"].lower()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("LOCALHOST", 200),
        ("evil.example", 421),
        ("localhost.evil.example:8000", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
def test_on_loopback_without_a_key_other_names_are_refused(host, status):
    app = app_with(ServerOptions(allowed_hosts=default_hosts("127.0.0.1", has_keys=False)))
    assert ask(app, "GET", "/v1/models", headers={"host": host}).status_code == status


def test_names_matter_only_on_loopback_without_a_key():
    assert default_hosts("127.0.0.1", has_keys=True) == ()
    assert default_hosts("0.0.0.0", has_keys=False) == ()
    assert "127.0.0.2" in default_hosts("127.0.0.2", has_keys=False)
    assert [is_loopback(h) for h in ("127.1.2.3", "::1", "localhost", "0.0.0.0", "::", "example.com")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


# ---- logs


@contextlib.contextmanager
def logged(formatter):
    stream, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def test_a_json_line_has_time_level_message_and_request_id(locked):
    with logged(JsonLines()) as stream:
        response = ask(
            locked, "GET", f"/v1/models?key={KEY}", headers={**bearer(KEY), "x-request-id": "abc-1"}
        )
        wait_for(lambda: "blockdraft.access" in stream.getvalue(), "the line comes after the answer")
    line = next(json.loads(line) for line in stream.getvalue().splitlines() if "blockdraft.access" in line)
    assert response.headers["x-request-id"] == response.json()["id"] == line["request_id"] == "abc-1"
    assert line["message"].startswith("GET /v1/models 200 in ")
    assert line["level"] == "info"
    assert time.strptime(line["time"], "%Y-%m-%dT%H:%M:%S.%fZ")
    lines = [line for line in stream.getvalue().splitlines() if '"httpx"' not in line]  # it logs addresses
    assert KEY not in "".join(lines)


@pytest.mark.parametrize("formatter", [JsonLines([KEY]), TextLines([KEY])])
def test_neither_keys_nor_forged_lines_get_into_the_log(formatter):
    with logged(formatter) as stream:
        logging.getLogger("x").warning("key %s\n2026-01-01 forged", KEY)
        try:
            raise ValueError(KEY)
        except ValueError:
            logging.getLogger("x").exception("failed")
    lines = stream.getvalue().splitlines()
    assert KEY not in stream.getvalue()
    assert "***" in lines[0]
    assert "forged" in lines[0]
    assert "ValueError" in stream.getvalue()


def test_lines_of_requests_are_written_together_and_in_order_with_others():
    written = []
    stream = SimpleNamespace(write=written.append, flush=lambda: None)
    handler, logger = LineHandler(stream), logging.Logger("lines")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)

    def answered(name):
        logger.handle(AccessRecord("blockdraft.access", name, name))

    async def turn():
        answered("one")
        answered("two")
        logger.warning("three")
        answered("four")
        answered("five")
        assert "".join(written) == "one\ntwo\nthree\n"
        await asyncio.sleep(0)
        answered("six")
        other = threading.Thread(target=logger.warning, args=("seven",))
        other.start()
        other.join()

    asyncio.run(turn())
    answered("eight")
    assert list(filter(None, written)) == ["one\ntwo\nthree\n", "four\nfive\n", "six\nseven\n", "eight\n"]


def test_no_line_of_a_request_waits_for_another_thread_that_has_written_already():
    stream = io.StringIO()
    handler, threads = LineHandler(stream), []

    class Interrupted(deque):
        def append(self, record):
            if not threads:  # another thread writes what is held, just before this line is held, too
                threads.append(threading.Thread(target=handler.flush))
                threads[0].start()
                threads[0].join(0.1)  # it cannot until then
            super().append(record)

    async def turn():
        handler._held = Interrupted([logging.makeLogRecord({"msg": "theirs"})])
        handler.handle(AccessRecord("blockdraft.access", "ours", "id"))
        await asyncio.to_thread(threads[0].join)

    asyncio.run(turn())
    assert stream.getvalue() == "theirs\nours\n"


def test_a_line_that_cannot_be_made_takes_no_other_with_it(capsys):
    stream, logger = io.StringIO(), logging.Logger("lines")
    logger.addHandler(LineHandler(stream))

    async def turn():
        logger.handle(AccessRecord("blockdraft.access", "before", "id"))
        logger.warning("%d", "no number")
        logger.warning("after")

    asyncio.run(turn())
    assert stream.getvalue() == "before\nafter\n"
    assert "no number" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["raise ValueError", "sys.exit()", "os.kill(os.getpid(), 15)"])
def test_no_line_is_lost_when_the_process_ends_within_a_turn(end):
    program = f"""
import asyncio, logging, os, signal, sys
from blockdraft.server.http.logs import AccessRecord, set_up
set_up(is_json=False, level=logging.INFO)
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
async def turn():
    logging.getLogger("blockdraft.access").handle(AccessRecord("blockdraft.access", "POST / 200", "id-1"))
    {end}
asyncio.run(turn())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "info [id-1] POST / 200" in ended.stderr


# ---- connections


def closes_within(client, seconds):
    client.settimeout(seconds)
    try:
        return client.recv(1 << 16) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("first", [b"", b"GET / HT", b"GET /health HTTP/1.1\r\nhost: x\r\nx-a"])
def test_a_head_that_does_not_come_ends_the_connection(first):
    options = ServerOptions(idle_timeout_s=0.3)
    with listening(app_with(options), options) as address, socket.create_connection(address) as client:
        client.sendall(first)
        assert closes_within(client, 10)


def test_bytes_that_trickle_in_do_not_buy_time_not_even_for_a_second_request():
    options = ServerOptions(idle_timeout_s=0.5)
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    with listening(app_with(options), options) as address, socket.create_connection(address) as client:
        client.sendall(head + b"\r\n")
        client.settimeout(10)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        start_s = time.monotonic()
        client.sendall(head)
        with contextlib.suppress(OSError):
            while time.monotonic() < start_s + 10:
                client.sendall(b"x-a: b\r\n")
                if closes_within(client, 0.1):
                    break
        assert time.monotonic() - start_s < 5


def test_a_connection_in_use_outlives_the_time_for_one_head():
    options = ServerOptions(idle_timeout_s=0.3, keep_alive_s=5)
    with listening(app_with(options), options) as address, socket.create_connection(address) as client:
        client.settimeout(10)
        for _ in range(2):
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
            time.sleep(0.5)


@pytest.mark.parametrize(
    ("line", "more"),
    [
        (b"GET /health HTTP/1.1", b"x-long: " + b"a" * (64 << 10) + b"\r\n"),
        (b"GET /health HTTP/1.1", b"x-many: a\r\n" * 2000),
        (b"GET /health?" + b"a" * (100 << 10) + b" HTTP/1.1", b""),
        (b"GET /" + b"a" * (100 << 10) + b" HTTP/1.1", b""),
    ],
    ids=["long", "many", "query", "path"],
)
def test_a_head_that_is_too_large_is_refused_when_it_comes_at_once_too(line, more):
    options = ServerOptions()
    with listening(app_with(options), options) as address, socket.create_connection(address) as client:
        with contextlib.suppress(OSError):  # refused before it was all sent
            client.sendall(line + b"\r\nhost: x\r\n" + more + b"\r\n")
        client.settimeout(10)
        assert client.recv(1 << 16).split()[1] in (b"400", b"431")


def test_a_probe_of_http_1_0_that_names_no_host_is_answered():
    """A web page cannot ask so: browsers always say whom they ask."""
    options = ServerOptions(allowed_hosts=default_hosts("127.0.0.1", has_keys=False))
    with listening(app_with(options), options) as address, socket.create_connection(address) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        client.settimeout(10)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = (
    b"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
)


def all_that_comes(address, *parts):
    """Return all that the server sends until it ends the connection."""
    received = b""
    with socket.create_connection(address) as client, contextlib.suppress(ConnectionError):
        for part in parts:
            client.sendall(part)
            time.sleep(0.02)
        client.settimeout(10)
        while data := client.recv(1 << 16):
            received += data
    return received


@pytest.mark.parametrize("more", [b"0\r\nx-end: ", b"2;"], ids=["trailer", "chunk extension"])
def test_what_surrounds_a_body_is_limited_as_a_head_is(more):
    options = ServerOptions()
    with listening(app_with(options), options) as address:
        found = all_that_comes(address, CHUNKED + more, *[b"a" * 4096] * 8)
    assert b"HTTP/1.1 200" not in found


def test_a_header_behind_the_body_is_none_of_the_requests():
    options = ServerOptions(api_keys=(KEY,), keep_alive_s=1)
    end = f"0\r\nauthorization: Bearer {KEY}\r\n\r\n".encode()
    with listening(app_with(options), options) as address:
        assert all_that_comes(address, CHUNKED + end).startswith(b"HTTP/1.1 401")


def test_a_stream_for_http_1_0_ends_with_its_connection():
    async def stream(request):
        async def pieces():
            yield b"one"
            yield b"two"

        return StreamingResponse(pieces())

    options = ServerOptions()
    with listening(AuthLimits(Starlette(routes=[Route("/", stream)]), options), options) as address:
        found = all_that_comes(address, b"GET / HTTP/1.0\r\n\r\n")
    assert b"chunked" not in found
    assert found.endswith(b"\r\n\r\nonetwo")


def open_silently(address, count):
    return [socket.create_connection(address) for _ in range(count)]


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nx-a: "])
def test_probes_and_requests_are_answered_beside_any_number_of_silent_connections(first):
    options = ServerOptions(max_connections=1)
    with contextlib.ExitStack() as opened, listening(app_with(options), options) as (host, port):
        silent = open_silently((host, port), NUM_SPARE_CONNECTIONS + 60)
        for client in silent:
            opened.enter_context(client)
            with contextlib.suppress(OSError):  # one that has given way already
                client.sendall(first)
        for path in ("/live", "/health", "/ready", "/ping", "/v1/models"):
            assert httpx.get(f"http://{host}:{port}{path}").status_code == 200, path
        assert closes_within(silent[0], 10)
        silent[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):  # the newest stay
            silent[-1].recv(1)


def test_a_connection_that_is_being_answered_does_not_give_way():
    release, entered = threading.Event(), threading.Event()

    async def slow(request):
        entered.set()
        while not release.is_set():
            await asyncio.sleep(0.01)
        return JSONResponse({})

    options = ServerOptions(max_connections=1)
    app = AuthLimits(Starlette(routes=[Route("/", slow)]), options)
    with contextlib.ExitStack() as opened, listening(app, options) as address:
        client = opened.enter_context(socket.create_connection(address))
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert entered.wait(10)
        for silent in open_silently(address, NUM_SPARE_CONNECTIONS + 60):
            opened.enter_context(silent)
        release.set()
        client.settimeout(10)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_probe_does_not_wait_for_a_body_that_does_not_come():
    options = ServerOptions(max_connections=1)
    head = b"POST /ping HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
    with listening(app_with(options), options) as (host, port), contextlib.ExitStack() as opened:
        for _ in range(3):
            client = opened.enter_context(socket.create_connection((host, port)))
            client.sendall(head)
            client.settimeout(10)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert httpx.get(f"http://{host}:{port}/v1/models").status_code == 200


def test_a_client_that_does_not_read_is_dropped_and_its_work_ends():
    ended = threading.Event()

    async def endless(request):
        async def pieces():
            try:
                while True:
                    yield b"x" * 10_000
                    await asyncio.sleep(0)
            finally:
                ended.set()

        return StreamingResponse(pieces())

    options = ServerOptions(send_timeout_s=0.3)
    app = AuthLimits(Starlette(routes=[Route("/", endless)]), options)
    with listening(app, options) as address, socket.create_connection(address) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert ended.wait(20)


def test_what_a_request_raises_is_logged_without_its_text():
    options = ServerOptions()
    with logged(JsonLines()) as stream, listening(app_with(options), options) as (host, port):
        response = httpx.post(f"http://{host}:{port}/broken", json="my private words")
    assert response.status_code == 500
    assert "ValueError" in stream.getvalue()
    assert "private" not in stream.getvalue() + response.text


# ---- connections that end, or go on, while something is under way


class Held:
    """An application that waits for as long as its client is there."""

    def __init__(self):
        self.entered, self.ended = threading.Event(), threading.Event()

    async def answer(self, request):
        work = asyncio.sleep(60)
        self.entered.set()
        try:
            await exchange_of(request.scope).while_connected(work)
        finally:
            self.ended.set()
        return JSONResponse({})


@pytest.mark.parametrize("size", [10, 80_000])  # the latter comes at once, more than waits to be read
def test_a_client_that_goes_is_noticed_however_long_its_body_was(size):
    held, options = Held(), ServerOptions()
    app = AuthLimits(Starlette(routes=[Route("/", held.answer, methods=["POST"])]), options)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with listening(app, options, flush_s=1) as address:
        with socket.create_connection(address) as client:
            client.sendall(head % size + b" " * size)
            assert held.entered.wait(10)
        assert held.ended.wait(5)


def test_what_follows_a_request_that_waits_is_no_error_of_the_server(caplog):
    held, options = Held(), ServerOptions()
    app = AuthLimits(Starlette(routes=[Route("/", held.answer)]), options)
    with listening(app, options, flush_s=1) as address, socket.create_connection(address) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert held.entered.wait(10)
        client.sendall(b"no HTTP\r\n\r\n")
        assert not held.ended.wait(0.2)
        client.close()
        assert held.ended.wait(5)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_head_is_not_waited_for_while_the_server_does_not_read():
    async def slow(request):
        await asyncio.sleep(0.5)
        return JSONResponse({})

    options = ServerOptions(idle_timeout_s=0.3, keep_alive_s=1)
    get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    with listening(AuthLimits(Starlette(routes=[Route("/", slow)]), options), options) as address:
        found = all_that_comes(address, get + get + get[:9], get[9:])
    assert found.count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize(
    "framing",
    [b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"],
    ids=["length", "chunked"],
)
@pytest.mark.parametrize("at", [None, -9, -1])
def test_a_request_that_asks_for_another_protocol_keeps_its_body(framing, at):
    """As Java's client does with its first request: it would like to speak HTTP/2."""
    options = ServerOptions()
    sent = (
        b"POST /v1/models HTTP/1.1\r\nconnection: Upgrade, HTTP2-Settings\r\nhost: x\r\nupgrade: h2c\r\n"
        b"http2-settings: AAEAAEAA\r\ncontent-type: application/json\r\n" + framing
    )
    last = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    parts = (sent + last,) if at is None else (sent[:at], sent[at:] + sent, last)
    with listening(app_with(options), options) as address:
        found = all_that_comes(address, *parts)
    num_posts = 1 if at is None else 2
    assert found.count(b"HTTP/1.1 200") == num_posts + 1
    assert found.count(b'"length":2') == num_posts


def test_the_rest_of_an_answer_that_nobody_reads_is_dropped_too():
    """Less than what stops an answer from being written: nothing but time tells that nobody reads."""
    made = []

    async def run():
        options = ServerOptions(send_timeout_s=0.2, keep_alive_s=1)
        state = ServerState()
        config = uvicorn_config(answers_at_once, options)
        config.load()

        def make():
            made.append(config.http_protocol_class(config, state, {}))
            return made[-1]

        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        with client:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, server.sockets[0].getsockname())
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            deadline_s = time.monotonic() + 10
            while (state.connections or not state.total_requests) and time.monotonic() < deadline_s:
                await asyncio.sleep(0.02)
            left = len(state.connections)
        server.close()
        return left

    async def answers_at_once(scope, receive, send):
        transport = made[-1].transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not transport.get_write_buffer_size():
            await send({"type": "http.response.body", "body": b"x" * 8000, "more_body": True})
            await asyncio.sleep(0.05)  # for the client's side to take what it can
        await send({"type": "http.response.body", "body": b"x" * 1000})
        assert not made[-1].is_write_paused

    assert asyncio.run(run()) == 0
