"""`FoldingAgent`: when its dialogue is full, the model writes a summary that replaces the history.

A summary is an action: a model call with its own trace, and a step of the turn in which it is written. It does not reach the env
and earns no reward; it gets the credit of its turn, so the episode's reward teaches the model what to write down. See
docs/folding.md.
"""

from dataclasses import replace
from typing import Any

from ludic.agents.base_agent import Agent, AgentActStep
from ludic.agents.react_agent import ReActAgent
from ludic.context.windows import SummarisedDialog
from ludic.seeds import CallSeeds
from ludic.types import ConfigError, InferenceSpec, derive_seed


class FoldingAgent(Agent):
    """Summarises the dialogue before a model call whose prompt would be too long."""

    name = "folding_agent"

    def __init__(
        self,
        *,
        ctx: SummarisedDialog,
        fold_at_tokens: int | None = None,
        max_summary_tokens: int | None = None,
        summary_prompt: str = (
            "Before you go on: everything above will be forgotten. Write down, in a few sentences, what you need to know: what "
            "you are doing and why, what you have found out, what to do next. Do not act in this reply."
        ),
        summary_heading: str = "What you wrote down before:",
        **agent_kwargs: Any,
    ) -> None:
        """The agent folds when `ctx.is_full`, or when the next prompt would have more than `fold_at_tokens` tokens; the prompt
        of the summary is longer by `summary_prompt`. `max_summary_tokens=None` allows a summary as many tokens as any reply."""
        if not isinstance(ctx, SummarisedDialog):
            raise ConfigError(
                f"{type(self).__name__} folds its dialogue: give it ctx=SummarisedDialog(…), not {ctx!r:.60} (on the command "
                "line --context summarised)."
            )
        for name, limit in (("fold_at_tokens", fold_at_tokens), ("max_summary_tokens", max_summary_tokens)):
            if limit is not None and limit < 1:
                raise ConfigError(f"{type(self).__name__}({name}={limit}): it must be at least 1, or None.")
        if ctx.max_turns is None and fold_at_tokens is None:
            raise ConfigError(
                f"{type(self).__name__} would never fold: give SummarisedDialog(max_turns=…), fold_at_tokens=…, or both."
            )
        super().__init__(ctx=ctx, **agent_kwargs)
        self._dialog = ctx
        self.fold_at_tokens = fold_at_tokens
        self.max_summary_tokens = max_summary_tokens
        self.summary_prompt = summary_prompt
        self.summary_heading = summary_heading

    async def _make_room(
        self, inference: InferenceSpec | None, sampling_seed: int | None, timeout_s: float | None
    ) -> list[AgentActStep]:
        if not self._is_full():
            return []
        self.ctx.add_note(self.summary_prompt)
        seed = None if sampling_seed is None else derive_seed(sampling_seed, CallSeeds.SUMMARY)
        call = await self._call_model(self._for_summary(inference), seed, timeout_s, tools=self._advertised)
        self._remember(call)
        written = without_thinking(call.text)
        self._dialog.fold(self._memory(written or "(nothing)"))
        info = {**call.info, "summary": True, "summary_empty": not written}
        return [self._step(call, parse_result=None, action_target="internal", info=info)]

    def _is_full(self) -> bool:
        if not self._dialog.has_replies:
            return False
        if self._dialog.is_full or self.fold_at_tokens is None:
            return self._dialog.is_full
        return self._conversation.num_tokens(self._messages(), tools=self._advertised) > self.fold_at_tokens

    def _for_summary(self, inference: InferenceSpec | None) -> InferenceSpec:
        inference = inference or InferenceSpec()
        limit = self.max_summary_tokens
        if limit is None:
            return inference
        sampling = replace(inference.sampling, max_tokens=limit, min_tokens=min(limit, inference.sampling.min_tokens))
        return replace(inference, sampling=sampling)

    def _memory(self, summary: str) -> str:
        """The message that replaces the history. Subclasses add to it: GameBoyAgent its notes."""
        return f"{self.summary_heading}\n{summary}"


class FoldingReActAgent(FoldingAgent, ReActAgent):
    """FoldingAgent with tools: it also folds inside a tool loop. Summaries do not count towards `max_react_steps`."""

    name = "folding_react_agent"


def without_thinking(text: str) -> str:
    """The reply without its thinking; empty if it was cut off inside the thinking."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()
