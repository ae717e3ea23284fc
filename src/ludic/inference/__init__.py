"""Inference: requests to a policy, clients, chat templates, token-exact continuation, engines.

`agents`, `batch_gen`, `distributed` and `run` import it. Loads without torch, transformers or vllm, except local/. Start with
templates/ (tokens), then local/ (the embedded engine).
"""

from typing import TYPE_CHECKING

from ludic.inference.scripted import ScriptedClient
from ludic.inference.teachers import LocalTeacher, tokenizer_fingerprint
from ludic.inference.templates.chat import (
    ByteTemplate,
    ChatTemplate,
    HermesToolParser,
    Llama3ToolParser,
    TemplateResult,
    ToolParser,
    ToolParseResult,
    XMLToolParser,
    make_tool_call,
)
from ludic.inference.templates.conversation import Conversation, Prompt
from ludic.inference.templates.hf import HFChatTemplate, tool_parser_for
from ludic.plugins import lazy
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

if TYPE_CHECKING:
    from ludic.inference.openai_client import OpenAIChatClient
    from ludic_tinker.client import TinkerChatClient, TinkerConfig
    from ludic_vllm.client import VLLMChatClient
    from ludic_vllm.teacher import VLLMTeacher

__all__ = [
    "ChatClient", "VersionedClient", "ChatResponse", "TokenCompletionRequest", "SamplingParams", "SamplingConfig",
    "ReturnSpec", "ToolRequest", "InferenceSpec", "BackendExtensions", "VLLMExtensions",
    "ChatTemplate", "TemplateResult", "HFChatTemplate", "ByteTemplate", "Conversation", "Prompt", "ScriptedClient",
    "VLLMChatClient", "OpenAIChatClient", "TinkerChatClient", "TinkerConfig", "LocalTeacher", "VLLMTeacher",
    "tokenizer_fingerprint", "ToolParser", "ToolParseResult", "HermesToolParser", "Llama3ToolParser", "XMLToolParser",
    "make_tool_call", "tool_parser_for",
]  # fmt: skip

__getattr__ = lazy(
    __name__,
    {
        "openai_client": "OpenAIChatClient",
        "ludic_tinker.client": "TinkerChatClient TinkerConfig",
        "ludic_vllm.client": "VLLMChatClient",
        "ludic_vllm.teacher": "VLLMTeacher",
    },
)
