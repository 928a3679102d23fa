"""OpenAI's client: chat, a parsed answer, a tool that must be called, and the Responses API."""

import json
import sys

import openai
import pydantic

URL, MODEL = sys.argv[1:]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}


class City(pydantic.BaseModel):
    name: str
    is_capital: bool


def chat():
    options = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert "Paris" in whole


def parsed_chat():
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=City, temperature=0, max_completion_tokens=64
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def chat_tool():
    options = {"model": MODEL, "temperature": 0, "max_completion_tokens": 64}
    tools = [{"type": "function", "function": FUNCTION}]
    message = (
        client.chat.completions.create(**options, messages=QUESTION, tools=tools, tool_choice="required")
        .choices[0]
        .message
    )
    (call, *_) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    again = client.chat.completions.create(
        **options, messages=[*QUESTION, message, result], tools=tools, tool_choice="none"
    )
    assert again.choices[0].message.content


def responses():
    options = {"model": MODEL, "temperature": 0, "max_output_tokens": 48}
    first = client.responses.create(**options, input="What is the capital of France?")
    assert "Paris" in first.output_text
    with client.responses.stream(**options, input="And of Italy?", previous_response_id=first.id) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert final.output_text
    assert client.responses.retrieve(final.id).output_text == final.output_text
    client.responses.delete(first.id)
    found = None
    try:
        client.responses.create(**options, input="x", previous_response_id=first.id)
    except openai.BadRequestError as error:
        found = error
    assert found.code == "previous_response_not_found"


def parsed_response():
    answer = client.responses.parse(
        model=MODEL,
        input="What is the capital of France?",
        text_format=City,
        temperature=0,
        max_output_tokens=64,
    )
    assert isinstance(answer.output_parsed, City)


def response_tool():
    tool = {"type": "function", "strict": True, **FUNCTION}
    options = {"model": MODEL, "tools": [tool], "temperature": 0, "max_output_tokens": 64}
    answer = client.responses.create(**options, input="The weather in Paris?", tool_choice="required")
    call = next(item for item in answer.output if item.type == "function_call")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = client.responses.create(
        **options, input=[result], previous_response_id=answer.id, tool_choice="none"
    )
    assert again.output_text


for check in (chat, responses, parsed_chat, parsed_response, chat_tool, response_tool):
    check()
    sys.stdout.write(f"{check.__name__}: ok\n")
