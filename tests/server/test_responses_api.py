"""OpenAI's Responses API: what its clients send and get, over the fixture pair and by script."""

import json
import tracemalloc
from dataclasses import replace

import openai
import pytest
from openai.types.responses import Response as ClientResponse
from openai.types.responses import ResponseItemList as ClientItems
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from blockdraft.server.api.responses import schemas
from blockdraft.server.api.responses.fields import ResponsesRequest
from blockdraft.server.api.responses.items import add_input, add_item, sealed
from blockdraft.server.api.responses.stored import (
    ENTRY_BYTES,
    ITEM_BYTES,
    ResponseStore,
    StoredResponse,
    replayed,
)
from blockdraft.server.api.responses.writer import ResponseWriter
from blockdraft.server.api.translation import Conversation
from blockdraft.server.http.body import Nested
from tests.server.asking import ask, listening
from tests.server.pair import NAME, app_over, models, thinking_tokenizer
from tests.server.scripted import AGENT, SCRIPTS, ScriptedChat, call, events_of, piece, streamed, taken

PATH = "/v1/responses"
HELLO = {"model": NAME, "max_output_tokens": 5, "input": "t1 t2 t3", "temperature": 0}
HEAD = {"id": "resp_1", "created": 1, "model": "m", "system_fingerprint": "bd-1"}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "r"}
WHOLE, EVENT = TypeAdapter(schemas.Response), TypeAdapter(schemas.Event)
CLIENT_EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def app():
    with app_over(models()) as app:
        yield app


@pytest.fixture(scope="module")
def client(app):
    with listening(app) as (host, port):
        yield openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)


def create(app, **fields):
    return ask(app, "POST", PATH, json={**HELLO, **fields})


def checked(answer):
    """The answer, in the shape that is described and that OpenAI's client knows."""
    assert answer.status_code == 200, answer.text
    WHOLE.validate_python(answer.json(), strict=True)
    ClientResponse.model_validate(answer.json())
    return answer.json()


def writer(**fields):
    return ResponseWriter(ResponsesRequest(**{**HELLO, **fields}), HEAD, lambda answer: None, ScriptedChat())


def without_ids(items):
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


def assembled(events):
    """The items that a client puts together of what it was told bit by bit, each checked at its end."""
    items, texts = [], {}
    for event in events:
        kind, place = event["type"], event.get("output_index")
        if kind == "response.output_item.added":
            assert place == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[place]["id"]
            texts[place] = texts.get(place, "") + event["delta"]
        elif kind.endswith((".text.done", "_text.done", "_arguments.done")):
            assert texts.get(place, "") == event.get("text", event.get("arguments"))
        elif kind == "response.content_part.added":
            assert event["part"]["text"] == ""
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == texts.get(place, "")
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == items[place]["id"]
            items[place] = event["item"]
    return items


