"""Anthropic's Messages API: what its clients send and get, over the fixture pair and by script."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from pydantic import TypeAdapter

from blockdraft.engine.engine import Engine
from blockdraft.engine.streams import EngineStopped
from blockdraft.errors import CapacityError
from blockdraft.server.api.messages import schemas
from blockdraft.server.api.messages.fields import MessagesRequest
from blockdraft.server.api.messages.routes import MessageWriter
from blockdraft.server.app import make_app
from blockdraft.server.http.replies import MessageError, error_response, json_of
from blockdraft.server.options import ServerOptions
from tests.server.asking import ask
from tests.server.pair import NAME, app_over, models, plan, thinking_tokenizer
from tests.server.remote import remote_engine
from tests.server.scripted import AGENT, SCRIPTS, ScriptedChat, call, events_of, piece, streamed, taken

PATH = "/v1/messages"
JSON = {"content-type": "application/json"}
HELLO = {
    "model": NAME,
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "t1 t2 t3"}],
    "temperature": 0,
}
HEAD = {"id": "msg_1", "created": 1, "model": "m", "system_fingerprint": "bd-1"}
TOOL = {"name": "weather", "input_schema": {"type": "object"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "r"}
WHOLE, EVENT, ERROR = (
    TypeAdapter(kind) for kind in (schemas.MessageAnswer, schemas.MessageEvent, MessageError)
)


@pytest.fixture(scope="module")
def app():
    with app_over(models()) as app:
        yield app


def create(app, **fields):
    return ask(app, "POST", PATH, json={**HELLO, **fields})


def checked_error(response, status, kind, part=""):
    assert response.status_code == status, response.text
    error = ERROR.validate_python(response.json(), strict=True)
    assert error["error"]["type"] == kind
    assert part in error["error"]["message"]
    assert error["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


def writer(**fields):
    asked = MessagesRequest(**{**HELLO, **fields})
    return MessageWriter(asked, HEAD, ScriptedChat())


def assembled(events):
    """The message that a client puts together."""
    message = events[0]["message"]
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append({**event["content_block"], "_json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], event["delta"]
            key = {"input_json_delta": "_json"}.get(delta["type"], delta["type"].removesuffix("_delta"))
            added = delta["partial_json"] if key == "_json" else delta[key]
            block[key] += added
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block in message["content"]:
        partial = block.pop("_json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(partial)
            except ValueError:
                block["input"] = {"INVALID_JSON": partial}
    return message


# ---- by script


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1e999}',
        '{"a": [NaN]}',
        '{"a": -Infinity}',
        '{"a": "\\ud800"}',
        '{"a\\udc00": 1}',
        '{"a": 123456789012345678901234567890}',
        '{"a": 1, "a": 2}',
        '{"a": ' + "[" * 5000,
    ],
    ids=["1e999", "NaN", "Infinity", "surrogate", "surrogate key", "large", "twice", "deep"],
)
def test_arguments_that_no_client_could_send_back_are_shown_as_they_were_written(arguments):
    script = [piece(calls=[call(0, arguments, id="call_a", name="weather")], end="stop")]
    (block,) = taken(writer(), script)["content"]
    assert block["input"] == {"INVALID_JSON": arguments}
    assert json_of(block).encode()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_says_what_the_whole_answer_says(name):
    events = streamed(writer(), SCRIPTS[name])
    for event in events:
        EVENT.validate_python(event, strict=True)
    whole = taken(writer(), SCRIPTS[name])
    WHOLE.validate_python(whole, strict=True)
    assert assembled(events) == whole
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


def test_thoughts_text_and_calls_are_blocks_of_their_own():
    whole = taken(writer(), AGENT)
    assert whole["content"] == [
        {"type": "thinking", "thinking": "I need both.", "signature": "blockdraft"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "call_b", "name": "now", "input": {}},
    ]
    assert whole["stop_reason"] == "tool_use"
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (6, 4)


def test_what_ends_comes_before_what_begins():
    blocks = taken(writer(), SCRIPTS["mixed"])["content"]
    kinds = ["text", "tool_use", "thinking", "text", "tool_use", "text"]
    assert [block["type"] for block in blocks] == kinds
    assert [block["id"] for block in blocks if block["type"] == "tool_use"] == ["call_a", "call_b"]
    assert all(block.get("input", {}) == {} for block in blocks)


def test_thoughts_can_be_hidden():
    hidden = {"thinking": {"type": "adaptive", "display": "omitted"}}
    events = streamed(writer(**hidden), AGENT)
    assert assembled(events)["content"][0] == taken(writer(**hidden), AGENT)["content"][0]
    assert "I need" not in json.dumps(events)


def test_a_stop_sequence_is_named():
    script = [piece("One", end="stop", stop="two")]
    whole = taken(writer(stop_sequences=["two"]), script)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "two")


def test_a_stream_that_breaks_off_ends_with_an_error_event():
    (error,) = events_of(writer().failed("the engine was lost."))
    ERROR.validate_python(error, strict=True)
    assert error["error"] == {"type": "api_error", "message": "the engine was lost."}


# ---- what a request asks of the model


def chat_of(**fields):
    return MessagesRequest(**{**HELLO, **fields}).chat()


def test_turns_become_messages_of_a_chat():
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"x": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "d"},
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}]},
            ],
        },
    ]
    system = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    asked = chat_of(messages=turns, system=system, tools=[TOOL])
    function = {"name": "weather", "arguments": '{"x":"é"}'}
    call = {"id": "c1", "type": "function", "function": function}
    assert asked.messages == [
        {"role": "system", "content": "one\n\ntwo"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "user", "content": "d"},
    ]


def test_a_system_message_among_the_turns_is_a_reminder():
    turns = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"}]
    system.append({"type": "text", "text": "d"})
    assert chat_of(messages=turns, system=system).messages == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\n\n<system-reminder>\nb\n</system-reminder>\n\nc"},
    ]


def test_a_last_turn_of_the_model_is_continued(app):
    turns = [{"role": "user", "content": "t1"}, {"role": "assistant", "content": "t2 t3"}]
    assert create(app, messages=turns).json()["content"][0]["text"] == " t4 t5 t6 t7 t8"


def test_a_form_beside_a_forced_call_is_taken():
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert chat_of(tools=[TOOL], tool_choice={"type": "any"}, output_config=form).must_call


# ---- over HTTP


def test_whole_and_streamed_over_http(app):
    answer = create(app)
    assert answer.status_code == 200
    whole = WHOLE.validate_python(answer.json(), strict=True)
    assert whole["content"] == [{"type": "text", "text": " t4 t5 t6 t7 t8"}]
    assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("max_tokens", 5)
    stream = create(app, stream=True)
    assert stream.headers["content-type"].startswith("text/event-stream")
    message = assembled(events_of(stream.text))
    assert message["content"] == whole["content"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop_sequences": [" t6"]}, " t4 t5", "stop_sequence"),
        ({"temperature": 100, "top_k": 1, "metadata": {"user_id": "u"}}, " t4 t5 t6 t7 t8", "max_tokens"),
        ({"system": "t9"}, " t4 t5 t6 t7 t8", "max_tokens"),
        ({"thinking": {"type": "disabled"}, "service_tier": "auto"}, " t4 t5 t6 t7 t8", "max_tokens"),
    ],
)
def test_a_field_does_what_it_says(app, fields, text, reason):
    answer = create(app, **fields).json()
    assert (answer["content"][0]["text"], answer["stop_reason"]) == (text, reason)


def test_thoughts_of_a_thinking_model_are_blocks():
    with app_over(replace(models(), tokenizer=thinking_tokenizer())) as app:
        answer = create(app, messages=[{"role": "user", "content": "t1 t2"}], max_tokens=7).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["content"][0]["thinking"] == " t4 t5 "


def test_tokens_are_counted(app):
    body = {"model": NAME, "messages": HELLO["messages"], "system": "t7"}
    assert ask(app, "POST", f"{PATH}/count_tokens", json=body).json() == {"input_tokens": 4}


def test_fields_that_mean_nothing_are_named(app):
    answer = create(app, temprature=1, metadata={"user_id": "u"}, service_tier="auto", stream=True)
    assert answer.headers["x-blockdraft-ignored-fields"] == "temprature"
    assert "x-blockdraft-ignored-fields" not in create(app).headers


# ---- errors


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'messages.0.role'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'messages.0.content.0.type'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'messages.0.content.0.text'"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "'messages.0.content': a string or an array is needed",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "messages"),
        ({"system": [{"type": "image"}]}, "'system.0.type'"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "'tools.0.type'"),
        ({"tools": [{"name": "w"}]}, "'tools.0.input_schema'"),
        ({"tools": [TOOL, TOOL]}, "'tools' holds 'weather' 2 times"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "'tool_choice' is 'x'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "'messages.0.content.0.tool_use_id'"),
        ({"tool_choice": {"type": "tool"}}, "'tool_choice.name'"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "t1 " * 600}]}, "context"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(app, fields, part):
    checked_error(create(app, **fields), 400, "invalid_request_error", part)


def test_every_refusal_has_anthropics_shape(app):
    checked_error(create(app, model="claude"), 404, "not_found_error", "'claude'")
    checked_error(ask(app, "GET", PATH), 405, "invalid_request_error")
    checked_error(ask(app, "GET", f"{PATH}/nothing"), 404, "not_found_error")
    checked_error(ask(app, "POST", PATH, content=b"{", headers=JSON), 400, "invalid_request_error")
    checked_error(ask(app, "POST", PATH, content=b"a=b"), 415, "invalid_request_error")


VERSION = {"anthropic-version": "2023-06-01"}


def test_models_have_anthropics_shape_where_its_client_asks(app):
    answer = ask(app, "GET", "/v1/models", headers=VERSION)
    page = TypeAdapter(schemas.ModelPage).validate_python(answer.json(), strict=True)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    (model,) = page["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", NAME, "target")
    assert datetime.fromisoformat(model["created_at"]).tzinfo == UTC
    assert (page["first_id"], page["last_id"], page["has_more"]) == (NAME, NAME, False)
    assert ask(app, "GET", f"/v1/models/{NAME}", headers=VERSION).json() == model
    for name in ("after_id", "before_id"):
        assert ask(app, "GET", f"/v1/models?{name}={NAME}", headers=VERSION).json()["data"] == []
    checked_error(ask(app, "GET", "/v1/models/claude", headers=VERSION), 404, "not_found_error", "'claude'")
    checked_error(ask(app, "POST", "/v1/models", headers=VERSION), 405, "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1/files?beta=true", "/v1/skills", f"/v1{PATH}"])
@pytest.mark.parametrize("body", [{}, {"files": {"file": b"x"}}], ids=["empty", "multipart"])
def test_anthropics_client_knows_the_error_of_a_path_that_is_not_there(app, path, body):
    checked_error(ask(app, "POST", path, headers=VERSION, **body), 404, "not_found_error", "no such path")


def test_models_keep_openais_shape_otherwise(app):
    answer = ask(app, "GET", "/v1/models")
    assert answer.json()["data"][0]["object"] == "model"
    assert "request-id" not in answer.headers
    refusal = ask(app, "GET", "/v1/models/claude")
    assert set(refusal.json()["error"]) == {"message", "type", "param", "code"}
    # The header changes nothing on paths that are OpenAI's alone.
    refusal = ask(app, "POST", "/v1/chat/completions", json={}, headers=VERSION)
    assert set(refusal.json()["error"]) == {"message", "type", "param", "code"}


class Lost:
    """An engine that takes no request."""

    def __init__(self, engine, error):
        self.error = None
        self.is_hanging = self.is_silent = False
        self.startup, self.tokenizer, self.engine_info = engine.startup, engine.tokenizer, engine.engine_info
        self._error = error

    async def submit(self, prompt_ids, sampling, turn):
        raise self._error


def test_refusals_of_the_guard_and_the_engine_have_it_too():
    with remote_engine(lambda startup: Engine(models(), plan())) as engine:
        guarded = make_app(engine, name=NAME, options=ServerOptions(api_keys=("k",), max_body_bytes=64))
        full = make_app(Lost(engine, CapacityError("full.")), name=NAME, options=ServerOptions())
        lost = make_app(Lost(engine, EngineStopped("lost.")), name=NAME, options=ServerOptions())
        bug = make_app(Lost(engine, ZeroDivisionError("secret")), name=NAME, options=ServerOptions())
        checked_error(create(guarded), 401, "authentication_error", "x-api-key")
        checked_error(ask(guarded, "GET", "/v1/models", headers=VERSION), 401, "authentication_error")
        key = {"x-api-key": "k"}
        checked_error(ask(guarded, "POST", PATH, json=HELLO, headers=key), 413, "request_too_large")
        checked_error(create(full), 429, "rate_limit_error", "full")
        checked_error(create(lost), 503, "api_error", "lost")
        checked_error(create(bug), 500, "api_error", "internal error")
        assert create(full).headers["retry-after"] == "1"


def test_an_overload_and_a_time_limit_have_anthropics_numbers():
    overload = error_response(503, "busy.", code="too_many_connections", retry_after_s=1).of(PATH, "id")
    assert (overload.status_code, overload.headers["retry-after"]) == (529, "1")
    assert json.loads(overload.body)["error"]["type"] == "overloaded_error"
    late = error_response(504, "late.", code="timeout").of(f"{PATH}/count_tokens", "id")
    assert (late.status_code, json.loads(late.body)["error"]["type"]) == (504, "timeout_error")
