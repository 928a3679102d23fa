"""Answers that come back as history are always accepted, and errors speak of JSON, never of Python."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.checkpoints.dummy import byte_tokenizer
from blockdraft.errors import RequestError
from blockdraft.server.api.chat.answers import ChatAnswer
from blockdraft.server.api.chat.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from blockdraft.server.api.chat.prepare import find_dialect, prepare_chat
from blockdraft.server.api.fields import parse
from blockdraft.server.api.messages.fields import CountTokensRequest, MessagesRequest
from blockdraft.server.api.messages.routes import MessageWriter
from blockdraft.server.api.responses.fields import ResponsesRequest
from blockdraft.server.api.responses.items import add_input
from blockdraft.server.api.responses.writer import ResponseWriter
from blockdraft.server.api.translation import Conversation
from blockdraft.text.tokenizer import Tokenizer
from tests.server.scripted import ScriptedChat, call, piece, taken

TOKENIZER = Tokenizer(byte_tokenizer(300))
DIALECT = find_dialect(TOKENIZER)
USER = {"role": "user", "content": "?"}
HEAD = {"id": "a", "created": 1, "model": "m", "system_fingerprint": "bd-1"}
TEXTS = st.sampled_from(["", "", "Hello.", "\u00e9\n"])
ARGUMENTS = st.sampled_from(["{}", '{"city": "Paris"}', '{"city": "Pa', "", "[1]"])


@st.composite
def answers(draw):
    """Thoughts, text and calls, any of them or none, whole or cut off."""
    calls = [call(n, draw(ARGUMENTS), id=f"call_{n}", name="f") for n in range(draw(st.integers(0, 2)))]
    end = draw(st.sampled_from(["stop", "length"]))
    return [piece(draw(TEXTS), draw(TEXTS)), piece(draw(TEXTS), calls=calls), piece(end=end)]


def is_taken(messages):
    """Return whether a chat request with this history becomes a prompt."""
    asked = parse(ChatRequest, json.dumps({"messages": messages}).encode())
    return bool(prepare_chat(asked, DIALECT, {}).prompt_ids)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(answers(), st.booleans())
def test_an_answer_of_chat_completions_is_accepted_as_history(script, has_nulls):
    asked = ChatRequest(messages=[USER])
    answer = ChatAnswer(prepare_chat(asked, DIALECT, {}), head=HEAD)
    answer.first_choice.pieces = script
    message = answer.whole()["choices"][0]["message"]
    if has_nulls:  # as OpenAI's client writes a message that it has read
        message = {"tool_calls": None, "function_call": None, "audio": None, **message}
    assert is_taken([USER, message, USER])


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(answers(), st.sampled_from([None, {"type": "adaptive", "display": "omitted"}]))
def test_an_answer_of_messages_is_accepted_as_history(script, thinking):
    fields = {"messages": [USER], "max_tokens": 9, "thinking": thinking}
    whole = taken(MessageWriter(MessagesRequest(**fields), HEAD, ScriptedChat()), script)
    back = {"role": "assistant", "content": whole["content"]}
    asked = parse(MessagesRequest, json.dumps({**fields, "messages": [USER, back, USER]}).encode())
    assert is_taken(asked.chat().messages)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(answers(), st.booleans())
def test_an_answer_of_responses_is_accepted_as_history(script, is_sealed):
    include = ["reasoning.encrypted_content"] if is_sealed else []
    asked = ResponsesRequest(input="?", include=include)
    whole = taken(ResponseWriter(asked, HEAD, lambda answer: None, ScriptedChat()), script)
    asked = parse(ResponsesRequest, json.dumps({"input": [USER, *whole["output"], USER]}).encode())
    conversation = Conversation()
    add_input(conversation, asked.input, lambda item_id: None)
    assert is_taken(asked.chat(conversation).messages)


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_a_message_of_the_model_may_be_empty_in_every_api(message):
    back = {"role": "assistant", **message}
    assert is_taken([USER, back, USER])
    assert is_taken(MessagesRequest(messages=[USER, back, USER], max_tokens=9).chat().messages)
    conversation = Conversation()
    add_input(conversation, [USER, back, USER], lambda item_id: None)
    assert is_taken(conversation.rendered())


@pytest.mark.parametrize(
    "message", [{"content": None, "refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}]
)
def test_a_refusal_is_what_the_model_said(message):
    asked = ChatRequest(messages=[USER, {"role": "assistant", **message}, USER])
    assert "No." in TOKENIZER.decode(prepare_chat(asked, DIALECT, {}).prompt_ids)


# ---- what errors say

LEAST = {
    ChatRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "?"},
    ResponsesRequest: {"input": "?"},
    MessagesRequest: {"messages": [USER], "max_tokens": 9},
    CountTokensRequest: {"messages": [USER]},
    TokenizeRequest: {"prompt": "?"},
    DetokenizeRequest: {"tokens": [1]},
}
WRONG = [0, -1, 2.5, 1e300, "x", "", True, [], {}, [None], [5], [[True]], ["x"], [{}], [{"type": None}]]
WRONG += [{"type": None}, {"type": 5}, {"a": None}, {"type": "function", "function": 5}, {"type": ["x"]}]
WRONG += [{"type": "json_schema", "json_schema": 5}, {"type": "json_schema", "schema": [1]}, [USER, None]]
WRONG += [[{"role": None}], [{"role": "user", "content": {}}], [{"role": "user", "content": [5]}]]
WRONG += [[{"role": "assistant", "tool_calls": 5}], [{"type": "function", "function": {"name": 5}}]]
PYTHON = re.compile(
    r"NoneType|\bNone\b|\bTrue\b|\bFalse\b|\bdict|Dict|\btuple|\bstr\b|\bbool\b|\bint\b|\bfloat\b|list\[|function-|"
    r"constrained|\b[A-Z][a-z]+[A-Z]\w*"
)


def asked_of(kind, body):
    """Read a body to the end, as the server does. RequestError: it was refused."""
    asked = parse(kind, json.dumps(body).encode())
    if kind is ResponsesRequest:
        conversation = Conversation()
        add_input(conversation, asked.input, lambda item_id: None)
        asked = asked.chat(conversation)
    elif issubclass(kind, CountTokensRequest):
        asked = asked.chat()
    if isinstance(asked, ChatRequest):
        prepare_chat(asked, DIALECT, {})


def refusal_of(kind, body):
    try:
        asked_of(kind, body)
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_no_error_names_a_type_of_python(kind):
    asked_of(kind, LEAST[kind])
    bodies = [{**LEAST[kind], name: value} for name in kind.model_fields for value in WRONG]
    refusals = [refusal for body in bodies if (refusal := refusal_of(kind, body))]
    assert len(refusals) > len(WRONG) // 2
    assert [text for text in refusals if PYTHON.search(text)] == []


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"response_format": 5}, "'response_format': Input should be an object."),
        ({"messages": {}}, "'messages': Input should be an array."),
        ({"messages": [5]}, "'messages.0': Input should be an object."),
        ({"tool_choice": {"type": "function"}}, "'tool_choice.function': Field required."),
        ({"tools": [{"type": "function", "function": {}}]}, "'tools.0.function.name': Field required."),
    ],
)
def test_an_error_says_where_in_the_body_it_lies(body, text):
    with pytest.raises(RequestError) as found:
        asked_of(ChatRequest, {"messages": [USER], **body})
    assert str(found.value) == text


@pytest.mark.parametrize(("body", "name"), [("[]", "a list"), ("null", "null"), ("1", "a number")])
def test_a_body_that_is_no_object_is_named_as_json_does(body, name):
    with pytest.raises(RequestError, match=f"the body is {name}: send a JSON object"):
        parse(ChatRequest, body.encode())
