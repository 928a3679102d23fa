"""Tools over HTTP: calls whole and streamed, what the engine is asked for, and what is refused."""

import json
from dataclasses import replace

import pytest

from blockdraft.engine.request import StructuredOutputs, Thinking
from blockdraft.grammar.limits import MAX_GRAMMAR_CHARS
from blockdraft.server.api.chat.fields import ChatRequest, CompletionRequest
from blockdraft.server.api.chat.prepare import find_dialect, prepare_chat
from blockdraft.server.api.fields import parse
from blockdraft.server.api.tool_fields import MAX_SCHEMA_DEPTH
from tests.server.asking import ask
from tests.server.pair import NAME, app_over, client_of, models, spelled_tokenizer, thinking_tokenizer

# What the pair writes after tN is tN+1: with these names it calls a tool after t3.
CALLING = {
    "t4": "Well",
    "t5": "<tool_call>",
    "t6": '{"name":',
    "t7": '"f",',
    "t8": '"arguments":',
    "t9": '{"city":',
    "t10": '"Paris"}}',
    "t11": "</tool_call>",
}
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.description }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }} {% for call in m.tool_calls %}<tool_call> "
    "{{ call.function.arguments.city }} {% endfor %}{% endfor %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "t20", "parameters": PARAMETERS}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
ASKED = {"messages": [{"role": "user", "content": "t1 t2 t3"}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "t19"}'}}
CHAT = "/v1/chat/completions"


def calling_tokenizer(**options):
    return spelled_tokenizer(CALLING, TEMPLATE, **options)


@pytest.fixture(scope="module")
def client():
    with client_of(replace(models(), tokenizer=calling_tokenizer())) as client:
        yield client


@pytest.fixture(scope="module")
def app():
    with app_over(models()) as app:
        yield app


def request(client, **options):
    asked = {"model": NAME, "temperature": 0, "max_tokens": 20, "stop": ["</tool_call>"], "tools": [TOOL]}
    return client.chat.completions.create(**{**ASKED, **asked, **options})


def test_a_call_comes_whole(client):
    (choice,) = request(client).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == " Well"
    assert (call.type, call.function.name) == ("function", "f")
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_a_call_is_streamed_as_openai_streams_it(client):
    one_by_one = {"speculative": False}
    chunks = [chunk.choices[0] for chunk in request(client, stream=True, extra_body=one_by_one)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0] * len(calls)
    assert calls[0].id.startswith("call_")
    assert (calls[0].type, calls[0].function.name) == ("function", "f")
    assert {(call.id, call.type, call.function.name) for call in calls[1:]} == {(None, None, None)}
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Paris"}
    assert "".join(chunk.delta.content or "" for chunk in chunks) == " Well"
    assert chunks[-1].finish_reason == "tool_calls"
    assert {chunk.finish_reason for chunk in chunks[:-1]} == {None}


def test_a_call_that_is_cut_off_ended_by_length(client):
    (choice,) = request(client, max_tokens=6).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city":'


def test_with_tool_choice_none_a_call_is_content(client):
    (choice,) = request(client, tool_choice="none", stop=[], max_tokens=8).choices
    assert choice.message.tool_calls is None
    assert choice.message.content.endswith("</tool_call>")
    assert choice.finish_reason == "length"


def test_every_choice_has_calls_of_its_own(client):
    choices = request(client, n=2).choices
    ids = {choice.message.tool_calls[0].id for choice in choices}
    assert len(ids) == 2


def bound_to(city, **more):
    return {
        "type": "object",
        "properties": {"city": {"type": "string", **city}},
        "required": ["city"],
        **more,
    }


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (bound_to({}), None),
        (bound_to({"enum": ["Rome", "Oslo"]}), "city: \"Paris\" is not a listed value ('enum')"),
        (bound_to({"maxLength": 3}), "city: \"Paris\" breaks 'maxLength' 3"),
        (bound_to({"format": "date"}), "city: \"Paris\" does not have the format 'date'"),
        (bound_to({"not": {"const": "Paris"}}), "city: \"Paris\" matches what 'not' forbids"),
        (bound_to({}, minProperties=2), "the object breaks 'minProperties' 2"),
    ],
)
def test_a_call_that_has_not_its_schema_is_delivered_and_named(client, caplog, schema, problem):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    (choice,) = request(client, tools=[tool]).choices
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    expected = None if problem is None else [{"index": 0, "error": problem}]
    assert (choice.model_extra or {}).get("invalid_tool_calls") == expected
    *_, last = request(client, tools=[tool], stream=True)
    assert (last.choices[0].model_extra or {}).get("invalid_tool_calls") == expected
    assert (problem is not None) is any("does not match its schema" in line for line in caplog.messages)


