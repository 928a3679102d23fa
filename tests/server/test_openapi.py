"""The OpenAPI document, and hostile requests made of it: no 5xx, answers as described, nothing leaks."""

import json

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks

from blockdraft.server.app import make_api
from blockdraft.server.openapi import openapi
from tests.server.asking import ask
from tests.server.pair import app_over, models

Unused = object  # a loop that no route asks anything

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
SECRETS = ("Traceback", "site-packages", "/blockdraft/", '.py"', "Error(")
WITH_BODY = [
    *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
]
PLAIN = [
    (method.upper(), path)
    for path, methods in openapi()["paths"].items()
    for method in methods
    if path not in WITH_BODY
]


@pytest.fixture(scope="module")
def app():
    with app_over(models(max_context=32, max_queue=4)) as app:
        yield app


@pytest.fixture(scope="module")
def schema(app):
    return schemathesis.openapi.from_asgi("/openapi.json", app)


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


def test_what_the_document_calls_valid_is_read(app):
    """Limits in the document and in the models are the same: they come from one place."""
    chat = openapi()["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["n"]["anyOf"][0]["maximum"] == 128
    assert {"type": "null"} in chat["n"]["anyOf"]
    assert {"speculative", "chat_template_kwargs", "logit_bias", "stop"} <= chat.keys()


@pytest.mark.parametrize(
    ("path", "body", "is_valid"),
    [
        ("/detokenize", {"tokens": [3.0, 4]}, True),
        ("/detokenize", {"tokens": [3.5]}, False),
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
def test_the_document_and_the_server_agree(app, path, body, is_valid):
    document = json.loads(json.dumps(openapi()))
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = {**document, **content["application/json"]["schema"]}
    assert jsonschema_rs.is_valid(schema, body) is is_valid
    assert (ask(app, "POST", path, json=body).status_code == 200) is is_valid


@pytest.mark.parametrize(("method", "path"), PLAIN)
def test_requests_without_a_body(schema, method, path):
    attack(schema[path][method], GenerationMode.POSITIVE, 20)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda m: m.value)
@pytest.mark.parametrize("path", WITH_BODY)
def test_hostile_requests(schema, path, mode):
    num_examples = 40 if path == "/detokenize" else 15  # large bodies take long to make
    assert attack(schema[path]["POST"], mode, num_examples) >= num_examples // 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda m: m.value)
@pytest.mark.parametrize("path", WITH_BODY)
def test_thousands_of_hostile_requests(schema, path, mode):
    assert attack(schema[path]["POST"], mode, 500) >= 250
