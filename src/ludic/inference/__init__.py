"""Inference: requests to a policy, clients, chat templates, token-exact continuation, engines.

`agents`, `batch_gen`, `distributed` and `run` import it. Loads without torch, transformers or vllm, except local/. Start with
templates/ (tokens), local/ (the embedded engine), vllm/ (servers).
"""

import importlib
from typing import Any

from ludic.inference.openai_client import OpenAIChatClient
from ludic.inference.scripted import ScriptedClient
from ludic.inference.teachers import LocalTeacher, VLLMTeacher, tokenizer_fingerprint
from ludic.inference.templates.chat import ByteTemplate, ChatTemplate, TemplateResult
from ludic.inference.templates.conversation import Conversation, Prompt
from ludic.inference.templates.hf import HFChatTemplate, tool_parser_for
from ludic.inference.templates.tool_calls import (
    HermesToolParser,
    Llama3ToolParser,
    ToolParser,
    ToolParseResult,
    XMLToolParser,
    make_tool_call,
)
from ludic.inference.vllm.client import VLLMChatClient
from ludic.types import (
    BackendExtensions,
    ChatClient,
    ChatResponse,
    InferenceSpec,
    ReturnSpec,
    SamplingConfig,
    SamplingParams,
    TokenCompletionRequest,
    ToolRequest,
    VersionedClient,
    VLLMExtensions,
)

__all__ = [
    "ChatClient", "VersionedClient", "ChatResponse", "TokenCompletionRequest", "SamplingParams", "SamplingConfig",
    "ReturnSpec", "ToolRequest", "InferenceSpec", "BackendExtensions", "VLLMExtensions",
    "ChatTemplate", "TemplateResult", "HFChatTemplate", "ByteTemplate", "Conversation", "Prompt", "ScriptedClient",
    "VLLMChatClient", "OpenAIChatClient", "TinkerChatClient", "TinkerConfig", "LocalTeacher", "VLLMTeacher",
    "tokenizer_fingerprint", "ToolParser", "ToolParseResult", "HermesToolParser", "Llama3ToolParser", "XMLToolParser",
    "make_tool_call", "tool_parser_for",
]  # fmt: skip

_ABOVE = {"TinkerChatClient": "ludic.tinker.client", "TinkerConfig": "ludic.tinker.client"}


def __getattr__(name: str) -> Any:
    """Load Tinker's names lazily: they live above this package."""
    if name not in _ABOVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ABOVE[name]), name)
