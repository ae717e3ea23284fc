"""LangGraph; `ChatAnthropic(base_url=…)` and `ChatOpenAI(use_responses_api=True, …)` work as well."""

from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: sunny"


async def agent(task, *, base_url, api_key, model):
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key).bind_tools([weather])

    async def call_model(state):
        return {"messages": [await chat.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode([weather]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    state = await graph.compile().ainvoke({"messages": [("user", task)]})
    return state["messages"][-1].text
