"""pydantic-ai."""

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: sunny"


async def agent(task, *, base_url, api_key, model):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    chat = OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client))
    return (await Agent(chat, tools=[weather]).run(task)).output
