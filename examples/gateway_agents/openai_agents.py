"""OpenAI's Agents SDK; `OpenAIChatCompletionsModel` works as well. Without `tracing_disabled` the SDK sends traces to OpenAI."""

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: sunny"


async def agent(task, *, base_url, api_key, model):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    forecaster = Agent(name="forecaster", tools=[weather], model=OpenAIResponsesModel(model, openai_client=client))
    result = await Runner.run(forecaster, task, run_config=RunConfig(tracing_disabled=True))
    return result.final_output
