"""Agents of real frameworks, each as its own manual writes it: nothing here knows of Ludic.

Every agent asks a model about the weather with two tools, until the model answers without calling one, and returns that answer.
"""

import inspect
import json
import os
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # it would send its traces to OpenAI
os.environ["LANGSMITH_TRACING"] = "false"

import agents
from anthropic import AsyncAnthropic
from anthropic.types.beta import BetaUserMessageParam
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models import anthropic as pydantic_anthropic
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

# pydantic-ai was written for anthropic 1, whose type this was; now it is a union of types.
pydantic_anthropic.BetaMessageParam = BetaUserMessageParam

SYSTEM = "You know the weather."
QUESTION = "Where is it warmer: Zürich or Rome?"


class Tools:
    """The tools, and what they were asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def weather(self, city: str) -> str:
        """The weather in a city."""
        self.asked.append(("weather", city))
        return f'{city}: "sunny",\n  {19 + len(city)} °C  '

    def country(self, city: str) -> str:
        """The country of a city."""
        self.asked.append(("country", city))
        return f"{city} is in Italy."

    @property
    def functions(self) -> list[Callable[[str], str]]:
        return [self.weather, self.country]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        return {"weather": self.weather, "country": self.country}[name](**arguments)


@dataclass(frozen=True)
class Ask:
    """What an agent is given: where the model is, and the tools."""

    url: str
    """Of the server, without /v1."""
    key: str
    model: str = "policy"
    tools: Tools = field(default_factory=Tools)
    counts: list[int] = field(default_factory=list)
    """Prompt tokens that the server counted in advance."""

    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    def anthropic(self) -> AsyncAnthropic:
        return AsyncAnthropic(base_url=self.url, api_key=self.key, max_retries=0)


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
DESCRIPTIONS = {"weather": "The weather in a city.", "country": "The country of a city."}
AGENTS: dict[str, Callable[[Ask], Awaitable[str]]] = {}
TALKS: dict[str, Callable[[Ask], Awaitable[str]]] = {}
"""Without tools: the user asks three times, and the answers are joined."""
QUESTIONS = ("Where is it warm?", "And\n tomorrow?  ", "Sure?")


def agent(run: Callable[[Ask], Awaitable[str]]) -> Callable[[Ask], Awaitable[str]]:
    AGENTS[run.__name__] = run
    return run


def talk(run: Callable[[Ask], Awaitable[list[str]]]) -> Callable[[Ask], Awaitable[list[str]]]:
    async def joined(ask: Ask) -> str:
        return "|".join(await run(ask))

    TALKS[run.__name__] = joined
    return run


# --- openai: chat completions ---

CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": PARAMETERS, "strict": True}}
    for name, text in DESCRIPTIONS.items()
]


def chat_results(message: Any, tools: Tools) -> list[Any]:
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": tools.call(call.function.name, json.loads(call.function.arguments)),
        }
        for call in message.tool_calls
    ]


async def chat_loop(ask: Ask, role: str, answer: Callable[[AsyncOpenAI, dict[str, Any]], Awaitable[Any]]) -> str:
    messages: list[Any] = [{"role": role, "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    async with ask.openai() as client:
        while True:
            done = await answer(client, {"model": ask.model, "messages": messages, "tools": CHAT_TOOLS})
            message = done.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages += [message, *chat_results(message, ask.tools)]


@agent
async def openai_chat(ask: Ask) -> str:
    return await chat_loop(ask, "system", lambda client, asked: client.chat.completions.create(**asked))


@agent
async def openai_chat_stream(ask: Ask) -> str:
    async def answer(client: AsyncOpenAI, asked: dict[str, Any]) -> Any:
        async with client.chat.completions.stream(**asked) as stream:
            return await stream.get_final_completion()

    return await chat_loop(ask, "developer", answer)


@agent
async def openai_chat_without_tools(ask: Ask) -> str:
    """Reads the calls in the text itself, as older agents do."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    async with ask.openai() as client:
        while True:
            stream = await client.chat.completions.create(model=ask.model, messages=messages, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            names = [name for name in DESCRIPTIONS if name in text]
            if not names:
                return text
            messages += [{"role": "assistant", "content": text}]
            messages += [{"role": "user", "content": ask.tools.call(names[0], {"city": "Rome"})}]


# --- openai: Responses ---

RESPONSES_TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": text, "parameters": PARAMETERS, "strict": True}
    for name, text in DESCRIPTIONS.items()
]


