"""The server over the fixture pair: its answers, its errors, and how it is before and after."""

import asyncio
import gc
import json
import socket
import threading
import time
import weakref
from dataclasses import replace

import httpx
import pytest

from blockdraft.checkpoints.opening import open_checkpoint
from blockdraft.engine.engine import Engine
from blockdraft.engine.info import Fingerprint
from blockdraft.engine.request import Deltas, TokenLogprobs
from blockdraft.server.api import host as host_module
from blockdraft.server.api.chat.logprobs import MIN_LOGPROB, chat_logprobs
from blockdraft.server.app import make_api, make_app
from blockdraft.server.http.auth_limits import AuthLimits
from blockdraft.server.http.exchange import exchange_of
from blockdraft.server.options import ServerOptions
from blockdraft.text.tokenizer import Tokenizer
from tests.server import pair
from tests.server.asking import ask, connected, listening
from tests.server.pair import PAIR
from tests.server.remote import remote_engine

CHAT = "/v1/chat/completions"
NAME = "pair"
OPTIONS = ServerOptions()
HELLO = {"messages": [{"role": "user", "content": "t1 t2 t3"}], "temperature": 0, "max_tokens": 5}
LONG = {**HELLO, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def models():
    return pair.models()


@pytest.fixture
def engine(models):
    engine = Engine(models, pair.plan())
    engine.fingerprint = Fingerprint.of({"weights": "1"})
    return engine


@pytest.fixture
def loop(engine):
    with remote_engine(lambda startup: engine) as loop:
        yield loop


@pytest.fixture
def app(loop, models):
    return make_app(loop, name=NAME, options=OPTIONS)


def chat(app, body):
    return ask(app, "POST", CHAT, json=body)


def events_of(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed_text(events, index=0):
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


# ---- answers


def test_each_choice_can_be_repeated_by_its_seed_and_the_fingerprint_is_in_every_object(app, engine):
    body = {**HELLO, "temperature": 1, "n": 3, "max_tokens": 12, "ignore_eos": True}
    whole = chat(app, body).json()
    assert len({choice["seed"] for choice in whole["choices"]}) == 3
    for choice in whole["choices"]:
        again = chat(app, {**body, "n": 1, "seed": choice["seed"]}).json()
        assert again["choices"][0]["message"] == choice["message"]
        assert again["choices"][0]["seed"] == choice["seed"]
    events = events_of(chat(app, {**body, "seed": whole["choices"][0]["seed"], "stream": True}).text)
    ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sum(choice["seed"] == whole["choices"][0]["seed"] for choice in ends) == 1
    assert {event["system_fingerprint"] for event in (whole, *events)} == {engine.fingerprint.id}


def test_a_stream_carries_the_same_text_with_role_first_and_usage_last(app):
    body = {**HELLO, "temperature": 1, "seed": 3, "n": 2, "max_tokens": 30, "ignore_eos": True}
    whole = chat(app, body).json()
    response = chat(app, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"  # a proxy in front sends each piece on at once
    events = events_of(response.text)
    for choice in whole["choices"]:
        assert streamed_text(events, choice["index"]) == choice["message"]["content"]
    for index in range(2):
        first = next(e for e in events if e["choices"][0]["index"] == index)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 60
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1


def test_a_stream_without_stream_options_has_no_usage(app):
    events = events_of(chat(app, {**HELLO, "stream": True}).text)
    assert all("usage" not in event for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_two_choices_of_one_seed_differ_and_repeat(app):
    body = {**HELLO, "temperature": 1.5, "seed": 3, "n": 2, "max_tokens": 30}
    first, second = ([c["message"]["content"] for c in chat(app, body).json()["choices"]] for _ in "ab")
    assert first == second
    assert first[0] != first[1]


def test_requests_that_run_together_are_answered_as_if_alone(app):
    bodies = [
        {
            "messages": [{"role": "user", "content": f"t{i} t{i + 2}"}],
            "seed": i,
            "max_tokens": 10 + 5 * i,
            "stream": i % 2 == 1,
        }
        for i in range(6)
    ]

    def text_of(response, body):
        if body["stream"]:
            return streamed_text(events_of(response.text))
        return response.json()["choices"][0]["message"]["content"]

    async def together():
        async with connected(app) as client:
            return await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))

    responses = asyncio.run(together())
    alone = [text_of(chat(app, body), body) for body in bodies]
    assert [text_of(response, body) for response, body in zip(responses, bodies, strict=True)] == alone
    assert len(set(alone)) == 6


@pytest.mark.parametrize(
    ("fields", "content", "reason"),
    [
        ({"logit_bias": {"7": 100}, "max_tokens": 3}, " t7 t7 t7", "length"),
        ({"stop": " t6"}, " t4 t5", "stop"),
        ({"stop": ["nothing", "t5 t6"]}, " t4 ", "stop"),
        ({"stop_token_ids": [6]}, " t4 t5", "stop"),
        ({"max_completion_tokens": 2, "max_tokens": 4}, " t4 t5", "length"),
        ({"max_tokens": None, "max_completion_tokens": 1}, " t4", "length"),
        ({"temperature": 100, "top_k": 1}, " t4 t5 t6 t7 t8", "length"),
        ({"temperature": 100, "top_p": 0.0001}, " t4 t5 t6 t7 t8", "length"),
        ({"temperature": 100, "min_p": 1.0}, " t4 t5 t6 t7 t8", "length"),
        ({"logit_bias": {"62": 100}}, "", "stop"),  # 62 is the end token
        ({"tools": None, "user": "me", "metadata": {}, "tool_choice": "none"}, " t4 t5 t6 t7 t8", "length"),
    ],
)
def test_a_field_does_what_it_says(app, fields, content, reason):
    (choice,) = chat(app, {**HELLO, **fields}).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason)


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 5}])
def test_the_end_token_can_be_kept_from_ending(app, fields):
    body = {**HELLO, "logit_bias": {"62": 100}, **fields}
    assert chat(app, body).json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 100}]
)
def test_a_penalty_reaches_the_sampler(app, penalty):
    body = {**HELLO, "max_tokens": 12, "logit_bias": {"7": 9.0, "8": 8.5}}
    plain, penalised = chat(app, body), chat(app, {**body, **penalty})
    assert plain.status_code == penalised.status_code == 200
    assert plain.json()["choices"] != penalised.json()["choices"]


