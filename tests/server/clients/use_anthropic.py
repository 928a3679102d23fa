"""Anthropic's client: messages whole and streamed, tokens counted, a tool used, an error understood."""

import sys

import anthropic

URL, MODEL = sys.argv[1:]
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=300)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS = {"model": MODEL, "max_tokens": 48, "extra_body": {"temperature": 0}}
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}


def text():
    whole = client.messages.create(**OPTIONS, messages=QUESTION, system="You are helpful.")
    assert "Paris" in whole.content[0].text
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**OPTIONS, messages=QUESTION, system="You are helpful.") as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert streamed == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    count = client.messages.count_tokens(model=MODEL, messages=QUESTION, system="You are helpful.")
    assert count.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def tool():
    options = {**OPTIONS, "tools": [TOOL]}
    with client.messages.stream(**options, messages=QUESTION, tool_choice={"type": "any"}) as stream:
        answer = stream.get_final_message()
    call = next(block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use"
    assert call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(**options, messages=turns, tool_choice={"type": "none"})
    assert again.content[0].type == "text"


def errors():
    found = None
    try:
        client.messages.create(model="claude", max_tokens=1, messages=QUESTION)
    except anthropic.NotFoundError as error:
        found = error
    assert found.body["error"]["type"] == "not_found_error"
    assert found.request_id


for check in (text, errors, tool):
    check()
    sys.stdout.write(f"{check.__name__}: ok\n")
