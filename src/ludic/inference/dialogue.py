"""For loops of one's own, such as `ludic.minimal`: one conversation between messages and tokens, and a policy to ask.

An agent of `ludic.agents` does both, among other things; here they are alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ludic.inference.chat_template import ChatTemplate, ToolSchemas, shows_tools
from ludic.inference.conversation import Conversation, Prompt
from ludic.inference.tool_parser import READABLE_CALLS
from ludic.types import (
    ChatClient,
    ConfigError,
    Message,
    ReturnSpec,
    SamplingParams,
    TokenCompletionRequest,
    TokenIds,
    TokenTrace,
    require_repeatable_reply,
)


class ChatDialogue:
    """Continues by the stored tokens and what the template writes behind a reply; what was sampled is never retokenised."""

    def __init__(self, template: ChatTemplate, decode: Callable[[TokenIds], str]) -> None:
        """`decode` gives the text of sampled tokens, without special ones."""
        self._template, self._decode = template, decode
        self._conversation = Conversation(template)
        self._tools: ToolSchemas = ()
        self._num_calls = 0

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> Prompt:
        """`messages` is the whole conversation so far. One that does not continue the last prompt and its reply is
        rendered afresh."""
        if tools and tools is not self._tools:
            _require_tools(self._template, tools)
        self._tools = tools
        return self._conversation.next_prompt(list(messages), tools=tools or None)

    def reply(self, completion: TokenTrace) -> Message:
        """What was sampled, as the assistant's message; the next prompt has it, as it is, behind the last one's messages."""
        text = self._template.reply_prefix + self._decode(completion.completion_token_ids)
        message: Message = {"role": "assistant", "content": text}
        if self._tools and completion.finish_reason != "length":  # a call that was cut off is none
            found = self._template.parse_tool_calls(text)
            if found.tool_calls and not found.parse_error:
                calls = [{**call, "id": f"call{self._num_calls + n:05d}"} for n, call in enumerate(found.tool_calls)]
                self._num_calls += len(calls)
                message = {"role": "assistant", "content": found.content, "tool_calls": calls}
        self._conversation.record(completion.completion_token_ids, message["content"])
        return message


def find_stop(text: str, sampling: SamplingParams, num_exempt: int = 0) -> int | None:
    """Where the first stop text begins that ends behind the first `num_exempt` characters; None if there is none."""
    stops = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or ()
    found = (text.find(stop, max(num_exempt - len(stop) + 1, 0)) for stop in stops)
    return min((at for at in found if at >= 0), default=None)


def up_to_stop(ids: TokenIds, tokenizer: Any, sampling: SamplingParams) -> str:
    """The text before the first stop text: that belongs to the tokens, and not to the message.

    A stop text that the first `min_tokens` tokens hold has ended nothing, and stays.
    """
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    exempt = tokenizer.decode(list(ids)[: sampling.min_tokens], skip_special_tokens=True)
    return text[: find_stop(text, sampling, len(exempt))]


class ClientPolicy:
    """Asks whatever completes tokens: the embedded engine, a server, a remote service."""

    def __init__(self, client: ChatClient, sampling: SamplingParams, model: str = "policy") -> None:
        self.client, self.sampling, self.model = client, sampling, model

    async def sample(self, prompt: Prompt, *, seed: int | None = None) -> TokenTrace:
        """One reply, with the log-probs of its tokens."""
        request = TokenCompletionRequest(
            model=self.model,
            prompt_token_ids=prompt.token_ids,
            sampling=self.sampling,
            return_=ReturnSpec.for_rl(),
            seed=seed,
        )
        response, _ = await self.client.complete_tokens(request)
        require_repeatable_reply(request, response)
        return response.to_trace(temperature=self.sampling.temperature)


def _require_tools(template: ChatTemplate, tools: ToolSchemas) -> None:
    names = ", ".join(tool["function"]["name"] for tool in tools)
    if not template.supports_tools():
        raise ConfigError(
            f"Tools are offered ({names}), but the chat template cannot read tool calls. {READABLE_CALLS}: use such a model, or "
            "give the template a parser, for example HFChatTemplate(tokenizer, tool_parser=HermesToolParser())."
        )
    if not shows_tools(template, tools):
        raise ConfigError(
            f"Tools are offered ({names}), but the chat template does not write them into the prompt, so the model would never "
            "hear of them. Use a model whose template has tool support."
        )