def test_a_call_that_was_cut_off_is_no_news(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": bound_to({"maxLength": 3})}}
    (choice,) = request(client, tools=[tool], max_tokens=6).choices
    assert "invalid_tool_calls" not in (choice.model_extra or {})


def prepared(tokenizer=None, **options):
    asked = parse(ChatRequest, json.dumps({**ASKED, **options}).encode())
    return prepare_chat(asked, find_dialect(tokenizer or calling_tokenizer()), {})


def test_templates_see_tools_and_arguments_as_objects():
    tokenizer = calling_tokenizer()
    messages = [
        {"role": "user", "content": "t1"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "t2"},
        {"role": "user", "content": "t3"},
    ]
    ids = prepared(tokenizer, messages=messages, tools=[TOOL]).prompt_ids
    assert tokenizer.decode(ids) == "t20 t1 <tool_call> t19 t2 t3"


@pytest.mark.parametrize(
    "arguments", ["", "{broken", "[1]", None, '{"city": "\\ud800"}', '{"city": 1e999}', '{"city": NaN}']
)
def test_arguments_that_a_model_has_written_wrong_are_never_refused(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert prepared(messages=messages, tools=[TOOL]).prompt_ids


def test_a_template_without_tools_is_told_in_words():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    dialect = find_dialect(spelled_tokenizer({}, template))
    assert dialect.tools.name == "plain"
    seen = []
    dialect.tokenizer.encode_chat = lambda messages, **options: seen.append((messages, options)) or [1]
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "sun"},
    ]
    prepare_chat(ChatRequest.model_validate({"messages": messages, "tools": [TOOL]}), dialect, {})
    ((messages, options),) = seen
    assert "tools" not in options
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be short.\n\n")
    assert '"t20"' in messages[0]["content"]
    assert '{"name": "f", "arguments": {"city": "t19"}}' in messages[2]["content"]
    assert messages[3]["content"] == "Result of f:\nrain\n\nResult of f:\nsun"


@pytest.mark.parametrize(
    ("options", "is_bound"),
    [
        ({"tools": [TOOL]}, False),
        ({"tools": [STRICT]}, True),
        ({"tools": [STRICT], "tool_choice": "none"}, False),
        ({"tools": [TOOL], "tool_choice": "required"}, True),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, True),
    ],
)
def test_a_call_is_bound_by_a_grammar_where_it_must_be_right(options, is_bound):
    form = prepared(**options).sampling.structured_outputs
    assert (form is not None) is is_bound
    if form is not None:
        assert form.grammar.startswith("start: ")


