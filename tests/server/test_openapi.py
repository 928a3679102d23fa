"""The OpenAPI document, and hostile requests made of it: no 5xx, answers as described, nothing leaks."""

import functools
import json
import re

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks

from blockdraft.server.api.openapi import EngineLimits, openapi
from blockdraft.server.app import make_api
from blockdraft.text.tokenizer import ROLES
from tests.matrix import slow_but
from tests.server.asking import ask, listening
from tests.server.pair import app_over, loaded, models

BLOCK, VOCABULARY = 8, 64  # of the fixture pair
Unused = object  # a loop that no route asks anything

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
# Refusals that a schema can tell beforehand; those of relations between fields, of lengths in tokens and of
# what a text means (a grammar, an id) are others.
SHAPE = re.compile(
    r"Input should|Field required|should have at|should match|should be|is needed|it is empty|no role|"
    r"its role|content is|part of (a message|type)|not supported (here|yet)|must be a string|a call is|"
    r"cannot be set|a function has|(?<!logit_bias: )token id [0-9]+ is|verifies at most"
)
SECRETS = ("Traceback", "site-packages", "/blockdraft/", '.py"', "Error(")
WITH_BODY = [
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/detokenize"),
    *("/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"),
]
PLAIN = [
    (method.upper(), path)
    for path, methods in openapi()["paths"].items()
    for method in methods
    if path not in WITH_BODY
]


@pytest.fixture(scope="module")
def app():
    small, plan = loaded(max_model_len=32, max_queue=4)
    with app_over(small, plan=plan) as app:
        yield app


@pytest.fixture(scope="module")
def roomy():
    """A server with room for tools in its prompts."""
    with app_over(models()) as app, listening(app) as (host, port):
        transport = httpx.HTTPTransport(verify=False)  # certificates would take long to read
        with httpx.Client(transport=transport, base_url=f"http://{host}:{port}", timeout=60) as client:
            yield client


@pytest.fixture(scope="module")
def schema(app):
    with listening(app) as (host, port):
        yield schemathesis.openapi.from_url(f"http://{host}:{port}/openapi.json")


def attack(operation, mode, num_examples):
    """The number of requests sent."""
    num_sent = 0

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case):
        nonlocal num_sent
        num_sent += 1
        response = case.call(timeout=120)
        # To it a body that is too large, as one with too many items may be, is not refused by status 413.
        made = CHECKS[:-1] if response.status_code == 413 else CHECKS
        case.validate_response(response, checks=made)
        if mode is GenerationMode.POSITIVE and response.status_code == 400:
            assert not SHAPE.search(response.text), (response.text[:500], case.body)
        assert not any(secret in response.text for secret in SECRETS), response.text[:500]

    one()
    return num_sent


def test_the_document_has_every_route_and_sound_schemas():
    api = make_api(Unused(), name="pair")
    routes = {(method, r.path.replace(":path", "")) for r in api.routes for method in r.methods - {"HEAD"}}
    routes -= {("GET", path) for path in ("/", "/events", "/page/{name}", "/favicon.ico")}  # the page's own
    assert routes == {(m.upper(), path) for path, methods in openapi()["paths"].items() for m in methods}
    document = json.loads(json.dumps(openapi()))
    for name, schema in document["components"]["schemas"].items():
        jsonschema_rs.meta.validate(schema)
        jsonschema_rs.validator_for({**document, "$ref": f"#/components/schemas/{name}"})


