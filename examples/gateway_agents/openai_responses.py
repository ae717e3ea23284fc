"""The Responses API with the package `openai`; `previous_response_id` works as well."""

import json

from openai import AsyncOpenAI

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "The weather in a city.", "parameters": CITY}


async def agent(task, *, base_url, api_key, model):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    items = [{"role": "user", "content": task}]
    while True:
        response = await client.responses.create(model=model, input=items, tools=[WEATHER])
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += response.output
        for call in calls:
            result = weather(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def weather(city):
    return f"{city}: sunny"
