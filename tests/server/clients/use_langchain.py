"""LangChain's OpenAI client: text, a stream, a tool and a form, over chat completions and Responses."""

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(description="its name")


for is_new in (False, True):
    chat = ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key="none",
        temperature=0,
        max_tokens=64,
        max_retries=0,
        use_responses_api=is_new,
    )
    question = "What is the capital of France?"
    whole = chat.invoke(question)
    assert "Paris" in whole.text
    assert "".join(chunk.text for chunk in chat.stream(question)) == whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    call = chat.bind_tools([Weather], tool_choice="required").invoke("The weather in Paris?").tool_calls[0]
    assert call["name"] == "Weather"
    assert isinstance(call["args"]["city"], str)
    form = chat.with_structured_output(Weather, method="json_schema").invoke("The weather in Paris?")
    assert isinstance(form, Weather)
    sys.stdout.write(f"responses={is_new}: ok\n")