# ---- by script


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_says_what_the_whole_answer_says(name):
    events = streamed(writer(), SCRIPTS[name])
    for event in events:
        EVENT.validate_python(event, strict=True)
        CLIENT_EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    whole = taken(writer(), SCRIPTS[name])
    WHOLE.validate_python(whole, strict=True)
    last = events[-1]["response"]
    assert assembled(events) == last["output"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert {**last, "output": None} == {**whole, "output": None}


def test_events_come_in_openais_order():
    kinds = [event["type"].removeprefix("response.") for event in streamed(writer(), AGENT)]
    message = ["output_item.added", "content_part.added", *["output_text.delta"] * 2]
    message += ["output_text.done", "content_part.done", "output_item.done"]
    thought = [kind.replace("output_text", "reasoning_text") for kind in message]
    arguments = "function_call_arguments"
    first = ["output_item.added", *[f"{arguments}.delta"] * 2, f"{arguments}.done", "output_item.done"]
    second = ["output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done"]
    begin = ["created", "in_progress"]
    assert kinds == [*begin, *thought, *message, *first, *second, "completed"]


def test_an_answer_that_is_cut_off_says_so():
    whole = taken(writer(), SCRIPTS["cut call"])
    assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert streamed(writer(), SCRIPTS["cut"])[-1]["type"] == "response.incomplete"


def test_the_cost_has_cached_and_reasoning_tokens():
    usage = taken(writer(), AGENT)["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2


def test_a_stream_that_breaks_off_has_failed():
    one = writer()
    one.event(0, AGENT[0])
    (event,) = events_of(one.failed("the engine was lost."))
    CLIENT_EVENT.validate_python(event)
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"] == {"code": "server_error", "message": "the engine was lost."}


def test_thoughts_are_sealed_where_a_client_keeps_them():
    include = ["reasoning.encrypted_content"]
    thoughts = taken(writer(include=include), AGENT)["output"][0]
    conversation = Conversation()
    add_item(conversation, Nested({**thoughts, "content": None}, "input.0"), lambda item_id: None)
    assert conversation.messages == [{"role": "assistant", "reasoning_content": "I need both."}]
    for broken in ("gAAAA", "blockdraft:%", sealed("é")[:-1]):
        add_item(conversation, Nested({**thoughts, "content": None, "encrypted_content": broken}, "i"), None)
    assert len(conversation.messages) == 1


def test_a_function_of_a_namespace_is_called_by_its_own_name():
    """Codex keeps some of its functions in namespaces."""
    space = {"type": "namespace", "name": "crew", "description": "", "tools": [{**TOOL, "name": "hire"}]}
    script = [piece(calls=[call(0, "{}", id="call_a", name="crew__hire")]), piece(end="stop")]
    (item,) = taken(writer(tools=[space]), script)["output"]
    assert (item["namespace"], item["name"]) == ("crew", "hire")
    events = streamed(writer(tools=[space]), script)
    assert assembled(events)[0]["namespace"] == "crew"
    assert next(event["name"] for event in events if "name" in event) == "hire"
    conversation = Conversation()
    add_item(conversation, Nested(item, "input.0"), None)
    assert conversation.messages[0]["tool_calls"][0]["function"]["name"] == "crew__hire"


# ---- what a request asks of the model


def test_items_become_messages_of_a_chat():
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "r2"}]},
    ]
    conversation = Conversation()
    add_input(conversation, items, lambda item_id: None)
    function = {"name": "weather", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")]
    assert conversation.rendered("be short") == [
        {"role": "system", "content": "be short\n\nbe kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "r1"},
        {"role": "tool", "tool_call_id": "c2", "content": "r2"},
    ]


def test_a_form_beside_a_forced_call_is_taken():
    """instructor sends both."""
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    asked = ResponsesRequest(**HELLO, tools=[TOOL], tool_choice="required", text=form)
    assert asked.chat(Conversation([{"role": "user", "content": "t1"}])).must_call


# ---- over HTTP


def test_openais_client_reads_whole_and_streamed_answers(client):
    whole = client.responses.create(**HELLO)
    assert (whole.output_text, whole.status) == (" t4 t5 t6 t7 t8", "incomplete")
    assert whole.usage.output_tokens == 5
    events = list(client.responses.create(**HELLO, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text


def test_a_response_is_kept_continued_and_deleted(app, client):
    first = checked(create(app, instructions="t9", metadata={"a": "b"}))
    second = checked(create(app, previous_response_id=first["id"], input="t1 t2"))
    assert second["usage"]["input_tokens"] == 3 + 5 + 2  # the instructions were for the first alone
    third = checked(create(app, previous_response_id=second["id"], input="t1 t2"))
    assert third["usage"]["input_tokens"] == 10 + 5 + 2
    assert ask(app, "GET", f"{PATH}/{first['id']}").json() == first
    item = {"type": "item_reference", "id": first["output"][0]["id"]}
    answer = checked(
        create(app, input=[{"role": "user", "content": "t1"}, item, {"role": "user", "content": "t2"}])
    )
    assert answer["usage"]["input_tokens"] == 1 + 5 + 1
    deleted = ask(app, "DELETE", f"{PATH}/{first['id']}").json()
    assert deleted == {"id": first["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        assert ask(app, method, f"{PATH}/{first['id']}").status_code == 404
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**HELLO, previous_response_id=first["id"])
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    checked(create(app, previous_response_id=second["id"]))  # it holds all that was said
    assert create(app, input=[item]).status_code == 400


def test_a_streamed_response_is_kept_and_one_that_is_not_to_be_is_not(app):
    answer = events_of(create(app, stream=True).text)[-1]["response"]
    assert ask(app, "GET", f"{PATH}/{answer['id']}").json() == answer
    answer = checked(create(app, store=False))
    assert ask(app, "GET", f"{PATH}/{answer['id']}").status_code == 404


def test_a_stored_response_is_streamed_again(app, client):
    whole = checked(create(app))
    url = f"{PATH}/{whole['id']}"
    events = events_of(ask(app, "GET", f"{url}?stream=true").text)
    for event in events:
        EVENT.validate_python(event, strict=True)
        CLIENT_EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert assembled(events) == whole["output"]
    assert events[-1]["response"] == whole == ask(app, "GET", f"{url}?stream=false").json()
    seen = list(client.responses.retrieve(whole["id"], stream=True))
    assert [event.type for event in seen] == [event["type"] for event in events]
    later = client.responses.retrieve(whole["id"], stream=True, starting_after=3)
    assert [event.sequence_number for event in later] == list(range(4, len(events)))
    (last,) = client.responses.retrieve(whole["id"], stream=True, starting_after=1000)
    assert last.response.output_text == " t4 t5 t6 t7 t8"
    assert client.responses.retrieve(whole["id"]).output_text == last.response.output_text


@pytest.mark.parametrize("name", SCRIPTS)
def test_events_of_a_stored_response_say_what_it_holds(name):
    whole = taken(writer(), SCRIPTS[name])
    events = events_of(replayed(whole, None))
    for event in events:
        EVENT.validate_python(event, strict=True)
    assert assembled(events) == whole["output"]
    assert events[-1]["type"] == f"response.{whole['status']}"


def test_a_response_names_what_it_was_made_of(app, client):
    items = [
        {"role": "developer", "content": "t9"},
        {"role": "user", "content": "t1"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "crew__hire", "arguments": "{}"},
        RESULT,
        {"role": "assistant", "content": "t2"},
        {"role": "user", "content": "t3"},
    ]
    space = {"type": "namespace", "name": "crew", "description": "", "tools": [{**TOOL, "name": "hire"}]}
    asked = {"input": items, "tools": [space], "tool_choice": "none"}
    whole = checked(create(app, **asked))
    page = ask(app, "GET", f"{PATH}/{whole['id']}/input_items?order=asc").json()
    TypeAdapter(schemas.InputItems).validate_python(page, strict=True)
    ClientItems.model_validate(page)
    kinds = [(item["type"], item.get("role")) for item in page["data"]]
    assert kinds == [
        ("message", "developer"),
        ("message", "user"),
        ("reasoning", None),
        ("function_call", None),
        ("function_call_output", None),
        ("message", "assistant"),
        ("message", "user"),
    ]
    assert (page["data"][3]["namespace"], page["data"][3]["name"]) == ("crew", "hire")
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    assert page["has_more"] is False
    # Sent as they are they make the same prompt, and its tokens are counted beforehand.
    again = checked(create(app, **{**asked, "input": page["data"]}))
    assert again["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    count = client.responses.input_tokens.count(model=NAME, **asked)
    assert (count.object, count.input_tokens) == ("response.input_tokens", whole["usage"]["input_tokens"])
    newest = list(client.responses.input_items.list(whole["id"], limit=3))  # all pages, one by one
    assert [item.id for item in newest] == [item["id"] for item in reversed(page["data"])]
    following = checked(create(app, previous_response_id=whole["id"], input="t4"))
    told = ask(app, "GET", f"{PATH}/{following['id']}/input_items?limit=100&order=asc").json()["data"]
    assert len(told) == len(items) + 2  # the first answer and the new question


@pytest.mark.parametrize(
    ("address", "param"),
    [
        ("?stream=yes", "stream"),
        ("?include=message.output_text.logprobs", "include"),
        ("?include[]=file_search_call.results&include[]=message.output_text.logprobs", "include"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?stream=true&starting_after=x", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_0", "after"),
    ],
)
def test_a_wrong_parameter_of_an_address_is_named(app, address, param):
    name = checked(create(app))["id"]
    answer = ask(app, "GET", f"{PATH}/{name}{address}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_is_below_responses_and_not_there_is_answered_by_name(app, client):
    name = checked(create(app))["id"]
    answer = ask(app, "POST", f"{PATH}/{name}")
    assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, {"GET", "HEAD", "DELETE"})
    for path in ("input_tokens", "compact"):
        for method in ("GET", "DELETE", "PUT"):
            answer = ask(app, method, f"{PATH}/{path}")
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
            assert answer.json()["error"]["message"] == f"this path does not take {method}: use POST."
    with pytest.raises(openai.NotFoundError, match="does not compact"):
        client.responses.compact(model=NAME, input="t1")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(name)
    for path in (f"{PATH}/resp_0?stream=true", f"{PATH}/resp_0/input_items"):
        assert ask(app, "GET", path).status_code == 404
    assert ask(app, "POST", f"{PATH}/resp_0/cancel").status_code == 404


def test_thoughts_of_a_thinking_model_are_items():
    with app_over(replace(models(), tokenizer=thinking_tokenizer())) as app:
        answer = checked(create(app, input="t1 t2", max_output_tokens=7))
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][0]["content"][0]["text"] == " t4 t5 "
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


def test_fields_that_mean_nothing_are_named(app):
    answer = create(app, temprature=1, client_metadata={}, prompt_cache_key="k")
    assert answer.headers["x-blockdraft-ignored-fields"] == "temprature"


@pytest.mark.parametrize(
    "fields",
    [
        {"truncation": "auto", "service_tier": "flex", "user": "u", "prompt_cache_key": "k"},
        {"text": {"format": {"type": "text"}}, "tool_choice": "none", "tools": []},
        {"background": False, "max_tool_calls": 3, "safety_identifier": "s", "top_logprobs": 0},
        {"include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": False}},
        {"speculative": False, "seed": 3},
    ],
)
def test_what_asks_nothing_is_taken(app, fields):
    assert checked(create(app, **fields))["output"][0]["content"][0]["text"] == " t4 t5 t6 t7 t8"


@pytest.mark.parametrize(
    ("fields", "part", "param"),
    [
        ({"input": None}, "input", "input"),
        ({"input": []}, "at least 1 item", "input"),
        ({"input": [{"type": "reasoning"}]}, "'input' hold no text for the model", "input"),
        ({"input": [{"role": "user", "content": "t1"}] * 4097}, "at most 4096 items", "input"),
        ({"input": [{"type": "computer_call"}]}, "'input.0.type'", "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "'input.0.content.0.type'",
            "input",
        ),
        ({"input": [{"role": "robot", "content": "x"}]}, "'input.0.role'", "input"),
        ({"input": [{"role": "user"}]}, "'input.0.content': a string or an array is needed", "input"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "'input.0.name'", "input"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "'input.0.id'", "input"),
        ({"input": "t1 " * 600}, "context", "input"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "'tools.0.type'", "tools"),
        ({"tools": [{"type": "function"}]}, "'tools.0.name'", "tools"),
        ({"tools": [TOOL, TOOL]}, "'tools' holds 'weather' 2 times", "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "'x'", "tool_choice"),
        ({"tool_choice": "required"}, "no 'tools'", "tool_choice"),
        ({"input": [RESULT]}, "'input.0.call_id'", "input"),
        ({"tool_choice": {"type": "web_search"}}, "'tool_choice.type'", "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"name": "x"}]}},
            "tool_choice",
            None,
        ),
        ({"text": {"format": {"type": "xml"}}}, "'text.format.type'", "text"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "'text.format.schema'", "text"),
        ({"background": True}, "background", "background"),
        ({"conversation": "conv_1"}, "conversation", "conversation"),
        ({"reasoning": {"effort": "huge"}}, "reasoning", "reasoning"),
        ({"include": ["message.output_text.logprobs"]}, "logprobs", "include"),
        ({"previous_response_id": "resp_0"}, "not found", "previous_response_id"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(app, fields, part, param):
    answer = create(app, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert part in error["message"]
    assert error["param"] == (param or "tool_choice")


# ---- what is kept


def stored(size, **answer):
    """A response that takes `size` bytes of the store's memory, by its own count."""
    items = {f"item {size}": {"id": "i"}}
    parts = ({"output": [], **answer}, [{"role": "user", "content": ""}], items)
    num_around = len(json.dumps(parts, separators=(",", ":")))
    message = {"role": "user", "content": "x" * (size - num_around - ENTRY_BYTES - ITEM_BYTES)}
    return StoredResponse(parts[0], (message,), items)


def test_the_oldest_go_first_by_number_and_by_size():
    store = ResponseStore(max_responses=3, max_bytes=10_000)
    for number in range(5):
        store.put(f"r{number}", stored(2000 + number))
    assert [store.get(f"r{number}") is not None for number in range(5)] == [False, False, True, True, True]
    assert store.num_bytes == 2002 + 2003 + 2004
    assert store.item("item 2001") is None
    assert store.item("item 2002") == {"id": "i"}
    store.put("large", stored(7000))
    assert (len(store), store.num_bytes) == (2, 9004)
    store.put("too large", stored(10_001))
    assert store.get("too large") is None
    assert len(store) == 2
    assert store.remove("large")
    assert store.num_bytes == 2004


def test_what_is_kept_comes_back_as_it_was():
    store, given = ResponseStore(), stored(3000, text="\u00e9\ud800 \U0001f600", number=1.5)
    store.put("r", given)
    assert store.get("r") == given


def bytes_kept_by(fill):
    """The bytes allocated by `fill` and not freed; those of other threads are not counted."""
    tracemalloc.start(16)
    try:
        fill()
        is_ours = tracemalloc.Filter(True, __file__, all_frames=True)
        ours = tracemalloc.take_snapshot().filter_traces([is_ours])
    finally:
        tracemalloc.stop()
    return sum(trace.size for trace in ours.traces)


@pytest.mark.parametrize("junk", [[[]] * 1000, [{"a": 1.5}] * 75])
def test_the_store_takes_no_more_memory_than_its_limit_says(junk):
    """Empty lists take twenty times as much as their text."""
    store, text = ResponseStore(max_bytes=1 << 15), json.dumps(junk)

    def fill():
        for number in range(20):
            store.put(f"r{number}", stored(3000, junk=json.loads(text)))

    assert bytes_kept_by(fill) < 1.1 * (1 << 15)
    assert len(store) > 1


def test_a_store_of_many_small_responses_keeps_to_its_limit_too():
    store = ResponseStore(max_bytes=1 << 17)

    def fill():
        for number in range(150):
            items = {f"msg_{number:016}_{place:016}": {"id": "i"} for place in range(5)}
            store.put(f"resp_{number:032}", StoredResponse({"output": []}, (), items))

    assert bytes_kept_by(fill) < 1.1 * (1 << 17)


def test_names_that_mean_nothing_in_the_form_are_not_kept(app):
    answer = checked(create(app, text={"format": {"type": "text", "junk": [[]] * 1000}}))
    assert answer["text"]["format"] == {"type": "text"}
