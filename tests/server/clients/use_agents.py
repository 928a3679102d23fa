"""OpenAI's agents SDK: an agent that has to use a tool, over Responses and over chat completions."""

import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL, MODEL = sys.argv[1:]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
asked = []


@function_tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    asked.append(city)
    return "It is sunny."


for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    asked.clear()
    agent = Agent(
        name="Weather",
        instructions="You are a helpful assistant.",
        tools=[weather],
        model=kind(MODEL, client),
        model_settings=ModelSettings(temperature=0, max_tokens=48, tool_choice="required"),
        tool_use_behavior="stop_on_first_tool",
    )
    plain = agent.clone(tools=[], model_settings=ModelSettings(temperature=0, max_tokens=24))
    answer = Runner.run_sync(plain, "What is the capital of France?").final_output
    assert "Paris" in answer, answer
    result = Runner.run_sync(agent, "How is the weather in Paris?", max_turns=3)
    assert asked
    assert result.final_output == "It is sunny."
    sys.stdout.write(f"{kind.__name__}: ok\n")
