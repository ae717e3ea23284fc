"""Chat completions with the package `openai`."""

import json

from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(base_url="http://gateway/v1", api_key="of the session")
"""One for all calls: a client with its own connections per call takes several times as long."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


async def agent(task, *, base_url, api_key, model):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": task}]
    while True:
        done = await client.chat.completions.create(model=model, messages=messages, tools=[WEATHER])
        message = done.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def weather(city):
    return f"{city}: sunny"