FORMS = [
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"grammar": "start: /a/"},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_form_beside_a_forced_call_binds_nothing(form, choice):
    asked = {"tools": [TOOL], "tool_choice": choice}
    both, alone = prepared(**asked, **form), prepared(**asked)
    assert both.sampling.structured_outputs == alone.sampling.structured_outputs
    assert both.output_field == "tools"


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}},
            StructuredOutputs(json=PARAMETERS, is_lenient=True),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": PARAMETERS, "strict": True},
                }
            },
            StructuredOutputs(json=PARAMETERS),
        ),
        ({"structured_outputs": {"json": json.dumps(PARAMETERS)}}, StructuredOutputs(json=PARAMETERS)),
        ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=["a", "b"])),
        ({"grammar": "start: /a/"}, StructuredOutputs(grammar="start: /a/")),
        ({"guided_json": PARAMETERS}, StructuredOutputs(json=PARAMETERS)),
        ({"guided_regex": "a"}, StructuredOutputs(regex="a")),
        ({"guided_choice": ["a"]}, StructuredOutputs(choice=["a"])),
        ({"guided_grammar": "start: /a/"}, StructuredOutputs(grammar="start: /a/")),
        (
            {"structured_outputs": {"json": PARAMETERS, "whitespace_pattern": " ?"}},
            StructuredOutputs(json=PARAMETERS, whitespace_pattern=" ?"),
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": False}},
            StructuredOutputs(json_object=True, whitespace_pattern=r"[ \n\r\t]{1,32}"),
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            StructuredOutputs(json_object=True),
        ),
        (
            {"guided_json": PARAMETERS, "guided_whitespace_pattern": " ?"},
            StructuredOutputs(json=PARAMETERS, whitespace_pattern=" ?"),
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": " ?"},
            StructuredOutputs(json_object=True, whitespace_pattern=" ?"),
        ),
    ],
)
def test_every_way_to_ask_for_a_form_is_understood(options, form):
    assert prepared(**options).sampling.structured_outputs == form
    asked = parse(CompletionRequest, json.dumps({"prompt": "t1", **options}).encode())
    assert asked.sampling({}).structured_outputs == form


def test_the_engine_hears_of_thoughts_where_a_form_or_a_budget_must_know_of_them():
    tokenizer = thinking_tokenizer()  # t3 is <think>, t6 is </think>
    assert prepared(tokenizer).sampling.thinking is None
    thinking = Thinking(open_ids=(3,), close_ids=(6,), max_tokens=7)
    assert prepared(tokenizer, thinking_token_budget=7).sampling.thinking == thinking
    opened = {"messages": [{"role": "user", "content": "t1 <think>"}], "split_special_tokens": False}
    formed = prepared(tokenizer, **opened, structured_outputs={"regex": "a"})
    assert formed.sampling.thinking == Thinking(close_ids=(6,))
    closed = {**opened, "messages": [{"role": "user", "content": "t1 <think> </think>"}]}
    assert prepared(tokenizer, **closed, structured_outputs={"regex": "a"}).sampling.thinking is None
    assert prepared(structured_outputs={"regex": "a"}).sampling.thinking is None


DEEP = '{"items": ' * 600 + "{}" + "}" * 600
BAD_TYPE = {"type": "function", "function": {"name": "f", "parameters": {"type": "strng"}}}
BAD_PART = {"type": "function", "function": {"name": "f", "parameters": {"properties": 1}}}
OTHER = {"type": "function", "function": {"name": "g"}}
JSON_OBJECT = {"response_format": {"type": "json_object"}}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"anyOf": {}}}}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def said(role, **message):
    return {"messages": [{"role": role, "content": "x", **message}]}


