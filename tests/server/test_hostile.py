"""Bodies made to hurt: each is a 400 that names its field, quickly, with nothing of the server's inside."""

import json

import pytest

from blockdraft.errors import RequestError
from blockdraft.server.api.chat.fields import ChatRequest, CompletionRequest
from blockdraft.server.api.chat.messages import for_template
from blockdraft.server.api.fields import parse
from blockdraft.server.http.body import MAX_DEPTH, parse_object
from tests.server.asking import ask
from tests.server.pair import app_over, models

ROUTES = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "t1"}]


@pytest.fixture(scope="module")
def app():
    with app_over(models()) as app:
        yield app


def post(app, path, body, headers=JSON):
    return ask(app, "POST", path, content=body, headers=headers)


def check_refused(response, status=400):
    assert response.status_code == status, response.text[:300]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 500
    for secret in ("Traceback", "/blockdraft/", "site-packages", ".py"):
        assert secret not in response.text
    return error


def deep(depth, inside="1"):
    return "[" * depth + inside + "]" * depth


@pytest.mark.parametrize("path", ROUTES)
def test_json_that_means_two_things_is_refused_everywhere(app, path):
    check_refused(post(app, path, b'{"n": 1, "n": 2}'))


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "not valid JSON"),
        (b"null", "send a JSON object"),
        (b"{}x", "not valid JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "64 bits"),
        (b'{"a": {"\\ud800": 1}}', "U+D800"),
        (b'{"\\udfff": 1}', "U+DFFF"),
        (f'{{"a": {deep(100_000)}}}'.encode(), "nests deeper"),
        (b'{"a": 1, "a": 1}', "'a' twice"),
        (b'{"a": [{"b": 1, "b": 1}]}', "'b' twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": [1e999]}', "1e999"),
        (b'{"a": 18446744073709551616}', "64 bits"),
        (b'{"a": ["\\ud800"]}', "U+D800"),
        (b'{"a": {"\\udfff": 1}}', "U+DFFF"),
        (f'{{"a": {deep(MAX_DEPTH + 1)}}}'.encode(), "nests deeper"),
        (b'{"a":' * 100_000, "nests deeper"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"[1]", "send a JSON object"),
    ],
)
def test_the_refusal_of_a_body_says_why(body, part):
    with pytest.raises(RequestError) as caught:
        parse_object(body)
    assert part in str(caught.value)