def function_outputs(response: Any, tools: Tools) -> list[Any]:
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": tools.call(item.name, json.loads(item.arguments)),
        }
        for item in response.output
        if item.type == "function_call"
    ]


@agent
async def openai_responses(ask: Ask) -> str:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    async with ask.openai() as client:
        while True:
            response = await client.responses.create(
                model=ask.model, instructions=SYSTEM, input=items, tools=RESPONSES_TOOLS
            )
            results = function_outputs(response, ask.tools)
            if not results:
                return response.output_text
            items += [*response.output, *results]


@agent
async def openai_responses_stream(ask: Ask) -> str:
    items: list[Any] = [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    async with ask.openai() as client:
        while True:
            async with client.responses.stream(model=ask.model, input=items, tools=RESPONSES_TOOLS) as stream:
                response = await stream.get_final_response()
            results = function_outputs(response, ask.tools)
            if not results:
                return response.output_text
            items += [item.model_dump(exclude_none=True) for item in response.output]
            items += results


@agent
async def openai_responses_by_id(ask: Ask) -> str:
    items, previous = [{"role": "user", "content": QUESTION}], None
    async with ask.openai() as client:
        while True:
            response = await client.responses.create(
                model=ask.model,
                instructions=SYSTEM,
                input=items,
                tools=RESPONSES_TOOLS,
                previous_response_id=previous,
            )
            items, previous = function_outputs(response, ask.tools), response.id
            if not items:
                return response.output_text


# --- anthropic ---

ANTHROPIC_TOOLS: list[Any] = [
    {"name": name, "description": text, "input_schema": PARAMETERS} for name, text in DESCRIPTIONS.items()
]


def tool_results(message: Any, tools: Tools) -> list[Any]:
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": tools.call(block.name, block.input)}
        for block in message.content
        if block.type == "tool_use"
    ]


async def anthropic_loop(ask: Ask, answer: Callable[[AsyncAnthropic, dict[str, Any]], Awaitable[Any]]) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with ask.anthropic() as client:
        while True:
            asked = {"model": ask.model, "system": SYSTEM, "messages": messages, "tools": ANTHROPIC_TOOLS}
            ask.counts.append((await client.messages.count_tokens(**asked)).input_tokens)
            message = await answer(client, {**asked, "max_tokens": 1000})
            results = tool_results(message, ask.tools)
            if not results:
                return "".join(block.text for block in message.content if block.type == "text")
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


@agent
async def anthropic(ask: Ask) -> str:
    return await anthropic_loop(ask, lambda client, asked: client.messages.create(**asked))


@agent
async def anthropic_stream(ask: Ask) -> str:
    async def answer(client: AsyncAnthropic, asked: dict[str, Any]) -> Any:
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_message()

    return await anthropic_loop(ask, answer)


# --- the OpenAI Agents SDK ---


def agents_sdk(ask: Ask, model: Any) -> agents.Agent:
    tools = [agents.function_tool(function) for function in ask.tools.functions]
    return agents.Agent(name="forecaster", instructions=SYSTEM, tools=tools, model=model)


def openai_agents(kind: type[Any], *, streams: bool) -> Callable[[Ask], Awaitable[str]]:
    async def run(ask: Ask) -> str:
        async with ask.openai() as client:
            agent = agents_sdk(ask, kind(ask.model, openai_client=client))
            if not streams:
                return str((await agents.Runner.run(agent, QUESTION)).final_output)
            result = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    return run


