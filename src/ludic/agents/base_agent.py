"""`Agent`: a model with a context and a parser.

It builds the prompt from its context, sends exact token ids, stores the reply, and parses an action from it. The interaction
protocol connects it with an environment.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ludic.context import ContextStrategy
from ludic.inference import ChatTemplate, Conversation, Prompt
from ludic.inference.templates.chat import ToolSchemas, with_tools
from ludic.parsers import Parser, ParseResult
from ludic.types import (
    ActionTarget,
    ChatClient,
    ChatResponse,
    ConfigError,
    ContextError,
    InferenceSpec,
    Info,
    Message,
    MessageView,
    Observation,
    OutOfRoom,
    ParserContractError,
    PromptTooLong,
    TokenBudgetSpent,
    TokenCompletionRequest,
    TokenMismatch,
    TokenTrace,
    ToolCall,
    require_trainable_reply,
)

_DEFAULT_INFERENCE = InferenceSpec()
# Dropped from a client's info: token arrays belong in the trace, and raw responses are not kept.
_TOO_BIG_FOR_INFO = frozenset(
    {"raw_response", "used_args", "prompt", "prompt_text", "prompt_token_ids", "completion_token_ids", "token_ids",
     "logprobs"}
)  # fmt: skip


@dataclass(slots=True)
class AgentActStep:
    """One model call."""

    prompt_messages: MessageView
    action: str
    """Raw text of the reply."""
    trace: TokenTrace
    parse_result: ParseResult | None
    """Result of the action parser; None for calls that are not meant for the env."""
    action_target: ActionTarget = "env"
    loop_index: int = 0
    info: Info = field(default_factory=dict)
    tool_calls: Sequence[ToolCall] | None = None
    tool_results: Sequence[dict[str, Any]] | None = None


@dataclass(slots=True)
class AgentActResult:
    """All steps of one `act`, in order."""

    steps: list[AgentActStep]

    @property
    def final_step(self) -> AgentActStep:
        return self.steps[-1]


@dataclass(slots=True)
class ModelCall:
    """One answered request."""

    response: ChatResponse
    trace: TokenTrace
    messages: MessageView
    info: Info

    @property
    def text(self) -> str:
        return self.response.text


class Agent:
    """One model call per turn; the reply is parsed into an action."""

    name = "agent"
    _advertised: ToolSchemas | None = None
    """Tool schemas in every prompt; a plain agent has none."""
    _as_text: ToolSchemas = ()
    """Tool schemas that the system message describes, because the template has no place for tools."""

    def __init__(
        self,
        *,
        client: ChatClient,
        model: str,
        ctx: ContextStrategy,
        parser: Parser,
        chat_template: ChatTemplate,
        reject_incomplete_completions: bool = True,
        incomplete_completion_penalty: float = -0.1,
        incomplete_completion_feedback: str = "Your reply was cut off before it was finished. Answer more briefly.",
        max_prompt_tokens: int | None = None,
    ) -> None:
        if not isinstance(ctx, ContextStrategy):
            raise ConfigError(f"ctx must be a context object such as FullDialog(), got {ctx!r}.")
        if chat_template is None:
            raise ConfigError(
                f"{type(self).__name__} needs a chat_template: prompts are rendered locally, so that training sees the "
                "exact tokens. For example chat_template=HFChatTemplate(tokenizer)."
            )
        self.client = client
        self.model = model
        self.ctx = ctx
        self.parser = parser
        self.chat_template = chat_template
        self.reject_incomplete_completions = reject_incomplete_completions
        self.incomplete_completion_penalty = incomplete_completion_penalty
        self.incomplete_completion_feedback = incomplete_completion_feedback
        self.max_prompt_tokens = max_prompt_tokens
        self.last_info: Info = {}
        self._conversation = Conversation(chat_template)
        self._in_episode = False
        self._tokens_left: int | None = None

    # --- called by the protocol ---

    def begin_episode(self) -> None:
        self.require_free()
        self._in_episode = True

    def require_free(self) -> None:
        """Raise ConfigError if the agent is in an episode: it has one memory, so it can be in only one at a time."""
        if self._in_episode:
            raise ConfigError(
                f"This {type(self).__name__} is in an episode already. An agent remembers one conversation: make one agent "
                "(and one protocol) per concurrent episode."
            )

    def end_episode(self) -> None:
        self._in_episode = False
        self._tokens_left = None

    def allow_tokens(self, max_tokens: int | None) -> None:
        """Limit the tokens sampled from now on; the last reply is cut off at the limit."""
        self._tokens_left = max_tokens

    def take_tools(self, tools: Sequence[Callable[..., Any]]) -> None:
        """Take the tools of the next episode (`LudicEnv.episode_tools`), replacing those of the last one."""
        if tools:
            raise ConfigError(
                f"This env offers tools, which {type(self).__name__} cannot call. Use an agent that can: ToolAgent or "
                "ReActAgent (on the command line --agent react)."
            )

    def reset(self, system_prompt: str | None = None) -> None:
        self.ctx.reset(system_prompt=system_prompt)
        self._conversation.reset()
        self.last_info = {}

    def on_env_reset(self, obs: Observation, info: Info) -> None:
        self.ctx.on_env_reset(obs, info)

    def on_after_step(self, obs: Observation, info: Info) -> None:
        self.ctx.on_after_step(obs, info)

    def add_tool_result(self, tool_call_id: str, tool_name: str, result: str) -> None:
        """Add the result of a tool that the protocol ran."""
        self.ctx.add_tool_result(tool_call_id, tool_name, result)

    async def act(
        self,
        inference: InferenceSpec | None = None,
        sampling_seed: int | None = None,
        timeout_s: float | None = None,
    ) -> AgentActResult:
        """Call the model once and parse its reply."""
        steps = await self._make_room(inference, sampling_seed, timeout_s)
        try:
            call = await self._call_model(inference, sampling_seed, timeout_s)
        except OutOfRoom:
            if not steps:
                raise
            return AgentActResult(steps)  # keep the sampled steps; the protocol sees that there is no action
        self._remember(call)
        steps.append(self._action_step(call))
        return AgentActResult(steps)

    async def _make_room(
        self, inference: InferenceSpec | None, sampling_seed: int | None, timeout_s: float | None
    ) -> list[AgentActStep]:
        """Called before every model call of a turn. Agents that shorten their memory with model calls (FoldingAgent) do it
        here and return those steps."""
        return []

    async def push_policy_update(
        self, params: Mapping[str, Any], timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        """Send new weights to the agent's client."""
        if not isinstance(self.client, ChatClient):
            raise RuntimeError(f"{type(self.client).__name__} cannot take new weights: it has no sync_weights.")
        return await asyncio.to_thread(self.client.sync_weights, params, timeout_s=timeout_s, version=version)

    # --- phases of a model call ---

    def _messages(self) -> list[Message]:
        """The prompt of the next model call."""
        return with_tools(self.ctx.on_before_act(), self._as_text)

    async def _call_model(
        self,
        inference: InferenceSpec | None,
        sampling_seed: int | None,
        timeout_s: float | None,
        tools: ToolSchemas | None = None,
    ) -> ModelCall:
        inference = inference or _DEFAULT_INFERENCE
        if self._tokens_left is not None:
            inference = self._within_budget(inference, self._tokens_left)
        sampling = inference.sampling
        prompt = self._conversation.next_prompt(self._messages(), tools=tools, with_spans=inference.message_spans)
        self._check_prompt(prompt)
        request = TokenCompletionRequest(
            model=self.model,
            prompt_token_ids=prompt.token_ids,
            prompt_text=prompt.text,
            sampling=sampling,
            return_=inference.return_,
            seed=sampling_seed,
            extensions=inference.extensions,
            images=prompt.images,
        )
        answer = self.client.complete_tokens(request)
        response, client_info = await (answer if timeout_s is None else self._in_time(answer, timeout_s))
        self._check_response(request, response)
        untrainable_sampling = require_trainable_reply(request, response)
        if self._tokens_left is not None:
            self._tokens_left -= len(response.completion_token_ids)
        trace = response.to_trace(
            prompt_token_ids=prompt.token_ids,
            temperature=sampling.temperature,
            untrainable_sampling=untrainable_sampling,
            images=prompt.images,
            message_spans=prompt.message_spans,
        )
        info = {key: value for key, value in client_info.items() if key not in _TOO_BIG_FOR_INFO} if client_info else {}
        if response.finish_reason is not None:
            info["finish_reason"] = response.finish_reason
        if prompt.is_new_segment:
            info["new_segment"] = True
        self.last_info = info
        if self.chat_template.reply_prefix:
            response = replace(response, text=self.chat_template.reply_prefix + response.text)
        return ModelCall(response, trace, prompt.messages, info)

    @staticmethod
    def _within_budget(inference: InferenceSpec, left: int) -> InferenceSpec:
        """The inference with `max_tokens` cut to the tokens that the agent may still sample."""
        sampling = inference.sampling
        if sampling.max_tokens <= left:
            return inference
        if left <= 0:
            raise TokenBudgetSpent("This agent has sampled all the tokens that it may in this episode.")
        capped = replace(sampling, max_tokens=left, min_tokens=min(left, sampling.min_tokens))
        return replace(inference, sampling=capped)

    async def _in_time(
        self, answer: Awaitable[tuple[ChatResponse, Info]], timeout_s: float
    ) -> tuple[ChatResponse, Info]:
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"{type(self.client).__name__} did not answer within timeout_s={timeout_s:g}."
            ) from error

    def _check_prompt(self, prompt: Prompt) -> None:
        if prompt.rewrote_history and not self.ctx.rewrites_history:
            raise ContextError(
                f"{type(self.ctx).__name__} showed another history than in the call before, but declares "
                "rewrites_history = False. Append only, or declare rewrites_history = True on the class."
            )
        if self.max_prompt_tokens is not None and len(prompt.token_ids) > self.max_prompt_tokens:
            raise PromptTooLong(len(prompt.token_ids), self.max_prompt_tokens)

    def _check_response(self, request: TokenCompletionRequest, response: ChatResponse) -> None:
        sent, echoed = request.prompt_token_ids, response.prompt_token_ids
        if echoed is not sent and not np.array_equal(echoed, sent):
            raise TokenMismatch(
                f"{type(self.client).__name__} answered for a prompt of {len(echoed)} tokens that differs from the "
                f"{len(sent)} tokens sent. The server must take token ids as they are (no template, no added BOS)."
            )
        if request.return_.return_chosen_logprobs and response.completion_logprobs is None:
            raise ConfigError(
                f"{type(self.client).__name__} was asked for log-probs of the sampled tokens and gave none; training on "
                "this rollout would need them. Use a client that returns them, or ReturnSpec.for_eval()."
            )

    def _remember(self, call: ModelCall) -> None:
        self.ctx.on_after_act(call.response)
        self._conversation.record(call.trace.completion_token_ids, call.text)

    # --- reading the reply ---

    def _action_step(self, call: ModelCall, loop_index: int = 0) -> AgentActStep:
        """The step of a reply to the env: rejected if it was cut off, otherwise parsed."""
        info = call.info
        if self._is_cut_off(call):
            info = {**info, "incomplete_completion": True}
            result = ParseResult(None, self.incomplete_completion_penalty, self.incomplete_completion_feedback)
        else:
            result = self._parse(call.response.text)
        return AgentActStep(call.messages, call.response.text, call.trace, result, "env", loop_index, info)

    def _is_cut_off(self, call: ModelCall) -> bool:
        return self.reject_incomplete_completions and call.trace.finish_reason == "length"

    def _parse(self, text: str) -> ParseResult:
        result = self.parser(text)
        if not isinstance(result, ParseResult):
            if inspect.iscoroutine(result):
                result.close()
            raise ParserContractError(
                f"The parser {self.parser!r} returned {type(result).__name__}; a parser returns "
                "ParseResult(action, reward, obs), with action=None when the text cannot be read."
            )
        return result

    @staticmethod
    def _step(call: ModelCall, **fields: Any) -> AgentActStep:
        fields.setdefault("info", call.info)
        return AgentActStep(prompt_messages=call.messages, action=call.text, trace=call.trace, **fields)
