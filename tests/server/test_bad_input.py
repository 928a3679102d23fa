"""Forms and tools that cannot be: every API refuses them in its own shape, and names the field at fault.

What is wrong is said once below, and put into the words of chat completions, Responses and Messages.
"""

import asyncio
import json
from dataclasses import replace

import pytest

from blockdraft.engine.engine import Engine
from blockdraft.engine.request import Delta
from blockdraft.server.api.streaming import EventSource
from blockdraft.server.app import make_app
from blockdraft.server.options import ServerOptions
from blockdraft.text.tokenizer import Tokenizer
from tests.grammar import json_tokens
from tests.matrix import slow_but
from tests.server.asking import connected
from tests.server.pair import models, plan
from tests.server.remote import remote_engine

pytest.importorskip("llguidance")

# The answer begins behind its thoughts: a form binds it from the first token on.
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}<think></think>"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
FORM_FIELDS = {"chat": "response_format", "responses": "text", "messages": "output_config"}
TURN_FIELDS = {"chat": "messages", "responses": "input", "messages": "messages"}


@pytest.fixture(scope="module")
def app():
    parts = replace(json_tokens.tokenizer()._parts, chat_template=TEMPLATE)
    served = replace(models(), tokenizer=Tokenizer(parts))
    with remote_engine(lambda startup: Engine(served, plan())) as engine:
        yield make_app(engine, name="m", options=ServerOptions(), tool_format="hermes")


# ---- one request in the words of each API


def chat(*, schema=None, tools=(), choice=None, turn=None):
    body = {"max_tokens": 3, "messages": [CHAT_TURNS[turn]]}
    if schema is not None:
        form = {"name": "f", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    if tools:
        functions = [{"name": name, "parameters": given, "strict": True} for name, given in tools]
        body["tools"] = [{"type": "function", "function": function} for function in functions]
    if choice is not None:
        body["tool_choice"] = {"type": "function", "function": {"name": choice}}
    return body


def responses(*, schema=None, tools=(), choice=None, turn=None):
    body = {"max_output_tokens": 3, "input": [RESPONSES_ITEMS[turn]]}
    if schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "f", "schema": schema, "strict": True}}
    if tools:
        body["tools"] = [
            {"type": "function", "name": name, "parameters": given, "strict": True} for name, given in tools
        ]
    if choice is not None:
        body["tool_choice"] = {"type": "function", "name": choice}
    return body


def messages(*, schema=None, tools=(), choice=None, turn=None):
    body = {"max_tokens": 3, "messages": [{"role": "user", "content": MESSAGES_CONTENT[turn]}]}
    if schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    if tools:
        body["tools"] = [{"name": name, "input_schema": given, "strict": True} for name, given in tools]
    if choice is not None:
        body["tool_choice"] = {"type": "tool", "name": choice}
    return body


CHAT_TURNS = {
    None: {"role": "user", "content": "abc"},
    "result": {"role": "tool", "tool_call_id": "c1", "content": "abc"},
    "image": {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
}
RESPONSES_ITEMS = {
    None: {"role": "user", "content": "abc"},
    "result": {"type": "function_call_output", "call_id": "c1", "output": "abc"},
    "image": {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
}
MESSAGES_CONTENT = {
    None: "abc",
    "result": [{"type": "tool_result", "tool_use_id": "c1", "content": "abc"}],
    "image": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}],
}
BODIES = {"chat": chat, "responses": responses, "messages": messages}


# ---- what is wrong


def nested(depth):
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "integer"}


def object_of(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def many_objects(num_all, num_any):
    """Each of them alone is small; all that can be combined are too many."""
    return [
        {"anyOf": [object_of(**{f"p{one}_{other}": {}}) for other in range(num_any)]}
        for one in range(num_all)
    ]


EXPLODING = "(" * 99 + "a" + "{1,99})" * 99
SCHEMAS = {
    "no number": ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum (3)"),
    "no type": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    "no value": (object_of(a=False), "'a'"),
    "no choice": ({"enum": []}, "Unsatisfiable"),
    "itself": ({"$ref": "#"}, "nothing"),
    "each other": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "nothing",
    ),
    "without end": (object_of(a={"$ref": "#"}), "nothing"),
    "nowhere": ({"$ref": "#/$defs/a"}, "$defs"),
    "elsewhere": ({"$ref": "http://localhost:1/schema.json"}, "localhost"),
    "deep": (nested(70), "levels"),
    "too many": ({"allOf": many_objects(12, 6)}, "too large"),
    "too long": (object_of(a={"type": "string", "description": "x" * (1 << 19)}), "characters"),
    "no regex": (object_of(a={"type": "string", "pattern": "("}), "regex"),
    "half an escape": (object_of(a={"type": "string", "pattern": "a\\"}), "lone backslash"),
    "no such type": ({"type": "strng"}, "strng"),
}
GRAMMARS = {
    "lark": ({"structured_outputs": {"grammar": 'start: a\na: ("x"\n'}}, "structured_outputs", "2("),
    "gbnf": ({"structured_outputs": {"grammar": "root ::= a\na ::= (\n"}}, "structured_outputs", "line"),
    "llama.cpp's": ({"grammar": "start: other"}, "grammar", "other"),
    "old": ({"guided_grammar": "start: other"}, "guided_grammar", "other"),
    "old regex": ({"guided_regex": "("}, "guided_regex", "regex"),
    "regex": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed"),
    "half an escape": ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs", "lone backslash"),
    "no text": ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs", "nothing"),
}
OTHERS = {
    "twice": ({"tools": [("f", PARAMETERS), ("f", PARAMETERS)]}, "tools", "2 times"),
    "unknown": ({"tools": [("f", PARAMETERS)], "choice": "g"}, "tool_choice", "'g'"),
    "no tools": ({"choice": "f"}, "tool_choice", "tools"),
    "result": ({"turn": "result"}, None, "call"),
    "image": ({"turn": "image"}, None, "text"),
}


