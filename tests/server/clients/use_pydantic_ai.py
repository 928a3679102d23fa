"""Pydantic AI: text, a typed answer and a tool, over chat completions, Responses and Messages."""

import sys

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, NAME = sys.argv[1:]
openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="none", max_retries=0))
SETTINGS = {"max_tokens": 64, "temperature": 0.0}


class City(BaseModel, extra="forbid"):  # the small model would go on with fields of its own
    name: str
    country: str


MODELS = (
    OpenAIChatModel(NAME, provider=openai),
    OpenAIResponsesModel(NAME, provider=openai),
    AnthropicModel(NAME, provider=anthropic),
)
for model in MODELS:
    answer = Agent(model, model_settings=SETTINGS).run_sync("What is the capital of France?")
    assert "Paris" in answer.output, answer
    # By a tool that must be called, and where the API has it by the form of the answer.
    kinds = [City] if isinstance(model, AnthropicModel) else [City, NativeOutput(City)]
    for kind in kinds:
        typed = Agent(model, output_type=kind, model_settings=SETTINGS, retries=2)
        found = typed.run_sync("Name the capital of France and its country.").output
        assert isinstance(found, City)
    sys.stdout.write(f"{type(model).__name__}: ok\n")