def test_limits_of_fields_are_in_the_document(app):
    """EngineLimits in the document and in the models are the same: they come from one place."""
    served = ask(app, "GET", "/openapi.json").json()["components"]["schemas"]
    assert served["Speculative"]["properties"]["width"]["anyOf"][0]["maximum"] == BLOCK
    assert served["DetokenizeRequest"]["properties"]["tokens"]["items"]["maximum"] == VOCABULARY - 1
    assert "x-" not in json.dumps(openapi())
    roles = {
        role
        for kind in ("SaidParam", "AnswerParam", "ResultParam")
        for role in served[kind]["properties"]["role"].get("enum", ())
    }
    roles |= {served[kind]["properties"]["role"].get("const") for kind in ("AnswerParam", "ResultParam")}
    assert roles == set(ROLES)
    chat = openapi()["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["n"]["anyOf"][0]["maximum"] == 128
    assert {"type": "null"} in chat["n"]["anyOf"]
    assert {"speculative", "chat_template_kwargs", "logit_bias", "stop"} <= chat.keys()


def said(role, content="t1", **more):
    return {"role": role, "content": content, **more}


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PARTS = [{"type": "text", "text": "t1"}]
CALLS = [{"id": "c", "function": {"name": "f"}}]
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
FORM = {"type": "json_schema", "name": "n", "schema": {}}
NAMED = {"type": "function", "name": "f"}
CHATS = [
    ([], False),
    ([{}], False),
    ([said("robot")], False),
    ([said("")], False),
    ([said("user", None)], False),
    ([{"role": "user"}], False),
    ([said("user", 5)], False),
    ([said("user", PARTS)], True),
    ([said("user", ["t1"])], False),
    ([said("ipython", False, tool_calls=CALLS)], False),
    ([said("user", [{"type": "image_url", "image_url": {"url": "x"}}])], False),
    ([said("user"), {"role": "assistant"}, said("user")], True),
    ([said("user"), said("assistant", None), said("user")], True),
    ([said("user"), said("assistant", [{"type": "refusal", "refusal": "t2"}]), said("user")], True),
    ([said("user"), said("assistant", None, tool_calls=CALLS), said("user")], True),
    ([said("user"), said("assistant", None, tool_calls=[{"id": "c"}])], False),
    ([said("user"), said("assistant", None, tool_calls={})], False),
    ([said("user"), said("assistant", None, tool_calls=CALLS), said("tool", tool_call_id="c")], True),
    ([said("user"), said("tool")], False),
]
INPUTS = [
    ([], False),
    ([said("user")], True),
    ([said("user", [{"type": "input_text", "text": "t1"}])], True),
    ([said("user", [{"type": "input_image"}])], False),
    ([said("robot")], False),
    ([{"role": "user"}], False),
    ([said("user"), {"role": "assistant"}], True),
    ([said("user"), CALL_ITEM, {"type": "function_call_output", "call_id": "c", "output": "t1"}], True),
    ([said("user"), {**CALL_ITEM, "name": ""}], False),
    ([said("user"), {**CALL_ITEM, "arguments": {}}], False),
    ([said("user"), {"type": "reasoning", "summary": [{"text": "t1"}]}], True),
    ([said("user"), {"type": "reasoning", "summary": ["t1"]}], False),
    ([said("user"), {"type": "reasoning", "content": [{"text": "t1"}], "summary": 5}], False),
    ([said("user"), {"type": "reasoning", "content": ""}], False),
    ([said("user"), {"type": "computer_call"}], False),
    ([{"type": "item_reference"}], False),
]
TURNS = [
    ([], False),
    ([said("user", PARTS)], True),
    ([said("user", None)], False),
    ([said("robot")], False),
    ([said("tool")], False),
    ([said("user"), {"role": "assistant"}, said("user")], True),
    ([said("user"), said("assistant", [{"type": "thinking", "thinking": "t1"}]), said("user")], True),
    ([said("user"), said("assistant", [{"type": "thinking"}]), said("user")], False),
    ([said("user"), said("assistant", [{"type": "tool_use", "id": "c", "name": "f", "input": {}}])], True),
    ([said("user"), said("assistant", [{"type": "tool_use", "id": "c", "name": "f"}])], False),
    ([said("user", [{"type": "image"}])], False),
    ([said("user", [{"type": "tool_result"}])], False),
]
FIELDS = [
    (CHAT, {"speculative": {"width": 8}}, True),
    (CHAT, {"speculative": {"width": 9}}, False),
    (CHAT, {"speculative": {"width": 0}}, False),
    (CHAT, {"stop_token_ids": [64]}, False),
    (CHAT, {"logit_bias": {"0": 1, "10": 1}}, True),
    (CHAT, {"logit_bias": {"00": 1}}, False),
    (CHAT, {"audio": {}}, False),
    (CHAT, {"audio": None, "functions": [], "use_beam_search": False}, True),
    (CHAT, {"use_beam_search": True}, False),
    (CHAT, {"separate_reasoning": True, "return_hidden_states": False}, True),
    (CHAT, {"return_hidden_states": True}, False),
    (CHAT, {"use_beam_search": 0}, False),
    (CHAT, {"priority": False}, False),
    (CHAT, {"priority": 0.0}, True),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, False),
    (RESPONSES, {"background": True}, False),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, False),
    (RESPONSES, {"tools": [{**NAMED, "parameters": {}}]}, True),
    (RESPONSES, {"tools": [{**NAMED, "name": "a b"}]}, False),
    (RESPONSES, {"tools": [{**NAMED, "strict": "yes"}]}, False),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "s", "tools": [NAMED]}]}, True),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "s", "tools": [{"name": "f"}]}]}, False),
    (RESPONSES, {"tools": [NAMED], "tool_choice": {"type": "function"}}, False),
    (RESPONSES, {"tools": [NAMED], "tool_choice": {"type": "allowed_tools", "tools": [NAMED]}}, True),
    (RESPONSES, {"tools": [NAMED], "tool_choice": {"type": "allowed_tools", "tools": []}}, False),
    (RESPONSES, {"text": {"format": {}}}, False),
    (RESPONSES, {"text": {"format": {**FORM, "schema": None}}}, False),
    (RESPONSES, {"text": {"format": {"type": "text"}}}, True),
    (MESSAGES, {"thinking": {"type": "enabled"}}, False),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1.0}}, True),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 0}}, False),
    (MESSAGES, {"tool_choice": {"type": "tool"}}, False),
    (MESSAGES, {"tools": [{"name": "f"}]}, False),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}]}, True),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": 5}}]}, False),
    (MESSAGES, {"system": [{"type": "image"}]}, False),
    (MESSAGES, {"system": PARTS}, True),
    (MESSAGES, {"mcp_servers": [{}]}, False),
]
LEAST = {
    CHAT: {"messages": [said("user")], "max_tokens": 2},
    RESPONSES: {"input": "t1", "max_output_tokens": 2},
    MESSAGES: {"messages": [said("user")], "max_tokens": 2},
}