def refused(app, api, body):
    """The messages of the refusal, whole and streamed, after a look at their shape; the field is in it."""
    whole, streamed = post(app, PATHS[api], body, {**body, "stream": True})
    return checked(api, whole), checked(api, streamed)


def post(app, path, *bodies):
    async def all_of_them():
        async with connected(app) as client:
            return [await client.post(path, json=body) for body in bodies]

    return asyncio.run(all_of_them())


def checked(api, response):
    assert response.status_code == 400, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    content = response.json()
    error = content["error"]
    assert error["type"] == "invalid_request_error"
    if api == "messages":
        assert (content["type"], set(error)) == ("error", {"type", "message"})
        return error["message"], None
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"], error["param"]


def check(app, api, body, field, words):
    for message, param in refused(app, api, body):
        assert words in message
        assert param in (field, None)
        assert param is not None or field in message
        assert len(message) < 1000


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_cannot_be_kept_to(app, api, name):
    schema, words = SCHEMAS[name]
    check(app, api, BODIES[api](schema=schema), FORM_FIELDS[api], words)
    if schema.get("type") == "object":
        check(app, api, BODIES[api](tools=[("f", schema)], choice="f"), "tools", words)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_that_cannot_be_kept_to(app, name):
    fields, field, words = GRAMMARS[name]
    check(app, "chat", {**chat(), **fields}, field, words)
    for response in post(app, "/v1/completions", {"prompt": "abc", **fields}):
        assert checked("completions", response)[1] == field


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("name", OTHERS)
def test_tools_and_turns_that_cannot_be(app, api, name):
    fields, field, words = OTHERS[name]
    check(app, api, BODIES[api](**fields), field or TURN_FIELDS[api], words)


@pytest.mark.parametrize("api", slow_but(PATHS, "chat"))
def test_a_regex_that_explodes_when_the_answer_has_begun(app, api):
    """Few tokens are read before: a whole vocabulary would meet the limit with the first mask."""
    body = BODIES[api](schema=object_of(a={"type": "string", "pattern": f"^[ab]{{30}}{EXPLODING}$"}))
    body = {name: 60 if name.startswith("max_") else value for name, value in body.items()}
    check(app, api, body, FORM_FIELDS[api], "too many")


class OneStream:
    """A stream and its writer: texts as they come."""

    is_over = True

    def __init__(self, *deltas):
        self.deltas = list(deltas)

    def listen(self, call):
        pass

    def take(self):
        return self.deltas.pop(0) if self.deltas else None

    def event(self, prompt, delta):
        return delta.text

    def failed(self, message):
        return f"failed: {message}"


def test_a_stream_whose_form_cannot_be_kept_to_any_longer_ends_with_an_error():
    stream = OneStream(
        Delta("r", 0, "ab", (1,)), Delta("r", 0, "", (), finish_reason="abort", stop_reason="too many")
    )
    events = EventSource(stream, [stream])
    assert events.take() == "abfailed: too many"
    assert events.is_over


@pytest.mark.parametrize("api", PATHS)
def test_others_are_answered_while_a_huge_schema_is_read(app, api):
    names = [f"name_{number}" for number in range(900)]
    pattern = "^([a-z]{3,40}-[0-9]+|(abc|xy){2,9}[^,]{1,40})" + api + "x" * 135
    schema = object_of(**{name: {"type": "string", "pattern": f"{pattern}{name}$"} for name in names})
    body = json.dumps(BODIES[api](schema=schema)).encode()
    assert len(body) > 150_000  # 500 KB with 2,000 of them: compiled in a second, on two cores

    async def both():
        async with connected(app) as client:
            headers = {"content-type": "application/json"}
            for first in (BODIES[api](), BODIES[api](schema=object_of(a={"type": "string"}))):
                await client.post(PATHS[api], json=first)  # makes what is made once
            huge = asyncio.ensure_future(client.post(PATHS[api], content=body, headers=headers))
            num_answered = 0
            while not huge.done():
                response = await client.post(PATHS[api], json=BODIES[api]())
                assert response.status_code == 200, response.text
                num_answered += not huge.done()
            return await huge, num_answered

    response, num_answered = asyncio.run(both())
    assert response.status_code in (200, 400), response.text[:500]
    assert num_answered >= 2