@pytest.mark.parametrize(
    ("options", "part", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "2 times", "tools"),
        ({"tools": [BAD_TYPE]}, "strng", "tools"),
        ({"tools": [BAD_PART]}, "properties", "tools"),
        ({"tools": [TOOL], "tool_choice": OTHER}, "'g'", "tool_choice"),
        ({"tool_choice": "required"}, "no 'tools'", "tool_choice"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "2 structured outputs",
            "structured_outputs",
        ),
        ({"structured_outputs": {}}, "set json", "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "not JSON", "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, **JSON_OBJECT}, "2 structured outputs", "structured_outputs"),
        ({"response_format": BAD_SCHEMA}, "anyOf", "response_format"),
        ({"guided_json": DEEP}, "nests deeper", "guided_json"),
        ({"guided_json": '{"const": NaN}'}, "not a JSON number", "guided_json"),
        ({"guided_json": '{"const": "\\ud800"}'}, "surrogate", "guided_json"),
        ({"structured_outputs": {"json": DEEP}}, "nests deeper", "structured_outputs"),
        ({"guided_regex": "a" * (1 << 20)}, "524288", "guided_regex"),
        (said("tool", tool_call_id="call_1"), "no earlier message", "messages"),
        (said("tool"), "no earlier message", "messages"),
        (said("assistant", tool_calls=[{"id": 3}]), "tool_calls", "messages"),
        (said("user", content=[IMAGE]), "reads text only", "messages"),
        ({"reasoning_effort": "huge"}, "xhigh", "reasoning_effort"),
        ({"verbosity": "loud"}, "medium", "verbosity"),
        ({"thinking_token_budget": -1}, "greater", "thinking_token_budget"),
    ],
)
def test_what_cannot_be_is_refused_by_name(app, options, part, param):
    response = ask(app, "POST", CHAT, json={**ASKED, "max_tokens": 2, **options})
    assert response.status_code == 400
    error = response.json()["error"]
    assert part in error["message"]
    assert error["param"] == param


def test_fields_that_nobody_knows_are_named(app, caplog):
    body = {**ASKED, "max_tokens": 2, "temprature": 0, "user": "me", "store": False, "top\nk": 1}
    response = ask(app, "POST", CHAT, json=body)
    assert response.status_code == 200
    assert response.headers["x-blockdraft-ignored-fields"] == "temprature, top?k"
    assert "temprature" in caplog.text
    assert (
        "x-blockdraft-ignored-fields" not in ask(app, "POST", CHAT, json={**ASKED, "max_tokens": 2}).headers
    )
    streamed = ask(app, "POST", CHAT, json={**body, "stream": True})
    assert streamed.headers["x-blockdraft-ignored-fields"] == "temprature, top?k"


def test_a_suffix_is_filled_in_where_the_model_can(app):
    response = ask(app, "POST", "/v1/completions", json={"prompt": "t1", "suffix": "t9"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")
    names = {"t10": "<fim_prefix>", "t11": "<fim_suffix>", "t3": "<fim_middle>"}
    with client_of(replace(models(), tokenizer=spelled_tokenizer(names))) as client:
        asked = {"model": NAME, "prompt": "t1 t2", "suffix": "t9", "temperature": 0, "max_tokens": 2}
        answer = client.completions.create(**asked, extra_body={"return_token_ids": True})
        assert answer.choices[0].prompt_token_ids == [10, 1, 2, 11, 9, 3]


def tool_of(schema, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"type": "object", "properties": {"a": schema}}


def test_schemas_of_tools_are_bounded_before_anything_is_built(app):
    large = tool_of({"type": "object", "description": "x" * MAX_GRAMMAR_CHARS})
    half = {"type": "object", "description": "x" * (MAX_GRAMMAR_CHARS // 2)}
    two = [tool_of(half), tool_of(half, "g")]
    for tools, part in (
        ([large], "524288 characters"),
        (two, "524288 characters"),
        ([tool_of(nested(MAX_SCHEMA_DEPTH))], "'f' nests deeper than 48 levels: flatten it"),
    ):
        for path, body in (
            (CHAT, {**ASKED, "tools": tools}),
            ("/v1/messages", {**ASKED, "max_tokens": 1, "tools": [anthropic(tool) for tool in tools]}),
            (
                "/v1/responses",
                {"input": "t1", "tools": [{"type": "function", **tool["function"]} for tool in tools]},
            ),
        ):
            answer = ask(app, "POST", path, json={"model": NAME, **body})
            assert answer.status_code == 400, answer.text
            assert part in answer.json()["error"]["message"]
    asked = parse(
        ChatRequest, json.dumps({**ASKED, "tools": [tool_of(nested(MAX_SCHEMA_DEPTH - 3))]}).encode()
    )
    assert len(asked.callable_tools) == 1


def anthropic(tool):
    return {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