def test_every_kind_of_json_that_is_in_bounds_is_read():
    body = (
        '{"a": [1, -2.5e3, true, null, "é\\ud83d\\ude00", {"b": 18446744073709551615}], "c": '
        + deep(62)
        + "}"
    )
    assert parse_object(body.encode()) == json.loads(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{}]),
        ("messages", [{"role": "user", "content": 1}]),
        ("messages", [{"role": 1, "content": "t1"}]),
        ("messages", [{"role": "user", "content": {"type": "text"}}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}]),
        ("messages", [{"role": "user", "content": [1]}]),
        ("messages", [{"role": "user", "content": "t1"}] * 4097),
        ("messages", [1]),
        ("n", 129),
        ("n", 2**63),
        ("n", 1.5),
        ("n", "1"),
        ("max_tokens", 2**31),
        ("max_completion_tokens", -1),
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", 101),
        ("top_k", -2),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("stop", ["x"] * 65),
        ("stop", ["x" * 1025]),
        ("stop", 1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", list(range(65))),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 1, "01": 1}),
        ("logit_bias", {"99999999999": 1}),
        ("logit_bias", {"x" * 10_000: 1}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("logit_bias", [1]),
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("prompt_logprobs", 21),
        ("stream", 1),
        ("stream_options", {"include_usage": 1}),
        ("stream_options", []),
        ("speculative", "yes"),
        ("speculative", {"width": 0}),
        ("speculative", {"width": True}),
        ("chat_template_kwargs", {str(i): 1 for i in range(65)}),
        ("chat_template_kwargs", {"a": "x" * 20_000}),
        ("chat_template_kwargs", {"self": 1}),
        ("chat_template_kwargs", {"continue_final_message": 1}),
        ("chat_template_kwargs", {"split_special_tokens": True}),
        ("chat_template_kwargs", {"add_special_tokens": True}),
        ("chat_template_kwargs", []),
        ("reasoning_effort", "extreme"),
        ("request_id", "x" * 129),
        ("request_id", "a\nb"),
        ("model", 1),
        ("messages", None),
        ("messages", "hi"),
        ("messages", [{"role": "user"}]),
        ("top_p", 0),
        ("max_tokens", 0),
        ("min_tokens", 2),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"64": 1}),
        ("stop_token_ids", [64]),
        ("top_logprobs", 2),
        ("stream_options", {"include_usage": True}),
        ("speculative", {"width": 100}),
        ("speculative", {"with": 1}),
        ("chat_template_kwargs", {"messages": []}),
        ("echo", True),
        ("tools", [{"type": "function", "function": {"name": "f g"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("response_format", {"type": "json_schema"}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_chat_field_out_of_bounds_is_named(app, field, value):
    body = {"messages": MESSAGES, "max_tokens": 1, field: value}
    error = check_refused(post(app, ROUTES[0], json.dumps(body).encode()))
    assert error["param"] == field


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 600, 100_000])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (lambda depth: '{"a":' * depth + "1" + "}" * depth, "nests deeper"),
        (lambda depth: '{"enum": ' + deep(depth) + "}", "nests deeper"),
        (lambda depth: '{"a": 1, "a": 1}', "twice"),
        (lambda depth: '{"a": NaN}', "NaN"),
        (lambda depth: '{"a": "\\ud800"}', "U+D800"),
    ],
    ids=["objects", "lists", "twice", "constant", "surrogate"],
)
def test_the_rules_of_a_body_hold_for_json_inside_its_texts(app, text, why, depth):
    for field, value in (("guided_json", text(depth)), ("structured_outputs", {"json": text(depth)})):
        body = {"messages": MESSAGES, "max_tokens": 1, field: value}
        error = check_refused(post(app, ROUTES[0], json.dumps(body).encode()))
        assert error["param"] == field
        assert why in error["message"]


def test_arguments_that_nest_too_deep_are_shown_to_the_model_as_text():
    function = {"name": "f", "arguments": '{"a":' * 600 + "1" + "}" * 600}
    call = {"id": "c", "type": "function", "function": function}
    shaped = for_template([{"role": "assistant", "tool_calls": [call]}], has_developer=False)
    assert shaped[0]["tool_calls"][0]["function"]["arguments"] == {"arguments": function["arguments"]}


@pytest.mark.parametrize("part", ["image_url", "input_image", "input_audio", "video_url", "x" * 50])
def test_a_part_that_is_no_text_is_refused_by_its_type(app, part):
    content = [{"type": "text", "text": "t1"}, {"type": part}]
    body = {"messages": [{"role": "user", "content": content}]}
    error = check_refused(post(app, ROUTES[0], json.dumps(body).encode()))
    assert repr(part) in error["message"]
    assert "text only" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "t1", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages"),
        ("/tokenize", {"prompt": "t1", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**32]}, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "tokens"),
    ],
)
def test_token_routes_name_the_field(app, path, body, param):
    status = 404 if param == "model" else 400
    assert check_refused(post(app, path, json.dumps(body).encode()), status)["param"] == param


RANGES = {
    "n": [1, 128],
    "temperature": [0, 100],
    "top_p": [1e-9, 1],
    "top_k": [-1, 2**31 - 1],
    "min_p": [0, 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "repetition_penalty": [0.01, 100],
    "seed": [-(2**63), 2**63 - 1],
    "prompt_logprobs": [0, 20],
    "max_tokens": [1, 2**31 - 1],
}


@pytest.mark.parametrize("field", RANGES)
def test_the_ends_of_every_range_are_good_for_the_engine_too(field):
    """The ranges are written twice: for the document, and in SamplingParams."""
    for value in RANGES[field]:
        for kind, more in ((ChatRequest, {"messages": MESSAGES}), (CompletionRequest, {"prompt": "t1"})):
            sampling = parse(kind, json.dumps({**more, field: value}).encode()).sampling({})
            assert getattr(sampling, field) == value
    low, high = RANGES[field]
    step = 1 if isinstance(high, int) and isinstance(low, int) else 0.1
    for value in (low - step, high + step):
        with pytest.raises(RequestError):
            parse(ChatRequest, json.dumps({"messages": MESSAGES, field: value}).encode())
