"""A LangGraph agent with a calculator that answers word problems. Nothing in it knows of training.

ludic train gsm8k --agent examples/langgraph_agent/agent.py:solve --data gsm8k_train.jsonl --model qwen2.5-coder-1.5b
"""

import re

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from ludic.tools.calculator import calculator as evaluate

MAX_MESSAGES = 12
SYSTEM = (
    "You solve math word problems. Use the calculator for every calculation. When you know the result, give it as a plain "
    r"number inside \boxed{}, for example \boxed{42}."
)


@tool
def calculator(expression: str) -> str:
    """The value of an arithmetic expression, such as (3 + 4) * 2.5"""
    try:
        return evaluate(expression)
    except ValueError as error:
        return f"Error: {error}"


async def solve(task: str, *, base_url: str, api_key: str, model: str) -> str:
    llm = ChatOpenAI(model=model, base_url=base_url, api_key=api_key).bind_tools([calculator])

    async def ask(state: MessagesState) -> dict:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    def after_model(state: MessagesState) -> str:
        messages = state["messages"]
        return "tools" if messages[-1].tool_calls and len(messages) < MAX_MESSAGES else END

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", after_model, ["tools", END])
    graph.add_edge("tools", "model")
    state = await graph.compile().ainvoke({"messages": [("system", SYSTEM), ("user", task)]})
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", state["messages"][-1].text)
    return boxed[-1] if boxed else "no answer"