@functools.cache
def validator(path):
    document = json.loads(json.dumps(openapi(EngineLimits(BLOCK, VOCABULARY))))
    content = document["paths"][path]["post"]["requestBody"]["content"]
    return jsonschema_rs.validator_for({**document, **content["application/json"]["schema"]})


@pytest.mark.parametrize(
    ("path", "body", "is_valid"),
    [
        *((CHAT, {**LEAST[CHAT], "messages": messages}, is_valid) for messages, is_valid in CHATS),
        *((RESPONSES, {**LEAST[RESPONSES], "input": items}, is_valid) for items, is_valid in INPUTS),
        *((MESSAGES, {**LEAST[MESSAGES], "messages": turns}, is_valid) for turns, is_valid in TURNS),
        *((path, {**LEAST[path], **more}, is_valid) for path, more, is_valid in FIELDS),
        ("/detokenize", {"tokens": [3.0, 4]}, True),
        ("/detokenize", {"tokens": [3.5]}, False),
        ("/detokenize", {"tokens": [64]}, False),
        ("/v1/responses/input_tokens", {}, False),
        ("/v1/responses/input_tokens", {"instructions": "t1"}, True),
        ("/v1/responses/input_tokens", {"input": "t1", "instructions": None}, True),
        ("/v1/completions", {"prompt": [1.0, 2]}, True),
        ("/v1/completions", {"prompt": [[1.0], [2.0, 3]]}, True),
        ("/v1/completions", {"prompt": [1.5]}, False),
        ("/v1/completions", {"prompt": "t1", "stop_token_ids": [5.0]}, True),
        ("/v1/completions", {"prompt": "t1", "speculative": {"width": 2.0}}, True),
        ("/v1/completions", {"prompt": "t1", "max_tokens": 0}, True),
        ("/v1/completions", {"prompt": "t1", "max_tokens": 0, "echo": True}, True),
        ("/v1/completions", {"prompt": "t1", "max_tokens": -1}, False),
        ("/tokenize", {"prompt": "t1"}, True),
        ("/tokenize", {"prompt": "t1", "messages": None}, True),
        ("/tokenize", {"messages": [{"role": "user", "content": "t1"}], "prompt": None}, True),
        ("/tokenize", {}, False),
        ("/tokenize", {"prompt": None}, False),
        ("/tokenize", {"prompt": "t1", "messages": [{"role": "user", "content": "t1"}]}, False),
    ],
)
def test_the_document_and_the_server_agree(roomy, path, body, is_valid):
    assert validator(path).is_valid(body) is is_valid
    assert (roomy.post(path, json=body).status_code == 200) is is_valid


@pytest.mark.parametrize("num_examples", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "path"), slow_but(PLAIN, ("GET", "/v1/models"), *PLAIN[:2]))
def test_requests_without_a_body(schema, method, path, num_examples):
    attack(schema[path][method], GenerationMode.POSITIVE, num_examples)


@pytest.mark.parametrize("num_examples", [2, pytest.param(625, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda m: m.value)
@pytest.mark.parametrize("path", slow_but(WITH_BODY, *WITH_BODY[:4]))
def test_hostile_requests(schema, path, mode, num_examples):
    """Ten thousand in all, where slow tests run."""
    assert attack(schema[path]["POST"], mode, num_examples) >= num_examples // 2
