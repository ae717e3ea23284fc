"""Messages with the package `anthropic`."""

from anthropic import AsyncAnthropic

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather in a city.", "input_schema": CITY}


async def agent(task, *, base_url, api_key, model):
    client = AsyncAnthropic(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": task}]
    while True:
        message = await client.messages.create(model=model, max_tokens=500, messages=messages, tools=[WEATHER])
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)} for call in calls]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


def weather(city):
    return f"{city}: sunny"
