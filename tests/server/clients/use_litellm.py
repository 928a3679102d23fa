"""LiteLLM: our server as an OpenAI one, by chat and by Responses, and as an Anthropic one."""

import json
import sys

import litellm

URL, MODEL = sys.argv[1:]
litellm.telemetry = False
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}

for kind, base in (("openai", f"{URL}/v1"), ("anthropic", URL)):
    options = {"model": f"{kind}/{MODEL}", "api_base": base, "api_key": "none", "max_tokens": 48}
    options |= {"temperature": 0, "messages": QUESTION, "num_retries": 0}
    whole = litellm.completion(**options).choices[0].message.content
    assert "Paris" in whole
    chunks = litellm.completion(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    called = litellm.completion(**options, tools=[TOOL], tool_choice="required").choices[0].message
    assert json.loads(called.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
    sys.stdout.write(f"{kind}: ok\n")

answer = litellm.responses(
    model=f"openai/{MODEL}",
    api_base=f"{URL}/v1",
    api_key="none",
    input="What is the capital of France?",
    max_output_tokens=24,
    temperature=0,
)
assert "Paris" in answer.output[0].content[0].text
sys.stdout.write("responses: ok\n")
