"""Talking to a policy: requests, clients, chat templates, tool-call dialects, token-exact continuation.

Loads without torch, transformers or vllm: HFChatTemplate is handed a tokenizer, it does not make one.
"""

from ludic.inference.byte_template import ByteTemplate
from ludic.inference.chat_template import ChatTemplate, TemplateResult
from ludic.inference.conversation import Conversation, Prompt
from ludic.inference.hf_template import HFChatTemplate, tool_parser_for
from ludic.inference.openai_client import OpenAIChatClient
from ludic.inference.scripted import ScriptedClient
from ludic.inference.teachers import LocalTeacher, VLLMTeacher
from ludic.inference.tinker_client import TinkerChatClient
from ludic.inference.tinker_service import TinkerConfig
from ludic.inference.tokenizer_fingerprint import tokenizer_fingerprint
from ludic.inference.tool_parser import (
    HermesToolParser,
    Llama3ToolParser,
    ToolParser,
    ToolParseResult,
    XMLToolParser,
    make_tool_call,
)
from ludic.inference.vllm_client import VLLMChatClient
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