AGENTS |= {
    "openai_agents": openai_agents(agents.OpenAIResponsesModel, streams=False),
    "openai_agents_stream": openai_agents(agents.OpenAIResponsesModel, streams=True),
    "openai_agents_chat": openai_agents(agents.OpenAIChatCompletionsModel, streams=False),
    "openai_agents_chat_stream": openai_agents(agents.OpenAIChatCompletionsModel, streams=True),
}


# --- LangGraph ---


async def langgraph_loop(ask: Ask, model: Any) -> str:
    bound = model.bind_tools(ask.tools.functions)

    async def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode(ask.tools.functions))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    state = await graph.compile().ainvoke({"messages": [("system", SYSTEM), ("user", QUESTION)]})
    return str(state["messages"][-1].text)


def chat_openai(ask: Ask, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(model=ask.model, base_url=f"{ask.url}/v1", api_key=ask.key, max_retries=0, **settings)


def chat_anthropic(ask: Ask, **settings: Any) -> ChatAnthropic:
    return ChatAnthropic(model=ask.model, base_url=ask.url, api_key=ask.key, max_retries=0, **settings)


AGENTS |= {
    "langgraph_openai": lambda ask: langgraph_loop(ask, chat_openai(ask)),
    "langgraph_openai_stream": lambda ask: langgraph_loop(ask, chat_openai(ask, streaming=True)),
    "langgraph_openai_responses": lambda ask: langgraph_loop(ask, chat_openai(ask, use_responses_api=True)),
    "langgraph_anthropic": lambda ask: langgraph_loop(ask, chat_anthropic(ask)),
    "langgraph_anthropic_stream": lambda ask: langgraph_loop(ask, chat_anthropic(ask, streaming=True)),
}


# --- pydantic-ai ---


async def read_on(context: Any, events: AsyncIterable[Any]) -> None:
    async for _ in events:
        pass


async def pydantic_loop(ask: Ask, model: Any, **settings: Any) -> str:
    return (await Agent(model, system_prompt=SYSTEM, tools=ask.tools.functions).run(QUESTION, **settings)).output


def pydantic_ai(kind: type[Any], **settings: Any) -> Callable[[Ask], Awaitable[str]]:
    async def run(ask: Ask) -> str:
        async with ask.openai() as client:
            return await pydantic_loop(ask, kind(ask.model, provider=OpenAIProvider(openai_client=client)), **settings)

    return run


AGENTS |= {
    "pydantic_ai_openai": pydantic_ai(OpenAIChatModel),
    "pydantic_ai_openai_stream": pydantic_ai(OpenAIChatModel, event_stream_handler=read_on),
    "pydantic_ai_responses": pydantic_ai(OpenAIResponsesModel),
}


@agent
async def pydantic_ai_anthropic(ask: Ask) -> str:
    async with ask.anthropic() as client:
        create = client.beta.messages.create
        known = inspect.signature(create).parameters  # anthropic 2 has fewer; those that are gone were not set
        client.beta.messages.create = lambda **given: create(**{k: v for k, v in given.items() if k in known})
        return await pydantic_loop(ask, AnthropicModel(ask.model, provider=AnthropicProvider(anthropic_client=client)))


# --- three questions, without tools ---


@talk
async def openai_chat_talk(ask: Ask) -> list[str]:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    answers = []
    async with ask.openai() as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
            done = await client.chat.completions.create(model=ask.model, messages=messages)
            answers.append(done.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@talk
async def openai_responses_talk(ask: Ask) -> list[str]:
    items: list[Any] = []
    answers = []
    async with ask.openai() as client:
        for question in QUESTIONS:
            items.append({"role": "user", "content": [{"type": "input_text", "text": question}]})
            response = await client.responses.create(model=ask.model, instructions=SYSTEM, input=items)
            answers.append(response.output_text)
            items.append({"role": "assistant", "content": response.output_text})  # as its manual does: no ids
    return answers


@talk
async def anthropic_talk(ask: Ask) -> list[str]:
    messages: list[Any] = []
    answers = []
    async with ask.anthropic() as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            message = await client.messages.create(model=ask.model, system=SYSTEM, messages=messages, max_tokens=500)
            answers.append("".join(block.text for block in message.content if block.type == "text"))
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers
