"""`JudgeAgent`: an agent with tools answers a judge's questions: it may compute, search or run code before its verdict.

It takes the place of a `JudgeModel` in every judge: `LLMJudge(JudgeAgent(make_agent), "…")`.
"""

from collections.abc import Callable
from typing import Any

from ludic.agents import Agent
from ludic.types import InferenceSpec, Message, ReturnSpec, SamplingParams
from ludic_judges.model import Asking

AGENT_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1024)


class JudgeAgent(Asking):
    """Asks a new agent for each verdict; `make_agent` returns one, with its client, model, context and tools."""

    def __init__(
        self, make_agent: Callable[[], Agent], *, sampling: SamplingParams = AGENT_SAMPLING, **limits: Any
    ) -> None:
        """`limits`: see `Asking`."""
        agent = make_agent()
        super().__init__(model=agent.model, chat_template=agent.chat_template, sampling=sampling, **limits)
        self._make_agent = make_agent
        self._identity = {
            "agent": type(agent).__qualname__,
            "tools": getattr(agent, "tool_schemas", None),
            "system_prompt": agent.ctx.default_system_prompt,
        }

    def identity(self) -> Any:
        return self._identity

    async def reply_to(self, messages: list[Message], opening: str, seed: int) -> str:
        agent = self._make_agent()
        agent.begin_episode()
        try:
            agent.reset()
            # A new agent for each attempt: what was wrong with the last one stands below the question.
            told = [message["content"] for message in messages if message["role"] == "user"]
            agent.on_env_reset("\n\n".join(dict.fromkeys([told[0], told[-1]])), {})
            inference = InferenceSpec(sampling=self.sampling, return_=ReturnSpec.for_eval())
            result = await agent.act(inference, sampling_seed=seed)
        finally:
            agent.end_episode()
        for step in result.steps:
            self.count(step.info, len(step.trace.prompt_token_ids), len(step.trace.completion_token_ids))
        if result.final_step.action_target != "env":
            raise RuntimeError("The agent ended on a tool call instead of a verdict.")
        return result.final_step.action