def test_a_token_that_cannot_come_has_a_logprob_that_json_can_hold(models):
    logprobs = chat_logprobs([TokenLogprobs(4, -float("inf"), ((5, -float("inf")),))], models.tokenizer)
    assert logprobs["content"][0]["logprob"] == MIN_LOGPROB
    json.dumps(logprobs, allow_nan=False)


# ---- errors


def check_error(response, status, part, param=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert part in error["message"]
    assert error["param"] == param
    assert "Traceback" not in response.text


@pytest.mark.parametrize(
    ("fields", "part", "param"),
    [
        ({"messages": []}, "at least 1 item", "messages"),
        ({"n": 0}, "'n': Input should be greater", "n"),
        ({"logit_bias": {"64": 1}}, "vocabulary", "logit_bias"),
        ({"tools": [{"type": "function"}]}, "Field required", "tools"),
        ({"response_format": {"type": "xml"}}, "json_object", "response_format"),
        ({"messages": [{"role": "user", "content": "t1 " * 600}]}, "context", "messages"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(app, fields, part, param):
    check_error(chat(app, {**HELLO, **fields}), 400, part, param)


def test_a_token_that_only_the_tokenizer_knows_is_refused_for_its_message(models):
    parts = open_checkpoint(str(PAIR / "target")).tokenizer_parts()
    assert parts.tokenizer.add_tokens(["t64"]) == 1
    with pair.app_over(replace(models, tokenizer=Tokenizer(parts))) as app:
        for is_stream in (False, True):
            body = {**HELLO, "messages": [{"role": "user", "content": "t64"}], "stream": is_stream}
            check_error(chat(app, body), 400, "token id 64", "messages")
        assert chat(app, HELLO).status_code == 200


def test_paths_methods_and_models_that_do_not_exist(app):
    check_error(ask(app, "GET", "/v1/nothing"), 404, "no such path")
    check_error(ask(app, "GET", CHAT), 405, "POST")
    check_error(ask(app, "DELETE", "/v1/models"), 405, "does not take DELETE")
    check_error(chat(app, {**HELLO, "model": "gpt-4"}), 404, "'gpt-4'", "model")


OTHER_PATHS = [
    ("/chat/completions", ["/v1/chat/completions", "base URL"]),
    ("/completions", ["/v1/completions", "base URL"]),
    ("/models", ["/v1/models", "base URL"]),
    ("/messages", ["/v1/messages", "base URL"]),
    ("/openai/v1/responses", ["/v1/responses", "base URL"]),
    ("/api/v1/chat/completions", ["this is /v1/chat/completions here"]),
    ("/v1/v1/messages", ["twice", "/v1/messages"]),
    ("/v1/embeddings", ["no embeddings", "/v1/chat/completions"]),
    ("/embeddings", ["no embeddings"]),
    ("/v1/audio/transcriptions", ["no speech"]),
    ("/v1/images/generations", ["no images"]),
    ("/v1/files", ["no files"]),
    ("/api/chat", ["Ollama", "/v1"]),
    ("/api/generate", ["Ollama"]),
    ("/api/tags", ["Ollama"]),
    ("/completion", ["llama.cpp"]),
    ("/generate", ["TGI"]),
    ("/v1beta/models/gemini:generateContent", ["Gemini"]),
    ("/nothing", ["/openapi.json"]),
]


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x", "text/plain"])
def test_a_path_of_other_servers_is_a_404_that_says_what_there_is(kind):
    async def ask_all():
        async with connected(make_app(Starting("ready"), name=NAME, options=OPTIONS)) as client:
            for path, parts in OTHER_PATHS:
                response = await client.post(path, content=b"{}", headers={"content-type": kind})
                error = response.json()["error"]
                message = error if isinstance(error, str) else error["message"]
                assert response.status_code == 404, path
                assert message.startswith("no such path: ")
                assert [part for part in parts if part not in message] == []
                assert (await client.get(path)).status_code == 404, path

    asyncio.run(ask_all())


def test_a_form_sent_to_a_path_that_is_there_is_a_415(app):
    headers = {"content-type": "multipart/form-data; boundary=x"}
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"):
        assert ask(app, "POST", path, content=b"--x--", headers=headers).status_code == 415


def test_a_full_queue_is_a_429_that_says_when_to_come_back(app):
    check_error(chat(app, {**HELLO, "n": 9}), 400, "queue holds 8")

    async def rush():
        async with connected(app) as http:
            body = {**HELLO, "n": 8, "max_tokens": 100, "ignore_eos": True}
            return await asyncio.gather(*(http.post(CHAT, json=body) for _ in range(6)))

    refused = [response for response in asyncio.run(rush()) if response.status_code != 200]
    assert refused
    for response in refused:
        check_error(response, 429, "queue is full")
        assert int(response.headers["retry-after"]) >= 1
    lines = ask(app, "GET", "/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("blockdraft:requests_refused_total")]
    assert float(next(line for line in counted if "queue_full" in line).split()[-1]) >= len(refused)


class Patient(Engine):
    """It goes on after its first step when all requests have come, and after an answer when that was read."""

    def __init__(self, models, plan, num_requests, read):
        super().__init__(models, plan)
        self._num_requests, self._read = num_requests, read
        self.num_come = self.num_steps = self.num_ended = 0

    def add(self, *args, **kwargs):
        request_id = super().add(*args, **kwargs)
        self.num_come += 1
        return request_id

    def step(self):
        is_waiting = self.num_steps and self.num_come < self._num_requests
        if is_waiting or len(self._read) < self.num_ended:
            time.sleep(0.001)  # for the thread that sends and reads
            return Deltas()
        deltas = super().step()
        self.num_steps += 1
        self.num_ended += sum(delta.finish_reason is not None for delta in deltas)
        return deltas


def test_a_client_with_many_requests_does_not_keep_another_waiting(models):
    options = ServerOptions(api_keys=("key-of-many-requests", "key-of-a-single-one"))
    keys = [{"authorization": f"Bearer {key}"} for key in options.api_keys]
    ended, body = [], {**HELLO, "max_tokens": 24, "ignore_eos": True}
    served = Patient(models, replace(pair.plan(), max_num_seqs=1, max_queue=9), 9, ended)

    async def crowd(app):
        async with connected(app) as http:

            async def one(name, key, **more):
                response = await http.post(CHAT, json={**body, **more}, headers=keys[key])
                assert response.status_code == 200, response.text
                ended.append(name)

            tasks = [asyncio.create_task(one("many", 0)) for _ in range(6)]
            while served.num_come < 6 or not served.num_steps:
                await asyncio.sleep(0.001)
            tasks.append(asyncio.create_task(one("late", 0, priority=1)))
            tasks += [
                asyncio.create_task(one("single", 1)),
                asyncio.create_task(one("first", 0, priority=-1)),
            ]
            await asyncio.gather(*tasks)

    with remote_engine(lambda startup: served) as engine:
        asyncio.run(crowd(make_app(engine, name="pair", options=options)))
    assert ended == ["many", "first", "single", *["many"] * 5, "late"]


def test_a_request_leaves_nothing_to_the_garbage_collector(app):
    seen = []

    async def watched(scope, receive, send):
        seen.append(weakref.ref(exchange_of(scope)))
        await app(scope, receive, send)

    async def ask_some():
        async with connected(watched) as http:
            for is_stream in (True, False, True):
                response = await http.post(CHAT, json={**HELLO, "stream": is_stream})
                assert response.status_code == 200
            return [exchange() is None for exchange in seen]

    gc.disable()
    try:
        assert asyncio.run(ask_some()) == [True, True, False], "the connection has its last one"
    finally:
        gc.enable()


def test_a_model_without_a_chat_template_says_so(models):
    parts = replace(open_checkpoint(str(PAIR / "target")).tokenizer_parts(), chat_template=None)
    with pair.app_over(replace(models, tokenizer=Tokenizer(parts))) as app:
        check_error(chat(app, HELLO), 400, "no chat template", "messages")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_failed_step_fails_its_requests_and_the_third_in_a_row_the_server(
    app, engine, monkeypatch, is_stream
):
    def broken(*_):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(engine.scheduler, "commit", broken)
    for advice, health in (("ask again", 200), ("ask again", 200), ("restart the server", 503)):
        response = chat(app, {**HELLO, "stream": is_stream})
        check_error(response, 503, advice)  # a stream too: it had not begun
        assert "secret" not in response.text
        assert ask(app, "GET", "/health").status_code == health
    check_error(chat(app, HELLO), 503, "failed")
    assert "secret" not in ask(app, "GET", "/health").text
    assert ask(app, "GET", "/ready").status_code == ask(app, "POST", "/ping").status_code == 503


@pytest.mark.parametrize("is_stream", [False, True])
def test_after_one_failed_step_the_next_request_is_served(app, engine, monkeypatch, is_stream):
    expected = chat(app, HELLO).json()["choices"][0]["message"]["content"]
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "commit", lambda *_: 1 / 0)
        assert "internal error" in chat(app, {**HELLO, "stream": is_stream}).text
    assert chat(app, HELLO).json()["choices"][0]["message"]["content"] == expected
    assert not engine.has_work
    engine.check()


def test_a_failed_page_check_ends_the_server_at_the_first_failure(app, engine, monkeypatch):
    monkeypatch.setattr(engine.scheduler, "commit", lambda *_: 1 / 0)
    monkeypatch.setattr(engine, "check", lambda: 1 / 0)
    check_error(chat(app, HELLO), 503, "restart the server")
    assert ask(app, "GET", "/health").status_code == 503


def test_a_bug_of_ours_is_a_500_without_details(app, models, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode_chat", lambda *_, **__: 1 / 0)
    response = chat(app, HELLO)
    check_error(response, 500, "internal error")
    assert "division" not in response.text


# ---- before it is ready


class Starting:
    """A loop whose engine is not there yet, and its progress."""

    error = tokenizer = engine_info = None
    is_hanging = is_silent = False

    def __init__(self, state):
        self.state = state
        self.startup = self

    def snapshot(self):
        phase = {"name": "load", "state": "running", "seconds": 1.5, "detail": None, "progress": 0.5}
        return {"state": self.state, "seconds": 2.0, "phases": [phase], "warnings": [], "error": None}

    def status(self):
        return []


POSTS = {
    CHAT: HELLO,
    "/v1/completions": {"prompt": "t1"},
    "/tokenize": {"prompt": "t1"},
    "/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("state", ["starting", "failed", "draining"])
def test_until_it_is_ready_everything_that_needs_the_engine_is_a_503(state):
    app = AuthLimits(make_api(Starting(state), name=NAME), OPTIONS)
    answers = [ask(app, "POST", path, json=body) for path, body in POSTS.items()]
    answers += [ask(app, "GET", path) for path in ("/v1/models", f"/v1/models/{NAME}")]
    for answer in answers:
        check_error(answer, 503, "/ready")
        assert ("retry-after" in answer.headers) == (state == "starting")
    ready = ask(app, "GET", "/ready")
    assert (ready.status_code, ready.json()["state"]) == (503, state)
    assert ready.json()["phases"][0]["progress"] == 0.5
    for path in ("/health", "/ping"):
        health = ask(app, "GET", path)
        assert (health.status_code, health.json()) == (503, {"status": state})
        assert ("retry-after" in health.headers) == (state == "starting")
    for path in ("/live", "/version", "/openapi.json"):
        assert ask(app, "GET", path).status_code == 200


def test_an_engine_that_is_silent_is_not_healthy():
    loop = Starting("ready")
    loop.is_silent = True
    app = AuthLimits(make_api(loop, name=NAME), OPTIONS)
    health = ask(app, "GET", "/health")
    assert (health.status_code, health.json()) == (503, {"status": "hanging"})
    assert ask(app, "GET", "/live").status_code == 200  # it may come back


def test_prompts_that_do_not_fit_the_queue_together_leave_nothing_behind(app, engine, loop, monkeypatch):
    abort, aborted = loop.abort, []
    monkeypatch.setattr(loop, "abort", lambda request_id: (aborted.append(request_id), abort(request_id)))
    body = {"prompt": [[1]] * 20, "n": 8, "max_tokens": 400, "ignore_eos": True}
    for is_stream in (False, True):
        response = ask(app, "POST", "/v1/completions", json={**body, "stream": is_stream})
        assert "queue is full" in response.text  # a stream may have begun with those that did fit
        assert is_stream or response.status_code == 429
    assert len(aborted) >= 2  # those that did fit, both times
    assert chat(app, HELLO).status_code == 200
    assert not engine.scheduler.has_work
    engine.check()


# ---- connections


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_away_frees_its_rows_and_pages(app, engine, loop, monkeypatch, is_stream):
    """The engine stands still in its second step until the server has noticed that the client left."""
    reached, noticed = threading.Event(), threading.Event()
    num_steps, step, abort = iter(range(1000)), engine.step, loop.abort

    def held_step():
        if next(num_steps) == 1:
            reached.set()
            assert noticed.wait(30)
        return step()

    def seen_abort(request_id):
        abort(request_id)
        noticed.set()

    monkeypatch.setattr(engine, "step", held_step)
    monkeypatch.setattr(loop, "abort", seen_abort)
    body = json.dumps({**LONG, "stream": is_stream}).encode()
    lines = [f"POST {CHAT} HTTP/1.1", "host: test", "content-type: application/json"]
    head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode()
    with listening(app) as address:
        with socket.create_connection(address) as client:
            client.sendall(head + body)
            assert reached.wait(30)
        assert noticed.wait(30)
        host, port = address
        answer = httpx.post(f"http://{host}:{port}{CHAT}", json=HELLO, timeout=60)
    assert answer.status_code == 200
    assert not engine.scheduler.has_work
    engine.check()
    assert next(num_steps) < 20


def test_the_head_of_the_events_ends(app):
    async def head():
        async with connected(app) as client:
            return await asyncio.wait_for(client.head("/events"), timeout=20)

    response = asyncio.run(head())
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")


def test_many_prompts_are_queued_at_once(loop, app):
    """One after the other, each would wait for a step, and a drain could fall between two of them."""
    waiting = []
    submit = loop.submit

    async def watched(prompt_ids, sampling, turn):
        waiting.append(len(waiting))
        await asyncio.sleep(0)
        assert len(waiting) == 5
        return await submit(prompt_ids, sampling, turn)

    loop.submit = watched

    body = {"prompt": ["t1 t2"] * 5, "max_tokens": 2, "temperature": 0}
    response = ask(app, "POST", "/v1/completions", json=body)
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 5


@pytest.mark.parametrize(
    ("fields", "is_beside"),
    [
        ({}, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, True),
        ({"response_format": {"type": "json_object"}}, True),
    ],
    ids=["plain", "tools", "form"],
)
def test_grammars_are_made_beside_the_event_loop_however_short_the_body(app, monkeypatch, fields, is_beside):
    seen, prepare = [], host_module.prepare_chat

    def prepare_and_note(*args):
        seen.append(threading.current_thread() is threading.main_thread())
        return prepare(*args)

    monkeypatch.setattr(host_module, "prepare_chat", prepare_and_note)
    chat(app, {**HELLO, **fields})
    assert seen == [not is_beside]
