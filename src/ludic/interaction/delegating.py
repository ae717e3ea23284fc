"""`DelegatingProtocol`: a parent agent hands subtasks to sub-agents through an external tool.

The parent calls `delegate(to, task)`; a child agent with its own memory and env (by default question and answer) works on the
task, and its answer is the tool's result. The protocol returns all parent and child rollouts, linked by id, so that both can be
trained.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ludic.agents import Agent
from ludic.envs import LudicEnv, SingleAgentEnv
from ludic.envs.threads import opened
from ludic.interaction.base import AnyEnv, ToolAnswers, recorded
from ludic.interaction.session import ExternalTools
from ludic.interaction.single_agent import SingleAgentProtocol
from ludic.seeds import CallSeeds
from ludic.tasks import all_or_none
from ludic.types import (
    AgentStep,
    ConfigError,
    InferenceSpec,
    Info,
    Observation,
    Rollout,
    StepOutcome,
    ToolCall,
    derive_seed,
)
from ludic.util.files import parse_json

logger = logging.getLogger(__name__)


class TaskEnv(SingleAgentEnv):
    """A text task; the agent's answer is the result. The env gives no reward."""

    blocking = False

    def __init__(self, task: str) -> None:
        super().__init__()
        self.task = task

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        return self.task, {}

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("Done.", 0.0, truncated=False, terminated=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delegate:
    """One kind of sub-agent."""

    make_agent: Callable[[], Agent]
    make_env: Callable[[str], LudicEnv[Any, Any, Any]] = TaskEnv
    """Builds the child's env from the task's text."""
    max_steps: int = 1
    description: str = ""


@dataclass(kw_only=True, slots=True)
class _Episode:
    """State of the running episode: the settings that children inherit, and their rollouts."""

    sampling_seed: int | None
    env_seed: int | None
    inference: InferenceSpec | None
    timeout_s: float | None
    num_started: int = 0
    child_ids: list[str] = field(default_factory=list)
    descendants: list[Rollout] = field(default_factory=list)


class DelegatingProtocol(SingleAgentProtocol):
    """A SingleAgentProtocol whose external `delegate` tool starts child episodes.

    Limits: `max_depth` nested delegations, `max_children` per parent, `max_child_tokens` sampled by one child. They count per
    episode, so concurrent children do not affect each other. A refused or failed delegation returns an error message to the
    parent and does not end its episode.
    """

    TOOL = "delegate"

    def __init__(
        self,
        agent: Agent,
        *,
        delegates: Mapping[str, Delegate],
        max_depth: int = 1,
        max_children: int = 8,
        max_child_tokens: int | None = None,
        depth: int = 0,
        **protocol_settings: Any,
    ) -> None:
        super().__init__(agent, **protocol_settings)
        if not delegates:
            raise ConfigError("DelegatingProtocol needs at least one delegate: delegates={name: Delegate(…)}.")
        if max_depth < 1 or max_children < 1 or (max_child_tokens is not None and max_child_tokens < 1):
            raise ConfigError(
                f"max_depth={max_depth}, max_children={max_children}, max_child_tokens={max_child_tokens}; "
                "each must be at least 1."
            )
        self.delegates = dict(delegates)
        self.max_depth = max_depth
        self.max_children = max_children
        self.max_child_tokens = max_child_tokens
        self.depth = depth
        self._episode: _Episode | None = None

    @classmethod
    def tool(cls, delegates: Mapping[str, Delegate]) -> Callable[..., str]:
        """The tool to give the parent: `ToolAgent(external_tools=[DelegatingProtocol.tool(delegates)])`."""
        names = tuple(delegates)
        listing = "; ".join(f"{name}: {d.description}" if d.description else name for name, d in delegates.items())

        def delegate(to: str, task: str) -> str:
            raise AssertionError("delegation is run by the protocol, not by the agent")

        delegate.__doc__ = f"Hand a self-contained subtask to a sub-agent and get its answer. Sub-agents: {listing}."
        delegate.__annotations__["to"] = Literal[names]
        return delegate

    async def run(
        self,
        *,
        env: AnyEnv,
        max_steps: int,
        env_seed: int | None = None,
        sampling_seed: int | None = None,
        inference: InferenceSpec | None = None,
        timeout_s: float | None = None,
    ) -> list[Rollout]:
        """The parent's rollout first, then those of all its descendants."""
        self.agent.require_free()
        self._episode = _Episode(
            sampling_seed=sampling_seed, env_seed=env_seed, inference=inference, timeout_s=timeout_s
        )
        own = await super().run(
            env=env,
            max_steps=max_steps,
            env_seed=env_seed,
            sampling_seed=sampling_seed,
            inference=inference,
            timeout_s=timeout_s,
        )
        return self._with_descendants(own)

    @property
    def unfinished(self) -> list[Rollout]:
        return self._with_descendants(super().unfinished)

    def _with_descendants(self, own: list[Rollout]) -> list[Rollout]:
        """The parent's rollouts and those of its descendants, linked."""
        if self._episode is None:
            return own
        for rollout in own:
            rollout.meta.update(depth=self.depth, child_rollout_ids=self._episode.child_ids)
            for child in self._episode.descendants:
                child.meta.setdefault("parent_rollout_id", rollout.id)
        return [*own, *self._episode.descendants]

    # --- delegation calls ---

    def _external_tools(self) -> ExternalTools:
        return self._answer_calls

    async def _answer_calls(self, calls: list[ToolCall], step: AgentStep) -> ToolAnswers:
        assert self._episode is not None, "tools are called while an episode runs"
        others = [call for call in calls if call["function"]["name"] != self.TOOL]
        handler = super()._external_tools()
        if others and handler is None:
            names = sorted({call["function"]["name"] for call in others})
            raise RuntimeError(
                f"No external_tool_handler for {names}; DelegatingProtocol itself only runs {self.TOOL!r}."
            )
        answers = list(await handler(others, step)) if others and handler is not None else []
        mine = [call for call in calls if call["function"]["name"] == self.TOOL]
        orders = [self._accept(call, step) for call in mine]
        reports = await all_or_none(self._run_child(order) for order in orders)
        for call, (answer, family) in zip(mine, reports, strict=True):
            self._episode.child_ids.extend(rollout.id for rollout in family[:1])  # in the order of the calls
            self._episode.descendants.extend(family)
            answers.append({"tool_call_id": call["id"], "tool_name": self.TOOL, "content": answer})
        return answers

    def _accept(self, call: ToolCall, step: AgentStep) -> "_Order | str":
        """The numbered order for a child, or the error message for the parent."""
        assert self._episode is not None, "tools are called while an episode runs"
        arguments = parse_json(call["function"]["arguments"])
        name, task = arguments.get("to"), arguments.get("task")
        if not isinstance(name, str) or name not in self.delegates or not isinstance(task, str) or not task.strip():
            return f"Error: delegate needs to (one of {sorted(self.delegates)}) and task (text); got {arguments}."
        if self.depth >= self.max_depth:
            return f"Error: a sub-agent at depth {self.depth} cannot delegate further. Do the task yourself."
        if self._episode.num_started >= self.max_children:
            return f"Error: all {self.max_children} delegations are used. Do the task yourself."
        number = self._episode.num_started
        self._episode.num_started += 1
        return _Order(delegate=name, task=task, number=number, parent_step_id=step.id)

    async def _run_child(self, order: "_Order | str") -> tuple[str, list[Rollout]]:
        """The tool's answer, and the rollouts of the child and its descendants."""
        if isinstance(order, str):
            return order, []
        delegate = self.delegates[order.delegate]
        protocol = self._child_protocol(delegate)
        link = {"delegate": order.delegate, "parent_step_id": order.parent_step_id, "depth": self.depth + 1}
        with recorded(protocol, {}) as family:
            family += await self._child_episode(protocol, delegate, order)
        family[0].meta.update(link)
        if (failure := family[0].failure) is not None:
            logger.warning("The sub-agent %r failed: %s", order.delegate, failure.summary)
        return _answer_of(family[0]), family

    # --- the child ---

    def _child_protocol(self, delegate: Delegate) -> "DelegatingProtocol":
        protocol = DelegatingProtocol(
            delegate.make_agent(),
            delegates=self.delegates,
            max_depth=self.max_depth,
            max_children=self.max_children,
            max_child_tokens=self.max_child_tokens,
            depth=self.depth + 1,
            max_tokens=self.max_child_tokens,
            external_tool_handler=self.external_tool_handler,
            external_tool_timeout_s=self.external_tool_timeout_s,
            max_external_rounds=self.max_external_rounds,
        )
        protocol.env_timeout_s = self.env_timeout_s
        return protocol

    async def _child_episode(
        self, protocol: "DelegatingProtocol", delegate: Delegate, order: "_Order"
    ) -> list[Rollout]:
        assert self._episode is not None, "children run inside their parent's episode"
        episode = self._episode
        async with opened(
            partial(delegate.make_env, order.task), on_loop=delegate.make_env is TaskEnv, timeout_s=self.env_timeout_s
        ) as env:
            return await protocol.run(
                env=env,
                max_steps=delegate.max_steps,
                env_seed=_child_seed(episode.env_seed, order.number),
                sampling_seed=_child_seed(episode.sampling_seed, order.number),
                inference=episode.inference,
                timeout_s=episode.timeout_s,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """One accepted delegation."""

    delegate: str
    task: str
    number: int
    parent_step_id: str


def _answer_of(child: Rollout) -> str:
    if child.failure is not None:
        return f"Error: the sub-agent failed ({child.failure.error}: {child.failure.message}). Do the task yourself."
    answers = [step.parsed_action for step in child.env_steps if step.parsed_action is not None]
    return str(answers[-1]) if answers else "Error: the sub-agent gave no readable answer."


def _child_seed(seed: int | None, number: int) -> int | None:
    return None if seed is None else derive_seed(seed, CallSeeds.CHILD, number)
