"""A client of a session without HTTP, for the tests of forests, sessions and threads."""

import json
from collections.abc import Callable
from typing import Any

from ludic.inference import ByteTemplate, ChatTemplate, HermesToolParser, ScriptedClient
from ludic.types import ChatClient, InferenceSpec, ReturnSpec, SamplingParams, TokenCompletionRequest
from ludic_serve.gateway.session import Policy, Session
from ludic_serve.gateway.wire.canonical import ClientMessage, ModelRequest, Reply

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
INFERENCE = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=200), return_=ReturnSpec.for_rl())


def called(*arguments: Any, prose: str = "") -> str:
    calls = (json.dumps({"name": "add", "arguments": given}) for given in arguments)
    return prose + "".join(f"<tool_call>{call}</tool_call>" for call in calls)


def make_session(
    replies: list[str] | Callable[[TokenCompletionRequest], str],
    template: ChatTemplate | None = None,
    client: ChatClient | None = None,
    **settings: Any,
) -> Session:
    template = template or ByteTemplate(tool_parser=HermesToolParser())
    client = client or ScriptedClient(replies, tokenizer=getattr(template, "tokenizer", None))
    policy = Policy(client=client, chat_template=template, model="policy")
    return Session(**{"policies": {"policy": policy}, "default": "policy", "inference": INFERENCE} | settings)


def system(text: str) -> ClientMessage:
    return ClientMessage(role="system", content=text)


def user(text: str) -> ClientMessage:
    return ClientMessage(role="user", content=text)


def tool(call_id: str, text: str) -> ClientMessage:
    return ClientMessage(role="tool", content=text, tool_call_id=call_id)


def assistant(reply: Reply, **changes: Any) -> ClientMessage:
    """The reply as a client sends it back, with all ids."""
    ids = (f"msg_{reply.token}", *(call["id"] for call in reply.tool_calls))
    same = {"content": reply.content, "reasoning": reply.reasoning, "tool_calls": reply.tool_calls, "ids": ids}
    return ClientMessage(role="assistant", **{**same, **changes})


async def ask(session: Session, *messages: ClientMessage, is_delivered: bool = True, **settings: Any) -> Reply:
    call = session.begin(ModelRequest(messages=list(messages), **settings))
    reply = await call.reply()
    if is_delivered:
        session.delivering(call)
    return reply
